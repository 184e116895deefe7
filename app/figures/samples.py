"""Lines and stacks of samples, with a gap where samples are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from app.figures.base import Trace, area, line

#: A pause is longer than all of these: a multiple of its neighbours, a share of the line (thinned to 500 buckets or
#: more), and two ticks of the collector in seconds. Steps come in bursts, and a burst has no gaps.
_TIMES_LONGER, _RATIO, _LEAST_SECONDS = 5, 0.01, 2.0


def pauses(x: Any) -> list[float]:
    """Return where samples go on, in elapsed seconds, after some were missing."""
    x = np.asarray(x, dtype=np.float64)
    apart = np.diff(x)
    beside = np.maximum(apart[:-2], apart[2:])  # a single sample between two pauses would not be seen
    longest = np.maximum(_LEAST_SECONDS, np.maximum(_TIMES_LONGER * beside, _RATIO * (x[-1:] - x[:1])))
    return [float(each) for each in x[2:-1][apart[1:-1] > longest]]


def broken(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], starts: Sequence[float]) -> tuple[Any, Any]:
    """Return the line with a gap before each moment in `starts`."""
    at = np.searchsorted(x, sorted(starts))
    at = at[(at > 0) & (at < len(x))]
    return np.insert(x, at, np.nan), np.insert(y, at, np.nan)


def sample_line(name: str, x: Any, y: Any, colour: str, unit: str, **more: Any) -> Trace:
    """Return a line of samples."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return line(name, *broken(x, y, pauses(x)), colour, unit, **more)


def stack(x: Any, layers: Sequence[tuple[str, Any, str]], unit: str) -> Iterator[Trace]:
    """Stack layers of samples, each a name, values and a colour. Either side of a pause is a stack of its own."""
    x = np.asarray(x, dtype=np.float64)
    bounds = [0, *np.searchsorted(x, pauses(x)).tolist(), len(x)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        for name, y, colour in layers:
            part = area(name, x[begin:end], np.asarray(y)[begin:end], colour, unit)
            yield part | {"stackgroup": str(number), "legendgroup": name, "showlegend": number == 0}
