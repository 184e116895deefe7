"""Processes that a training starts and never ends."""

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, finish, ns, sample_host, sample_process, start_training

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_OTHER

SECONDS = START_SECONDS + 1 + np.arange(90.0)


def training(starts, lives_seconds):
    """Return a run of 90 s with helper processes of 20 MiB that start at these seconds and live for some."""
    script = start_training()
    script.add("step", [{"time_ns": ns(at), "step": number} for number, at in enumerate(SECONDS)])
    flat = np.full(len(SECONDS), 300.0 * MIB)
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=flat, rss=flat)
    for number, start in enumerate(starts):
        times = SECONDS[start : start + lives_seconds]
        held = np.full(len(times), 20.0 * MIB)
        shared = 250.0 * MIB  # they are forks of the training, and only some were read
        private = held if number % 3 else np.full(len(times), np.nan)
        sample_process(script, times, ("node", 500 + number, 1), ROLE_OTHER, private=private, rss=shared + held)
    return finish(sample_host(script, SECONDS, demand=flat, total=10**12))


def test_processes_that_get_more_are_a_leak_of_the_run():
    (found,) = diagnose(training(np.arange(0, 88, 2), 90).tables()).findings
    assert (found.kind, found.severity, found.locus.pid) == ("main-heap-leak", "warning", None)
    assert found.rate.value == pytest.approx(10 * MIB, rel=0.15)
    assert "starts processes that do not end: 44 more so far hold 88" in found.summary
    assert "wait()" in found.advice[0].text


@pytest.mark.parametrize(
    ("starts", "lives_seconds"),
    [(np.arange(0, 88, 2), 6), (np.arange(0, 30, 1), 90), (np.arange(0, 88, 11), 90)],
    ids=["they end", "a pool that is full", "a few"],
)
def test_processes_that_end_or_stay_few_are_none(starts, lives_seconds):
    verdict = diagnose(training(starts, lives_seconds).tables())
    assert [finding for finding in verdict.findings if finding.kind == "main-heap-leak"] == []
