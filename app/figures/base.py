"""The common parts of all figures: layout, axes with units, limit lines, the budget of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.theme import Theme
from collector.store.queries import Lines

ELAPSED = "elapsed (s)"

#: A trace as a dict: Plotly checks it when it is added to a figure, and would check an object of its own twice.
Trace = dict[str, Any]
#: Points of a trace, at most.
MAX_POINTS = 2000
#: The font of the pages; in a report, the reader's system font.
FONT = '"Source Sans", system-ui, sans-serif'
#: Widths in pixels: a letter on an axis (an upper bound of the average), the space around names, an axis title.
_LETTER_WIDTH, _NAMES_PADDING, _TITLE_WIDTH = 7, 20, 24
#: Elapsed time in a hover text. `axis.scale_elapsed` replaces it where a window is in minutes or hours.
HOVER_SECONDS = "%{x:,.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure with its title, the question that it answers, and its caption, which says what it shows.

    The title stands outside the figure, where it wraps on a narrow screen and does not meet the legend.
    """

    title: str
    figure: go.Figure
    caption: str
    takeaway: str = ""

    @property
    def alt(self) -> str:
        """Text alternative of the figure, for readers who cannot see it."""
        return f"{self.title} {self.caption} {self.takeaway}".strip()

    @property
    def words(self) -> str:
        """All text in and around the figure."""
        layout = self.figure.layout
        axes = [layout[name].title.text for name in ("xaxis", "yaxis", "yaxis2") if name in layout]
        return " ".join(map(str, [self.alt, *axes, *(trace.name for trace in self.figure.data)]))


def blank(theme: Theme, *, x_title: str, y_title: str, revision: str, height: int = 320) -> go.Figure:
    """Return an empty figure in the house style.

    `revision` is the run: zoom and hidden traces stay as the reader left them while it is the same.
    """
    axis = axis_style(theme)
    figure = go.Figure(  # set at once: each later update would check the whole layout again
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 12, "b": 44},
            "paper_bgcolor": theme.background,
            "plot_bgcolor": theme.background,
            "font": {"color": theme.text, "size": 13, "family": FONT},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": theme.background, "font": {"color": theme.text}},
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "yref": "container",
                "y": 1,
                "yanchor": "top",
                "traceorder": "normal",
                "bgcolor": "rgba(0, 0, 0, 0)",  # several rows overlap the figure and must not hide lines
            },
            "uirevision": revision,
            "xaxis": {"title": axis_title(x_title), "unifiedhovertitle": {"text": hover_title(x_title)}, **axis},
            "yaxis": {"title": axis_title(y_title), "rangemode": "tozero", "automargin": True, **axis},
        }
    )
    figure.layout.template = None  # Plotly takes twice as long to draw with a template, even an empty one
    return figure


def hover_title(x_title: str) -> str:
    """Return the text above the values on hover: x with the unit that the axis title names."""
    return HOVER_SECONDS if x_title.endswith("(s)") else "step %{x:,.0f}" if x_title == "step" else "%{x}"


def axis_style(theme: Theme) -> dict[str, Any]:
    """Return the colours of an axis."""
    return {"gridcolor": theme.grid, "zerolinecolor": theme.grid, "linecolor": theme.grid}


def axis_title(text: str) -> dict[str, Any]:
    """Return the title of an axis: quantity and unit."""
    return {"text": text, "standoff": 8, "font": {"size": 13}}


def line(name: str, x: Any, y: Any, colour: str, unit: str, **attributes: Any) -> Trace:
    """Return a line trace on numpy arrays; `unit` follows the value on hover."""
    return dict(
        type="scatter",
        name=escape(name, quote=False),  # Plotly reads names as HTML, and hosts and runs have any name
        x=np.asarray(x, dtype=np.float64),
        y=np.asarray(y, dtype=np.float32),
        mode=attributes.pop("mode", "lines"),
        line={"color": colour, "width": 1.8, **attributes.pop("line", {})},
        hovertemplate=f"%{{y:,.4~g}} {unit}",
        **attributes,
    )


def area(name: str, x: Any, y: Any, colour: str, unit: str) -> Trace:
    """Return one layer of a stack, all on the same x. Its edge is thin, so that a thin layer is visible."""
    return line(name, x, y, colour, unit, stackgroup="one", fillcolor=faint(colour), line={"width": 0.8})


def name_rows(figure: go.Figure, names: Sequence[str], **axis_attributes: Any) -> None:
    """Make the y axis one of short names, the first on top, with a margin that has room for them.

    Plotly could choose the margin itself (`automargin`), but would draw everything twice.
    """
    padding = _NAMES_PADDING + (_TITLE_WIDTH if figure.layout.yaxis.title.text else 0)
    left = padding + _LETTER_WIDTH * max(map(len, names))
    axis = {"type": "category", "autorange": "reversed", "showgrid": False, "automargin": False, **axis_attributes}
    figure.update_layout(margin={"l": left}, yaxis=axis)


def limit(figure: go.Figure, value: float, text: str, theme: Theme) -> None:
    """Draw a limit as a dashed line in a neutral colour, with its name on it."""
    position = {"xref": "x domain", "yref": "y"}
    style = {"color": theme.limit, "width": 1.6, "dash": "dash"}
    # Plotly's `add_hline` does the same, but takes five times as long.
    figure.add_shape(type="line", x0=0, x1=1, y0=value, y1=value, line=style, **position)
    figure.add_annotation(
        text=text,
        font={"color": theme.limit},
        bgcolor=theme.background,
        x=0,
        xanchor="left",
        y=value,
        yanchor="bottom",
        showarrow=False,
        **position,
    )


def sampled(lines: Lines) -> str:
    """Return in words how a line was thinned; empty if every sample is drawn."""
    return f"min-max of {lines.samples_count:,} samples" if lines.thinned else ""


def faint(colour: str, opacity: float = 0.45) -> str:
    """Return the colour, partly transparent."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
