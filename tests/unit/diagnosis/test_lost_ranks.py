"""Ranks that end by a status of their own, so that another one loses its peer and raises."""

import numpy as np
import pytest
from ended_runs import DEATHS, end_run
from simulated_runs import MAIN, MIB, START_SECONDS, Script, jittered, sample_process, simulate

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN

LAUNCHER = ("node", 99, 4000)
RANKS = [("node", 200 + rank, 8000) for rank in range(2)]
LOST_PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:5798"


def ranks(*, have_numbers=True):
    """Return a launcher (the command) with two training processes below it."""
    script = Script()
    script.manifest["command"].update(pid=LAUNCHER[1], start_ticks=LAUNCHER[2])
    for rank, key in enumerate(RANKS):
        number = rank if have_numbers else None
        script.event(START_SECONDS, "process-start", key, number, parent_pid=LAUNCHER[1])
    return script


def death(script):
    """Return the only death, and the reason in the exit record."""
    verdict = diagnose(end_run(script, 1).tables())
    (found,) = [one for one in verdict.findings if one.kind in DEATHS]
    return found, verdict.ending.record.reason


@pytest.mark.parametrize(("exits_at", "cause"), [(8, 1), (10, 0)])
def test_a_rank_that_called_sys_exit_before_another_one_raised_is_the_cause(exits_at, cause):
    script = ranks()
    raised = {"type": "RuntimeError", "message": LOST_PEER if cause == 1 else "the loss is no number"}
    script.event(START_SECONDS + 9, "exception", RANKS[0], 0, **raised)
    said = {"message": "exit status 3", "status": 3, "site": "/home/me/train.py:7, in check", "handled": None}
    script.event(START_SECONDS + exits_at, "exit-message", RANKS[1], 1, **said)
    named = {"type": "ChildFailedError", "message": "exitcode : 3 (pid: 201)"}
    found, reason = death(script.event(START_SECONDS + 12, "exception", LAUNCHER, **named))
    assert (found.kind, found.locus.rank) == ("crashed", cause)
    assert ("called sys.exit at train.py:7, in check: exit status 3." in found.summary) == (cause == 1)
    assert reason == ("sys.exit with a message" if cause == 1 else "uncaught exception")


@pytest.mark.parametrize(
    ("ends_at", "message", "is_named"),
    [(8, LOST_PEER, True), (10, LOST_PEER, False), (8, "NCCL error: unhandled cuda error", False)],
)
def test_a_rank_that_ended_by_itself_before_another_one_lost_it_is_named(ends_at, message, is_named):
    script = ranks()
    script.event(START_SECONDS + 9, "exception", RANKS[0], 0, type="RuntimeError", message=message)
    script.event(START_SECONDS + ends_at, "process-exit", RANKS[1], 1, lost_count=0)
    # A helper that inherited the rank is no rank.
    script.event(START_SECONDS + 7, "process-exit", ("node", 900, 9000), 0, lost_count=0)
    found, _ = death(script)
    assert found.locus.rank == 0
    assert ("Rank 1 had ended without an error before." in found.summary) == is_named
    assert "Rank 0 had ended" not in found.summary
    assert ("same number of steps" in found.advice[0].text) == is_named


def test_a_trial_that_called_sys_exit_is_not_the_cause_of_the_error_of_another_one():
    script = ranks(have_numbers=False)
    said = {"message": "exit status 2", "status": 2, "site": "/home/me/trial.py:7, in main", "handled": None}
    script.event(START_SECONDS + 5, "exit-message", RANKS[0], **said)
    script.event(START_SECONDS + 5.1, "process-exit", RANKS[0], lost_count=0)
    found, _ = death(script.event(START_SECONDS + 50, "exception", RANKS[1], type="ValueError", message="NaN"))
    assert found.locus.pid == RANKS[1][1]


def test_the_pid_in_the_message_of_a_launcher_is_one_of_its_own_host():
    script = ranks()
    far, launcher = ("other", 200, 8500), ("other", 98, 4000)
    script.event(START_SECONDS, "process-start", far, 2, parent_pid=98)
    script.event(START_SECONDS + 9, "exception", RANKS[1], 1, type="RuntimeError", message=LOST_PEER)
    for key, text in ((LAUNCHER, "exitcode : 1 (pid: 201)"), (launcher, "exitcode : 7 (pid: 200)")):
        script.event(START_SECONDS + 10, "exception", key, type="ChildFailedError", message=text)
    found, _ = death(script)
    assert (found.locus.host, found.locus.rank) == ("other", 2)


@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("ChildFailedError", "exitcode  : -15 (pid: 200)  (SIGTERM)\n exitcode  : 7 (pid: 201)"),
        ("ProcessExitedException", "process 1 terminated with exit code 7"),
    ],
)
@pytest.mark.parametrize(("message", "cause"), [(LOST_PEER, 1), (None, 1), ("the loss is no number", 0)])
def test_a_rank_that_ended_without_a_record_is_the_cause_where_another_one_lost_it(launcher, named, message, cause):
    script = ranks()
    if message:
        script.event(START_SECONDS + 9, "exception", RANKS[0], 0, type="RuntimeError", message=message)
    found, reason = death(script.event(START_SECONDS + 12, "exception", LAUNCHER, type=launcher, message=named))
    assert (found.kind, found.locus.rank) == ("crashed", cause)
    assert ("Rank 1 (pid 201) ended with exit status 7, without an exception" in found.summary) == (cause == 1)
    assert reason == ("exit without an exception" if cause == 1 else "uncaught exception")


@pytest.mark.parametrize(("message", "named", "cause"), [(LOST_PEER, 300, 1), (LOST_PEER, 200, 0), ("NaN", 300, 0)])
def test_the_only_rank_without_a_record_of_its_end_is_the_one_that_another_lost(message, named, cause):
    """The launcher started the ranks again, and names one of the new ones, which failed before it trained."""
    script = ranks().event(START_SECONDS + 9, "exception", RANKS[0], 0, type="RuntimeError", message=message)
    failed = {"type": "ChildFailedError", "message": f"exitcode : 1 (pid: {named})"}
    found, _ = death(script.event(START_SECONDS + 20, "exception", LAUNCHER, **failed))
    assert (found.kind, found.locus.rank) == (("killed", 1) if cause else ("crashed", 0))


@pytest.mark.parametrize("sign", ["sample", "batch"])
def test_a_rank_that_lived_on_after_the_error_is_not_the_one_that_was_lost(sign):
    script = ranks().event(START_SECONDS + 9, "exception", RANKS[0], 0, type="RuntimeError", message=LOST_PEER)
    seconds = np.arange(START_SECONDS, START_SECONDS + 14)
    held = [MIB] * len(seconds)
    if sign == "sample":
        sample_process(script, seconds, RANKS[1], ROLE_MAIN, private=held, rss=held, rank=1)
    else:
        numbers = {"loader": 0, "epoch": 0, "worker": -1, "wait_ns": 0, "blocked_ns": 0}
        batches = [{"time_ns": int(time * 1e9), "index": i} | numbers for i, time in enumerate(seconds)]
        script.add("batch", batches, RANKS[1], 1)
    found, _ = death(script)
    assert (found.kind, found.locus.rank) == ("crashed", 0)


def test_a_rank_that_ended_normally_before_the_error_may_be_the_one_that_was_lost():
    script = ranks()
    script.event(START_SECONDS, "process-start", ("node", 202, 8000), 2, parent_pid=LAUNCHER[1])
    script.event(START_SECONDS + 8, "process-exit", RANKS[1], 1, lost_count=0)
    found, _ = death(script.event(START_SECONDS + 9, "exception", RANKS[0], 0, type="OSError", message=LOST_PEER))
    assert (found.kind, found.locus.rank) == ("crashed", 0)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_training_that_ended_before_the_ranks_began_changes_nothing(is_silent):
    script = ranks()
    before = ("node", 150, 5000)
    script.event(START_SECONDS - 9, "process-start", before, parent_pid=LAUNCHER[1])
    for rank in RANKS[: 2 if is_silent else 1]:
        script.event(START_SECONDS + 9, "exception", rank, rank[1] - 200, type="RuntimeError", message=LOST_PEER)
    if not is_silent:
        script.event(START_SECONDS - 5, "process-exit", before, lost_count=0)
    found, _ = death(script)
    assert (found.kind, found.locus.rank) == (("crashed", 0) if is_silent else ("killed", 1))


def test_an_evaluation_that_called_sys_exit_is_not_the_cause_of_the_error_of_a_rank():
    script, evaluation = ranks(), ("node", 300, 9000)
    script.event(START_SECONDS, "process-start", evaluation, parent_pid=RANKS[0][1])
    said = {"message": "exit status 2", "status": 2, "site": "/home/me/evaluate.py:7, in main", "handled": None}
    script.event(START_SECONDS + 5, "exit-message", evaluation, **said)
    script.event(START_SECONDS + 50, "exception", RANKS[0], 0, type="ValueError", message="NaN")
    assert "NaN" in death(script)[0].summary


def test_a_launch_of_more_ranks_after_a_failed_one_is_another_launch():
    script = ranks()
    for rank in range(4):
        script.event(START_SECONDS + 9, "process-start", ("node", 400 + rank, 9000), rank, parent_pid=LAUNCHER[1])
    script.event(START_SECONDS + 5, "exception", RANKS[1], 1, type="ValueError", message="first")
    script.event(START_SECONDS + 20, "exception", ("node", 403, 9000), 3, type="ValueError", message="second")
    verdict = diagnose(end_run(script, 1).tables())
    found = {f.severity: f.summary for f in verdict.findings if f.kind == "crashed"}
    assert "second" in found["critical"]
    assert "first" in found["warning"]


def test_a_command_that_trained_on_after_a_child_failed_ended_by_its_own_error():
    script = simulate(workers=0, prefetch=2, service=jittered(0.1), consumer=jittered(0.1), batches=60)
    child = ("node", 300, 9000)
    script.event(START_SECONDS + 1, "process-start", child, parent_pid=MAIN[1])
    script.event(START_SECONDS + 2, "exception", child, type="KeyError", message="'label'")
    script.event(script.now_seconds, "exception", type="ValueError", message="the loss is no number")
    verdict = diagnose(end_run(script, 1).tables())
    found = {f.severity: f.summary for f in verdict.findings if f.kind == "crashed"}
    assert "the loss is no number" in found["critical"]


def test_a_rank_that_begins_after_another_one_raised_is_part_of_the_same_launch():
    script = Script()
    script.manifest["command"].update(pid=LAUNCHER[1], start_ticks=LAUNCHER[2])
    for rank, (begin, end, text) in enumerate(((0, 3, "'label'"), (4, 9, LOST_PEER))):
        script.event(START_SECONDS + begin, "process-start", RANKS[rank], rank, parent_pid=LAUNCHER[1])
        script.event(START_SECONDS + end, "exception", RANKS[rank], rank, type="RuntimeError", message=text)
    found, _ = death(script)
    assert (found.locus.rank, found.severity) == (0, "critical")


@pytest.mark.parametrize("parent", [RANKS[0][1], 77])
def test_a_training_that_reports_the_failure_of_a_child_names_the_exception_of_the_child(parent):
    script, child = ranks(), ("node", 300, 9000)
    script.event(START_SECONDS + 3, "process-attached", child, argv=["python", "evaluate.py"], parent_pid=parent)
    raised = {"type": "KeyError", "message": "'bleu'", "site": "/home/me/evaluate.py:3, in main"}
    script.event(START_SECONDS + 8, "exception", child, **raised)
    failed = {"type": "CalledProcessError", "message": "Command 'python evaluate.py' returned exit status 1."}
    found, _ = death(script.event(START_SECONDS + 9, "exception", RANKS[0], 0, **failed))
    is_child = parent == RANKS[0][1]
    words = (
        "exit status 1. Process 300 (python evaluate.py) had ended at evaluate.py:3, in main with KeyError: 'bleu'."
    )
    assert found.summary.endswith(words) == is_child
    assert ("events/node.300.jsonl" in found.advice[0].text) == is_child


@pytest.mark.parametrize(
    ("failed", "is_named"),
    [
        ("['/usr/bin/python', PosixPath('/home/me/probe.py'), '--all']", True),
        ("['nvcc', 'a.cu']", False),
        ("['/usr/bin/python', 'check.py']", False),  # this child had no exception
    ],
)
def test_an_earlier_child_that_raised_is_not_the_one_whose_failure_is_reported(failed, is_named):
    script = ranks()
    for number, argv in enumerate((["python3", "probe.py", "--all"], ["python3", "check.py"])):
        key = ("node", 300 + number, 9000)
        script.event(START_SECONDS + 2, "process-attached", key, argv=argv, parent_pid=RANKS[0][1])
    script.event(START_SECONDS + 3, "exception", ("node", 300, 9000), type="ImportError", message="no flash_attn")
    text = f"Command '{failed}' returned non-zero exit status 2."
    script.event(START_SECONDS + 90, "exception", RANKS[0], 0, type="CalledProcessError", message=text)
    found, _ = death(script)
    assert ("ImportError" in found.summary) == is_named


def test_a_child_that_was_started_again_and_failed_otherwise_is_not_named_by_its_first_error():
    script = ranks()
    for number in range(2):
        key, argv = ("node", 300 + number, 9000), ["python", "probe.py"]
        script.event(START_SECONDS + 2 + number, "process-attached", key, argv=argv, parent_pid=RANKS[0][1])
    script.event(START_SECONDS + 2.5, "exception", ("node", 300, 9000), type="ImportError", message="no flash_attn")
    text = "Command '['python', 'probe.py']' returned non-zero exit status 2."
    script.event(START_SECONDS + 9, "exception", RANKS[0], 0, type="CalledProcessError", message=text)
    assert "ImportError" not in death(script)[0].summary
