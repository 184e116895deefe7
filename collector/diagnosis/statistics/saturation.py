"""Tell growth that ends, as of a cache that fills, from growth without an end. On plain arrays.

A cache that is visited at random fills at a rate in proportion to its empty share, so its level approaches its end
exponentially. Other growth decelerates too and has no end: a leak with a cache, a logarithm, a root. `saturation`
fits all of them. The growth ends only if the exponential fits, and none without an end fits nearly as well.

The fit is of increments, since the visits that add to a cache are random: the noise of its level is their sum. A
level also has noise of its own (batches of varying sizes), which moves two increments against each other. Both are
estimated, and the increments are weighted so that their noise is independent. Then "nearly as well" is a likelihood
ratio. It also bounds the time constants that are plausible, and so the level at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.statistics.growth import (
    LEAST_REST,
    PARTS_COUNT,
    Floats,
    lower_envelope,
    rest_ratio,
    rises_count,
    thin,
)

#: Most and fewest blocks of the lower envelope that is fitted.
_MAX_BLOCKS, _MIN_BLOCKS = 40, 12
_POINTS_PER_BLOCK = 3
#: Share of a series at its begin that is left out, as in the test for growth.
_WARM_UP_RATIO = 0.1
#: Time constants, as multiples of the length of the series.
_SCALES = np.geomspace(0.05, 10.0, 90)
#: Exponents and origins of growth as a power of the time; scales of a logarithm.
_POWERS, _ORIGINS = (0.3, 0.5, 0.7, 0.85, 1.0), (0.0, 0.05, 0.2, 1.0)
_LOG_SCALES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Precision of the levels, as a share of their rise: no fit has to be better.
_PRECISION_RATIO = 0.002
#: Likelihood ratio up to which an end is plausible: 99 % (chi-square, one degree of freedom).
_LIKELY = 6.63
#: Least increment that is expected of a block, as a share of their mean: visits are random, and so is their number.
_LEAST_INCREMENT_RATIO = 0.05
#: Largest share of the levels' own noise in the variance of an increment; a half would be all of it.
_MOST_OWN_NOISE = 0.45
#: Least share of the growth that is still to come. What is left of less has ended.
_LEAST_LEFT_RATIO = 0.05
#: Most growth that may be to come, as a multiple of that so far, for the end to be known.
_MAX_LEFT_RATIO = 2.0
#: Share of the growth at which a cache counts as full.
FULL_RATIO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """The growth without an end that must be ruled out.

    Attributes:
        likelihood: likelihood ratio up to which such a growth is plausible.
        leak_ratio: least rate of a leak next to a cache, as a share of the mean rate of growth.
    """

    likelihood: float
    leak_ratio: float


#: For growth that passes the test for a leak: 99 %. And for growth that would not be mentioned otherwise: 95 %.
STRICT, LENIENT = Doubt(likelihood=6.63, leak_ratio=0.25), Doubt(likelihood=3.84, leak_ratio=0.33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Growth that ends.

    Attributes:
        level: the level now.
        ends: the levels at the end that are plausible, in the unit of the values; `end` is the best one.
        scales: the time constant that belongs to each of `ends`, on the clock; `scale` belongs to `end`.
        rise: growth so far.
        since: time at which the fit begins, on the clock.
        n: points that were fitted.
    """

    level: float
    end: float
    scale: float
    ends: Floats
    scales: Floats
    rise: float
    since: float
    n: int

    def times_to(self, level: float) -> Floats:
        """Return the time on the clock until this level is met, for each plausible end; infinite if it is lower."""
        return _time_to(level, self.level, self.ends, self.scales)

    @property
    def slope(self) -> float:
        """The growth per unit of the clock now."""
        return (self.end - self.level) / self.scale

    @property
    def full_times(self) -> tuple[float, float, float]:
        """The time on the clock until the growth is nearly over: earliest, likeliest, latest."""
        start = self.level - self.rise
        ends, scales = np.append(self.ends, self.end), np.append(self.scales, self.scale)
        times = _time_to(start + FULL_RATIO * (ends - start), self.level, ends, scales)
        return float(times.min()), float(times[-1]), float(times.max())


def _time_to(level: float | Floats, now: float, ends: Floats, scales: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        times = scales * np.log((ends - now) / (ends - level))
    met: Floats = np.where(ends > level, np.maximum(times, 0.0), np.inf)
    return met


def saturation(
    clock: Floats, values: Floats, *, negligible: float, doubt: Doubt, parts: int = PARTS_COUNT
) -> Saturation | None:
    """Return the growth of a series if it decelerates towards an end that can be foretold.

    Args:
        clock: increasing times, in any unit.
        values: same length; NaN where missing.
        negligible: a rise below this (in the unit of the values) is of no interest.
        doubt: what must be ruled out.
        parts: number of parts of the series in which rises are counted, to see a rest at its end.
    """
    is_known = np.isfinite(values) & np.isfinite(clock)
    times, levels = thin(clock[is_known], values[is_known])
    first = int(np.ceil(_WARM_UP_RATIO * len(times)))
    times, levels = times[first:], levels[first:]
    blocks = min(_MAX_BLOCKS, len(times) // _POINTS_PER_BLOCK)
    if blocks < _MIN_BLOCKS or times[-1] <= times[0]:
        return None
    at, envelope = lower_envelope(times, levels, blocks)
    length, rise = float(at[-1] - at[0]), float(envelope[-1] - envelope[0])
    if rise < negligible or length <= 0:
        return None
    x, y = (at - at[0]) / length, (envelope - envelope[0]) / rise
    if y[len(y) // 2] <= x[len(x) // 2]:  # it does not decelerate
        return None
    whitener = _whitener(x, y)
    increments = whitener @ np.diff(y)
    shapes = [whitener @ np.diff(_shape(x, scale)) for scale in _SCALES]
    errors = np.array([_left_over(increments, shape) for shape in shapes])
    best = int(np.argmin(errors))
    variance = max(float(errors[best]) / (len(increments) - 2), _PRECISION_RATIO**2)
    without_end = _least_error_without_end(x, whitener, increments, doubt.leak_ratio)
    if without_end <= errors[best] + doubt.likelihood * variance:
        return None
    if _missing_rises(times, levels, float(_SCALES[best]), parts) > LEAST_REST:  # it has ended
        return None
    plausible = errors <= errors[best] + _LIKELY * variance
    left = np.array([_growth(increments, shape) for shape in shapes]) * np.exp(-1 / _SCALES)
    if not (left[best] >= _LEAST_LEFT_RATIO * (1 + left[best]) and (left[plausible] > 0).all()):
        return None
    if left[plausible].max() > _MAX_LEFT_RATIO:
        return None
    level = float(np.median(levels[-3:]))
    return Saturation(
        level=level,
        end=level + rise * float(left[best]),
        scale=length * float(_SCALES[best]),
        ends=level + rise * left[plausible],
        scales=length * _SCALES[plausible],
        rise=rise,
        since=float(times[0]),
        n=len(times),
    )


def _missing_rises(times: Floats, levels: Floats, scale: float, parts: int) -> float:
    """Return the number of rises that the rest at the end lacks, if the level approaches an end at this scale."""
    ratio, noise_ratio = rest_ratio(times, levels)
    before, whole = _shape(np.array([1 - ratio, 1.0]), scale)
    return float((whole / before - 1 - noise_ratio) * rises_count(levels, parts)) if before > 0 else np.inf


def _shape(x: Floats, scale: float) -> Floats:
    shape: Floats = -np.expm1(-x / scale)
    return shape


def _whitener(x: Floats, y: Floats) -> Floats:
    """Return the matrix that makes the noise of the increments independent and of one size."""
    fits = [_fit(x, y, scale) for scale in _SCALES]
    expected: Floats = np.diff(min(fits, key=lambda fit: float(((y - fit) ** 2).sum())))
    noise = np.diff(y) - expected
    weights: Floats = np.maximum(expected / expected.mean(), _LEAST_INCREMENT_RATIO)
    total = max(float(noise @ noise) / len(noise), _PRECISION_RATIO**2)
    own = min(max(-float(noise[1:] @ noise[:-1]) / len(noise), 0.0) / total, _MOST_OWN_NOISE)
    covariance: Floats = np.diag((1 - 2 * own) * weights + 2 * own)
    covariance -= own * (np.eye(len(noise), k=1) + np.eye(len(noise), k=-1))
    whitener: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return whitener


def _fit(x: Floats, y: Floats, scale: float) -> Floats:
    """Return the exponential of this scale that is nearest to the levels."""
    shapes = np.column_stack([np.ones(len(x)), _shape(x, scale)])
    fit: Floats = shapes @ np.linalg.lstsq(shapes, y, rcond=None)[0]
    return fit


def _growth(increments: Floats, shape: Floats) -> float:
    """Return the multiple of a shape, as whitened increments, that is nearest to those of the series."""
    return float(increments @ shape / (shape @ shape))


def _left_over(increments: Floats, shape: Floats) -> float:
    """Return the sum of squares that this multiple leaves."""
    return float(((increments - _growth(increments, shape) * shape) ** 2).sum())


def _least_error_without_end(x: Floats, whitener: Floats, increments: Floats, leak_ratio: float) -> float:
    """Return the least sum of squares of the growths without an end: powers, logarithms, a leak next to a cache."""
    shapes = [(x + origin) ** power for power in _POWERS for origin in _ORIGINS]
    shapes += [np.log1p(x / scale) for scale in _LOG_SCALES]
    errors = [_left_over(increments, whitener @ np.diff(shape)) for shape in shapes]
    leak = whitener @ np.diff(x)
    for scale in _SCALES:
        cache = whitener @ np.diff(_shape(x, scale))
        of_leak = np.linalg.lstsq(np.column_stack([cache, leak]), increments, rcond=None)[0][1]
        errors.append(_left_over(increments - max(float(of_leak), leak_ratio) * leak, cache))
    return min(errors)
