"""A DataLoader that times out: the worker that it waited for, and the line at which that stood."""

from __future__ import annotations

import pytest
from ended_runs import end_run, end_training
from hanging_trainings import stacks, training
from simulated_runs import MAIN, START_SECONDS
from stack_events import (
    FOR_A_BATCH,
    FOR_AN_INDEX,
    IN_A_SAMPLE,
    LOCK,
    POLL,
    WORKERS,
    process,
)

from collector.diagnosis.verdict import diagnose

WAITING = process(MAIN, FOR_A_BATCH, POLL)
IDLE = process(WORKERS[0], FOR_AN_INDEX, POLL)


@pytest.mark.parametrize("budgets", [0.2, 1.5])
def test_line_of_the_worker_is_named_where_its_loader_timed_out(budgets):
    """The timeout is shorter than any silence that is suspicious by itself, or longer."""
    in_a_sample = process(WORKERS[1], IN_A_SAMPLE, LOCK)
    script = stacks(training(timeout_seconds=50.0), WAITING, IDLE, in_a_sample, budgets=budgets)
    error = {
        "type": "RuntimeError",
        "message": "DataLoader timed out after 50.0 seconds",
        "site": "/home/me/train.py:20, in main",
    }
    script.event(START_SECONDS + 60, "exception", **error)
    found = diagnose(end_run(end_training(script), 1).tables()).findings
    hang, crash = (each for each in found if each.kind in ("hang", "crashed"))
    assert (hang.severity, crash.severity) == ("critical", "critical")
    assert "Worker 1 of loader 0 hangs: it is blocked on a lock" in hang.summary
    assert crash.consequence_of == "hang"
    assert crash.advice[0].text.startswith("Fix the hang first")
    assert not any("timeout" in advice.text or "stacks" in advice.text for advice in (*hang.advice, *crash.advice))


def test_worker_that_computes_until_its_loader_times_out_is_not_called_stuck():
    computing = process(WORKERS[1], IN_A_SAMPLE, "computing", used_seconds=0.9)
    script = stacks(training(timeout_seconds=5.0), WAITING, IDLE, computing, budgets=0.1)
    site = "/home/me/train.py:20, in main"
    error = {"type": "RuntimeError", "message": "DataLoader timed out after 5.0 seconds", "site": site}
    script.event(START_SECONDS + 60, "exception", **error)
    found = diagnose(end_run(end_training(script), 1).tables()).findings
    crash, hang = (each for each in found if each.kind in ("hang", "crashed"))
    assert (crash.kind, hang.severity) == ("crashed", "info")
    assert "may hang: it is computing in Files.__getitem__, dataset.py:41" in hang.summary
    assert hang.advice[0].text.startswith("Raise the loader's `timeout`")
    assert crash.advice[0].text.startswith("Look at the hang finding first: it names the line")
