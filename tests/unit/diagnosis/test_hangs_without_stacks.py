"""Hangs where py-spy is missing or may not read: the kernel's state names the process, and no line."""

from __future__ import annotations

import pytest
from hanging_trainings import only, stacks, training
from simulated_runs import MAIN
from stack_events import IDLE, IN_A_SAMPLE, IN_MAIN, LOCK, POLL, WAITING, WORKERS, process

from collector.diagnosis.hangs.hang import find_hangs


def unread(one, waits):
    """Return a process whose stacks could not be read: the kernel alone tells what it waits for."""
    return {**one, "unread": waits}


@pytest.mark.parametrize(("budgets", "severity"), [(1.1, "info"), (4.1, "critical")])
def test_without_py_spy_the_worker_that_does_not_wait_for_work_is_named(budgets, severity):
    seen = [unread(WAITING, POLL), unread(IDLE, POLL), unread(process(WORKERS[1], IN_A_SAMPLE, LOCK), LOCK)]
    found = only(stacks(training(batches=0), *seen, budgets=budgets))
    assert (found.locus.worker, found.severity) == (1, severity)
    assert "blocked on a lock (futex); the training process" in found.summary
    assert "Its line is unknown: py-spy is not installed" in found.summary


@pytest.mark.parametrize(
    ("waits", "pins", "role"),
    [
        (POLL, False, "worker"),
        (POLL, True, "worker"),
        (LOCK, True, "worker"),
        (LOCK, False, "main"),
        ("waiting for a disk", True, "main"),
        ("computing", True, None),
    ],
)
def test_without_py_spy_a_worker_at_work_holds_up_only_a_training_that_may_wait_for_its_batch(waits, pins, role):
    script = training()
    for event in script.events:
        if event["kind"] == "loader":
            event["pin_memory"] = pins
    seen = [unread(process(MAIN, IN_MAIN, waits), waits), unread(process(WORKERS[0], IN_A_SAMPLE, LOCK), LOCK)]
    found = find_hangs(stacks(script, *seen, budgets=9).tables())
    assert [one.locus.role for one in found] == [role] * (role is not None)


@pytest.mark.parametrize(("waits", "used_seconds", "count"), [("asleep", 0.0, 1), ("computing", 2.0, 0)])
def test_without_py_spy_a_training_process_that_stands_still_itself_is_information(waits, used_seconds, count):
    alone = [unread(process(MAIN, IN_MAIN, waits, used_seconds=used_seconds), waits), unread(IDLE, POLL)]
    found = find_hangs(stacks(training(), *alone, budgets=9).tables())
    assert [(one.locus.role, one.severity) for one in found] == [("main", "info")] * count


@pytest.mark.parametrize(
    ("waits", "fault", "remedies"),
    [
        (LOCK, None, []),
        ("computing", None, []),
        ("waiting for a pipe", None, []),
        ("waiting for the network (10.0.0.5:443)", "outside", ["Set a timeout for that connection, and retry"]),
    ],
)
def test_without_py_spy_the_advice_is_to_read_stacks_and_the_fault_only_what_the_kernel_shows(
    waits, fault, remedies
):
    seen = [unread(WAITING, POLL), unread(process(WORKERS[0], IN_A_SAMPLE, waits), waits)]
    found = only(stacks(training(), *seen, budgets=9))
    texts = [one.text for one in found.advice]
    assert texts[0].startswith("Install py-spy, or give Tidegauge the right to read stacks")
    assert (found.fault, texts[1:-1]) == (fault, remedies)
    assert texts[-1].startswith("Set DataLoader(timeout=...)")


def test_without_py_spy_a_training_at_a_futex_gets_no_advice_on_locks():
    found = only(stacks(training(), unread(process(MAIN, IN_MAIN, LOCK), LOCK), unread(IDLE, POLL), budgets=9))
    assert found.fault is None
    assert not [one.text for one in found.advice if "lock" in one.text]


def test_without_py_spy_the_state_of_a_process_is_not_that_of_dumps_of_its_stacks():
    found = only(stacks(training(), unread(WAITING, POLL), unread(process(WORKERS[0], IN_A_SAMPLE, LOCK), LOCK)))
    windows = {fact.name: fact.window for fact in found.evidence}
    assert windows["state"] == "state in the kernel"
    assert not [window for window in windows.values() if "stacks" in window]
