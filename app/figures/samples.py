"""Lines and stacks of what is sampled again and again, with a gap where nobody sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from app.figures.base import Trace, area, line

#: A pause: so many times as long as what lies beside it, and so much of the whole (a thinned line has 500 buckets).
_TIMES_LONGER, _RATIO = 5, 0.01


def pauses(x: Any) -> list[float]:
    """The places on the axis at which samples go on after nobody took any."""
    x = np.asarray(x, dtype=np.float64)
    apart = np.diff(x)
    beside = np.maximum(apart[:-2], apart[2:])  # a single sample between two pauses would not be seen
    is_long = (apart[1:-1] > _TIMES_LONGER * beside) & (apart[1:-1] > _RATIO * (x[-1:] - x[:1]))
    return [float(each) for each in x[2:-1][is_long]]


def broken(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], starts: Sequence[float]) -> tuple[Any, Any]:
    """The line with a gap before each moment in `starts`."""
    at = np.searchsorted(x, sorted(starts))
    at = at[(at > 0) & (at < len(x))]
    return np.insert(x, at, np.nan), np.insert(y, at, np.nan)


def sample_line(name: str, x: Any, y: Any, colour: str, unit: str, **more: Any) -> Trace:
    """A line of samples."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return line(name, *broken(x, y, pauses(x)), colour, unit, **more)


def stack(x: Any, layers: Sequence[tuple[str, Any, str]], unit: str) -> Iterator[Trace]:
    """Samples stacked: name, values and colour of each layer. What lies beside a pause are stacks of their own."""
    x = np.asarray(x, dtype=np.float64)
    bounds = [0, *np.searchsorted(x, pauses(x)).tolist(), len(x)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        for name, y, colour in layers:
            part = area(name, x[begin:end], np.asarray(y)[begin:end], colour, unit)
            yield part | {"stackgroup": str(number), "legendgroup": name, "showlegend": number == 0}
