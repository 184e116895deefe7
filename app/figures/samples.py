"""Lines and stacks of samples, with gaps where samples are missing; figures of the collector's own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from app.figures.base import TimeChart, Trace, area, line, over_time, sampled
from app.format import MIB
from app.theme import Theme
from collector.store.queries import Lines
from collector.units import quantity, size

#: A pause is longer than each of these: a multiple of the intervals around it, a share of the line (thinned to 500
#: buckets or more), and two ticks of the collector in seconds. Steps come in bursts, and a burst has no gaps.
_PAUSE_FACTOR, _PAUSE_RATIO, _SHORTEST_PAUSE_SECONDS = 5, 0.01, 2.0


def pauses(x: Any) -> list[float]:
    """Return where samples go on, in elapsed seconds, after some were missing."""
    x = np.asarray(x, dtype=np.float64)
    intervals = np.diff(x)
    # The longer neighbour counts: a single sample between two pauses would not be visible.
    neighbours = np.maximum(intervals[:-2], intervals[2:])
    bound = np.maximum(_PAUSE_FACTOR * neighbours, _PAUSE_RATIO * (x[-1:] - x[:1]))
    is_pause = intervals[1:-1] > np.maximum(_SHORTEST_PAUSE_SECONDS, bound)
    return [float(at) for at in x[2:-1][is_pause]]


def with_gaps(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], starts: Sequence[float]) -> tuple[Any, Any]:
    """Return the line with a gap before each moment in `starts`."""
    at = np.searchsorted(x, sorted(starts))
    at = at[(at > 0) & (at < len(x))]
    return np.insert(x, at, np.nan), np.insert(y, at, np.nan)


def sample_line(
    name: str, points: pd.DataFrame, colour: str, unit: str, *, scale: float = 1, **attributes: Any
) -> Trace:
    """Return a line of samples: their elapsed seconds, and their values divided by `scale`."""
    x, y = (points[column].to_numpy(np.float64) for column in ("elapsed_seconds", "value"))
    return line(name, *with_gaps(x, y / scale, pauses(x)), colour, unit, **attributes)


def stack(x: Any, layers: Sequence[tuple[str, Any, str]], unit: str) -> Iterator[Trace]:
    """Stack layers of samples, each a (name, values, colour). A pause separates two stacks."""
    x = np.asarray(x, dtype=np.float64)
    bounds = [0, *np.searchsorted(x, pauses(x)).tolist(), len(x)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        for name, y, colour in layers:
            part = area(name, x[begin:end], np.asarray(y)[begin:end], colour, unit)
            yield part | {"stackgroup": str(number), "legendgroup": name, "showlegend": number == 0}


def collector_timing(lines: Mapping[str, Lines], theme: Theme) -> TimeChart:
    """Draw the achieved sampling interval, and the age of the oldest record that is not in the lake."""
    figure = over_time(theme, y_title="time (s)")
    captions = []
    for name, colour, dash in (("interval", theme.quiet, "dash"), ("lag", theme.text, "solid")):
        if not lines[name].samples_count:
            continue
        by_host = lines[name].points.groupby("series")
        for host, points in by_host:
            label = f"{name}, {host}" if len(by_host) > 1 else name
            figure.add_trace(sample_line(label, points, colour, "s", line={"dash": dash}))
        highest = quantity(lines[name].points["value"].max(), "seconds")
        captions.append(f"longest {name} {highest} (n = {lines[name].samples_count:,})")
    caption = f"{'; '.join(captions).capitalize()}."
    if lines["lag"].samples_count:
        caption += " The lag rises until records are committed to the lake, after five minutes at most."
    if sampled(lines["interval"]):
        caption += f" Drawn as {sampled(lines['interval'])}."
    return TimeChart(title="Does the collector keep up?", figure=figure, caption=caption)


def collector_memory(lines: Lines, theme: Theme) -> TimeChart:
    """Draw the private memory of the collector of each host."""
    figure = over_time(theme, y_title="private dirty (MiB)")
    for number, (host, points) in enumerate(lines.points.groupby("series")):
        colour = theme.series[number % len(theme.series)]
        figure.add_trace(sample_line(str(host), points, colour, "MiB", scale=MIB))
    caption = f"Peak {size(lines.points['value'].max())} (n = {lines.samples_count:,})."
    return TimeChart(title="How much memory does the collector take?", figure=figure, caption=caption)
