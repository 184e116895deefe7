"""Ranks that end by a status of their own, so that another one loses its peer and raises."""

import pytest
from ended_runs import DEATHS, end_run
from simulated_runs import START_SECONDS, Script

from collector.diagnosis.verdict import diagnose

LAUNCHER = ("node", 99, 4000)
RANKS = [("node", 200 + rank, 8000) for rank in range(2)]
LOST_PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:5798"


def ranks():
    """Return a launcher (the command) with two training processes below it."""
    script = Script()
    script.manifest["command"].update(pid=LAUNCHER[1], start_ticks=LAUNCHER[2])
    for rank, key in enumerate(RANKS):
        script.event(START_SECONDS, "process-start", key, rank, parent_pid=LAUNCHER[1])
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
