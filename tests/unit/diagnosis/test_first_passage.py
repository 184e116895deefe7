"""The time until a limit is met, for memory that comes and goes above an unevenly rising level."""

import math

import numpy as np
import pytest

from collector.diagnosis.statistics.first_passage import first_passage_times


def ramp(count):
    return 160 * np.arange(count) / count


def stairs(generator, count):
    size = generator.uniform(3, 10)
    return size * np.floor(ramp(count) / size + generator.random())


SERIES = {
    "white noise": lambda g, n: ramp(n) + 3 * g.normal(size=n),
    "peaks": lambda g, n: ramp(n) + 12 * ((np.arange(n) + g.integers(40)) % 37 < 2) + 0.5 * g.normal(size=n),
    "lengths": lambda g, n: ramp(n) + 2 * g.lognormal(0, 0.5, size=n),
    "stairs": stairs,
    "a random walk": lambda g, n: ramp(n) + np.cumsum(g.uniform(3, 12) / math.sqrt(n) * g.normal(size=n)),
    "a rate that falls": lambda g, n: 160 * np.linspace(0, 1, n) ** g.uniform(0.75, 1) + 0.5 * g.normal(size=n),
}


def forecast(series, *, seen, seed):
    """Return (error of the middle, interval has the truth) after `seen` of the way to a limit of 100."""
    generator = np.random.default_rng(seed)
    values = SERIES[series](generator, int(generator.integers(200, 900)))
    met = int(np.argmax(values >= 100))
    now = int(seen * met)
    low, mid, high = np.percentile(first_passage_times(np.arange(float(now)), values[:now], 100.0), (5, 50, 95))
    truth = met - now + 1
    return abs(mid - truth) / truth, low <= truth <= high


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("seen", [0.5, 0.75])
def test_first_peak_at_the_limit_is_within_the_forecast_interval(series, seen):
    errors, held = zip(*(forecast(series, seen=seen, seed=seed) for seed in range(25)), strict=True)
    assert np.median(errors) <= 0.2
    assert np.mean(held) >= 0.8


def test_passage_without_noise_is_the_crossing_of_a_line():
    times = np.arange(100.0)
    met = first_passage_times(times, 2.0 * times, 400.0)
    assert np.percentile(met, (5, 50, 95)) == pytest.approx((101, 101, 101), rel=0.02)


def test_series_that_does_not_rise_never_meets_the_limit():
    assert not np.isfinite(first_passage_times(np.arange(20.0), np.full(20, 5.0), 10.0)).any()
    assert not np.isfinite(first_passage_times(np.full(20, 7.0), np.arange(20.0), 30.0)).any()
