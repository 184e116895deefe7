"""Deaths of processes: the right victim is named, and no other process."""

import pytest
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    Script,
    finish,
    jittered,
    ns,
    sample_host,
    sample_process,
    simulate,
)

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_WORKER

COLLECTOR = ("node", 90, 4900)
WORKERS = [("node", 1000 + worker, 7000 + worker) for worker in range(2)]
DEATHS = {"killed", "worker-killed", "host-oom-kill", "crashed"}
KILLED_MESSAGE = "DataLoader worker (pid 1001) is killed by signal: Killed. "


def training(*, collector=True):
    """Return a run of two workers in the middle of its training, with all processes alive."""
    script = simulate(workers=2, prefetch=2, service=jittered(0.01), consumer=jittered(0.02), batches=60)
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    script.living = frozenset({MAIN, COLLECTOR, *WORKERS})
    if not collector:
        script.living -= {COLLECTOR}
    return script


def end_run(script, exit_status=None, *, alive=()):
    """End all processes except `alive`; with an exit status, the collector saw the end."""
    end = script.now_seconds
    script.living = frozenset(alive)
    if exit_status is not None:
        script.event(end, "command-exit", COLLECTOR, command_pid=MAIN[1], exit_status=exit_status)
        script.event(end + 0.1, "collector-stop", COLLECTOR, records_count=1)
    return script


def end_training(script):
    return script.event(script.now_seconds - 0.3, "process-exit", lost_count=0)


def end_workers(script, *who, reason="done"):
    for worker in who or (0, 1):
        script.event(
            script.now_seconds - 0.4, "worker-exit", WORKERS[worker], loader=0, worker=worker, reason=reason
        )
    return script


def exception(script, kind, message=""):
    return script.event(script.now_seconds - 0.5, "exception", type=kind, message=message, traceback="…")


def deaths(script):
    return [
        (f.kind, f.locus.role, f.locus.worker, f.severity)
        for f in diagnose(script.tables()).findings
        if f.kind in DEATHS
    ]


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


def test_ctrl_c_is_information():
    script = end_run(end_training(end_workers(exception(training(), "KeyboardInterrupt"))), -2)
    assert deaths(script) == [("killed", "main", None, "info")]


def test_sigterm_is_a_warning_and_makes_no_worker_a_victim():
    assert deaths(end_run(training(), -15)) == [("killed", "main", None, "warning")]


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
    ("exit_status", "severity", "words"),
    [
        (143, "warning", "which stands for SIGTERM (128 + 15)"),
        (130, "warning", "which stands for SIGINT (128 + 2)"),
        (1, "critical", "without an uncaught Python exception"),
        (137, "critical", "without an uncaught Python exception"),
    ],
)
def test_exit_status_of_a_handled_signal_is_no_kill(exit_status, severity, words):
    verdict = diagnose(end_run(end_training(end_workers(training())), exit_status).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert (found.kind, found.severity) == ("crashed", severity)
    assert words in found.summary
    assert verdict.status == "failed"
    assert (verdict.ending.record.reason, verdict.ending.record.signal) == ("exit without an exception", None)


@pytest.mark.parametrize("status", [3, 143])
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


def test_a_resumed_collector_does_not_hide_that_the_first_was_killed():
    script = training(collector=False)
    second = ("node", 95, 9500)
    script.event(script.now_seconds, "collector-start", second, resumed=True, command_pid=MAIN[1])
    script.living = script.living | {second}
    assert deaths(script) == [("killed", "collector", None, "warning")]


def test_no_death_is_claimed_if_life_is_unknown():
    script = training()
    script.living = None
    assert deaths(script) == []
    assert diagnose(script.tables()).status == "running"


def with_memory(script, counts, *, column="cgroup_oom_kill_count"):
    seconds = [START_SECONDS + second for second in range(len(counts))]
    sample_host(script, seconds, demand=[900 * MIB] * len(counts), limit=1024 * MIB, **{column: counts})
    sample_process(
        script, seconds, MAIN, ROLE_MAIN, private=[300 * MIB] * len(counts), rss=[400 * MIB] * len(counts)
    )
    for worker, key in enumerate(WORKERS):
        held = [(worker + 1) * 250 * MIB] * len(counts)
        sample_process(script, seconds, key, ROLE_WORKER, private=held, rss=held, worker=worker, loader=0)
    return script


@pytest.mark.parametrize("column", ["cgroup_oom_kill_count", "host_oom_kill_count"])
def test_oom_kill_names_the_victim_and_its_memory(column):
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 4], column=column)
    end_run(end_training(end_workers(script, 0)), 1)
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(f.kind, f.locus.worker, f.locus.pid) for f in found] == [("host-oom-kill", 1, 1001)]
    assert {e.name: e.value for e in found[0].evidence}["last_held_bytes"] == 500 * MIB


@pytest.mark.parametrize(
    ("path", "container", "words", "remedy"),
    [
        ("/system.slice/slurmstepd.scope/job_4711/step_0", None, "Slurm job 4711, cgroup /system", "--mem=SIZE"),
        ("/slurm/uid_1000/job_4711", None, "Slurm job 4711", "--mem=SIZE"),
        (
            "/kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice",
            None,
            "Kubernetes pod 0a1b2c3d…",
            "limits.memory",
        ),
        ("/kubepods/burstable/pod0a1b2c3d-1111/4f5e", None, "Kubernetes pod 0a1b2c3d…", "limits.memory"),
        ("/system.slice/docker-0123456789abcdef.scope", None, "Docker container 0123456789ab", "docker run"),
        ("/docker/0123456789abcdef", None, "Docker container 0123456789ab", "docker run"),
        ("/machine.slice/libpod-0123456789abcdef.scope", None, "Podman container 0123456789ab", "podman run"),
        ("/user.slice/user-1000.slice/train.scope", None, "systemd unit train.scope", "MemoryMax="),
        ("/", "kubernetes", "the Kubernetes container", "limits.memory"),
        ("/lab/jobs", None, "cgroup /lab/jobs", "Raise the memory limit"),
    ],
)
def test_a_memory_kill_names_whose_limit_it_was_and_how_to_raise_it(path, container, words, remedy):
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 4])
    script.event(
        START_SECONDS, "memory-limit", ("node", 90, 4900), path=path, limit_bytes=1024 * MIB, container=container
    )
    end_run(end_training(end_workers(script, 0)), 1)
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "host-oom-kill"]
    assert f"the limit is 1 GiB ({words}" in found.summary
    assert any(remedy in advice.text for advice in found.advice)


@pytest.mark.parametrize(
    ("slurm", "limit", "kind"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, None, "host-oom-kill"),
        ({"SLURM_MEM_PER_CPU": "250", "SLURM_CPUS_ON_NODE": "4"}, None, "host-oom-kill"),
        ({"SLURM_MEM_PER_NODE": "2000"}, None, "killed"),
        ({"SLURM_MEM_PER_NODE": "0"}, None, "killed"),
        ({"SLURM_MEM_PER_CPU": "250"}, None, "killed"),
        ({"SLURM_MEM_PER_NODE": "1000"}, 1000 * MIB, "killed"),  # a control group holds it, and counted no kill
        ({}, None, "killed"),
    ],
)
def test_a_job_killed_at_slurms_own_limit_died_for_lack_of_memory(slurm, limit, kind):
    script = end_workers(training(), 0, 1, reason="parent-gone")
    seconds = [script.now_seconds - at for at in (3, 2, 1)]
    sample_host(script, seconds, demand=[900 * MIB] * 3, limit=limit)
    held, collector = [400 * MIB] * 3, [200 * MIB] * 3
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held)
    sample_process(script, seconds, WORKERS[0], ROLE_WORKER, private=held, rss=held, loader=0, worker=0)
    sample_process(script, seconds, COLLECTOR, ROLE_COLLECTOR, private=collector, rss=collector)
    script.manifest |= {"host": "node", "slurm": {"SLURM_JOB_ID": "4711", **slurm}}
    found = [f for f in diagnose(end_run(script).tables()).findings if f.locus.role == "main" and f.kind in DEATHS]
    assert [finding.kind for finding in found] == [kind]
    if kind == "host-oom-kill":
        assert "its job 4711 used 1000 MiB of its 1000 MiB" in found[0].summary
        assert any("sbatch --mem" in advice.text for advice in found[0].advice)


def test_earlier_oom_kills_are_not_blamed():
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 3])
    end_run(end_training(end_workers(script, 0)), 1)
    assert deaths(script) == [("worker-killed", "worker", 1, "critical")]


def test_one_oom_kill_has_one_victim():
    script = with_memory(training(), [0, 0, 1])
    end_run(end_workers(script, 0, reason="parent-gone"), -9)
    assert sorted(deaths(script)) == [
        ("host-oom-kill", "worker", 1, "critical"),
        ("killed", "main", None, "critical"),
    ]


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


def test_an_exit_status_without_exception_is_a_crash():
    assert deaths(end_run(end_training(end_workers(training())), 3)) == [("crashed", "main", None, "critical")]


def test_a_segmentation_fault_is_a_crash():
    script = end_run(end_workers(training(), reason="parent-gone"), -11)
    assert deaths(script) == [("crashed", "main", None, "critical")]
    assert "SIGSEGV" in diagnose(script.tables()).findings[0].summary


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


def test_exception_of_the_launcher_is_the_crash_and_not_its_ranks():
    script, launcher = ranks()
    text = "\n\n-- Process 0 terminated with the following error:\nTraceback\nValueError: boom"
    script.event(START_SECONDS + 9, "exception", launcher, type="ProcessRaisedException", message=text)
    found = [f for f in diagnose(end_run(script, 1).tables()).findings if f.kind in DEATHS]
    assert [(f.kind, f.locus.pid) for f in found] == [("crashed", 99)]
    assert "ValueError: boom" in found[0].summary


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


def deaths_after_kill(counts, column, demand):
    """Return the deaths in a training that SIGKILL ends after as many ticks as the kill counter has values."""
    script = Script().event(START_SECONDS, "process-start")
    count = len(counts)
    seconds = [START_SECONDS + second for second in range(count)]
    sample_host(script, seconds, demand=[demand] * count, limit=1024 * MIB, **{column: counts})
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=[300 * MIB] * count, rss=[300 * MIB] * count)
    script.now_seconds = START_SECONDS + count
    return [kind for kind, *_ in deaths(end_run(script, -9)) if kind != "host-oom-risk"]


@pytest.mark.parametrize("column", ["cgroup_oom_kill_count", "host_oom_kill_count"])
def test_oom_kill_long_before_the_end_is_not_blamed(column):
    assert deaths_after_kill([0] * 10 + [1] * 90, column, 1000 * MIB) == ["killed"]


def test_only_the_hosts_kill_count_needs_a_memory_shortage():
    late = [0] * 9 + [1]
    assert deaths_after_kill(late, "cgroup_oom_kill_count", 300 * MIB) == ["host-oom-kill"]
    assert deaths_after_kill(late, "host_oom_kill_count", 1000 * MIB) == ["host-oom-kill"]
    assert deaths_after_kill(late, "host_oom_kill_count", 300 * MIB) == ["killed"]


@pytest.mark.parametrize(("kills", "kinds"), [(0, []), (1, ["host-oom-kill"])])
def test_oom_killed_trial_of_a_finished_sweep_is_a_warning(kills, kinds):
    script, sweep = Script(), ("node", 99, 4000)
    script.manifest["command"].update(pid=sweep[1], start_ticks=sweep[2])
    seconds = [START_SECONDS + second for second in range(10)]
    counts = [0] * 6 + [kills] * 4
    sample_host(script, seconds, demand=[900 * MIB] * 10, limit=1024 * MIB, cgroup_oom_kill_count=counts)
    for trial, died in ((("node", 200, 8000), 5), (("node", 201, 8001), 9)):
        script.event(START_SECONDS, "process-start", trial, parent_pid=sweep[1])
        held = [300 * MIB] * died
        sample_process(script, seconds[:died], trial, ROLE_MAIN, private=held, rss=held)
    script.now_seconds = START_SECONDS + 10
    script.event(START_SECONDS + 9, "process-exit", ("node", 201, 8001), lost_count=0)
    found = [f for f in diagnose(end_run(script, 0).tables()).findings if f.kind in DEATHS]
    assert [f.kind for f in found] == kinds
    assert all((f.locus.pid, f.severity, "command went on" in f.summary) == (200, "warning", True) for f in found)


def test_evidence_counts_process_exit_events():
    script = end_run(end_training(end_workers(exception(training(), "KeyboardInterrupt"))), -2)
    found = next(f for f in diagnose(script.tables()).findings if f.kind == "killed")
    assert {e.name: e.value for e in found.evidence}["farewell_count"] == 1
