"""The ratio of two rates, with an interval."""

from __future__ import annotations

import math

import numpy as np

from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.statistics.student_t import student_t_quantile

#: Two-sided confidence of the interval.
_CONFIDENCE = 0.95
_MAX_AUTOCORRELATION = 0.8


def rate_ratio(first: Floats, second: Floats) -> tuple[float, float, float]:
    """Return the ratio of the first rate to the second, and the ends of its 95 % interval.

    Both are rates in consecutive parts of a run. The interval is that of Welch's t, of their logarithms; parts that
    resemble their neighbours count less.
    """
    logs = np.log(first), np.log(second)
    center = float(logs[0].mean() - logs[1].mean())
    variances = [_variance_of_mean(each) for each in logs]
    total = sum(variances)
    if total <= 0:
        return math.exp(center), math.exp(center), math.exp(center)
    freedom = total**2 / sum(variance**2 / (len(each) - 1) for variance, each in zip(variances, logs, strict=True))
    margin = student_t_quantile(freedom, (1 + _CONFIDENCE) / 2) * math.sqrt(total)
    return math.exp(center), math.exp(center - margin), math.exp(center + margin)


def _variance_of_mean(values: Floats) -> float:
    residuals = values - values.mean()
    squares = float(residuals @ residuals)
    if squares <= 0:
        return 0.0
    likeness = min(max(float(residuals[1:] @ residuals[:-1]) / squares, 0.0), _MAX_AUTOCORRELATION)
    return squares / (len(values) - 1) / len(values) * (1 + likeness) / (1 - likeness)
