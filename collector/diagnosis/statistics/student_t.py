"""Quantiles of Student's t distribution. SciPy, which has them too, is large and slow to import."""

from __future__ import annotations

import functools
import math

import numpy as np

#: Intervals of Simpson's rule, an even number: the integrands are smooth.
_INTERVALS_COUNT = 256
_PLACES = np.linspace(0.0, 1.0, _INTERVALS_COUNT + 1)
_WEIGHTS = np.array([1, *[4, 2] * (_INTERVALS_COUNT // 2 - 1), 4, 1]) / (3 * _INTERVALS_COUNT)
_PRECISION = 1e-12
_MOST_STEPS = 100


@functools.lru_cache(maxsize=1024)
def student_t_quantile(freedom: float, probability: float) -> float:
    """Return the value below which Student's t lies with this probability.

    Args:
        freedom: degrees of freedom, 1 or more.
        probability: above ½, below 1.

    With t = √freedom · tan(angle), the density of the angle is a constant times cos(angle) ** (freedom - 1). It
    falls, so that Newton's method finds the angle from below.
    """
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angle = 0.0
    for _ in range(_MOST_STEPS):
        density = constant * np.cos(angle * _PLACES) ** (freedom - 1)
        step = (probability - 0.5 - angle * float(_WEIGHTS @ density)) / float(density[-1])
        angle += step
        if abs(step) <= _PRECISION * angle:
            break
    return math.sqrt(freedom) * math.tan(angle)
