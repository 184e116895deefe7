"""The time until a limit is met, where memory comes and goes above a level that rises."""

import numpy as np
import pytest

from collector.diagnosis.passage import first_passage

NOISES = {
    "white": lambda g, n: g.normal(size=n),
    "peaks": lambda g, n: 5.0 * ((np.arange(n) + g.integers(40)) % 37 < 2) + 0.2 * g.normal(size=n),
    "sawtooth": lambda g, n: ((np.arange(n) + g.integers(40)) % 43) / 15,
    "lengths": lambda g, n: g.lognormal(0, 0.5, size=n),
}


def forecast(noise, *, seen, seed):
    """(error of the middle, whether the interval has the truth) after `seen` of the way to a limit of 100."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(200, 900))
    values = 110 * np.arange(count) / count + generator.uniform(1, 4) * NOISES[noise](generator, count)
    met = int(np.argmax(values >= 100))
    now = int(seen * met)
    times = np.arange(now, dtype=float)
    low, mid, high = first_passage(times, values[:now], 100.0)
    truth = met - now + 1
    return abs(mid - truth) / truth, low <= truth <= high


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seen", [0.5, 0.75])
def test_the_first_peak_that_meets_the_limit_is_forecast_and_the_interval_is_honest(noise, seen):
    errors, held = zip(*(forecast(noise, seen=seen, seed=seed) for seed in range(40)), strict=True)
    assert np.median(errors) <= 0.13
    assert np.mean(held) >= 0.7


def test_without_noise_it_is_the_crossing_of_a_line():
    times = np.arange(100.0)
    assert first_passage(times, 2.0 * times, 400.0) == pytest.approx((101, 101, 101), rel=0.02)
