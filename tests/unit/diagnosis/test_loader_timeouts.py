"""A DataLoader that times out: the worker that it waited for, and the line at which that stood."""

from __future__ import annotations

import pytest
from ended_runs import end_run, end_training
from hanging_trainings import stacks, training
from simulated_runs import START_SECONDS
from stack_events import IDLE, IN_A_SAMPLE, LOCK, WAITING, WORKERS, process

from collector.diagnosis.verdict import diagnose


def timed_out(worker, timeout_seconds, budgets):
    """Return the findings of a training whose loader times out, of its end and of the worker that it waits for."""
    script = stacks(training(timeout_seconds=timeout_seconds), WAITING, IDLE, worker, budgets=budgets)
    message, site = f"DataLoader timed out after {timeout_seconds} seconds", "/home/me/train.py:20, in main"
    script.event(START_SECONDS + 60, "exception", type="RuntimeError", message=message, site=site)
    found = diagnose(end_run(end_training(script), 1).tables()).findings
    return [each for each in found if each.kind in ("hang", "crashed")]


@pytest.mark.parametrize("budgets", [0.2, 1.5])
def test_line_of_the_worker_is_named_where_its_loader_timed_out(budgets):
    """The timeout is shorter than any silence that is suspicious by itself, or longer."""
    in_a_sample = process(WORKERS[1], IN_A_SAMPLE, LOCK)
    hang, crash = timed_out(in_a_sample, 50.0, budgets)
    assert (hang.severity, crash.severity) == ("critical", "critical")
    assert "Worker 1 of loader 0 hangs: it is blocked on a lock" in hang.summary
    assert crash.consequence_of == "hang"
    assert crash.advice[0].text.startswith("Fix the hang first")
    assert not any("timeout" in advice.text or "stacks" in advice.text for advice in (*hang.advice, *crash.advice))


def test_worker_that_computes_until_its_loader_times_out_is_not_called_stuck():
    computing = process(WORKERS[1], IN_A_SAMPLE, "computing", used_seconds=0.9)
    crash, hang = timed_out(computing, 5.0, budgets=0.1)
    assert (crash.kind, hang.severity) == ("crashed", "info")
    assert "may hang: it is computing in Files.__getitem__, dataset.py:41" in hang.summary
    assert hang.advice[0].text.startswith("Raise the loader's `timeout`")
    assert crash.advice[0].text.startswith("Look at the hang finding first: it names the line")
