"""Detect unbounded growth of a series. Robust trend statistics, on plain arrays.

Memory series are full of growth that is no leak: warm-up that saturates, the high-water mark of varying
sizes, one step at a checkpoint, the sawtooth of a garbage collector, slow noise. A rank test or a
regression alone calls most of them leaks. `growth` therefore checks several conditions on the *lower
envelope* (the level that is never given back), and only a series that meets all of them grows:

1. after the warm-up, which ends when the first differences become stationary,
2. a monotone trend (Kendall),
3. not in a few steps, as high-water marks and heap fragmentation cause them: it rose often, or at a steady beat,
4. not saturating: the second half rises like the first,
5. the rise stands out from the noise, and from what the caller calls negligible,
6. the interval of the slope (moving-block bootstrap) is above zero,
7. not at rest at the end for longer than chance explains.

The conditions are checked at several block widths, because a sawtooth hides a leak from blocks that are
narrower than its period.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from collector.diagnosis.statistics.student_t import student_t_quantile

Floats = npt.NDArray[np.float64]

#: Points that a trend needs at least.
MIN_POINTS = 12
#: Numbers of blocks at which growth is tested, the narrowest blocks first.
BLOCK_COUNTS = (20, 12, 8, 6)
_MIN_BLOCKS = 6
#: Number of parts of a series in which rises are counted. Few by time, since a pause at the end is no end. Where
#: steps made the level rise steadily, and then do no more, that is an end soon.
PARTS_COUNT, PARTS_COUNT_OF_STEPS = 20, 100
_MAX_POINTS = 2000
#: Least trend statistic: one-sided p < 0.005. With six blocks only a monotone envelope reaches it.
_KENDALL_Z = 2.6
#: One-sided confidence that a series that rose will rise again.
_CONFIDENCE = 0.99
#: Least slope of the second half, as a share of the sum of both halves' slopes. Linear growth has 0.5, a logarithm
#: 0.34, saturation less.
_SECOND_HALF_RATIO = 0.4
_RISE_TO_NOISE = 4.0
#: Least rise from an earlier begin of a growth, as a share of the rise since the later one.
_LEAST_OF_RISE = 0.5
#: Rise that ends a rest, as a multiple of the noise.
_REST_TO_NOISE = 3.0
#: Number of rises that are missing at the end of a series that has stopped to rise: random ones (Poisson) would all
#: be missing with a probability of 1 - _CONFIDENCE.
LEAST_REST = -math.log(1 - _CONFIDENCE)
_BOOTSTRAP_COUNT = 200
_INTERVAL_PERCENTILES = (5.0, 95.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of a series.

    Attributes:
        slope: units per second on the lower envelope.
        low, high: 90 % interval of the slope, widened to contain the slope of each half.
        rise: rise of the envelope from `since_seconds` on.
        since_seconds: time at which the growth began.
        n: points from `since_seconds` on.
    """

    slope: float
    low: float
    high: float
    rise: float
    since_seconds: float
    n: int


def growth(
    times_seconds: Floats, values: Floats, *, negligible: float, steps: Floats | None = None
) -> Growth | None:
    """Return the growth of a series, or None if it does not grow without bound.

    Args:
        times_seconds: increasing, irregular intervals are fine.
        values: same length; NaN where missing.
        negligible: a rise below this (in the unit of the values) is of no interest.
        steps: the step that the training was in at each time. A leak per step grows unevenly in time where the pace
            changes, so growth is tested on this clock too. Growth that has come to rest on it has ended.
    """
    by_time = _growth_on(times_seconds, values, negligible, PARTS_COUNT)
    if steps is None:
        return by_time and _from_its_begin(by_time, times_seconds, values)
    if by_time is not None:
        since = times_seconds >= by_time.since_seconds
        if _is_at_rest(steps[since], values[since], negligible):
            by_time = None
    by_step = None if by_time else _growth_on(steps, values, negligible, PARTS_COUNT_OF_STEPS)
    trend = by_time or (by_step and _in_seconds(by_step, steps, times_seconds))
    return trend and _from_its_begin(trend, times_seconds, values, steps)


def _from_its_begin(trend: Growth, times: Floats, values: Floats, steps: Floats | None = None) -> Growth:
    """Move the begin of a growth back to where its line begins, and count its rise from there.

    A warm-up that lies on the line belongs to the growth, which may be a line on one of the clocks only: time and,
    where all are known, steps.
    """
    finite = np.isfinite(values)
    clocks = [thin(clock[finite], values[finite])[0] for clock in (times, steps) if clock is not None]
    times, levels = thin(times[finite], values[finite])
    later = int(np.searchsorted(times, trend.since_seconds))
    begin = min(_line_begin(clock, levels, later) for clock in clocks if np.isfinite(clock).all())
    blocks = min(BLOCK_COUNTS[0], (len(times) - begin) // 2)
    if blocks < _MIN_BLOCKS:
        return trend
    at, envelope = lower_envelope(times[begin:], levels[begin:], blocks)
    # The envelope reaches from the middle of the first block to that of the last. A pause at the end adds nothing.
    rise = float((envelope[-1] - envelope[0]) * (times[-1] - times[begin]) / (at[-1] - at[0]))
    rise = min(rise, float(np.ptp(levels[begin:])))
    if rise < _LEAST_OF_RISE * trend.rise:
        return trend  # the level fell in between, by less than the noise
    return dataclasses.replace(trend, since_seconds=float(times[begin]), rise=rise, n=len(times) - begin)


def _line_begin(clock: Floats, values: Floats, later: int) -> int:
    """Return the index at which the level first follows the line of its later part, which begins at `later`."""
    level, blocks = _level(values), min(BLOCK_COUNTS[0], (len(clock) - later) // 2)
    if blocks < _MIN_BLOCKS or clock[-1] <= clock[later]:
        return later
    slope = theil_sen(*lower_envelope(clock[later:], level[later:], blocks))
    if slope <= 0:
        return later
    errors = level - slope * clock
    errors -= np.median(errors[later:])
    noise = max(_noise(level, values), _REST_TO_NOISE * spread(errors[later:]))
    off = np.flatnonzero(np.abs(errors[:later]) > noise)
    if not len(off):
        return 0
    # A level that rested before is left where the line meets it.
    meets = clock[off[-1]] + errors[off[-1]] / slope
    return min(max(int(np.searchsorted(clock, meets)), int(off[-1]) + 1), later)


def _is_at_rest(steps: Floats, values: Floats, negligible: float) -> bool:
    """Return whether the level rises no more while steps go on: a cache or a buffer that fills up is full."""
    finite = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(steps) < MIN_POINTS or steps[-1] <= steps[0]:
        return False
    late = values[steps >= (steps[0] + steps[-1]) / 2]
    return bool(np.ptp(late) < negligible) or missing_rises(steps, values, PARTS_COUNT_OF_STEPS) > LEAST_REST


def _in_seconds(by_step: Growth, steps: Floats, times: Floats) -> Growth:
    since = float(times[np.argmax(steps >= by_step.since_seconds)])
    pace = (float(np.nanmax(steps)) - by_step.since_seconds) / (float(times[-1]) - since)
    slope, low, high = pace * by_step.slope, pace * by_step.low, pace * by_step.high
    return dataclasses.replace(by_step, slope=slope, low=low, high=high, since_seconds=since)


def _growth_on(clock: Floats, values: Floats, negligible: float, parts: int) -> Growth | None:
    finite = np.isfinite(values) & np.isfinite(clock)
    times, levels = thin(clock[finite], values[finite])
    if len(times) < MIN_POINTS or np.ptp(levels) < negligible or times[-1] <= times[0]:
        return None
    warm = warm_up_end(levels)
    late = warm + _bend(times[warm:], levels[warm:])
    # Growth may begin late. And an apparent warm-up may be noise on growth that is there from the start.
    for first in dict.fromkeys((late, warm, _least_warm_up(len(times)))):
        rest = times[first:], levels[first:]
        counts = (count for count in BLOCK_COUNTS if len(times) - first >= 2 * count)
        result = next(filter(None, (_growth_in_blocks(*rest, count, negligible) for count in counts)), None)
        if result is not None and _goes_on(*rest, parts):
            begin = float(times[late if first == warm else first])
            return dataclasses.replace(result, since_seconds=max(result.since_seconds, begin))
    return None


def _bend(times: Floats, levels: Floats) -> int:
    """Return the index at which a series that was level begins to grow; 0 if it was not level at first.

    It is the point farthest below the chord of the lower envelope.
    """
    blocks = min(BLOCK_COUNTS[0], len(times) // 3)
    if blocks < _MIN_BLOCKS or times[-1] <= times[0]:
        return 0
    x, y = lower_envelope(times, levels, blocks)
    chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    bend = int(np.argmax(chord - y))
    was_level = _RISE_TO_NOISE * np.ptp(y[: bend + 1]) <= y[-1] - y[bend]
    return int(np.searchsorted(times, x[bend])) if was_level else 0


def spread(values: Floats) -> float:
    """Return the standard deviation that the median distance from the median stands for, if they are normal."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def theil_sen(x: Floats, y: Floats) -> float:
    """Return the median of the slopes of all pairs of points."""
    return float(slopes(x, y[np.newaxis, :])[0])


def slopes(x: Floats, y: Floats) -> Floats:
    """Return the Theil-Sen slope of every row of `y`."""
    i, j = _pairs(len(x))
    span = x[j] - x[i]
    i, j, span = i[span > 0], j[span > 0], span[span > 0]
    medians: Floats = np.median((y[:, j] - y[:, i]) / span, axis=1)
    return medians


@functools.cache
def _pairs(count: int) -> tuple[npt.NDArray[np.intp], ...]:
    """Return the indices of all pairs of points, cached: few counts occur, and often."""
    return np.triu_indices(count, 1)


def lower_envelope(times: Floats, values: Floats, blocks: int) -> tuple[Floats, Floats]:
    """Return the mean time of each of `blocks` blocks, and its low level (10 % quantile)."""
    edges = np.linspace(0, len(times), blocks + 1).astype(int)
    return np.add.reduceat(times, edges[:-1]) / np.diff(edges), _lows(values, edges)


def _lows(values: Floats, edges: npt.NDArray[np.intp]) -> Floats:
    """Return the low level of each block. Blocks of one size are computed together, in a tenth of the time."""
    lows, sizes = np.empty(len(edges) - 1), np.diff(edges)
    for size in np.unique(sizes):
        blocks = np.flatnonzero(sizes == size)
        lows[blocks] = np.quantile(values[edges[blocks][:, np.newaxis] + np.arange(size)], 0.1, axis=1)
    return lows


def warm_up_end(values: Floats) -> int:
    """Return the index at which the warm-up is over, at most the middle of the series.

    The warm-up lasts as long as the envelope's first differences lie far from those of the second half.
    It is at least a tenth of the series.
    """
    count = len(values)
    least = _least_warm_up(count)
    blocks = min(20, count // 2)
    if blocks < _MIN_BLOCKS:
        return least
    edges = np.linspace(0, count, blocks + 1).astype(int)
    differences = np.diff(_lows(values, edges))
    late = differences[blocks // 2 :]
    middle = float(np.median(late))
    tolerance = max(4.0 * spread(late), abs(middle), 1e-3 * float(np.ptp(values)))
    unusual = np.flatnonzero(np.abs(differences[: blocks // 2] - middle) > tolerance)
    return max(least, int(edges[unusual[-1] + 1])) if len(unusual) else least


def _least_warm_up(count: int) -> int:
    return math.ceil(count / 10)


def slope_interval(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the 90 % interval of the Theil-Sen slope, by a moving-block bootstrap of its residuals."""
    samples = bootstrap_samples(x, y, theil_sen(x, y), np.random.default_rng(0))
    low, high = np.percentile(slopes(x, samples), _INTERVAL_PERCENTILES)
    return float(low), float(high)


def bootstrap_samples(x: Floats, y: Floats, slope: float, generator: np.random.Generator) -> Floats:
    """Draw series with this slope, one per row: the fitted line plus blocks of its residuals in random order."""
    fit = slope * x + np.median(y - slope * x)
    count = len(x)
    residuals = y - fit
    # Short series underestimate both the spread and the autocorrelation of their noise.
    autocorrelation = np.clip(
        residuals[1:] @ residuals[:-1] / max(float(residuals @ residuals), 1e-300) + 2 / count, 0.0, 0.8
    )
    variance_factor = count / max(count - 2, 1) * (1 + autocorrelation) / (1 - autocorrelation)
    residuals = residuals * math.sqrt(variance_factor)
    width = max(2, round(count ** (1 / 3)))
    starts = generator.integers(0, count - width + 1, size=(_BOOTSTRAP_COUNT, math.ceil(count / width)))
    index = (starts[:, :, np.newaxis] + np.arange(width)).reshape(_BOOTSTRAP_COUNT, -1)[:, :count]
    samples: Floats = fit + residuals[index]
    return samples


def thin(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return at most `_MAX_POINTS` points: the lowest of each block, since only the envelope counts."""
    if len(times) <= _MAX_POINTS:
        return times, values
    edges = np.linspace(0, len(times), _MAX_POINTS + 1).astype(int)
    lowest = np.minimum.reduceat(values, edges[:-1])
    return times[edges[:-1]], lowest


def _growth_in_blocks(times: Floats, values: Floats, count: int, negligible: float) -> Growth | None:
    x, y = lower_envelope(times, values, count)
    x_origin = x[0]
    x, half = x - x_origin, count // 2
    if not 0 < x[half] < x[-1]:
        return None  # the clock of steps stood still for half of the blocks
    slope = theil_sen(x, y)
    rise = slope * x[-1]
    net = y[-1] - y[0]
    if min(rise, net) < max(negligible, _RISE_TO_NOISE * spread(y - slope * x)):
        return None
    if _kendall_z(y) < _KENDALL_Z:
        return None
    first, second = float((y[half] - y[0]) / x[half]), float((y[-1] - y[half]) / (x[-1] - x[half]))
    if second < _SECOND_HALF_RATIO * (first + second):
        return None
    low, high = slope_interval(x, y)
    if low <= 0:
        return None
    # Where the rate itself changed, the residuals of one line understate its uncertainty.
    low = min(low, *(half_slope for half_slope in (first, second) if half_slope > 0))
    high = max(high, first, second)
    begin = int(np.argmax(y >= y[0] + 0.1 * net))
    since = x_origin + x[max(begin - 1, 0)]
    return Growth(slope=slope, low=low, high=high, rise=float(net), since_seconds=float(since), n=len(times))


def _goes_on(times: Floats, values: Floats, parts: int) -> bool:
    """Return whether the level that is never given back rose so often, or so evenly, that it will rise again.

    Random rises add up to a total with a relative error of 1 / sqrt(n) (a compound Poisson process). Their number n
    is weighted, (sum)² / sum of squares: small ones hardly count next to a large one.

    A regular stair, as epochs cause it, needs fewer steps (a renewal-reward process; Student's t). Its errors are
    the differences of each step from the rate times the time since the last one, and the rises overdue before the
    first step and after the last.
    """
    if rises_count(values, parts) >= NormalDist().inv_cdf(_CONFIDENCE) ** 2:
        return missing_rises(times, values, parts) <= LEAST_REST
    level = _level(values)
    if level[-1] <= 0:  # all that rose was given back in the end
        return False
    stairs = _stairs(level, level[-1] / PARTS_COUNT)
    if len(stairs) < 3 or times[stairs[-1]] <= times[stairs[0]]:
        return False
    first, last = stairs[0], stairs[-1]
    heights, durations = np.diff(level[stairs]), np.diff(times[stairs])
    rate = heights.sum() / durations.sum()
    overdue = rate * (times[first] - times[0]) - level[first], rate * (times[-1] - times[last]) - heights.mean()
    errors = np.append(heights - rate * durations, np.maximum(overdue, 0.0))
    return bool(heights.sum() >= student_t_quantile(len(heights) - 1, _CONFIDENCE) * math.sqrt(errors @ errors))


def _level(values: Floats) -> Floats:
    """Return the level that is never given back, above the lowest value."""
    level: Floats = np.minimum.accumulate(values[::-1])[::-1] - values.min()
    return level


def rises_count(values: Floats, parts: int) -> float:
    """Return the number of rises of the level, weighted by their sizes; 0 if it never rises."""
    level = _level(values)
    rises = np.diff(level[np.linspace(0, len(level) - 1, parts + 1).astype(int)])
    return float(rises.sum() ** 2 / (rises @ rises)) if rises.any() else 0.0


def missing_rises(times: Floats, values: Floats, parts: int) -> float:
    """Return the number of rises that the rest at the end of a series lacks, at the rate of those before it."""
    ratio, noise_ratio = rest_ratio(times, values)
    return (ratio / (1 - ratio) - noise_ratio) * rises_count(values, parts) if ratio < 1 else math.inf


def rest_ratio(times: Floats, values: Floats) -> tuple[float, float]:
    """Return the share of the time for which a series has been at rest, and the rise that ends a rest.

    The level that is never given back rests where the last values are low by chance, and the highest value after a
    peak. So the rest is the time in which neither rose by more than the noise, given as a share of the whole rise.
    """
    level, highest = _level(values), np.maximum.accumulate(values) - values.min()
    noise = _noise(level, values)
    ends = (np.argmax(series >= series[-1] - noise) for series in (level, highest))
    ratio = float((times[-1] - times[max(ends)]) / (times[-1] - times[0]))
    return ratio, float(noise / level[-1]) if level[-1] > 0 else 0.0


def _noise(level: Floats, values: Floats) -> float:
    return float(max(level[-1] / (2 * PARTS_COUNT), _REST_TO_NOISE * spread(np.diff(values)) / math.sqrt(2)))


def _stairs(level: Floats, least_height: float) -> list[int]:
    """Return the indices at which a level that never falls is at least `least_height` above the previous one."""
    indices: list[int] = []
    while (i := int(np.searchsorted(level, level[indices[-1] if indices else 0] + least_height))) < len(level):
        indices.append(i)
    return indices


def _kendall_z(y: Floats) -> float:
    """Return Kendall's trend statistic in standard deviations, with the continuity correction."""
    count = len(y)
    i, j = _pairs(count)
    score = float(np.sign(y[j] - y[i]).sum())
    return (score - math.copysign(1.0, score)) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
