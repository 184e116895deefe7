"""Growth is found in series that leak, and not in series that only seem to."""

import numpy as np
import pytest

from collector.diagnosis.statistics.growth import growth, slope_interval, theil_sen

POINTS = 600
SEEDS = 100


def autoregressive(generator, phi):
    noise = generator.normal(size=POINTS) * np.sqrt(1 - phi * phi)
    values = np.empty(POINTS)
    values[0] = generator.normal()
    for i in range(1, POINTS):
        values[i] = phi * values[i - 1] + noise[i]
    return values


SHARE = np.arange(POINTS) / POINTS


def steps(generator, count):
    """Return the sum of `count` steps at random times and of random sizes."""
    sizes, at = generator.exponential(20 / count, size=count), generator.random(count)
    return (sizes * (SHARE[:, np.newaxis] > at)).sum(axis=1) + 0.1 * generator.normal(size=POINTS)


def marks(generator):
    """The high-water marks of three buffers, as heaps with fragments keep them."""
    return np.maximum.accumulate(np.exp(0.8 * generator.normal(size=(3, POINTS))), axis=1).sum(axis=0)


HEALTHY = {
    "white noise": lambda g: g.normal(size=POINTS),
    "slow noise": lambda g: autoregressive(g, 0.9),
    "saturating warm-up": lambda g: 20 * (1 - np.exp(-SHARE / g.uniform(0.02, 0.3))) + 0.2 * g.normal(size=POINTS),
    "a cache that is full": lambda g: 10 * np.minimum(SHARE, g.uniform(0.5, 0.74)) + 0.05 * g.normal(size=POINTS),
    "sawtooth": lambda g: 10 * ((np.arange(POINTS) % g.integers(10, 150)) / 50) + 0.2 * g.normal(size=POINTS),
    "single step": lambda g: 10.0 * (np.arange(POINTS) > g.integers(60, 540)) + 0.2 * g.normal(size=POINTS),
    "two steps": lambda g: (
        10.0 * (np.arange(POINTS) > g.integers(60, 300))
        + 10.0 * (np.arange(POINTS) > g.integers(300, 540))
        + 0.2 * g.normal(size=POINTS)
    ),
    "four steps of any size": lambda g: steps(g, 4),
    "high-water mark": lambda g: np.maximum.accumulate(np.exp(g.normal(size=POINTS))),
}
LEAKS = {
    "linear": lambda g: 10 * SHARE + 0.5 * g.normal(size=POINTS),
    "after warm-up": lambda g: 10 * SHARE + 20 * (1 - np.exp(-SHARE / 0.05)) + 0.3 * g.normal(size=POINTS),
    "from the middle on": lambda g: 20 * np.maximum(0, SHARE - 0.5) + 0.3 * g.normal(size=POINTS),
    "a stair per epoch": lambda g: 2 * np.floor(SHARE * 12) + 0.3 * g.normal(size=POINTS),
    "a stair of four epochs": lambda g: 5 * np.floor(SHARE * 4 + g.random()) + 0.1 * g.normal(size=POINTS),
    "forty steps of any size": lambda g: steps(g, 40),
    "under a sawtooth": lambda g: 15 * SHARE + ((np.arange(POINTS) % 40) / 10) + 0.2 * g.normal(size=POINTS),
}


def count_found(make):
    times = np.arange(POINTS, dtype=float)
    return sum(
        growth(times, make(np.random.default_rng(seed)), negligible=0.5) is not None for seed in range(SEEDS)
    )


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_series_are_almost_never_called_growth(kind):
    assert count_found(HEALTHY[kind]) <= 2


@pytest.mark.parametrize("kind", LEAKS)
def test_leaks_are_found(kind):
    assert count_found(LEAKS[kind]) >= 95


def test_several_high_water_marks_are_seldom_called_growth():
    assert count_found(marks) <= 10


def test_a_leak_in_slow_noise_is_mostly_found():
    assert count_found(lambda g: 14 * SHARE + autoregressive(g, 0.9)) >= 95


@pytest.mark.parametrize("noise", [0, 0.5])
@pytest.mark.parametrize("onset", [0.0, 0.2, 0.5])
def test_the_onset_of_a_leak_is_named(onset, noise):
    values = 40 * np.maximum(0, SHARE - onset) + noise * np.random.default_rng(0).normal(size=POINTS)
    values[:5] -= 5.0  # the warm-up
    grown = growth(np.arange(POINTS, dtype=float), values, negligible=0.5)
    assert grown.since_seconds == pytest.approx(onset * POINTS, abs=30)
    assert grown.rise == pytest.approx(40 * (1 - onset), rel=0.1)


def test_the_onset_of_a_leak_per_step_is_named_although_the_pace_changes():
    steps = np.cumsum(np.where(np.arange(POINTS) < 200, 1.0, 4.0))
    grown = growth(np.arange(POINTS, dtype=float), 0.05 * steps, negligible=0.5, steps=steps)
    assert grown.since_seconds <= 30


def test_leak_per_step_is_found_despite_a_changing_pace():
    pace = np.where(np.arange(POINTS) % 200 < 120, 10.0, 1.0) * np.linspace(4, 1, POINTS)
    steps = np.cumsum(pace)
    noise = np.random.default_rng(0).normal(size=POINTS)
    leaked = 30 * steps / steps[-1] + 0.3 * noise
    grown = growth(np.arange(POINTS, dtype=float), leaked, negligible=0.5, steps=steps)
    assert grown.slope == pytest.approx(30 / POINTS, rel=0.2)
    assert growth(np.arange(POINTS, dtype=float), noise, negligible=0.5, steps=steps) is None


def test_irregular_samples_and_gaps_do_not_hide_a_leak():
    generator = np.random.default_rng(3)
    times = np.sort(generator.uniform(0, 60, size=40))
    values = 100 + 5 * times
    values[::5] = np.nan
    grown = growth(times, values, negligible=16)
    assert grown is not None
    assert grown.slope == pytest.approx(5, rel=0.02)
    assert grown.low <= 5.001
    assert grown.high >= 4.999


@pytest.mark.parametrize("points", [0, 1, 2, 5, 11])
def test_a_few_points_are_no_trend(points):
    assert growth(np.arange(points, dtype=float), 1000.0 * np.arange(points), negligible=1) is None


def test_negligible_growth_is_ignored():
    assert growth(np.arange(100.0), 0.1 * np.arange(100.0), negligible=16) is None


def test_missing_values_are_no_growth():
    assert growth(np.arange(100.0), np.full(100, np.nan), negligible=1) is None


def test_the_slope_is_not_moved_by_outliers():
    y = 2.0 * np.arange(30.0)
    y[[3, 17]] = 500.0
    assert theil_sen(np.arange(30.0), y) == pytest.approx(2.0, abs=0.05)


def test_the_interval_narrows_with_less_noise_and_is_reproducible():
    x = np.arange(20.0)
    generator = np.random.default_rng(0)
    noise = generator.normal(size=20)
    wide, narrow = (slope_interval(x, x + scale * noise) for scale in (3.0, 0.3))
    assert wide[0] < narrow[0] < 1.1
    assert 0.9 < narrow[1] < wide[1]
    assert slope_interval(x, x + noise) == slope_interval(x, x + noise)


def test_full_cache_is_no_growth_despite_slow_first_steps():
    seconds = np.arange(0.0, 33.0)
    steps = np.where(seconds < 19, 150.0 * seconds, 2850 + 500.0 * (seconds - 19))
    held = 310.0 + 0.0163 * np.minimum(steps, 4800)
    assert growth(seconds, held, negligible=16.0) is not None
    assert growth(seconds, held, negligible=16.0, steps=steps) is None
    assert growth(seconds, 310.0 + 0.0163 * steps, negligible=16.0, steps=steps) is not None


@pytest.mark.parametrize("full", [0.8, 0.85, 0.9])
def test_a_buffer_that_is_full_is_no_growth_soon_after(full):
    """Each step fills a part of it until it is full, while the steps go on."""
    clock = np.arange(POINTS, dtype=float)
    for seed in range(20):
        values = 10 * np.minimum(SHARE, full) + 0.02 * np.random.default_rng(seed).normal(size=POINTS)
        assert growth(clock, values, negligible=0.5, steps=clock) is None


def test_a_pause_of_the_steps_does_not_hide_a_leak():
    """An evaluation at the end takes a quarter of the run, without a step."""
    clock = np.arange(POINTS, dtype=float)
    steps = np.minimum(clock, 0.75 * POINTS)
    values = 10 * steps / POINTS + 0.02 * np.random.default_rng(0).normal(size=POINTS)
    assert growth(clock, values, negligible=0.5, steps=steps) is not None


def test_growth_that_is_all_given_back_in_the_end_is_none():
    """The memory of a host falls at the end of its training, below all that it was."""
    clock = np.arange(POINTS, dtype=float)
    values = 100 + 10 * SHARE + 0.02 * np.random.default_rng(0).normal(size=POINTS)
    values[-1] = 90.0
    assert growth(clock, values, negligible=0.5) is None


def test_growth_while_the_steps_stand_still_is_none_per_step():
    """The last half of the samples lies in one step, as in an evaluation or a long wait."""
    steps_done = np.minimum(np.arange(60), 29).astype(float)
    with np.errstate(all="raise"):
        found = growth(np.arange(60.0), np.where(np.arange(60) < 30, 0.0, 5.0), negligible=1, steps=steps_done)
    assert found is None


def test_growth_after_memory_was_given_back_counts_from_the_low():
    """A program that ends frees its memory, and another one then takes more and more."""
    times, found = np.arange(130.0), []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 30, 130)
        values = 400 * np.maximum(1 - times / 30, 0) + 2 * np.maximum(times - 60, 0) + noise
        found.append(growth(times, values, negligible=32.0))
    assert any(found)
    assert all(trend is None or trend.rise > 0 for trend in found)


def test_rise_is_no_more_than_the_level_rose_where_the_steps_pause_near_the_end():
    """A pause makes the last block of samples long, and nothing grew meanwhile."""
    numbers = np.arange(300.0)
    times = 0.04 * numbers + np.where(numbers > 297, 5.0, 0.0)
    found = growth(times, 2.0 * numbers, negligible=16.0, steps=numbers)
    assert found is not None
    assert found.rise == pytest.approx(2.0 * numbers[-1], rel=0.02)
