"""When does a growing series first touch its limit? A distribution, from what was seen.

A limit is met by a peak, not by the level below it: by an evaluation, a long batch, a checkpoint. So the future is
played many times: the line on which the series grows, uncertain as a bootstrap of its noise says, and over it the
peaks that were seen, drawn anew for each stretch of time.
"""

from __future__ import annotations

import math

import numpy as np

from collector.diagnosis.trends import BLOCK_COUNTS, Floats, lower_envelope, slopes, theil_sen, variants

#: Stretches of time that are played one by one; what lies further on differs by no more than the peaks do.
_MOST_STRETCHES = 1000
_QUANTILES = (5.0, 50.0, 95.0)


def first_passage(clock: Floats, values: Floats, limit: float, *, seed: int = 0) -> tuple[float, float, float]:
    """How long until the limit is first met, on this clock: 5 %, 50 % and 95 % of the futures played.

    Args:
        clock: of the samples, in seconds or steps, increasing.
        values: same length and known, of a series that grows.
        limit: in the unit of the values.
        seed: of what is drawn.

    """
    generator = np.random.default_rng(seed)
    x, y, slope = _line(clock, values)
    count, middle, end = len(x), float(x.mean()), float(clock[-1])
    width = float(clock[-1] - clock[0]) / count
    lines = variants(x - middle, y, slope, generator)
    rates = np.maximum(slopes(x - middle, lines), 1e-6 * slope)
    bases = np.median(lines - rates[:, np.newaxis] * (x - middle), axis=1)
    above = values - np.median(y - slope * (x - middle)) - slope * (clock - middle)
    peaks = np.maximum.reduceat(above, np.linspace(0, len(clock), count + 1).astype(int)[:-1])
    passages = [
        _play(peaks, (limit - base) / rate + middle - end, rate, width, generator)
        for base, rate in zip(bases, rates, strict=True)
    ]
    low, mid, high = np.percentile(passages, _QUANTILES)
    return float(low), float(mid), float(high)


def unevenness(clock: Floats, values: Floats) -> float:
    """How far the level wanders from a line on this clock, as a share of its rise; infinite if it does not rise."""
    x, y, slope = _line(clock, values)
    off = y - slope * x
    return float(np.median(np.abs(off - np.median(off)))) / (slope * float(np.ptp(x))) if slope > 0 else math.inf


def _line(clock: Floats, values: Floats) -> tuple[Floats, Floats, float]:
    x, y = lower_envelope(clock, values, min(BLOCK_COUNTS[0], max(2, len(clock) // 3)))
    return x, y, theil_sen(x, y)


def _play(peaks: Floats, crossing: float, rate: float, width: float, generator: np.random.Generator) -> float:
    """One future: when the line, which alone would cross the limit at `crossing`, first does so with its peaks."""
    # The chance that a stretch has a higher peak than all before; how much higher, as the highest differ.
    highest = np.sort(peaks)[-max(2, len(peaks) // 4) :]
    spread = float(highest.mean() - highest[0])
    first = max(0, math.floor((crossing - (highest[-1] + 3 * spread) / rate) / width))
    count = min(_MOST_STRETCHES, math.ceil((highest[-1] + 3 * spread - peaks.min()) / rate / width) + 2)
    drawn = generator.integers(0, len(peaks) + 1, size=count)
    beyond = highest[-1] + generator.exponential(spread, size=count)
    over = np.where(drawn < len(peaks), peaks[np.minimum(drawn, len(peaks) - 1)], beyond)
    begins = (first + np.arange(count)) * width
    meets = crossing - over / rate
    met = np.flatnonzero(meets <= begins + width)
    at = met[0] if len(met) else count - 1
    if meets[at] > begins[at]:
        return float(meets[at])
    return float(begins[at] + generator.random() * width)  # the peak is somewhere in its stretch
