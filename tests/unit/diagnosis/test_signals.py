"""Ends by a signal: what the signal means, and whether it was handled."""

from signal import Signals

import pytest
from ended_runs import (
    COLLECTOR,
    DEATHS,
    KILLED_MESSAGE,
    WORKERS,
    deaths,
    end_run,
    end_training,
    end_workers,
    exception,
    training,
)
from simulated_runs import MAIN, MIB, START_SECONDS, Script, sample_process

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN


def test_ctrl_c_is_information():
    script = end_run(end_training(end_workers(exception(training(), "KeyboardInterrupt"))), -2)
    assert deaths(script) == [("killed", "main", None, "info")]


@pytest.mark.parametrize(
    ("signal", "told", "advice", "fault"),
    [
        (Signals.SIGHUP, "a terminal or its connection is closed", "tmux", "outside"),
        (Signals.SIGUSR1, "had no handler", "Save a checkpoint", "outside"),
        (Signals.SIGALRM, "a timer ran out", "signal.alarm", "your code"),
        (Signals.SIGPIPE, "whose reader was gone", "program after a `|`", "outside"),
        (Signals.SIGXCPU, "CPU time that it may use", "ulimit -t", "your settings"),
        (Signals.SIGXFSZ, "RLIMIT_FSIZE", "ulimit -f", "your settings"),
    ],
)
def test_signal_that_has_a_meaning_is_explained(signal, told, advice, fault):
    verdict = diagnose(end_run(training(), -signal).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert signal.name in found.summary
    assert told in found.summary
    assert advice in found.advice[0].text
    assert found.fault == fault


@pytest.mark.parametrize(
    ("limit", "unseen_seconds", "is_met"),
    [(None, 2, False), (100, 2, True), (104, 2, True), (110, 2, False), (130, 60, False)],
)
def test_sigkill_is_explained_by_cpu_time_that_reached_its_limit(limit, unseen_seconds, is_met):
    script = training()
    script.event(START_SECONDS - 1, "process-attached", argv=[], parent_pid=1, cpu_limit_seconds=limit)
    script.now_seconds += 60
    last = script.now_seconds - unseen_seconds
    row = {"private": [MIB], "rss": [MIB], "cpu_ns": [100_000_000_000], "allowed_cores_count": [2]}
    sample_process(script, [last], MAIN, ROLE_MAIN, **row)
    verdict = diagnose(end_run(script, -9).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert ("CPU time that it may use" in found.summary) == is_met
    assert ("ulimit -t" in found.advice[0].text) == is_met
    measured = {item.name: item.value for item in found.evidence}
    assert measured.get("cpu_limit_seconds") == (limit if is_met else None)


def test_sigterm_is_a_warning_and_makes_no_worker_a_victim():
    assert deaths(end_run(training(), -15)) == [("killed", "main", None, "warning")]


@pytest.mark.parametrize(
    ("exit_status", "severity", "words"),
    [
        (143, "warning", "which stands for SIGTERM (128 + 15)"),
        (130, "info", "which stands for SIGINT (128 + 2)"),
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


def test_the_command_timeout_is_named_and_no_crash():
    script = end_run(end_training(end_workers(training())), 124)
    seen = {"argv": ["timeout"], "is_python": False, "process_pid": 80, "process_start_ticks": 1}
    assert deaths(script) == [("crashed", "main", None, "critical")]
    script.event(START_SECONDS, "process-seen", COLLECTOR, **seen)
    assert deaths(script) == [("killed", "main", None, "warning")]
    assert "`timeout` ended the command" in diagnose(script.tables()).findings[0].summary


@pytest.mark.parametrize(
    ("raised", "signal"),
    [(("SignalException", "Process 100 got signal: 15"), "SIGTERM"), (("KeyboardInterrupt", ""), "SIGINT")],
)
def test_the_command_timeout_is_named_where_the_training_raised_its_signal(raised, signal):
    """torchrun and Lightning turn SIGTERM into an exception, and Python the signal of `timeout -s INT`."""
    script = exception(training(), *raised)
    end_run(end_training(end_workers(script)), 124)
    assert f"ended by {signal}" in diagnose(script.tables()).findings[0].summary
    seen = {"argv": ["timeout"], "is_python": False, "process_pid": 80, "process_start_ticks": 1}
    script.event(START_SECONDS, "process-seen", COLLECTOR, **seen)
    (found,) = [one for one in diagnose(script.tables()).findings if one.kind in DEATHS]
    assert (found.kind, found.severity) == ("killed", "warning")
    assert "`timeout` ended the command" in found.summary
    assert found.advice[0].text.startswith("Give `timeout` more time")


@pytest.mark.parametrize("is_over", [True, False])
def test_the_command_timeout_is_named_once_and_as_the_end_of_the_training(is_over):
    """It sends its signal to the whole process group: to each rank, and to the workers."""
    script = exception(training(), "RuntimeError", KILLED_MESSAGE.replace("Killed", "Terminated"))
    died = {"loader": 0, "epoch": 0, "worker": 1, "worker_pid": WORKERS[1][1], "exit_code": -15, "last_index": 10}
    script.event(script.now_seconds - 0.6, "worker-died", **died)
    for rank in range(2):
        key = ("node", 200 + rank, 8000)
        script.event(START_SECONDS, "process-start", key, rank, parent_pid=MAIN[1])
        script.event(script.now_seconds - 0.4, "exception", key, rank, type="SIGTERMException", message="")
    if is_over:
        seen = {"argv": ["timeout"], "is_python": False, "process_pid": 80, "process_start_ticks": 1}
        script.event(START_SECONDS, "process-seen", COLLECTOR, **seen)
    kinds = [(kind, role) for kind, role, *_ in deaths(end_run(script, 124))]
    one_each = [("killed", "main"), ("killed", "main"), ("worker-killed", "worker")]
    assert sorted(kinds) == ([("killed", "main")] if is_over else one_each)


@pytest.mark.parametrize("signal", [Signals.SIGUSR1, Signals.SIGHUP])
def test_ranks_that_timeout_ended_share_one_finding_whatever_its_signal(signal):
    script = exception(training(), "RuntimeError", KILLED_MESSAGE.replace("Killed", "Stopped"))
    died = {"loader": 0, "epoch": 0, "worker": 1, "worker_pid": WORKERS[1][1], "last_index": 10}
    script.event(script.now_seconds - 0.6, "worker-died", **died, exit_code=-signal)
    for rank in range(2):
        key = ("node", 200 + rank, 8000)
        script.event(START_SECONDS, "process-start", key, rank, parent_pid=MAIN[1])
        message = f"Process {key[1]} got signal: {signal.value}"
        script.event(script.now_seconds - 0.4, "exception", key, rank, type="SignalException", message=message)
    seen = {"argv": ["timeout"], "is_python": False, "process_pid": 80, "process_start_ticks": 1}
    script.event(START_SECONDS, "process-seen", COLLECTOR, **seen)
    assert [(kind, role) for kind, role, *_ in deaths(end_run(script, 124))] == [("killed", "main")]


@pytest.mark.parametrize(
    ("status", "words"), [(130, ""), (0, " The command went on, and ended with exit status 0.")]
)
def test_trainings_that_ctrl_c_ended_share_one_finding(status, words):
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number in range(3):
        key = ("node", 200 + number, 8000)
        script.event(START_SECONDS, "process-start", key, parent_pid=99)
        script.event(START_SECONDS + 9, "exception", key, type="KeyboardInterrupt", message="")
        script.event(START_SECONDS + 9.1, "process-exit", key, lost_count=0)
    found = [one for one in diagnose(end_run(script, status).tables()).findings if one.kind in DEATHS]
    told = f"3 training processes (pids 200, 201 and 202) ended by SIGINT.{words}"
    assert [(one.severity, one.summary) for one in found] == [("info", told)]


def test_the_command_timeout_is_named_before_the_first_step():
    seen = {"argv": ["/usr/bin/timeout", "9"], "is_python": False, "process_pid": 80, "process_start_ticks": 1}
    script = end_run(Script().event(START_SECONDS, "process-seen", COLLECTOR, **seen), 124)
    assert deaths(script) == [("killed", "other", None, "warning")]


@pytest.mark.parametrize(
    ("signal", "first"),
    [
        (11, "Read the Python stack in the command's output; if it has none, run again with PYTHONFAULTHANDLER=1"),
        (6, "Look at the end of the command's own output"),
        (7, "Check the room in /dev/shm"),
        (4, "Install packages that are built for this CPU"),
    ],
)
def test_a_fault_in_native_code_is_a_crash_with_advice_for_its_signal(signal, first):
    script = end_run(end_workers(training(), reason="parent-gone"), -signal)
    assert deaths(script) == [("crashed", "main", None, "critical")]
    found = diagnose(script.tables()).findings[0]
    assert f"ended by {Signals(signal).name}." in found.summary
    assert found.advice[0].text.startswith(first)


@pytest.mark.parametrize("raised", [False, True])
def test_a_fault_after_the_end_of_the_script_is_told_so(raised):
    script = end_workers(training())
    script = end_run(end_training(exception(script, "KeyError") if raised else script), -11)
    (found,) = [found for found in diagnose(script.tables()).findings if found.kind == "crashed"]
    assert ("SIGSEGV while its interpreter shut down, after the end" in found.summary) != raised
    assert found.advice[0].text.startswith("Join the script's threads") != raised
