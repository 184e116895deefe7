"""Processes that a training starts and never ends."""

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, finish, ns, sample_host, sample_process, start_training

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_OTHER

SECONDS = START_SECONDS + 1 + np.arange(180.0)


def training(starts, lives_seconds=180, *, run_seconds=180, is_live=False):
    """Return a run with helper processes of 20 MiB that start at these seconds and live for some."""
    script, run = start_training(), SECONDS[:run_seconds]
    script.add("step", [{"time_ns": ns(at), "step": number} for number, at in enumerate(run)])
    flat = np.full(len(run), 300.0 * MIB)
    sample_process(script, run, MAIN, ROLE_MAIN, private=flat, rss=flat)
    for number, start in enumerate(starts):
        times = run[np.arange(run_seconds) >= start][:lives_seconds]
        held = np.full(len(times), 20.0 * MIB)
        shared = 250.0 * MIB  # they are forks of the training, and only some were read
        private = held if number % 3 else np.full(len(times), np.nan)
        sample_process(script, times, ("node", 500 + number, 1), ROLE_OTHER, private=private, rss=shared + held)
    sample_host(script, run, demand=flat, total=10**12)
    if is_live:
        script.living, script.now_seconds = frozenset({MAIN}), float(run[-1])
    return script if is_live else finish(script)


def leaks(script):
    return [finding for finding in diagnose(script.tables()).findings if finding.kind == "main-heap-leak"]


def test_processes_that_get_more_are_a_leak_of_the_run():
    (found,) = diagnose(training(np.arange(0, 178, 2)).tables()).findings
    assert (found.kind, found.severity, found.locus.pid) == ("main-heap-leak", "warning", None)
    assert found.rate.value == pytest.approx(10 * MIB, rel=0.15)
    assert "starts processes that do not end: 88 more so far hold 1.72" in found.summary
    assert "wait()" in found.advice[0].text


@pytest.mark.parametrize(
    ("starts", "lives_seconds"),
    [
        (np.arange(0, 178, 2), 6),
        (np.arange(0, 64, 1), 180),
        (-90 * np.log(1 - np.arange(64) / 64), 180),
        (np.arange(0, 176, 22), 180),
    ],
    ids=["they end", "a pool that is full", "a pool that fills ever more slowly", "a few"],
)
def test_processes_that_end_or_stay_few_are_none(starts, lives_seconds):
    assert leaks(training(starts, lives_seconds)) == []


@pytest.mark.parametrize("is_live", [True, False], ids=["goes on", "has ended"])
@pytest.mark.parametrize(("starts", "run_seconds"), [(np.arange(0, 15, 0.5), 16), (np.arange(20, 60), 60)])
def test_processes_that_get_more_for_a_short_time_are_information(starts, run_seconds, is_live):
    """They may be a pool on its way to full."""
    found = leaks(training(starts, run_seconds=run_seconds, is_live=is_live))
    assert [each.severity for each in found] == ["info"]


def test_processes_that_get_more_for_minutes_of_a_run_that_goes_on_are_a_leak():
    assert [each.severity for each in leaks(training(np.arange(0, 178, 2), is_live=True))] == ["warning"]
