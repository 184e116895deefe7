"""Trainings that wait for a process of their own: the child is the culprit if it is stuck at a lock."""

from __future__ import annotations

import pytest
from hanging_trainings import only, stacks, training
from simulated_runs import MAIN, START_SECONDS, ns, start_training
from stack_events import FOR_AN_INDEX, LIBRARY, LOCK, POLL, WORKERS, add_stacks, process

from collector.diagnosis.hangs.hang import find_hangs

CHILD = ("node", 3000, 9000)
IN_RECV = [["Connection._recv", f"{LIBRARY}/multiprocessing/connection.py", 395], ["main", "/home/me/train.py", 33]]
IN_OPERATION = [["produce", "/home/me/data.py", 6]]
ENDING = [
    ["Thread.join", f"{LIBRARY}/threading.py", 1119],
    ["_exit_function", f"{LIBRARY}/multiprocessing/util.py", 360],
]
FOR_A_TASK = [["Queue.get", f"{LIBRARY}/multiprocessing/queues.py", 103], ["serve", "/home/me/data.py", 9]]
FEEDING = [["Connection._send", f"{LIBRARY}/multiprocessing/connection.py", 1]]
FEEDING.append(["Queue._feed", f"{LIBRARY}/multiprocessing/queues.py", 1])


def waiting_for_a_child(frames, *, moved_seconds_ago=None, feeds=False):
    """Return a training that waits for a process of its own, which is blocked on a lock with these frames."""
    child = process(CHILD, frames, LOCK, parent=MAIN[1], moved_seconds_ago=moved_seconds_ago)
    script = start_training()
    script.add("step", [{"time_ns": ns(START_SECONDS + 1 + index), "step": index} for index in range(10)])
    add_stacks(script, process(MAIN, IN_RECV, "waiting for a pipe"), child, silent=(MAIN,))
    for event in script.events if feeds else ():
        if event["kind"] == "stacks":
            thread = {"thread": "QueueFeederThread", "waits": "waiting for a full pipe", "frames": FEEDING}
            event["processes"][1]["threads"].append(thread)
    (finding,) = find_hangs(script.tables())
    return finding


@pytest.mark.parametrize(
    ("frames", "feeds", "does", "advice"),
    [
        (IN_OPERATION, False, "blocked on a lock (futex) in produce, data.py:6", "get_context('spawn')"),
        (ENDING, True, "waiting to end until someone takes what it put in a queue", "(`get`) before `join`"),
    ],
)
def test_a_child_at_a_lock_that_the_training_waits_for_is_the_culprit(frames, feeds, does, advice):
    finding = waiting_for_a_child(frames, feeds=feeds)
    assert (finding.severity, finding.locus.pid, finding.locus.role) == ("critical", 3000, "other")
    assert f"it is {does}; the training process (pid 100) waits for it in main, train.py:33" in finding.summary
    assert advice in finding.advice[0].text


@pytest.mark.parametrize(("frames", "moved_seconds_ago"), [(FOR_A_TASK, None), (IN_OPERATION, 3.0)])
def test_a_child_that_idles_or_moves_data_is_not_blamed(frames, moved_seconds_ago):
    finding = waiting_for_a_child(frames, moved_seconds_ago=moved_seconds_ago)
    assert (finding.severity, finding.locus.pid) == ("info", 100)


ENVIRONMENT = [["step", "/home/me/simulator.py", 8], ["_bootstrap", f"{LIBRARY}/multiprocessing/process.py", 314]]
IDLE = [*IN_RECV[:1], *ENVIRONMENT[1:]]
SOCKET = "waiting for a local socket"


@pytest.mark.parametrize(
    ("frames", "waits", "pid", "severity", "budgets"),
    [
        (ENVIRONMENT, SOCKET, 3000, "critical", 4.1),
        (ENVIRONMENT, SOCKET, 3000, "info", 2.0),
        (ENVIRONMENT, "asleep", 100, "info", 4.1),
        (IDLE, SOCKET, 100, "info", 4.1),
    ],
)
def test_a_child_that_owes_the_training_a_message_is_the_culprit(frames, waits, pid, severity, budgets):
    """Environments of a learner answer each step by a pipe; the others wait for the next one."""
    children = [process(CHILD, frames, waits, parent=MAIN[1])]
    children += [process(("node", 3001, 9001), IDLE, SOCKET, parent=MAIN[1])]
    script = start_training()
    script.add("step", [{"time_ns": ns(START_SECONDS + 1 + index), "step": index} for index in range(10)])
    add_stacks(script, process(MAIN, IN_RECV, SOCKET), *children, silent=(MAIN,), budgets=budgets)
    (finding,) = find_hangs(script.tables())
    assert (finding.locus.pid, finding.severity) == (pid, severity)


@pytest.mark.parametrize("sibling", [{"used_seconds": 2.0}, {"moved_seconds_ago": 3.0}])
def test_no_child_is_blamed_while_another_one_computes_or_moves_data(sibling):
    """The one that holds a connection open may be idle, and the other one owe the message."""
    children = [process(CHILD, ENVIRONMENT, SOCKET, parent=MAIN[1])]
    children += [process(("node", 3001, 9001), ENVIRONMENT, "waiting for a pipe", parent=MAIN[1], **sibling)]
    script = start_training()
    script.add("step", [{"time_ns": ns(START_SECONDS + 1 + index), "step": index} for index in range(10)])
    add_stacks(script, process(MAIN, IN_RECV, SOCKET), *children, silent=(MAIN,), budgets=4.1)
    (finding,) = find_hangs(script.tables())
    assert (finding.locus.pid, finding.severity) == (MAIN[1], "info")


@pytest.mark.parametrize(("dataset_length", "severity"), [(80, "info"), (400, "critical")])
def test_a_child_that_owes_an_answer_after_the_last_batch_only_may_hang(dataset_length, severity):
    """An evaluation in a child follows an epoch, and may take long."""
    child = process(CHILD, ENVIRONMENT, SOCKET, parent=MAIN[1])
    idle = process(WORKERS[0], FOR_AN_INDEX, POLL)
    script = stacks(
        training(dataset_length=dataset_length), process(MAIN, IN_RECV, SOCKET), child, idle, budgets=4.1
    )
    finding = only(script)
    assert (finding.locus.pid, finding.severity) == (3000, severity)
