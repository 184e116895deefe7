"""What every figure has in common: layout, axes with units, limit lines, the budget of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.theme import Theme
from collector.store.line_queries import Lines

#: As Plotly takes one: it checks a trace when it joins a figure, and would check one of its own classes twice.
Trace = dict[str, Any]
#: No trace has more points than this.
MAX_POINTS = 2000
#: As the pages; in a report, whatever the reader's system has.
FONT = '"Source Sans", system-ui, sans-serif'
#: Pixels: of a letter on an axis, at most on average, of what stands beside the names, and of the axis's title.
_LETTER, _BESIDE_NAMES, _TITLE = 7, 20, 24
#: How a hover gives elapsed time: `axis.in_unit` finds it.
HOVERED_SECONDS = "%{x:,.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure and its words: the title states the question that it answers, the caption what it shows.

    The title stands outside the figure, where it wraps on a narrow screen and meets no legend.
    """

    title: str
    figure: go.Figure
    caption: str
    takeaway: str = ""

    @property
    def alt(self) -> str:
        """What the figure says, for one who can't see it."""
        return f"{self.title} {self.caption} {self.takeaway}".strip()

    @property
    def words(self) -> str:
        """All that is written in and around the figure."""
        layout = self.figure.layout
        axes = [layout[name].title.text for name in ("xaxis", "yaxis", "yaxis2") if name in layout]
        return " ".join(map(str, [self.alt, *axes, *(trace.name for trace in self.figure.data)]))


def blank(theme: Theme, *, x_title: str, y_title: str, revision: str, height: int = 320) -> go.Figure:
    """An empty figure in the house style.

    `revision` is the run: zoom and hidden traces stay as the reader left them while it is the same.
    """
    axis = axis_style(theme)
    figure = go.Figure(  # in one piece: each later update would check the whole layout anew
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
                "bgcolor": "rgba(0, 0, 0, 0)",  # of several rows it may reach into the figure: it hides no line
            },
            "uirevision": revision,
            "xaxis": {"title": axis_title(x_title), "unifiedhovertitle": {"text": hovered(x_title)}, **axis},
            "yaxis": {"title": axis_title(y_title), "rangemode": "tozero", "automargin": True, **axis},
        }
    )
    figure.layout.template = None  # an empty one would be written too, and Plotly draws twice as long with any
    return figure


def hovered(x_title: str) -> str:
    """What stands above the values on hover: x with its unit, which the title has."""
    return HOVERED_SECONDS if x_title.endswith("(s)") else "step %{x:,.0f}" if x_title == "step" else "%{x}"


def axis_style(theme: Theme) -> dict[str, Any]:
    """The lines of an axis."""
    return {"gridcolor": theme.grid, "zerolinecolor": theme.grid, "linecolor": theme.grid}


def axis_title(text: str) -> dict[str, Any]:
    """The title of an axis: quantity and unit."""
    return {"text": text, "standoff": 8, "font": {"size": 13}}


def line(name: str, x: Any, y: Any, colour: str, unit: str, **more: Any) -> Trace:
    """A line trace on numpy arrays; `unit` stands behind the value on hover.

    Plotly makes HTML of names, and a host or a run may be called anything.
    """
    return dict(
        type="scatter",
        name=escape(name, quote=False),
        x=np.asarray(x, dtype=np.float64),
        y=np.asarray(y, dtype=np.float32),
        mode=more.pop("mode", "lines"),
        line={"color": colour, "width": 1.8, **more.pop("line", {})},
        hovertemplate=f"%{{y:,.4~g}} {unit}",
        **more,
    )


def area(name: str, x: Any, y: Any, colour: str, unit: str) -> Trace:
    """Return one layer of a stack; the layers share one grid of x. Its edge is thin: a thin layer is all edge."""
    return line(name, x, y, colour, unit, stackgroup="one", fillcolor=faint(colour), line={"width": 0.8})


def name_rows(figure: go.Figure, names: Sequence[str], **more: Any) -> None:
    """Make the y axis one of short names, the first on top, with room for them; `more` is of the axis.

    Plotly could find the room itself (`automargin`), but draws everything twice for it.
    """
    beside = _BESIDE_NAMES + (_TITLE if figure.layout.yaxis.title.text else 0)
    left = beside + _LETTER * max(map(len, names))
    axis = {"type": "category", "autorange": "reversed", "showgrid": False, "automargin": False, **more}
    figure.update_layout(margin={"l": left}, yaxis=axis)


def limit(figure: go.Figure, value: float, text: str, theme: Theme) -> None:
    """A limit: dashed, neutral, and named on the line itself."""
    of_line = {"xref": "x domain", "yref": "y"}
    style = {"color": theme.limit, "width": 1.6, "dash": "dash"}
    # As `add_hline` makes it, which takes five times as long.
    figure.add_shape(type="line", x0=0, x1=1, y0=value, y1=value, line=style, **of_line)
    figure.add_annotation(
        text=text,
        font={"color": theme.limit},
        bgcolor=theme.background,
        x=0,
        xanchor="left",
        y=value,
        yanchor="bottom",
        showarrow=False,
        **of_line,
    )


def sampled(lines: Lines) -> str:
    """How a thinned line came about, in words; empty if every sample is drawn."""
    return f"min-max of {lines.samples_count:,} samples" if lines.thinned else ""


def faint(colour: str, opacity: float = 0.45) -> str:
    """Return the colour, partly transparent."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
