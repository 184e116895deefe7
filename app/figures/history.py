"""Figures of one command over its runs: one point per run, the level of each stretch, and where it changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from app.figures.base import Chart, blank, line, marks
from app.format import byte_axis
from app.theme import Theme
from collector import report
from collector.units import quantity

_HEIGHT = 240
#: Pixels above the axes for the commit at a change.
_MARK_HEIGHT = 26


def trend(history: report.History, figure_of: report.Trend, theme: Theme) -> Chart | None:
    """Draw a figure of each comparable run, the oldest first; None if fewer than two runs have it."""
    points = report.trend_points(history, figure_of)
    if len(points) < 2:
        return None
    runs, values = [entry for entry, _ in points], [value for _, value in points]
    unit = report.trend_unit(history, figure_of)
    scale, axis_unit = 1.0, unit.replace("/second", "/s")
    if unit == "bytes":
        scale, axis_unit = byte_axis(max(values))
    elif figure_of.is_share:
        scale, axis_unit = 0.01, "%"
    figure = blank(
        theme, x_title="run, the oldest first", y_title=f"{figure_of.title} ({axis_unit})", height=_HEIGHT
    )
    figure.update_layout(showlegend=False, hovermode="closest", margin={"t": _MARK_HEIGHT})
    numbers = list(range(1, len(points) + 1))
    if len(numbers) <= 12:
        figure.update_xaxes(tickvals=numbers)
    figure.update_xaxes(range=[0.5, len(numbers) + 0.5])
    changes = report.level_changes(values, is_share=figure_of.is_share)
    for change in changes:
        _mark_change(figure, change.place + 0.5, runs[change.place], theme)
    for begin, end, level in _levels(values, changes):
        x, y = [begin + 0.6, end + 0.4], [level / scale] * 2
        figure.add_trace(line("level", x, y, theme.quiet, axis_unit, line={"dash": "dash"}, hoverinfo="skip"))
    hover = [f"{escape(_title(entry))}: {quantity(value, unit)}" for entry, value in points]
    heights = [value / scale for value in values]
    figure.add_trace(marks("runs", numbers, heights, theme.text, "circle", 8, "%{text}<extra></extra>", text=hover))
    low, high = quantity(min(values), unit), quantity(max(values), unit)
    spread = f"{low} in all {len(points)} runs" if low == high else f"{low} to {high} over {len(points)} runs"
    caption = f"Newest run {quantity(values[-1], unit)}, {spread}."
    return Chart(title=f"{figure_of.title[0].upper()}{figure_of.title[1:]}", figure=figure, caption=caption)


def _title(entry: report.ListEntry) -> str:
    commit = report.commit_words(entry)
    return f"{entry.name or entry.run_id} ({commit})" if commit else entry.name or entry.run_id


def _levels(values: Sequence[float], changes: Sequence[report.LevelChange]) -> list[tuple[int, int, float]]:
    """Return (begin, end, level) of each stretch, none if the level never changed."""
    if not changes:
        return []
    bounds = [0, *(change.place for change in changes), len(values)]
    levels = [changes[0].before, *(change.after for change in changes)]
    return [(begin, end, level) for (begin, end), level in zip(itertools.pairwise(bounds), levels, strict=True)]


def _mark_change(figure: go.Figure, x: float, run: report.ListEntry, theme: Theme) -> None:
    style = {"color": theme.text, "width": 1, "dash": "dot"}
    figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="y domain", line=style)
    figure.add_annotation(
        text=escape(report.place_words(run)),
        x=x,
        xanchor="left",
        y=1,
        yref="y domain",
        yanchor="bottom",
        showarrow=False,
        font={"color": theme.text, "size": 12},
    )
