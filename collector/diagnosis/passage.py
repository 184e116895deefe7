"""When does a growing series first touch its limit? In many futures, played from what was seen.

A limit is met by a peak, not by the level below it: by an evaluation, a long batch, a checkpoint. The level itself
keeps to no line: an allocator raises it in stairs, the pace changes, a cache fills ever more slowly. So each future
has a rate of its own, wanders as the past did, and has the peaks that were seen, drawn anew for each stretch.
"""

from __future__ import annotations

import math

import numpy as np

from collector.diagnosis.trends import BLOCK_COUNTS, Floats, lower_envelope, theil_sen

#: That are played.
FUTURES_COUNT = 500
#: Stretches of time that are played one by one; what lies further on is taken to be a line.
_MOST_STRETCHES = 400
#: So many times the time that the line alone would take is played.
_FARTHEST = 4.0
#: Parts of the past over which the wander is measured: over shorter spans what changes slowly would not be seen.
_SPANS = 4
_MOST_CHANGE = 4.0  # of the rate, from one half of the past to the next as long


def passages(clock: Floats, values: Floats, limit: float) -> Floats:
    """How long until the limit is first met, on this clock, in each of the futures; infinite where it never is.

    Args:
        clock: of the samples, in seconds or steps, increasing.
        values: same length and known, of a series that grows.
        limit: in the unit of the values.

    """
    generator = np.random.default_rng(0)
    x, y = _levels(clock, values)
    count, width, slope = len(x), float(clock[-1] - clock[0]) / len(x), _slope(x, y)
    if not slope > 0:
        return np.full(FUTURES_COUNT, math.inf)
    wanders = _wanders(x, y, slope, width, generator)
    rates = generator.choice(_rates(x, y, slope), size=FUTURES_COUNT)
    rates = rates + wanders / math.sqrt(count * width) * generator.normal(size=FUTURES_COUNT)
    edges = np.linspace(0, len(clock), count + 1).astype(int)
    above = values - slope * clock - np.repeat(y - slope * x, np.diff(edges))
    begins = generator.choice(y[-2:] + slope * (clock[-1] - x[-2:]), size=FUTURES_COUNT)
    ways = limit - float(np.median(above)) - begins
    peaks = np.maximum.reduceat(above, edges[:-1]) - float(np.median(above))
    return _play(ways, rates, wanders, peaks, max(width, 1e-9), slope, generator)


def unevenness(clock: Floats, values: Floats) -> float:
    """How far the level wanders from a line on this clock, as a share of its rise; infinite if it does not rise."""
    x, y = _levels(clock, values)
    slope = _slope(x, y)
    off = y - slope * x
    return float(np.median(np.abs(off - np.median(off)))) / (slope * float(np.ptp(x))) if slope > 0 else math.inf


def _levels(clock: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the lower envelope, in blocks in which the trend itself is no noise."""
    blocks = min(BLOCK_COUNTS[0], max(2, len(clock) // 3))
    x, y = lower_envelope(clock, values, blocks)
    slope = _slope(x, y)
    if not slope > 0:
        return x, y
    return x, lower_envelope(clock, values - slope * clock, blocks)[1] + slope * x


def _rates(x: Floats, y: Floats, slope: float) -> Floats:
    """What may be believed: all of the past, its later part, or that the rate goes on changing as it did."""
    third, half = len(x) // 3, len(x) // 2
    first, second = _slope(x[: half + 1], y[: half + 1]), _slope(x[half:], y[half:])
    change = min(max(second / first, 1 / _MOST_CHANGE), _MOST_CHANGE) if first > 0 else _MOST_CHANGE
    rates = [slope, _slope(x[third:], y[third:]), second, slope * change]
    return np.array([each for each in rates if math.isfinite(each)])


def _slope(x: Floats, y: Floats) -> float:
    return theil_sen(x, y) if np.ptp(x) > 0 else math.nan  # the training may have stood still


def _wanders(x: Floats, y: Floats, slope: float, width: float, generator: np.random.Generator) -> Floats:
    """How far the level goes astray per root of the clock: few spans tell, so it is drawn for each future."""
    lag = max(1, len(x) // _SPANS)
    astray = (y[lag:] - y[:-lag]) - slope * (x[lag:] - x[:-lag])
    variance = float((astray**2).mean()) / (lag * width) / (1 - lag / len(x))  # the slope was fitted to the same
    spans = len(x) / lag
    drawn: Floats = np.sqrt(variance * spans / generator.chisquare(spans, size=FUTURES_COUNT))
    return drawn


def _play(
    ways: Floats,
    rates: Floats,
    wanders: Floats,
    peaks: Floats,
    width: float,
    slope: float,
    generator: np.random.Generator,
) -> Floats:
    """Return when each future's level has made its way, or a peak above it, which lasts for a moment."""
    stretches = max(1, math.ceil(_FARTHEST * max(float(ways.max()) / slope, 5 * width) / width))
    width, stretches = width * max(1.0, stretches / _MOST_STRETCHES), min(stretches, _MOST_STRETCHES)
    shape = len(ways), stretches
    astray = wanders[:, np.newaxis] * math.sqrt(width) * generator.normal(size=shape)
    strides = rates[:, np.newaxis] * width + astray
    level = np.hstack([np.zeros((len(ways), 1)), np.cumsum(strides, axis=1)])
    with np.errstate(divide="ignore", invalid="ignore"):
        crossed = np.where(
            level[:, :-1] < ways[:, np.newaxis], (ways[:, np.newaxis] - level[:, :-1]) / strides, 0.0
        )
        moment = generator.random(shape)
        is_peak = level[:, :-1] + moment * strides >= ways[:, np.newaxis] - _drawn(peaks, shape, generator)
        is_crossed = level[:, 1:] >= ways[:, np.newaxis]
        share = np.minimum(np.where(is_crossed, crossed, 1.0), np.where(is_peak, moment, 1.0))
        beyond = stretches * width + (ways - np.median(peaks) - level[:, -1]) / rates
    is_met = is_crossed | is_peak
    at = is_met.argmax(axis=1)
    never = np.where(rates > 0, np.maximum(beyond, stretches * width), math.inf)
    met: Floats = np.where(is_met.any(axis=1), (at + share[np.arange(len(ways)), at]) * width, never)
    return met


def _drawn(peaks: Floats, shape: tuple[int, int], generator: np.random.Generator) -> Floats:
    """A peak for each stretch: one of those seen, or a higher one, by as much as the highest seen differ."""
    highest = np.sort(peaks)[-max(2, len(peaks) // 4) :]
    drawn = generator.integers(0, len(peaks) + 1, size=shape)
    higher = highest[-1] + generator.exponential(float(highest.mean() - highest[0]), size=shape)
    return np.where(drawn < len(peaks), peaks[np.minimum(drawn, len(peaks) - 1)], higher)
