"""Find out whether a series jumps to another level, for a while or for good, or rises all the time."""

from __future__ import annotations

import numpy as np

from collector.diagnosis.statistics.growth import Floats

_APART_RATIO = 0.8  # share of the values on their own side of the middle between both levels
_RISE_RATIO = 0.25  # share of the rise that comes from each third of the series to the next
_AT_ONCE_RATIO = 0.5  # share of the change that comes at the jump itself: a steady drift has none


def jump(values: Floats, least: int) -> int | None:
    """Return the place of the first value on another level, None if there is no such jump.

    At least `least` values lie before it, and after it.
    """
    count = len(values)
    if count < 2 * least:
        return None
    before = np.arange(least, count - least + 1)
    sums = np.cumsum(values)
    means_apart = (sums[-1] - sums[before - 1]) / (count - before) - sums[before - 1] / before
    place = int(before[np.argmax(before * (count - before) * means_apart**2)])
    low, high = float(np.median(values[:place])), float(np.median(values[place:]))
    is_above = values > (low + high) / 2
    is_own_side = np.where(np.arange(count) < place, is_above == (low > high), is_above == (high > low))
    near = float(np.median(values[place : place + least]) - np.median(values[place - least : place]))
    is_apart = min(is_own_side[:place].mean(), is_own_side[place:].mean()) >= _APART_RATIO
    return place if is_apart and near / ((high - low) or np.inf) >= _AT_ONCE_RATIO else None


def spell(values: Floats, least: int) -> tuple[int, int] | None:
    """Return the place of the first value of a part on a higher level, and of the first one after it.

    None if there is no such part. At least `least` values lie before it, in it, and after it.
    """
    if len(values) < 3 * least:
        return None
    sums = np.cumsum(values - values.mean())
    end = int(np.argmax(sums - np.minimum.accumulate(sums))) + 1
    begin = jump(values[:end], least)
    length = None if begin is None else jump(values[begin:], least)
    if begin is None or length is None or values[:begin].mean() > values[begin:end].mean():
        return None
    return begin, begin + length


def rises(values: Floats, least: int) -> bool:
    """Return whether a series rises from third to third of it, each of `least` values or more."""
    if len(values) < 3 * least:
        return False
    levels = [float(np.median(third)) for third in np.array_split(values, 3)]
    first, then = levels[1] - levels[0], levels[2] - levels[1]
    return min(first, then) > _RISE_RATIO * (first + then) > 0
