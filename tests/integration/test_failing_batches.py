"""Exceptions of a DataLoader that the training catches are in the verdict, with their line and count."""

from __future__ import annotations

import pytest

from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from tests.conftest import REPOSITORY, run_bare

SCRIPT = REPOSITORY / "tests" / "scripts" / "failing_batches.py"


def caught_errors(run):
    findings = diagnose(load_tables(run.run)).findings
    return [finding for finding in findings if finding.kind == "caught-errors"]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_that_the_training_catches_are_counted_with_their_line(run_attached, workers):
    run = run_attached(SCRIPT, str(workers))
    assert run.done.stdout == run_bare(SCRIPT, workers).stdout == "trained\n"
    (finding,) = caught_errors(run)
    assert finding.severity == "info"
    assert finding.value_of("caught_errors_count") == 8
    line = next(number for number, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "raise Val" in text)
    assert f"raised ValueError at failing_batches.py:{line}, in __getitem__ 8 times" in finding.summary
    assert ("worker" in finding.summary) == (workers > 0)
    assert len(run.events("loader-error")) == 4, "the first, and whenever the count has doubled"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_that_ends_the_training_is_not_among_those_that_it_caught(run_attached, workers):
    run = run_attached(SCRIPT, str(workers), "--uncaught")
    assert run.done.returncode == 1
    (finding,) = caught_errors(run)
    assert finding.value_of("caught_errors_count") == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_ends_the_epoch_by_stop_iteration_is_named_and_a_sampler_is_not(run_attached, workers):
    script = SCRIPT.with_name("ends_early.py")
    run = run_attached(script, str(workers))
    assert run.done.stdout == run_bare(script, workers).stdout == "trained on 3 of 10 batches\n"
    (finding,) = caught_errors(run)
    assert finding.severity == "warning"
    assert "raised StopIteration at ends_early.py:21, in __getitem__ once" in finding.summary
    assert "the batches after it are missing" in finding.summary
