"""Marks on the figures over time: epochs as ticks, and findings as dotted lines with a link to their evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from app.figures.axis import moved, own_axis
from app.figures.base import Chart
from app.theme import Theme

#: More epochs than this would be a bar of ticks.
MAX_EPOCHS = 100
#: Of the height: a tick.
_TICK = 0.04
#: Pixels: what a label takes of the height, above the figure, where it hides nothing.
_ROW = 19
#: Of the width: a letter of a tick's label, in the narrowest figures, and the edge, where an epoch parts nothing.
_LETTER, _EDGE = 0.016, 0.01
#: An error may come after the last sample, for PSS is read every few ticks: in units of x, and of the width.
_BEYOND, _BEYOND_RATIO = 5.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment, in elapsed seconds; `address` is where it leads, empty if nowhere."""

    at_seconds: float
    words: str
    address: str = ""


def marked(
    chart: Chart, epochs: Sequence[Mark], findings: Sequence[Mark], theme: Theme, clock: pd.DataFrame
) -> Chart:
    """The chart itself with what happened while it lasted; one whose x is no time stays as it is.

    Args:
        chart: a figure over elapsed seconds or steps.
        epochs: their begins, in order.
        findings: since when something is wrong, the gravest first.
        theme: colours.
        clock: `moment_queries.step_clock`, of which a figure over steps has need.

    """
    axis = own_axis(chart)
    if axis is None or (axis == "step" and len(clock) < 2):
        return chart
    drawn = [np.asarray(trace.x, dtype=np.float64) for trace in chart.figure.data]
    x = np.concatenate(drawn) if drawn else np.empty(0)
    if not np.isfinite(x).any():
        return chart
    low, high = float(np.nanmin(x)), float(np.nanmax(x))

    def placed(marks: Sequence[Mark], end: float) -> list[tuple[float, Mark]]:
        places = moved([mark.at_seconds for mark in marks], "elapsed", axis, clock)
        return [(float(at), mark) for at, mark in zip(places, marks, strict=True) if low <= at <= end]

    begun = [(at, mark) for at, mark in placed(epochs, high) if at > low + _EDGE * (high - low)]
    told = placed(findings, high + max(_BEYOND, _BEYOND_RATIO * (high - low)))
    if (last := max((at for at, _ in told), default=high)) > high:
        high = last
        chart.figure.layout.xaxis.range = [low, high + _EDGE * (high - low)]
    row = _make_room(chart.figure.layout, len(told))
    tops = [1 + row * (len(told) - 1 - place) for place in range(len(told))]
    shapes = [_line(at, top, theme, width=1.4, dash="dot") for top, (at, _) in zip(tops, told, strict=True)]
    labels = [_label(mark, at, top, low, high, theme) for top, (at, mark) in zip(tops, told, strict=True)]
    caption = chart.caption
    if len(begun) > MAX_EPOCHS:
        caption += f" {len(begun):,} epochs began meanwhile, too many to mark."
    else:
        shapes += [_line(at, _TICK, theme, width=1.0) for at, _ in begun]
        labels += _named(begun, low, high, theme)
    layout = chart.figure.layout
    layout.shapes, layout.annotations = (*layout.shapes, *shapes), (*layout.annotations, *labels)
    takeaway = " ".join([chart.takeaway, *(f"Marked: {mark.words}." for _, mark in told)]).strip()
    return replace(chart, caption=caption, takeaway=takeaway)


def _make_room(layout: Any, rows_count: int) -> float:
    """Lower the top of the figure by so many rows of labels, and give the height of one, of what is left."""
    low, high = layout.yaxis.domain or (0.0, 1.0)
    row: float = _ROW / (layout.height - layout.margin.t - layout.margin.b)
    layout.yaxis.domain = (low, high - rows_count * row)
    return row / (high - rows_count * row - low)


def _line(at: float, height: float, theme: Theme, **style: Any) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "y domain",
        "x0": at,
        "x1": at,
        "y0": 0,
        "y1": height,
        "line": {"color": theme.quiet, **style},
    }


def _label(mark: Mark, at: float, y: float, low: float, high: float, theme: Theme) -> dict[str, Any]:
    """Towards the middle, so that the edge cuts none. Plotly makes HTML of it."""
    words = escape(mark.words, quote=False)
    style = f"color:{theme.text}"  # Plotly's own blue is too faint for small letters
    link = f'<a href="{escape(mark.address)}" target="_self" style="{style}"><u>{words}</u></a>'
    anchor = "left" if at - low < (high - low) / 2 else "right"
    font = {"size": 12, "color": theme.text}
    return _text(at, link if mark.address else words, theme, font=font, xanchor=anchor, y=y, yanchor="bottom")


def _named(begun: Sequence[tuple[float, Mark]], low: float, high: float, theme: Theme) -> Iterator[dict[str, Any]]:
    """The names of those ticks that have the room for it."""
    free = low
    for at, mark in begun:
        width = len(mark.words) * _LETTER * (high - low)
        if free <= at <= high - width:
            style = {"size": 10, "color": theme.text}
            yield _text(at, escape(mark.words), theme, font=style, xanchor="left", y=0, yanchor="bottom")
            free = at + width


def _text(at: float, text: str, theme: Theme, **more: Any) -> dict[str, Any]:
    about = {"xref": "x", "yref": "y domain", "showarrow": False, "borderpad": 1, "bgcolor": theme.background}
    return {"x": at, "text": text, **about, **more}
