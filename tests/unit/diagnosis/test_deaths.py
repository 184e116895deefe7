"""Deaths of processes: the right victim is named, and no other process."""

from signal import Signals

import pytest
from ended_runs import (
    DEATHS,
    KILLED_MESSAGE,
    WORKERS,
    deaths,
    end_run,
    end_training,
    end_workers,
    exception,
    training,
    with_memory,
)
from simulated_runs import MAIN, START_SECONDS, Script, finish, jittered, ns, simulate

from collector.diagnosis.verdict import diagnose


def test_running_training_has_no_victim():
    verdict = diagnose(training().tables())
    assert verdict.status == "running"
    assert [finding.kind for finding in verdict.findings] == ["compute-bound"]


def test_a_finished_training_has_no_victim():
    script = end_run(end_training(end_workers(training())), 0)
    verdict = diagnose(script.tables())
    assert (verdict.status, verdict.exit_status, verdict.workers_reporting) == ("finished", 0, (2, 2))
    assert [finding.kind for finding in verdict.findings] == ["compute-bound"]


def test_a_killed_training_is_the_only_victim():
    script = end_run(end_workers(training(), reason="parent-gone"), -9)
    assert deaths(script) == [("killed", "main", None, "critical")]
    assert diagnose(script.tables()).status == "killed"


def test_workers_that_outlive_a_killed_training_are_no_victims():
    script = end_run(training(), -9, alive=WORKERS)
    assert deaths(script) == [("killed", "main", None, "critical")]


def test_exit_status_of_a_shell_shows_the_signal():
    script = end_run(end_workers(training(), reason="parent-gone"), 137)
    script.manifest["command"]["pid"] = 99
    assert deaths(script) == [("killed", "main", None, "critical")]


def test_command_with_hooks_that_exits_before_it_trains_is_not_killed():
    script = Script()
    script.event(START_SECONDS + 1, "process-attached", argv=["python", "train.py"], parent_pid=90)
    verdict = diagnose(end_run(script, 143).tables())
    assert (verdict.status, deaths(script)) == ("failed", [])


def test_killed_worker_is_named_and_not_the_failed_training():
    script = exception(training(), "RuntimeError", KILLED_MESSAGE)
    script.event(
        script.now_seconds - 0.6,
        "worker-died",
        loader=0,
        epoch=0,
        worker=1,
        worker_pid=1001,
        exit_code=-9,
        last_index=7,
    )
    end_run(end_training(end_workers(script, 0)), 1)
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(f.kind, f.locus.worker, f.locus.loader, f.locus.pid) for f in found] == [("worker-killed", 1, 0, 1001)]
    assert "SIGKILL" in found[0].summary
    assert diagnose(script.tables()).status == "failed"


@pytest.mark.parametrize(
    ("exit_status", "reason"), [(1, "sys.exit with a message"), (3, "exit without an exception")]
)
def test_message_of_sys_exit_is_the_reason_if_the_status_is_its_own(exit_status, reason):
    script = end_workers(training())
    script.event(script.now_seconds, "exit-message", message="no images in /data", site="/my/train.py:12, in main")
    verdict = diagnose(end_run(end_training(script), exit_status).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert verdict.ending.record.reason == reason
    assert ("train.py:12, in main: no images in /data" in found.summary) == (exit_status == 1)


def test_status_that_was_given_to_sys_exit_names_the_line():
    script = end_workers(training())
    event = {"message": "exit status 3", "status": 3, "site": "/my/train.py:12, in main"}
    script.event(script.now_seconds, "exit-message", **event)
    verdict = diagnose(end_run(end_training(script), 3).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert found.summary.endswith("called sys.exit at train.py:12, in main: exit status 3.")


@pytest.mark.parametrize(
    ("handled", "kind", "severity", "told"),
    [
        ("KeyboardInterrupt: ", "killed", "info", "ended by SIGINT."),
        (
            "OSError: disk gone",
            "crashed",
            "critical",
            "at train.py:12, in main: exit status 1 (while it handled OSError: disk gone).",
        ),
    ],
)
def test_exit_within_the_handler_of_an_exception_is_told_with_it(handled, kind, severity, told):
    script = end_workers(training())
    event = {"message": "exit status 1", "status": 1, "site": "/my/train.py:12, in main", "handled": handled}
    script.event(script.now_seconds, "exit-message", **event)
    (found,) = [one for one in diagnose(end_run(end_training(script), 1).tables()).findings if one.kind in DEATHS]
    assert (found.kind, found.severity) == (kind, severity)
    assert found.summary.endswith(told)


def test_end_without_exit_handlers_says_so():
    verdict = diagnose(end_run(end_workers(training()), 3).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert "without running exit handlers, as by os._exit" in found.summary


def test_worker_whose_own_exception_made_the_training_raise_is_the_cause():
    """Its thread that sends tensors found no descriptor, so the training process got an EOFError."""
    script = training()
    error = {"type": "OSError", "message": "[Errno 24] Too many open files", "traceback": "…"}
    script.event(script.now_seconds - 0.51, "exception", WORKERS[1], **error)
    script = end_workers(exception(script, "EOFError", ""), 0, 1)
    (found,) = [f for f in diagnose(end_run(end_training(script), 1).tables()).findings if f.kind in DEATHS]
    assert found.summary.startswith("Worker 1 of loader 0 (pid 1001) ended with OSError")
    assert found.advice[0].text.startswith("List the open files")


@pytest.mark.parametrize("status", [0, 3, 143])
def test_worker_that_exits_by_itself_is_named_with_its_status_and_no_signal(status):
    message = "DataLoader worker (pid(s) 1001) exited unexpectedly"
    script = exception(training(), "RuntimeError", message)
    died = {"worker": 1, "worker_pid": 1001, "exit_code": status, "last_index": 7}
    script.event(script.now_seconds - 0.6, "worker-died", loader=0, epoch=0, **died)
    verdict = diagnose(end_run(end_training(end_workers(script, 0)), 1).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert (found.kind, found.locus.worker, found.severity) == ("worker-killed", 1, "critical")
    assert f"ended by itself with exit status {status}," in found.summary
    assert "sys.exit" in found.advice[0].text
    assert (verdict.ending.record.reason, verdict.ending.record.signal) == ("DataLoader worker exited", None)
    assert "Worker 1 of loader 0 died: exit status " + str(status) in " ".join(
        happening.text for happening in verdict.ending.happenings
    )


@pytest.mark.parametrize(
    ("reason", "message", "kinds"),
    [
        ("done", None, []),
        ("done", "DataLoader worker (pid 1001) is killed by signal: Aborted. ", ["worker-killed"]),
        ("MemoryError", None, ["worker-killed"]),
    ],
)
def test_worker_that_aborts_at_the_end_is_a_victim_if_training_failed(reason, message, kinds):
    script = end_workers(end_workers(training(), 0), 1, reason=reason)
    died = {"worker": 1, "worker_pid": 1001, "exit_code": -6, "last_index": 7}
    script.event(script.now_seconds - 0.35, "worker-died", loader=0, epoch=0, **died)
    if message:
        exception(script, "RuntimeError", message)
    assert [kind for kind, *_ in deaths(end_run(end_training(script), 1 if message else 0))] == kinds


@pytest.mark.parametrize(("kills", "kind"), [([3, 3, 3], "worker-killed"), ([3, 3, 4], "host-oom-kill")])
def test_killed_worker_with_a_caught_error_is_a_warning(kills, kind):
    script = with_memory(training(), kills)
    gone = script.now_seconds + 1
    died = {"worker": 1, "worker_pid": 1001, "exit_code": -9, "last_index": 7}
    script.event(gone, "worker-died", loader=0, epoch=0, **died)
    script.event(gone + 0.1, "epoch-start", loader=0, epoch=1, worker_pids=[1002, 1003])
    script.add("step", [{"time_ns": ns(gone + second), "step": 1000 + second} for second in range(-1, 4)])
    script.now_seconds = gone + 5
    found = [f for f in diagnose(end_run(end_training(script), 0).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.severity, f.since_step) for f in found] == [(kind, "warning", 1000)]
    assert found[0].summary.endswith("The training caught the error and went on.")
    assert "ended because" not in found[0].advice[0].expected


@pytest.mark.parametrize("message", [KILLED_MESSAGE, "DataLoader worker (pid(s) 1001) exited unexpectedly"])
def test_exception_message_names_the_killed_worker(message):
    script = end_run(end_training(end_workers(exception(training(), "RuntimeError", message), 0)), 1)
    assert deaths(script) == [("worker-killed", "worker", 1, "critical")]


def test_training_worker_and_collector_killed_together_are_all_named():
    script = end_run(end_workers(training(), 0, reason="parent-gone"))
    assert set(deaths(script)) == {
        ("killed", "main", None, "critical"),
        ("worker-killed", "worker", 1, "critical"),
        ("killed", "collector", None, "info"),
    }
    assert not any("unharmed" in finding.summary for finding in diagnose(script.tables()).findings)


def test_a_killed_collector_leaves_the_training_unharmed():
    script = training(collector=False)
    assert deaths(script) == [("killed", "collector", None, "warning")]
    assert diagnose(script.tables()).status == "running"


@pytest.mark.parametrize(("host", "severity"), [("node", "info"), ("node-b", "warning")])
def test_a_collector_that_resumes_on_its_host_leaves_nothing_to_do(host, severity):
    script = training(collector=False)
    second = (host, 95, 9500)
    script.event(script.now_seconds, "collector-start", second, resumed=True, command_pid=MAIN[1])
    script.living = script.living | {second}
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert (found.severity, bool(found.advice)) == (severity, severity == "warning")
    assert ("until another one resumed" in found.summary) == (severity == "info")


def test_a_collector_killed_in_a_finished_run_is_information_without_advice():
    script = end_training(end_workers(training()))
    script.living = frozenset()
    verdict = diagnose(script.tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert (verdict.status, found.severity, found.advice) == ("finished", "info", ())
    assert "until the end, processes" in found.summary


def test_no_death_is_claimed_if_life_is_unknown():
    script = training()
    script.living = None
    assert deaths(script) == []
    assert diagnose(script.tables()).status == "running"


def test_an_uncaught_exception_is_a_crash_with_its_message():
    script = end_run(end_training(end_workers(exception(training(), "ValueError", "loss is NaN\nat step 7"))), 1)
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(f.kind, f.locus.role) for f in found] == [("crashed", "main")]
    assert "ValueError: loss is NaN" in found[0].summary


def test_exception_of_a_helper_in_a_finished_run_is_no_crash():
    script = end_run(end_training(end_workers(training())), 0)
    script.event(
        script.now_seconds - 3, "exception", ("node", 555, 1), type="OSError", message="helper", traceback=""
    )
    assert deaths(script) == []


def test_trials_that_a_sweep_survives_are_a_warning_once_for_those_that_raised_alike():
    script, _ = ranks(count=4)
    for number in (1, 2):
        raised = {"type": "RuntimeError", "message": "shapes differ", "site": "/home/me/trial.py:9, in main"}
        script.event(START_SECONDS + number, "exception", ("node", 200 + number, 8000), **raised)
    verdict = diagnose(end_run(script, 0).tables())
    [found] = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert (found.kind, found.severity, found.locus.pid) == ("crashed", "warning", 201)
    assert "RuntimeError at trial.py:9, in main: shapes differ" in found.summary
    assert "The command went on, and ended with exit status 0" in found.summary
    assert (found.value_of("victims_count"), verdict.status) == (2, "finished")


@pytest.mark.parametrize(("message", "said"), [("", ""), ("no such trial.", ": no such trial")])
def test_a_survived_exception_and_what_went_on_are_two_sentences(message, said):
    script, _ = ranks()
    script.event(START_SECONDS + 1, "exception", ("node", 201, 8000), type="KeyError", message=message)
    [found] = [f for f in diagnose(end_run(script, 0).tables()).findings if f.kind in DEATHS]
    assert f"ended with KeyError{said}. The command went on" in found.summary


def test_an_exit_status_without_exception_is_a_crash():
    assert deaths(end_run(end_training(end_workers(training())), 3)) == [("crashed", "main", None, "critical")]


def test_command_killed_before_any_loader_is_a_victim():
    assert deaths(end_run(Script(), -9)) == [("killed", "other", None, "critical")]


def test_torchrun_names_the_rank_that_was_killed_first():
    script = Script()
    script.manifest["command"]["pid"] = 99
    launcher = ("node", 99, 4000)
    ranks = [("node", 200 + rank, 8000) for rank in range(2)]
    for rank, key in enumerate(ranks):
        script.event(START_SECONDS, "process-start", key, rank)
    script.event(
        START_SECONDS + 9,
        "exception",
        launcher,
        type="ChildFailedError",
        traceback="",
        message="Root Cause (first observed failure):\n[0]:\n  rank : 1 (local_rank: 1)\n  exitcode  : "
        "-9 (pid: 201)\n",
    )
    end_run(script, 1)
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(f.kind, f.locus.rank, f.locus.pid) for f in found] == [("killed", 1, 201)]
    (found,) = [one for one in diagnose(script.tables()).findings if one.kind == "killed"]
    assert found.summary.startswith("Rank 1 (pid 201) ended by SIGKILL")


def test_workers_of_a_finished_epoch_are_no_victims():
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.01),
        consumer=jittered(0.02),
        batches=30,
        epochs=3,
        persistent=False,
    )
    end_run(script, -9, alive=[("node", 1200, 7200), ("node", 1201, 7201)])
    assert deaths(script) == [("killed", "main", None, "critical")]


def test_finding_explains_why_nothing_attached_to_the_command():
    verdict = diagnose(end_run(Script(), 0).tables())
    assert verdict.status == "finished"
    assert [finding.kind for finding in verdict.findings] == ["cannot-tell"]
    assert "ended before its processes were sampled" in verdict.findings[0].summary


def test_finished_helper_gives_exit_status_zero():
    assert diagnose(finish(end_workers(training())).tables()).exit_status == 0


def ranks(parent=99, count=2):
    """Return a launcher (the command) with training processes below it that all ended without a word."""
    script = Script()
    script.manifest["command"].update(pid=parent, start_ticks=4000)
    for rank in range(count):
        script.event(START_SECONDS, "process-start", ("node", 200 + rank, 8000), rank, parent_pid=parent)
    return script, ("node", parent, 4000)


@pytest.mark.parametrize("message", [" the loss is no number:", " \nthe loss is no number:"])
@pytest.mark.parametrize(("count", "rank", "pid"), [(2, 1, 201), (0, None, 99)])  # of none that had begun to train
def test_an_exception_that_the_launcher_passes_on_is_told_of_the_process_that_raised_it(message, count, rank, pid):
    script, launcher = ranks(count=count)
    text = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in step
    raise ValueError("boom")
    ^^^^^^^^^^^^^^^^^^^^^^^^
ValueError:"""
    text += f"{message}\n  it is nan"
    raised = {"type": "ProcessRaisedException", "message": text, "site": "/home/me/start.py:3, in <module>"}
    script.event(START_SECONDS + 9, "exception", launcher, **raised)
    said = {"message": "exit status 1", "status": 1, "handled": "ValueError: boom"}
    for number in range(count):  # as torch does once it has written the exception, and then CPython
        for site in ("torch/multiprocessing/spawn.py:96, in _wrap", "multiprocessing/spawn.py:123, in spawn_main"):
            child = ("node", 200 + number, 8000)
            script.event(START_SECONDS + 8, "exit-message", child, number, site=f"/lib/{site}", **said)
    found = [f for f in diagnose(end_run(script, 1).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.locus.rank, f.locus.pid) for f in found] == [("crashed", rank, pid)]
    assert "ended with ValueError at train.py:9, in step: the loss is no number:" in found[0].summary


@pytest.mark.parametrize(
    ("launcher", "ranks", "exit_status", "cause"),
    [
        ("CalledProcessError", (None, None), 1, 202),  # accelerate launch; the first child was a helper
        ("ChildFailedError", (0, 1), 1, 201),  # torchrun: the second rank lost its peer
        (None, (None, None), 1, 202),  # a shell
        (None, (None, None), 2, None),  # a shell with a status of its own
        ("OSError", (None, None), 1, 99),  # then its children lost their parent
        ("CalledProcessError", (), 1, 99),  # its child is no Python program
    ],
)
def test_a_child_that_raises_before_it_trains_is_the_cause(launcher, ranks, exit_status, cause):
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number, rank in enumerate(ranks, 1):
        raised = {"type": "ImportError", "message": f"of child {number}"}
        script.event(START_SECONDS + number, "exception", ("node", 200 + number, 8000), rank, **raised)
    if launcher:
        script.event(START_SECONDS + 3, "exception", ("node", 99, 4000), type=launcher, message="of the launcher")
    verdict = diagnose(end_run(script, exit_status).tables())
    assert verdict.status == "failed"
    found = [(one.kind, one.locus.pid) for one in verdict.findings if one.kind in DEATHS]
    assert found == ([("crashed", cause)] if cause else [])


def test_what_a_command_says_at_its_end_counts_more_than_a_helper_that_failed_before():
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    script.event(START_SECONDS + 1, "exception", ("node", 201, 8000), type="ImportError", message="of a probe")
    said = {"message": "no data in /data", "status": None, "site": "/home/me/train.py:7, in main", "handled": None}
    script.event(START_SECONDS + 60, "exit-message", ("node", 99, 4000), **said)
    (found,) = [one for one in diagnose(end_run(script, 1).tables()).findings if one.kind in DEATHS]
    assert "no data in /data" in found.summary


def test_a_child_that_was_interrupted_is_not_the_cause_of_the_failure_before():
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number, kind in enumerate(("ImportError", "KeyboardInterrupt"), 1):
        script.event(START_SECONDS + number, "exception", ("node", 200 + number, 8000), type=kind, message="")
    script.event(START_SECONDS + 3, "exception", ("node", 99, 4000), type="CalledProcessError", message="it failed")
    (found,) = [one for one in diagnose(end_run(script, 1).tables()).findings if one.kind in DEATHS]
    assert found.locus.pid == 201


def test_the_message_of_a_program_that_quotes_another_one_is_its_own():
    script, _ = ranks(count=1)
    raised = {"type": "RuntimeError", "message": "ffmpeg terminated with the following error: no such file"}
    script.event(START_SECONDS + 9, "exception", ("node", 200, 8000), 0, site="/home/me/a.py:3, in f", **raised)
    (found,) = [one for one in diagnose(end_run(script, 1).tables()).findings if one.kind in DEATHS]
    assert "RuntimeError at a.py:3, in f: ffmpeg terminated" in found.summary


@pytest.mark.parametrize(("exit_status", "severity"), [(-9, "warning"), (-15, "warning"), (-2, "info")])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_launcher_that_is_killed_while_its_training_goes_on_to_the_end(exit_status, severity, is_complete):
    script, launcher = ranks()
    end_run(script, exit_status)
    for rank in range(1 + is_complete):
        script.event(START_SECONDS + 60, "process-exit", ("node", 200 + rank, 8000), rank, lost_count=0)
    found = [one for one in diagnose(script.tables()).findings if one.kind == "killed"]
    assert ([(one.locus.pid, one.severity) for one in found] == [(launcher[1], severity)]) == is_complete
    if is_complete:
        assert found[0].summary.endswith(f"ended by {Signals(-exit_status).name}. The training ended by itself.")


def test_a_signal_that_the_launcher_raises_as_an_exception_is_no_crash():
    script, launcher = ranks()
    raised = {"type": "SignalException", "message": "Process 99 got signal: 15"}
    script.event(START_SECONDS + 9, "exception", launcher, **raised)
    found = [f for f in diagnose(end_run(script, 1).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.locus.pid) for f in found] == [("killed", 99)]
    assert "by SIGTERM" in found[0].summary


def test_launcher_message_names_the_rank_killed_by_a_signal():
    script, launcher = ranks()
    text = "process 1 terminated with signal SIGKILL"
    script.event(START_SECONDS + 9, "exception", launcher, type="ProcessExitedException", message=text)
    found = [f for f in diagnose(end_run(script, 1).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.locus.pid) for f in found] == [("killed", 201)]


def test_ranks_that_end_with_a_failed_command_are_no_victims():
    assert [kind for kind, *_ in deaths(end_run(ranks()[0], 1))] == ["crashed"]


def test_process_exit_event_overrides_the_exit_status_of_a_shell():
    script = end_run(end_training(end_workers(training())), 137)
    script.manifest["command"]["pid"] = 99
    assert "killed" not in {kind for kind, *_ in deaths(script)}
    assert diagnose(script.tables()).status == "failed"


@pytest.mark.parametrize("status", [-9, None])
def test_workers_that_end_with_their_training_are_no_victims(status):
    kinds = {(kind, role) for kind, role, *_ in deaths(end_run(training(), status))}
    assert ("killed", "main") in kinds
    assert ("worker-killed", "worker") not in kinds


def test_many_victims_in_one_loader_are_one_finding():
    script = simulate(workers=5, prefetch=2, service=jittered(0.01), consumer=jittered(0.02), batches=60)
    for worker in range(5):
        died = {"worker": worker, "worker_pid": 1000 + worker, "exit_code": -9, "last_index": 7}
        script.event(script.now_seconds - 1, "worker-died", loader=0, epoch=0, **died)
    found = [f for f in diagnose(end_run(end_training(script), 1).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.locus.worker) for f in found] == [("worker-killed", None)]
    assert {e.name: e.value for e in found[0].evidence}["victims_count"] == 5


def test_evidence_counts_process_exit_events():
    script = end_run(end_training(end_workers(exception(training(), "KeyboardInterrupt"))), -2)
    found = next(f for f in diagnose(script.tables()).findings if f.kind == "killed")
    assert {e.name: e.value for e in found.evidence}["farewell_count"] == 1


@pytest.mark.parametrize(
    ("own_frame", "site"),
    [("", "train.py:9, in <module>"), ('\n  File "/home/me/data.py", line 5, in pad', "data.py:5, in pad")],
)
def test_the_line_of_an_exception_in_a_worker_is_none_of_the_hooks_or_of_a_library(own_frame, site):
    hook = '  File "/src/training_harness/hooks/loading/worker.py", line 141, in timed'
    cython = '  File "pandas/_libs/index.pyx", line 167, in pandas._libs.index.IndexEngine.get_loc'
    frames = f"{hook}{own_frame}\n{cython}"
    text = f"Caught KeyError in DataLoader worker process 0.\nTraceback:\n{frames}\nKeyError: 'a'"
    script = exception(training(), "KeyError", message=text, site="/home/me/train.py:9, in <module>")
    (found,) = [f for f in diagnose(end_run(script, 1).tables()).findings if f.kind == "crashed"]
    assert f"ended with KeyError at {site}: 'a' (Caught KeyError in DataLoader worker process 0)" in found.summary
