"""Steps that become slower: by how much, and in which phase."""

import numpy as np
import pytest
from simulated_runs import MAIN, START_SECONDS, Script, ns, sample_process, start_training

from collector.diagnosis.verdict import diagnose
from collector.report import slower_words
from training_harness.records import ROLE_MAIN

STEPS = 300


def slowdown(backward_seconds, *, wait_seconds=0.0, queued=None):
    """Return the slowdown of a run whose backward passes take these times, `queued` (a share) without a core."""
    forward = np.full(STEPS, 0.02)
    durations = forward + backward_seconds + wait_seconds
    ends = START_SECONDS + np.cumsum(durations)
    script = start_training(Script())
    rows = [
        {
            "time_ns": ns(end),
            "step": step,
            "duration_ns": ns(durations[step]),
            "data_wait_ns": ns(wait_seconds),
            "forward_ns": ns(forward[step]),
            "backward_ns": ns(backward_seconds[step]),
            "unit": 2,
        }
        for step, end in enumerate(ends)
    ]
    script.add("step", rows, MAIN)
    if queued is not None:
        memory = np.full(STEPS, 1e9)
        run_queue = np.cumsum(durations * queued) * 1e9
        sample_process(script, ends, MAIN, ROLE_MAIN, private=memory, rss=memory, run_queue_ns=run_queue)
    return diagnose(script.tables()).summary["throughput"]["slowdown"]


def test_steps_that_take_longer_and_longer_are_told_with_the_phase_that_grew():
    found = slowdown(np.linspace(0.03, 0.09, STEPS), wait_seconds=0.01)
    assert found["phase"] == "backward"
    assert found["first_seconds"] < 0.075 < 0.1 < found["last_seconds"]
    growth = found["last_seconds"] - found["first_seconds"]
    assert found["phase_growth_seconds"] == pytest.approx(growth, rel=0.01)


@pytest.mark.parametrize(("late", "phase"), [(0.7, "waiting for a core"), (0.1, "backward")])
def test_steps_that_only_wait_longer_for_a_core_are_told_as_such(late, phase):
    """Other programs take the cores later on, or a longer backward pass waits for one in proportion."""
    queued = np.where(np.arange(STEPS) < STEPS / 2, 0.1, late)
    found = slowdown(np.where(np.arange(STEPS) < STEPS / 2, 0.03, 0.13), queued=queued)
    assert found["phase"] == phase
    if phase == "waiting for a core":
        assert found["phase_growth_seconds"] == pytest.approx(0.1, rel=0.05)
        assert "; waiting for a core grew most, by " in slower_words(found)


@pytest.mark.parametrize(
    "backward_seconds",
    [
        np.full(STEPS, 0.03),
        0.03 + 0.03 * np.random.default_rng(0).random(STEPS),
        np.where(np.arange(STEPS) < 40, 0.3, 0.03),  # a slow beginning
        np.where(np.arange(STEPS) > 280, 0.3, 0.03),  # a slow moment at the end
        np.where(np.arange(STEPS) % 5 == 0, np.linspace(0.03, 0.9, STEPS), 0.03),  # a fifth of the steps
    ],
)
def test_steady_and_uneven_steps_are_not_called_slower(backward_seconds):
    assert slowdown(backward_seconds) is None
