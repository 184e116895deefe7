"""The pace of the next steps, estimated from the steps before."""

import numpy as np
import pytest

from collector.diagnosis.statistics.first_passage import FUTURES_COUNT
from collector.diagnosis.statistics.step_pace import StepPace

AHEAD = np.ones(FUTURES_COUNT)  # as far as what was observed


def progress(seconds_per_step, *, idle_seconds=0.0):
    """Return the pace from one sample per second of a training, which begins after `idle_seconds`."""
    ends = idle_seconds + np.cumsum(seconds_per_step)
    times = np.arange(0.0, ends[-1])
    return StepPace.of(times, np.searchsorted(ends, times).astype(float))


def quantiles(paces):
    return np.percentile(paces, (5, 50, 95))


def test_even_pace_continues():
    low, mid, high = quantiles(progress(np.full(2000, 0.05)).draw(AHEAD))
    assert mid == pytest.approx(0.05, rel=0.01)
    assert 0.048 < low <= high < 0.052


def test_time_before_the_first_step_is_not_in_the_pace():
    paces = progress(np.full(2000, 0.05), idle_seconds=60.0).draw(AHEAD)
    assert quantiles(paces) == pytest.approx((0.05, 0.05, 0.05), rel=0.05)


def test_interval_of_a_slowing_pace_covers_both_futures():
    seconds = np.linspace(0.02, 0.06, 3000)
    low, mid, high = quantiles(progress(seconds).draw(AHEAD))
    newest, next_as_many = seconds[-1], 0.08  # the mean, if it goes on
    assert low < newest < mid <= high
    assert high >= 0.95 * next_as_many


def test_interval_of_an_uneven_pace_is_as_wide_as_its_past():
    quarters = np.repeat([0.04, 0.06, 0.05, 0.045], 600)
    low, mid, high = quantiles(progress(quarters).draw(AHEAD))
    assert low < 0.04 < mid < 0.06 < high


def test_run_without_steps_has_no_pace():
    assert StepPace.of(np.arange(50.0), np.full(50, np.nan)) is None
    assert StepPace.of(np.arange(50.0), np.zeros(50)) is None
