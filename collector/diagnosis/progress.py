"""How fast a training makes its steps, and how fast it may make the next ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from collector.diagnosis.passage import FUTURES_COUNT
from collector.diagnosis.trends import Floats

_PARTS_COUNT = 4
_SURE = 0.975  # one-sided confidence that the pace has a trend
_MOST_SPREAD = 3.0  # largest error of a pace, as the logarithm of its factor
#: Share of the futures in which a pace that changes goes on changing, for at most as long as it was observed.
_GOES_ON_RATIO, _LONGEST = 2 / 3, 1.0
_LEAST_RATIO = 0.25  # smallest pace in a future, as a share of the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The steps of a training, after its first ones, which are slower.

    Attributes:
        seconds: how long it was observed.
        steps: how many it made.
        parts: seconds per step in each quarter of these steps.

    """

    seconds: float
    steps: float
    parts: Floats

    @classmethod
    def of(cls, times: Floats, steps: Floats) -> Progress | None:
        """Return the progress seen in samples: their times in seconds, and the number of the step then.

        None if it made too few steps to tell.
        """
        known = np.isfinite(steps)
        times, steps = times[known], steps[known]
        if not len(steps):
            return None
        begin = max(int(np.searchsorted(steps, steps[0], side="right")) - 1, 0)  # sampled long before the first
        begin += (len(times) - begin) // 10
        made = float(steps[-1] - steps[begin])
        if len(times) - begin <= _PARTS_COUNT or not made > 0:
            return None
        moving = np.append(True, np.diff(steps[begin:]) > 0)
        edges = np.linspace(steps[begin], steps[-1], _PARTS_COUNT + 1)
        seconds = np.diff(np.interp(edges, steps[begin:][moving], times[begin:][moving]))
        return cls(seconds=float(seconds.sum()), steps=made, parts=seconds / (made / _PARTS_COUNT))

    def paces(self, horizons: Floats) -> Floats:
        """Return seconds per step in each future, as mean over its length, in units of what was observed.

        Where the quarters show a trend, the pace stays at its newest value or goes on changing. Else it is that of
        the whole training, of its later half or of its last quarter, or it follows the slight trend.
        """
        generator = np.random.default_rng(0)
        at = (np.arange(_PARTS_COUNT) + 0.5) / _PARTS_COUNT
        slope, level = np.polyfit(at, self.parts, 1)
        off = self.parts - (level + slope * at)
        freedom = _PARTS_COUNT - 2
        variance, spread_at = float(off @ off) / freedom, float(((at - 0.5) ** 2).sum())
        last, whole = float(self.parts[-1]), self.seconds / self.steps
        middle = 1 + np.minimum(horizons, _LONGEST) / 2
        goes_on = np.maximum(level + slope * middle, _LEAST_RATIO * last)
        if abs(slope) > stdtrit(freedom, _SURE) * math.sqrt(variance / spread_at):
            error = np.sqrt(variance * (1 + 1 / _PARTS_COUNT + (middle - 0.5) ** 2 / spread_at))
            steady = [last]
            share = _GOES_ON_RATIO
        else:
            freedom = _PARTS_COUNT - 1
            error = np.full(FUTURES_COUNT, self.parts.std(ddof=1) * math.sqrt(1 + 1 / _PARTS_COUNT))
            steady = [whole, float(self.parts[_PARTS_COUNT // 2 :].mean()), last]
            share = 1 / (len(steady) + 1)
        believed = np.where(
            generator.random(FUTURES_COUNT) < share, goes_on, generator.choice(steady, size=FUTURES_COUNT)
        )
        drawn = error / whole * generator.standard_t(freedom, size=FUTURES_COUNT)
        paces: Floats = believed * np.exp(np.clip(drawn, -_MOST_SPREAD, _MOST_SPREAD))
        return paces
