"""Is a series growing without bound? Robust trend statistics, on plain arrays.

Memory series are full of growth that is no leak: warm-up that saturates, the high-water mark of varying
sizes, one step at a checkpoint, the sawtooth of a garbage collector, slow noise. A rank test or a
regression alone calls most of them leaks. `growth` therefore asks several questions of the *lower
envelope* (the level that is never given back), and only a series that passes all of them grows:

1. after the warm-up, which ends when the first differences become stationary,
2. a monotone trend (Kendall),
3. not in a few steps, as high-water marks and fragments of the heap make them: it rose often, or in a steady beat,
4. not saturating: the second half rises like the first,
5. the rise stands out from the noise, and from what the caller calls negligible,
6. the interval of the slope (moving-block bootstrap) is above zero.

The questions are asked at several block widths, because a sawtooth hides a leak from blocks that are
narrower than its period.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

Floats = npt.NDArray[np.float64]

#: Fewer points than this say nothing about a trend.
MIN_POINTS = 12
#: The widths at which growth is asked for, the most blocks first.
BLOCK_COUNTS = (20, 12, 8, 6)
_MIN_BLOCKS = 6
_STEPS_COUNT = 20  # in which a rise is looked at
_MAX_POINTS = 2000
_KENDALL_Z = 2.6  # one-sided p < 0.005; with six blocks that asks for a monotone envelope
_SURE = 0.99  # one-sided, that what rose will rise again
_SECOND_HALF = 0.4  # of the sum of both halves' slopes; 0.5 when linear, 0.34 for a logarithm, less when saturating
_RISE_TO_NOISE = 4.0
_BOOTSTRAP_COUNT = 200
_INTERVAL = (5.0, 95.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A series that grows.

    Attributes:
        slope: units per second on the lower envelope; `low` and `high` bound it (90 %), and hold that of each half.
        rise: how much the envelope rose after the warm-up.
        since_seconds: time at which the growth began.
        n: points after the warm-up.

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
    """The growth of a series, or None if it does not grow without bound.

    Args:
        times_seconds: increasing, irregular steps are fine.
        values: same length; NaN where missing.
        negligible: a rise below this (in the unit of the values) is of no interest.
        steps: that the training was in at these times: what each step leaks grows unevenly in time where the pace
            changes, so growth is looked for on this clock too, and what rests on it has ended.

    """
    found = _growth_on(times_seconds, values, negligible)
    if steps is None:
        return found
    if found is not None:
        seen = times_seconds >= found.since_seconds
        if not _rests(steps[seen], values[seen], negligible):
            return found
    by_step = _growth_on(steps, values, negligible)
    return None if by_step is None else found or _in_seconds(by_step, steps, times_seconds)


def _rests(steps: Floats, values: Floats, negligible: float) -> bool:
    """Whether nothing of interest happens in the second half of the steps: what fills up has, at whatever pace."""
    known = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[known], values[known]
    return len(steps) > 0 and bool(np.ptp(values[steps >= (steps.min() + steps.max()) / 2]) < negligible)


def _in_seconds(by_step: Growth, steps: Floats, times: Floats) -> Growth:
    since = float(times[np.argmax(steps >= by_step.since_seconds)])
    pace = (float(np.nanmax(steps)) - by_step.since_seconds) / (float(times[-1]) - since)
    slope, low, high = (pace * each for each in (by_step.slope, by_step.low, by_step.high))
    return dataclasses.replace(by_step, slope=slope, low=low, high=high, since_seconds=since)


def _growth_on(clock: Floats, values: Floats, negligible: float) -> Growth | None:
    known = np.isfinite(values) & np.isfinite(clock)
    times, levels = thin(clock[known], values[known])
    if len(times) < MIN_POINTS or np.ptp(levels) < negligible or times[-1] <= times[0]:
        return None
    warm = warm_up_end(levels)
    late = warm + _bend(times[warm:], levels[warm:])
    # It may begin late; and what passed for a warm-up may be the noise of a growth that is there from the start.
    for first in dict.fromkeys((late, warm, _least_warm_up(len(times)))):
        seen = times[first:], levels[first:]
        counts = (count for count in BLOCK_COUNTS if len(times) - first >= 2 * count)
        found = next(filter(None, (_growth_in_blocks(*seen, count, negligible) for count in counts)), None)
        if found is not None and _goes_on(*seen):
            begun = float(times[late if first == warm else first])
            return dataclasses.replace(found, since_seconds=max(found.since_seconds, begun))
    return None


def _bend(times: Floats, levels: Floats) -> int:
    """Where a series that was level at first begins to grow, farthest below its chord; 0 if it was not level."""
    blocks = min(BLOCK_COUNTS[0], len(times) // 3)
    if blocks < _MIN_BLOCKS:
        return 0
    x, y = lower_envelope(times, levels, blocks)
    chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    at = int(np.argmax(chord - y))
    was_level = _RISE_TO_NOISE * np.ptp(y[: at + 1]) <= y[-1] - y[at]
    return int(np.searchsorted(times, x[at])) if was_level else 0


def theil_sen(x: Floats, y: Floats) -> float:
    """The median of the slopes of all pairs."""
    return float(slopes(x, y[np.newaxis, :])[0])


def slopes(x: Floats, y: Floats) -> Floats:
    """Theil-Sen slope of every row of `y`."""
    i, j = _pairs(len(x))
    span = x[j] - x[i]
    i, j, span = i[span > 0], j[span > 0], span[span > 0]
    medians: Floats = np.median((y[:, j] - y[:, i]) / span, axis=1)
    return medians


@functools.cache
def _pairs(count: int) -> tuple[npt.NDArray[np.intp], ...]:
    """The places of all pairs of so many points: few numbers of them are asked for, again and again."""
    return np.triu_indices(count, 1)


def lower_envelope(times: Floats, values: Floats, blocks: int) -> tuple[Floats, Floats]:
    """The low level of each of `blocks` blocks (10 % quantile) and the block's mean time."""
    edges = np.linspace(0, len(times), blocks + 1).astype(int)
    middle = np.array([times[a:b].mean() for a, b in itertools.pairwise(edges)])
    return middle, _lows(values, edges)


def _lows(values: Floats, edges: npt.NDArray[np.intp]) -> Floats:
    """The low level of each block; those of one size are looked at together, in a tenth of the time."""
    lows, sizes = np.empty(len(edges) - 1), np.diff(edges)
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        lows[alike] = np.quantile(values[edges[alike][:, np.newaxis] + np.arange(size)], 0.1, axis=1)
    return lows


def warm_up_end(values: Floats) -> int:
    """Index at which the warm-up is over, at most the middle of the series.

    The warm-up lasts as long as the envelope's first differences lie far from those of the second half.
    At least a tenth is always skipped.
    """
    count = len(values)
    least = _least_warm_up(count)
    blocks = min(20, count // 2)
    if blocks < _MIN_BLOCKS:
        return least
    edges = np.linspace(0, count, blocks + 1).astype(int)
    steps = np.diff(_lows(values, edges))
    late = steps[blocks // 2 :]
    middle = float(np.median(late))
    spread = 1.4826 * float(np.median(np.abs(late - middle)))
    tolerance = max(4.0 * spread, abs(middle), 1e-3 * float(np.ptp(values)))
    unusual = np.flatnonzero(np.abs(steps[: blocks // 2] - middle) > tolerance)
    return max(least, int(edges[unusual[-1] + 1])) if len(unusual) else least


def _least_warm_up(count: int) -> int:
    return math.ceil(count / 10)


def slope_interval(x: Floats, y: Floats) -> tuple[float, float]:
    """90 % interval of the Theil-Sen slope by a moving-block bootstrap of its residuals."""
    low, high = np.percentile(slopes(x, variants(x, y, theil_sen(x, y), np.random.default_rng(0))), _INTERVAL)
    return float(low), float(high)


def variants(x: Floats, y: Floats, slope: float, generator: np.random.Generator) -> Floats:
    """What else might have been seen on the line of this slope, one row each: its residuals in other orders."""
    fitted = slope * x + np.median(y - slope * x)
    count = len(x)
    residuals = y - fitted
    # Short series underrate both the spread and the memory of their noise.
    follow = np.clip(
        residuals[1:] @ residuals[:-1] / max(float(residuals @ residuals), 1e-300) + 2 / count, 0.0, 0.8
    )
    residuals = residuals * math.sqrt(count / max(count - 2, 1) * (1 + follow) / (1 - follow))
    width = max(2, round(count ** (1 / 3)))
    starts = generator.integers(0, count - width + 1, size=(_BOOTSTRAP_COUNT, math.ceil(count / width)))
    index = (starts[:, :, np.newaxis] + np.arange(width)).reshape(_BOOTSTRAP_COUNT, -1)[:, :count]
    others: Floats = fitted + residuals[index]
    return others


def thin(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most `_MAX_POINTS` points: the lowest of each block, since the envelope is what counts."""
    if len(times) <= _MAX_POINTS:
        return times, values
    edges = np.linspace(0, len(times), _MAX_POINTS + 1).astype(int)
    lowest = np.minimum.reduceat(values, edges[:-1])
    return times[edges[:-1]], lowest


def _growth_in_blocks(times: Floats, values: Floats, count: int, negligible: float) -> Growth | None:
    x, y = lower_envelope(times, values, count)
    x_origin = x[0]
    x = x - x_origin
    slope = theil_sen(x, y)
    rise = slope * x[-1]
    net = y[-1] - y[0]
    noise = 1.4826 * float(np.median(np.abs(y - slope * x - np.median(y - slope * x))))
    if min(rise, net) < max(negligible, _RISE_TO_NOISE * noise):
        return None
    if _kendall_z(y) < _KENDALL_Z:
        return None
    half = count // 2
    first, second = float((y[half] - y[0]) / x[half]), float((y[-1] - y[half]) / (x[-1] - x[half]))
    if second < _SECOND_HALF * (first + second):
        return None
    low, high = slope_interval(x, y)
    if low <= 0:
        return None
    # Where the rate itself changed, the residuals of one line don't tell how sure it is.
    low, high = min(low, *(each for each in (first, second) if each > 0)), max(high, first, second)
    begun = int(np.argmax(y >= y[0] + 0.1 * net))
    since = x_origin + x[max(begun - 1, 0)]
    return Growth(slope=slope, low=low, high=high, rise=float(net), since_seconds=float(since), n=len(times))


def _goes_on(times: Floats, values: Floats) -> bool:
    """Whether the level that is never given back rose so often, or so evenly, that it will rise again.

    Rises at random make a total with a relative error of 1 / sqrt(n) (a compound Poisson process). They are counted
    by weight, (sum)² / sum of squares: beside a large one the small ones hardly count. A stair, as of epochs, tells
    as much with fewer steps: there the error is how far each is from what the time since the last one makes expect
    (a renewal-reward process; Student's t), and how much is overdue before the first and after the last.
    """
    held = np.minimum.accumulate(values[::-1])[::-1] - values.min()
    steps = np.diff(held[np.linspace(0, len(held) - 1, _STEPS_COUNT + 1).astype(int)])
    if steps.sum() ** 2 >= ndtri(_SURE) ** 2 * (steps @ steps):
        return bool(steps.sum() > 0)
    at = _rises(held, held[-1] / _STEPS_COUNT)
    if len(at) < 3:
        return False
    sizes, treads = np.diff(held[at]), np.diff(times[at])
    rate = sizes.sum() / treads.sum()
    overdue = rate * (times[at[0]] - times[0]) - held[at[0]], rate * (times[-1] - times[at[-1]]) - sizes.mean()
    errors = np.append(sizes - rate * treads, np.maximum(overdue, 0.0))
    return bool(sizes.sum() >= stdtrit(len(sizes) - 1, _SURE) * math.sqrt(errors @ errors))


def _rises(held: Floats, least: float) -> list[int]:
    """Where a level that never falls is at least so much above where it was at the rise before."""
    at: list[int] = []
    while (place := int(np.searchsorted(held, (held[at[-1]] if at else held[0]) + least))) < len(held):
        at.append(place)
    return at


def _kendall_z(y: Floats) -> float:
    """Kendall's trend statistic in standard deviations, with the continuity correction."""
    count = len(y)
    i, j = _pairs(count)
    score = float(np.sign(y[j] - y[i]).sum())
    return (score - math.copysign(1.0, score)) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
