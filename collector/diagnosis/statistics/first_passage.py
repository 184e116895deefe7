"""Predict when a growing series first meets its limit, by simulating many futures from its past.

A peak meets the limit before the level below it does: an evaluation, a long batch, a checkpoint. The level itself
follows no line: an allocator raises it in stairs, the rate changes, a cache fills ever more slowly. So each future
is a random walk with its own rate and the scale of the past. Each of its intervals has a peak drawn from the past.
"""

from __future__ import annotations

import math

import numpy as np

from collector.diagnosis.statistics.growth import BLOCK_COUNTS, Floats, lower_envelope, theil_sen

#: Number of simulated futures.
FUTURES_COUNT = 500
#: Intervals that a future is simulated in; after them it goes on as a line.
_MAX_INTERVALS = 400
#: Simulated time, as a multiple of the time that the line alone would take to meet the limit.
_HORIZON_RATIO = 4.0
#: Parts of the past over which the random walk is measured: shorter spans would hide slow changes.
_SPANS = 4
#: Largest factor by which the rate may change from one half of the past to an equal time of the future.
_MAX_RATE_CHANGE = 4.0


def first_passage_times(clock: Floats, values: Floats, limit: float) -> Floats:
    """Return the time until the limit is first met in each simulated future; infinite where it never is.

    Args:
        clock: times of the samples, in seconds or steps, increasing.
        values: a growing series of the same length, without NaN.
        limit: in the unit of the values.

    Returns:
        `FUTURES_COUNT` times after the last sample, in the unit of the clock.
    """
    generator = np.random.default_rng(0)
    x, y = _levels(clock, values)
    count, width, slope = len(x), float(clock[-1] - clock[0]) / len(x), _slope(x, y)
    if not slope > 0:
        return np.full(FUTURES_COUNT, math.inf)
    scales = _draw_walk_scales(x, y, slope, width, generator)
    rates = generator.choice(_plausible_rates(x, y, slope), size=FUTURES_COUNT)
    rates = rates + scales / math.sqrt(count * width) * generator.normal(size=FUTURES_COUNT)
    edges = np.linspace(0, len(clock), count + 1).astype(int)
    above_level = values - slope * clock - np.repeat(y - slope * x, np.diff(edges))
    typical = float(np.median(above_level))
    starts = generator.choice(y[-2:] + slope * (clock[-1] - x[-2:]), size=FUTURES_COUNT)
    peaks = np.maximum.reduceat(above_level, edges[:-1]) - typical
    return _simulate(limit - typical - starts, rates, scales, peaks, max(width, 1e-9), slope, generator)


def unevenness(clock: Floats, values: Floats) -> float:
    """Return the typical distance of the level from a line, as a share of its rise; infinite without a rise."""
    x, y = _levels(clock, values)
    slope = _slope(x, y)
    residuals = y - slope * x
    spread = float(np.median(np.abs(residuals - np.median(residuals))))
    return spread / (slope * float(np.ptp(x))) if slope > 0 else math.inf


def _levels(clock: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the lower envelope. The trend is removed within each block, where it would count as noise."""
    blocks = min(BLOCK_COUNTS[0], max(2, len(clock) // 3))
    x, y = lower_envelope(clock, values, blocks)
    slope = _slope(x, y)
    if not slope > 0:
        return x, y
    return x, lower_envelope(clock, values - slope * clock, blocks)[1] + slope * x


def _plausible_rates(x: Floats, y: Floats, slope: float) -> Floats:
    """Return the rates of the whole past, its last two thirds and its last half, and one that goes on changing."""
    third, half = len(x) // 3, len(x) // 2
    first, second = _slope(x[: half + 1], y[: half + 1]), _slope(x[half:], y[half:])
    change = min(max(second / first, 1 / _MAX_RATE_CHANGE), _MAX_RATE_CHANGE) if first > 0 else _MAX_RATE_CHANGE
    rates = (slope, _slope(x[third:], y[third:]), second, slope * change)
    return np.array([rate for rate in rates if math.isfinite(rate)])


def _slope(x: Floats, y: Floats) -> float:
    return theil_sen(x, y) if np.ptp(x) > 0 else math.nan  # the training may have stood still


def _draw_walk_scales(x: Floats, y: Floats, slope: float, width: float, generator: np.random.Generator) -> Floats:
    """Estimate the random walk's standard deviation per square root of the clock, one value for each future.

    The past has too few spans to fix it, so each future draws its own from the chi-square distribution.
    """
    lag = max(1, len(x) // _SPANS)
    deviations = (y[lag:] - y[:-lag]) - slope * (x[lag:] - x[:-lag])
    fit_correction = 1 - lag / len(x)  # the slope was fitted to the same data
    variance = float((deviations**2).mean()) / (lag * width) / fit_correction
    spans = len(x) / lag
    scales: Floats = np.sqrt(variance * spans / generator.chisquare(spans, size=FUTURES_COUNT))
    return scales


def _simulate(
    distances: Floats,
    rates: Floats,
    scales: Floats,
    peaks: Floats,
    width: float,
    slope: float,
    generator: np.random.Generator,
) -> Floats:
    """Return when each future's level, or a short peak above it, first meets the limit.

    Args:
        distances: from the level now to the limit, one for each future, like `rates` and `scales`.
        rates: growth per unit of the clock.
        scales: standard deviations of the random walk per square root of the clock.
        peaks: heights above the level of the peaks of the past.
        width: length of an interval on the clock.
        slope: growth of the past, which sets how far to simulate.
        generator: source of the random numbers.
    """
    intervals = max(1, math.ceil(_HORIZON_RATIO * max(float(distances.max()) / slope, 5 * width) / width))
    width, intervals = width * max(1.0, intervals / _MAX_INTERVALS), min(intervals, _MAX_INTERVALS)
    shape = len(distances), intervals
    noise = scales[:, np.newaxis] * math.sqrt(width) * generator.normal(size=shape)
    increments = rates[:, np.newaxis] * width + noise
    level = np.hstack([np.zeros((len(distances), 1)), np.cumsum(increments, axis=1)])
    before, after, limit = level[:, :-1], level[:, 1:], distances[:, np.newaxis]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Times within an interval, as shares of it.
        crossing_time = np.where(before < limit, (limit - before) / increments, 0.0)
        peak_time = generator.random(shape)
        is_peak = before + peak_time * increments >= limit - _draw_peaks(peaks, shape, generator)
        is_crossed = after >= limit
        time = np.minimum(np.where(is_crossed, crossing_time, 1.0), np.where(is_peak, peak_time, 1.0))
        beyond = intervals * width + (distances - np.median(peaks) - level[:, -1]) / rates
    is_met = is_crossed | is_peak
    first = is_met.argmax(axis=1)
    later = np.where(rates > 0, np.maximum(beyond, intervals * width), math.inf)
    times: Floats = np.where(is_met.any(axis=1), (first + time[np.arange(len(first)), first]) * width, later)
    return times


def _draw_peaks(peaks: Floats, shape: tuple[int, int], generator: np.random.Generator) -> Floats:
    """Draw a peak for each interval: one of the past, or a higher one.

    A higher one exceeds the highest by an exponential excess, with a mean from the highest quarter of the past.
    """
    highest = np.sort(peaks)[-max(2, len(peaks) // 4) :]
    index = generator.integers(0, len(peaks) + 1, size=shape)
    higher = highest[-1] + generator.exponential(float(highest.mean() - highest[0]), size=shape)
    return np.where(index < len(peaks), peaks[np.minimum(index, len(peaks) - 1)], higher)
