"""Conversion of charts over time to steps, minutes or hours, and the marks on them.

Epochs are ticks. Findings are dotted lines with a link to their evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from app.figures.base import HOVERS, TITLES, Axis, TimeChart, faint
from app.theme import Theme

#: Shortest window in seconds, unit of elapsed time in such a window, and length of that unit in seconds.
_UNITS = ((2 * 3600, "h", 3600), (600, "min", 60))
#: Above this many epochs, their ticks would merge into a bar: a caption counts them instead.
MAX_EPOCHS = 100
#: Height of a tick, as a share of the figure's.
_TICK_RATIO = 0.04
#: Height of a label in pixels. Labels stand above the figure, where they hide nothing.
_LABEL_HEIGHT = 19
#: Shares of the width of the narrowest figures, on a phone: a letter of a tick's label, and the left edge, where an
#: epoch that begins separates nothing.
_LETTER_RATIO, _EDGE_RATIO = 0.023, 0.01
#: Time around a focus that a zoomed chart shows, as a share of the focus, on each side.
ZOOM_MARGIN = 0.5
#: Distance of a finding's mark from the last sample, at most: in units of x, or as a share of the width if that is
#: more. An error may come after the last sample, since PSS is read only every few ticks.
_BEYOND, _BEYOND_RATIO = 5.0, 0.05


def convert_axis(chart: TimeChart, axis: Axis, clock: pd.DataFrame) -> TimeChart:
    """Convert a chart's x to another axis, in place, and return it; it stays as it is in a run without steps.

    `clock` is `queries.step_clock`, with one column per axis. Points before the first step or after the last one
    have no step, so they are not drawn over steps.
    """
    if chart.axis == axis or len(clock) < 2:
        return chart
    for trace in chart.figure.data:
        trace.x = convert_x(trace.x, chart.axis, axis, clock)
    _name_x(chart, TITLES[axis], HOVERS[axis])
    return replace(chart, axis=axis)


def scale_elapsed(chart: TimeChart, window_seconds: float) -> TimeChart:
    """Scale a chart's elapsed time to minutes or hours, in place, if the window is long; return the chart.

    Traces, marks and the range are in seconds before, and all of them are scaled.
    """
    unit = next(((name, seconds) for shortest, name, seconds in _UNITS if window_seconds >= shortest), None)
    if unit is None or chart.axis != "elapsed":
        return chart
    name, unit_seconds = unit
    layout = chart.figure.layout
    for trace in chart.figure.data:
        trace.x = np.asarray(trace.x, dtype=np.float64) / unit_seconds
    for mark in (*layout.shapes, *layout.annotations):
        if mark.xref == "x":
            for coordinate in {"x", "x0", "x1"} & set(mark):
                mark[coordinate] /= unit_seconds
    if ends := layout.xaxis.range:
        layout.xaxis.range = [end / unit_seconds for end in ends]
    _name_x(chart, f"elapsed ({name})", f"%{{x:,.2f}} {name}")
    return chart


def _name_x(chart: TimeChart, title: str, hover: str) -> None:
    x_axis = chart.figure.layout.xaxis
    x_axis.title.text, x_axis.unifiedhovertitle.text = title, hover
    if chart.hover is not None:
        for trace in chart.figure.data:
            trace.hovertemplate = chart.hover(hover)


def convert_x(x: Any, source: Axis, target: Axis, clock: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Return positions on one axis as positions on another, NaN before the first step and after the last one.

    The clock of a long run begins after some steps, perhaps the slowest: these are drawn where it begins.
    """
    values = np.asarray(x, dtype=np.float64)
    if source == target or len(clock) < 2:
        return values
    from_values, to_values = clock[source].to_numpy(float), clock[target].to_numpy(float)
    if source == "step":
        values = values.clip(from_values[0], from_values[-1])
    return np.asarray(np.interp(values, from_values, to_values, left=np.nan, right=np.nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment, in elapsed seconds; `address` is the page that it links to, empty for none."""

    at_seconds: float
    words: str
    address: str = ""


def add_marks(
    chart: TimeChart, epochs: Sequence[Mark], findings: Sequence[Mark], theme: Theme, clock: pd.DataFrame
) -> TimeChart:
    """Add the marks that lie within a chart, and return it.

    Args:
        chart: over elapsed seconds or steps.
        epochs: their starts, in order.
        findings: the moments since when they hold, the gravest first.
        theme: colours.
        clock: `queries.step_clock`, which a figure over steps needs.
    """
    axis = chart.axis
    if axis == "step" and len(clock) < 2:
        return chart
    x = _positions(chart)
    if not np.isfinite(x).any():
        return chart
    low, high = float(np.nanmin(x)), float(np.nanmax(x))

    def place(marks: Sequence[Mark], end: float) -> list[tuple[float, Mark]]:
        positions = convert_x([mark.at_seconds for mark in marks], "elapsed", axis, clock)
        return [(float(at), mark) for at, mark in zip(positions, marks, strict=True) if low <= at <= end]

    ticks = [(at, mark) for at, mark in place(epochs, high) if at > low + _EDGE_RATIO * (high - low)]
    lines = place(findings, high + max(_BEYOND, _BEYOND_RATIO * (high - low)))
    if (last := max((at for at, _ in lines), default=high)) > high:
        high = last
        chart.figure.layout.xaxis.range = [low, high + _EDGE_RATIO * (high - low)]
    row_height = _make_room(chart.figure.layout, len(lines))
    tops = [1 + row_height * (len(lines) - 1 - row) for row in range(len(lines))]
    shapes = [_line(at, top, theme, width=1.4, dash="dot") for top, (at, _) in zip(tops, lines, strict=True)]
    labels = [_label(mark, at, top, low, high, theme) for top, (at, mark) in zip(tops, lines, strict=True)]
    caption = chart.caption
    if len(ticks) > MAX_EPOCHS:
        caption += f" {len(ticks):,} epochs began meanwhile, too many to mark."
    else:
        shapes += [_line(at, _TICK_RATIO, theme, width=1.0) for at, _ in ticks]
        labels += _tick_labels(ticks, low, high, theme)
    layout = chart.figure.layout
    layout.shapes, layout.annotations = (*layout.shapes, *shapes), (*layout.annotations, *labels)
    takeaway = " ".join([chart.takeaway, *(f"Marked: {mark.words}." for _, mark in lines)]).strip()
    return replace(chart, caption=caption, takeaway=takeaway)


def zoom(
    chart: TimeChart, begin_seconds: float, end_seconds: float, theme: Theme, clock: pd.DataFrame
) -> TimeChart:
    """Shade a time in a chart over elapsed seconds or steps, in place, and show it with some time around it.

    A chart without a point in it stays as it is.
    """
    begin, end = convert_x([begin_seconds, end_seconds], "elapsed", chart.axis, clock)
    x = _positions(chart)
    if not ((x >= begin) & (x <= end)).any():
        return chart
    layout, margin = chart.figure.layout, ZOOM_MARGIN * (end - begin)
    layout.xaxis.range = [max(begin - margin, float(np.nanmin(x))), min(end + margin, float(np.nanmax(x)))]
    ends = {"x0": float(begin), "x1": float(end), "y0": 0, "y1": 1}
    shade = {"type": "rect", "xref": "x", "yref": "y domain", **ends, "layer": "below", "line": {"width": 0}}
    layout.shapes = (*layout.shapes, {**shade, "fillcolor": theme.grid, "opacity": 0.6})
    return chart


def _positions(chart: TimeChart) -> np.ndarray[Any, Any]:
    xs = [np.asarray(trace.x, dtype=np.float64) for trace in chart.figure.data]
    return np.concatenate(xs) if xs else np.empty(0)


def _make_room(layout: Any, rows_count: int) -> float:
    """Lower the top of the y axis by some rows of labels; return a row's height as a share of the lowered axis."""
    low, high = layout.yaxis.domain or (0.0, 1.0)
    row_height: float = _LABEL_HEIGHT / (layout.height - layout.margin.t - layout.margin.b)
    layout.yaxis.domain = (low, high - rows_count * row_height)
    return row_height / (high - rows_count * row_height - low)


def _line(at: float, height: float, theme: Theme, **style: Any) -> dict[str, Any]:
    ends = {"x0": at, "x1": at, "y0": 0, "y1": height}
    return {"type": "line", "xref": "x", "yref": "y domain", **ends, "line": {"color": theme.quiet, **style}}


def _label(mark: Mark, at: float, y: float, low: float, high: float, theme: Theme) -> dict[str, Any]:
    """Return a label that reaches towards the middle, so that the edge does not cut it."""
    words = escape(mark.words, quote=False)  # Plotly reads labels as HTML
    style = f"color:{theme.text}"  # Plotly's own blue is too faint for small letters
    link = f'<a href="{escape(mark.address)}" target="_self" style="{style}"><u>{words}</u></a>'
    anchor = "left" if at - low < (high - low) / 2 else "right"
    return _text(at, y, link if mark.address else words, theme, size=12, anchor=anchor)


def _tick_labels(
    ticks: Sequence[tuple[float, Mark]], low: float, high: float, theme: Theme
) -> Iterator[dict[str, Any]]:
    """Yield the labels of the ticks that have room for one."""
    free_from = low
    for at, mark in ticks:
        width = len(mark.words) * _LETTER_RATIO * (high - low)
        if free_from <= at <= high - width:
            yield _text(at, 0, escape(mark.words), theme, size=10, anchor="left")
            free_from = at + width


def _text(x: float, y: float, text: str, theme: Theme, *, size: int, anchor: str) -> dict[str, Any]:
    place = {"x": x, "xref": "x", "xanchor": anchor, "y": y, "yref": "y domain", "yanchor": "bottom"}
    # A line below a label shows through it.
    style = {"font": {"size": size, "color": theme.text}, "bgcolor": faint(theme.background, 0.7), "borderpad": 1}
    return {"text": text, "showarrow": False, **place, **style}
