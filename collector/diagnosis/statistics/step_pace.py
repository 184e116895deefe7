"""The pace of a training's steps, and how it may go on in each of many futures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.statistics.first_passage import FUTURES_COUNT
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.statistics.student_t import student_t_quantile

_PARTS_COUNT = 4
#: One-sided confidence that the pace has a trend.
_CONFIDENCE = 0.975
#: Largest error of a pace, as the logarithm of its factor.
_MAX_LOG_ERROR = 3.0
#: Its smallest standard deviation: a processor's clock alone changes by as much from one minute to the next.
_LEAST_LOG_ERROR = 0.01
#: Share of the futures in which a changing pace goes on changing.
_CHANGING_RATIO = 2 / 3
#: Longest time for which it does, as a multiple of the time observed.
_MAX_CHANGE_RATIO = 1.0
#: Smallest pace in a future, as a share of the newest.
_MIN_PACE_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPace:
    """The pace of a training's steps, without its first ones, which are slower.

    Attributes:
        seconds: observed time.
        steps: number of steps in that time.
        parts: seconds per step in each quarter of these steps.
    """

    seconds: float
    steps: float
    parts: Floats

    @classmethod
    def of(cls, times: Floats, steps: Floats) -> StepPace | None:
        """Return the pace from samples of the step number, at times in seconds; None if there are too few steps."""
        finite = np.isfinite(steps)
        times, steps = times[finite], steps[finite]
        if not len(steps):
            return None
        begin = max(int(np.searchsorted(steps, steps[0], side="right")) - 1, 0)  # samples precede the first step
        begin += (len(times) - begin) // 10
        count = float(steps[-1] - steps[begin])
        if len(times) - begin <= _PARTS_COUNT or not count > 0:
            return None
        moving = np.append(True, np.diff(steps[begin:]) > 0)
        edges = np.linspace(steps[begin], steps[-1], _PARTS_COUNT + 1)
        seconds = np.diff(np.interp(edges, steps[begin:][moving], times[begin:][moving]))
        return cls(seconds=float(seconds.sum()), steps=count, parts=seconds / (count / _PARTS_COUNT))

    def draw(self, horizons: Floats) -> Floats:
        """Draw the mean seconds per step of each future.

        If the quarters show a trend, the pace stays at its newest value or goes on changing. Otherwise it is that
        of the whole training, of its later half or of its last quarter, or it follows the slight trend.

        Args:
            horizons: lengths of the futures, as multiples of the observed time.
        """
        generator = np.random.default_rng(0)
        x = (np.arange(_PARTS_COUNT) + 0.5) / _PARTS_COUNT
        slope, level = np.polyfit(x, self.parts, 1)
        residuals = self.parts - (level + slope * x)
        freedom = _PARTS_COUNT - 2
        variance, x_spread = float(residuals @ residuals) / freedom, float(((x - 0.5) ** 2).sum())
        last, overall = float(self.parts[-1]), self.seconds / self.steps
        middle = 1 + np.minimum(horizons, _MAX_CHANGE_RATIO) / 2
        changing = np.maximum(level + slope * middle, _MIN_PACE_RATIO * last)
        if abs(slope) > student_t_quantile(freedom, _CONFIDENCE) * math.sqrt(variance / x_spread):
            error = np.sqrt(variance * (1 + 1 / _PARTS_COUNT + (middle - 0.5) ** 2 / x_spread))
            steady = [last]
            changing_ratio = _CHANGING_RATIO
        else:
            freedom = _PARTS_COUNT - 1
            error = np.full(FUTURES_COUNT, self.parts.std(ddof=1) * math.sqrt(1 + 1 / _PARTS_COUNT))
            steady = [overall, float(self.parts[_PARTS_COUNT // 2 :].mean()), last]
            changing_ratio = 1 / (len(steady) + 1)
        is_changing = generator.random(FUTURES_COUNT) < changing_ratio
        means = np.where(is_changing, changing, generator.choice(steady, size=FUTURES_COUNT))
        log_error = np.hypot(error / overall, _LEAST_LOG_ERROR)
        log_errors = log_error * generator.standard_t(freedom, size=FUTURES_COUNT)
        paces: Floats = means * np.exp(np.clip(log_errors, -_MAX_LOG_ERROR, _MAX_LOG_ERROR))
        return paces
