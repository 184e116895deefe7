"""Processes without batches and steps: judged from their first sample to their teardown."""

import numpy as np
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

from collector.diagnosis.run.training import before_teardown
from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_OTHER

SECONDS = np.arange(180) + START_SECONDS + 1
COLLECTOR = ("node", 90, 4900)


def program(grown, *, key=MAIN, script=None, watched=False, total=10**13, **more):
    """Return a run of a process without hooks that holds 200 MiB and `grown` MiB more, and then ends."""
    script = script or Script()
    if watched:
        script.manifest["watched"] = True
    held = (200 + np.asarray(grown, dtype=float)) * MIB
    sample_process(script, SECONDS[: len(held)], key, ROLE_OTHER, private=held, rss=held, **more)
    return sample_host(script, SECONDS[: len(held)], demand=held + 2000 * MIB, total=total)


def note_program(script, name, *, has_torch, obstacle):
    """Add an event about a Python program that the collector saw."""
    script.event(
        START_SECONDS + 3,
        "process-seen",
        COLLECTOR,
        process_pid=MAIN[1],
        process_start_ticks=MAIN[2],
        argv=["python", name],
        is_python=True,
        has_torch=has_torch,
        obstacle=obstacle,
    )


def leaks(script):
    return [finding for finding in diagnose(script.tables()).findings if finding.kind == "main-heap-leak"]


RAMP = 10.0 * np.arange(180)


def test_leak_without_iterations_is_found_with_less_confidence():
    script = finish(program(RAMP))
    note_program(script, "serve.py", has_torch=False, obstacle=None)
    (found,) = leaks(script)
    assert found.severity == "warning"
    assert found.confidence < 0.85
    assert "(python serve.py)" in found.summary
    assert "No batch, optimizer step or forward pass of it was seen" in found.summary
    assert found.locus.role == "other"
    assert found.rate.value == pytest.approx(10 * MIB, rel=0.1)


@pytest.mark.parametrize(
    ("watched", "has_torch", "severity"), [(True, False, "warning"), (True, True, "info"), (False, False, "info")]
)
def test_leak_of_a_child_is_a_warning_where_a_watched_program_has_no_torch(watched, has_torch, severity):
    """Next to a process with torch, or to a command that runs, a child without torch is a helper."""
    script = program(np.zeros(180), watched=watched)
    held = (200 + RAMP) * MIB
    sample_process(script, SECONDS, ("node", 300, 6000), ROLE_OTHER, private=held, rss=held)
    note_program(script, "train.py", has_torch=has_torch, obstacle=None)
    (found,) = leaks(script)
    assert (found.severity, found.locus.pid) == (severity, 300)


def test_memory_released_at_the_end_hides_no_leak():
    grown = RAMP.copy()
    grown[-3:] = [900, 300, 0]
    assert len(leaks(finish(program(grown)))) == 1
    assert len(leaks(program(grown, watched=True))) == 1


def test_memory_that_takes_long_to_release_hides_no_risk():
    grown = np.concatenate([np.linspace(0, 13_000, 60), np.linspace(12_000, 0, 14)])
    script = finish(program(grown, total=17_000 * MIB))
    assert "host-oom-risk" in [finding.kind for finding in diagnose(script.tables()).findings]


def test_memory_released_repeatedly_is_no_leak():
    assert leaks(finish(program(10.0 * (np.arange(60) % 6)))) == []


def test_short_growth_without_iterations_is_information():
    (found,) = leaks(finish(program(RAMP[:60])))
    assert found.severity == "info"


def test_growth_until_an_exception_before_the_first_iteration_is_none():
    """It imported its modules."""
    script = program(RAMP[:60])
    script.event(START_SECONDS + 60, "exception", type="ValueError", message="no such option")
    assert leaks(finish(script, exit_status=1)) == []


def test_growth_before_the_first_batch_that_failed_is_no_leak():
    script = finish(program(RAMP[:60]))
    script.event(SECONDS[59], "process-start")
    script.event(SECONDS[59], "loader", loader=0, num_workers=2)
    verdict = diagnose(script.tables())
    assert verdict.findings == ()
    assert {check.name: check.reason for check in verdict.checks}["data loading"] == "no batch came"


def test_growth_of_a_helper_leaves_the_memory_of_the_training_fine():
    script = program(np.zeros(60))
    script.event(START_SECONDS, "process-start")
    verdict = diagnose(finish(program(RAMP[:60], key=("node", 300, 1), script=script)).tables())
    [found] = [finding for finding in verdict.findings if finding.kind == "main-heap-leak"]
    assert (found.severity, found.locus.pid) == ("info", 300)
    assert [check.status for check in verdict.checks if check.name == "training process's memory"] == ["fine"]


def add_fork(script, grown):
    """Add process 300, which a fork of the training made, such as that of a multiprocessing.Manager."""
    program(grown, key=("node", 300, 1), script=script)
    script.event(
        START_SECONDS + 3,
        "process-seen",
        COLLECTOR,
        process_pid=300,
        process_start_ticks=1,
        argv=["python", "train.py"],
        is_python=True,
        has_torch=True,
    )


@pytest.mark.parametrize("grown", [RAMP[:60], np.minimum(RAMP[:60], 300.0)], ids=["leaks", "is full"])
def test_fork_of_the_training_that_grows_while_it_trains_is_named_as_such(grown):
    script = program(np.zeros(60))
    for kind in ("process-attached", "process-start"):
        script.event(START_SECONDS, kind, argv=["python", "train.py"], parent_pid=90)
    script.add("step", [{"time_ns": ns(at), "step": number} for number, at in enumerate(SECONDS[:60])])
    add_fork(script, grown)
    found = leaks(finish(script))
    assert [leak.severity for leak in found] == (["warning"] if grown[-1] > 300 else [])
    for leak in found:
        assert leak.summary.startswith("Process 300 (forked from the training process) keeps taking host memory")
        assert "No batch" not in leak.summary


@pytest.mark.parametrize(("asked_for", "count"), [(np.full(180, 2000.0), 0), (200 + RAMP, 1)])
def test_filling_memory_allocated_before_is_no_leak(asked_for, count):
    assert len(leaks(finish(program(RAMP, data_bytes=asked_for * MIB)))) == count


def test_memory_released_slowly_is_no_teardown():
    grown = np.concatenate([10.0 * np.arange(30), 300 - 10.0 * np.arange(30)])
    assert leaks(finish(program(grown))) == []


@pytest.mark.parametrize(("seconds", "severities"), [(60, []), (180, ["warning"])])
def test_growth_of_a_live_process_without_iterations_is_told_after_two_minutes(seconds, severities):
    script = program(RAMP[:seconds])
    script.living, script.now_seconds = frozenset({MAIN}), float(SECONDS[seconds - 1])
    assert [finding.severity for finding in diagnose(script.tables()).findings if finding.locus.pid] == severities


def attached(script):
    """Return the run as one whose process has the hooks."""
    script.event(START_SECONDS, "process-attached", argv=["python", "train.py"], parent_pid=90)
    return script


def growing_while_it_runs(**more):
    script = program(RAMP, **more)
    script.living, script.now_seconds = frozenset({MAIN}), float(SECONDS[-1])
    return script


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (growing_while_it_runs(), "was seen yet: it loads its data, or leaks"),
        (finish(program(RAMP), exit_status=-15), "was seen at all: it loaded its data, or leaked"),
        (finish(program(RAMP)), "was seen at all: it loaded its data, or leaked"),
    ],
    ids=["running", "ended by SIGTERM", "finished"],
)
def test_growth_with_hooks_before_the_first_iteration_is_information(script, words):
    verdict = diagnose(attached(script).tables())
    [found] = [finding for finding in verdict.findings if finding.rate]
    assert (found.kind, found.severity, found.suspected) == ("cannot-tell", "info", "main-heap-leak")
    assert "10 MiB/s" in found.summary
    assert words in found.summary
    assert found.advice[0].text.startswith("If it should not load that much, look for what keeps references")
    assert [check.status for check in verdict.checks if check.name == "training process's memory"] == ["not judged"]


def test_loading_that_approaches_the_limit_is_a_warning_that_names_no_leak():
    script = attached(growing_while_it_runs(total=5_000 * MIB))
    (risk,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "host-oom-risk"]
    assert risk.severity == "critical"
    assert risk.advice[0].text == "Hold less memory in the training process"
    assert not [each for each in risk.advice if "leak" in each.text]


@pytest.mark.parametrize("who_steps", [MAIN, ("node", 300, 1)], ids=["itself, by hand-written updates", "a child"])
def test_growth_while_the_run_trains_is_a_leak_of_a_process_without_iterations(who_steps):
    script = attached(growing_while_it_runs())
    if who_steps == MAIN:
        script.event(SECONDS[2], "backward-pass")
    else:
        steps = [{"time_ns": ns(at), "step": number} for number, at in enumerate(SECONDS)]
        script.add("step", steps, key=who_steps)
    assert [leak.severity for leak in leaks(script) if leak.locus.pid == MAIN[1]] == ["warning"]


@pytest.mark.parametrize("has_begun", [False, True], ids=["loads", "trains"])
def test_growth_of_a_fork_before_the_first_iteration_is_information(has_begun):
    """A dataset in the list of a multiprocessing.Manager, whose process has no hooks of its own."""
    script = attached(program(np.zeros(180)))
    script.living, script.now_seconds = frozenset({MAIN, ("node", 300, 1)}), float(SECONDS[-1])
    add_fork(script, RAMP)
    if has_begun:
        script.event(SECONDS[2], "backward-pass")
    [found] = [finding for finding in diagnose(script.tables()).findings if finding.rate]
    assert (found.kind, found.severity) == (("main-heap-leak", "warning") if has_begun else ("cannot-tell", "info"))
    assert found.summary.startswith("Process 300 (forked from the training process)")
    assert ("was seen yet: it loads its data, or leaks" in found.summary) != has_begun


@pytest.mark.parametrize("more", [{}, {"alive": np.ones(30)}])
def test_samples_of_a_steady_process_are_not_dropped_as_teardown(more):
    script = Script()
    held = np.full(30, 200.0 * MIB)
    sample_process(script, SECONDS[:30], MAIN, ROLE_OTHER, private=held, rss=held, **more)
    assert len(before_teardown(script.tables().stream("process"))) == 30


def test_interrupted_watch_leaves_the_process_running():
    script = program(np.zeros(60), watched=True)
    script.living = frozenset({MAIN})
    script.manifest["end_time_ns"] = ns(START_SECONDS + 61)
    verdict = diagnose(script.tables())
    assert (verdict.status, verdict.watch_ended) == ("running", True)
    assert verdict.duration_seconds == pytest.approx(61)


def test_run_without_iterations_names_the_attached_process():
    script = finish(program(np.zeros(60)))
    script.event(START_SECONDS + 2, "process-attached", argv=["python", "serve.py"], parent_pid=90)
    script.events = [event for event in script.events if event["kind"] != "process-exit"]
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "cannot-tell"]
    assert "attached to process 100 (python serve.py)" in found.summary
    assert {each.name: each.value for each in found.evidence}["attached_processes_count"] == 1


@pytest.mark.parametrize(
    ("obstacle", "why", "remedy"),
    [
        ("PYTHONPATH replaced", "PYTHONPATH was replaced", "PYTHONPATH=.:$PYTHONPATH"),
        ("-S", "started with -S", "Leave -S out"),
        (None, "do not show why", "training_harness.attach()"),
    ],
)
def test_training_without_hooks_gets_the_reason_and_a_remedy(obstacle, why, remedy):
    script = program(np.zeros(60))
    script.event(START_SECONDS + 61, "command-exit", COLLECTOR, command_pid=MAIN[1], exit_status=0)
    note_program(script, "train.py", has_torch=True, obstacle=obstacle)
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "cannot-tell"]
    assert why in found.summary
    assert remedy in found.advice[0].text


def test_run_is_running_while_a_process_left_behind_lives():
    script = finish(program(np.zeros(60)))
    left = [{"pid": 777, "start_ticks": 7, "argv": ["python", "train.py"], "is_python": True}]
    script.event(START_SECONDS + 99, "left-running", COLLECTOR, processes=left)
    script.living = frozenset({("node", 777, 7)})
    verdict = diagnose(script.tables())
    assert verdict.status == "running"
    assert any("777 (python train.py)" in finding.summary for finding in verdict.findings)
    script.living = frozenset()
    assert diagnose(script.tables()).status == "finished"


def test_a_training_in_the_background_lasts_beyond_the_end_of_its_command():
    script = simulate(workers=0, prefetch=0, service=jittered(0.1), consumer=jittered(0.1), batches=50)
    script.manifest["command"]["pid"] = 99
    script.event(START_SECONDS + 1, "command-exit", COLLECTOR, command_pid=99, exit_status=0)
    left = [{"pid": MAIN[1], "start_ticks": MAIN[2], "argv": ["python", "train.py"], "is_python": True}]
    script.event(START_SECONDS + 2, "left-running", COLLECTOR, processes=left)
    script.event(START_SECONDS + 60, "process-exit", lost_count=0)
    verdict = diagnose(script.tables())
    assert (verdict.status, verdict.duration_seconds) == ("finished", 60)


@pytest.mark.parametrize(("exit_status", "words"), [(-9, "SIGKILL"), (3, "exit status 3")])
def test_end_of_the_command_is_told_beside_a_process_left_behind(exit_status, words):
    script = finish(program(np.zeros(60)), exit_status=exit_status)
    left = [{"pid": 777, "start_ticks": 7, "argv": ["python", "train.py"], "is_python": True}]
    script.event(START_SECONDS + 99, "left-running", COLLECTOR, processes=left)
    script.living = frozenset({("node", 777, 7)})
    told = f"The command ended ({words}), and 1 of the processes that it started still runs"
    assert [found for found in diagnose(script.tables()).findings if found.summary.startswith(told)]


def test_workers_that_are_still_leaving_a_killed_training_are_not_mentioned():
    script = simulate(workers=2, prefetch=2, service=jittered(0.1), consumer=jittered(0.1), batches=50)
    script.event(script.now_seconds, "command-exit", COLLECTOR, command_pid=MAIN[1], exit_status=-9)
    left = [{"pid": 1000, "start_ticks": 7000, "argv": ["python", "train.py"], "is_python": True}]
    script.event(script.now_seconds, "left-running", COLLECTOR, processes=left)
    script.living = frozenset({("node", 1000, 7000)})
    assert not [finding for finding in diagnose(script.tables()).findings if "started" in finding.summary]
