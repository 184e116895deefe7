"""The common parts of all figures: layout, axes with units, lines, bars, marks and limits, the budget of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.theme import Theme
from collector.store.queries import Lines
from collector.units import counted

#: Time on an x axis: seconds since the run was made, or optimizer steps.
Axis = Literal["elapsed", "step"]
AXES: tuple[Axis, ...] = ("elapsed", "step")
TITLES: dict[Axis, str] = {"elapsed": "elapsed (s)", "step": "step"}
#: x in a hover text, in seconds.
HOVER_SECONDS = "%{x:,.1f} s"
HOVERS: dict[Axis, str] = {"elapsed": HOVER_SECONDS, "step": "step %{x:,.0f}"}
#: A trace as a dict: Plotly checks it when it is added to a figure, and would check an object of its own twice.
Trace = dict[str, Any]
#: Points of a trace, at most.
MAX_POINTS = 2000
#: The font of the pages; in a report, the reader's system font.
FONT = '"Source Sans", system-ui, sans-serif'
#: Widths in pixels: a letter on an axis (an upper bound of the average), the space around names, an axis title.
_LETTER_WIDTH, _NAMES_PADDING, _TITLE_WIDTH = 7, 20, 24
#: Dashes that tell lines apart besides their colours.
DASHES = ("solid", "dash", "dot", "dashdot")


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

    def keep_view(self, revision: str) -> None:
        """Keep zoom and hidden traces as the reader left them while `revision`, the run, is the same."""
        self.figure.layout.uirevision = revision


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart(Chart):
    """A chart over time.

    Attributes:
        axis: the unit of x.
        hover: given x in a hover text, returns the text of its traces, if they name x.
        gpu: name of the GPU that it is about, empty if of none in particular.
    """

    axis: Axis = "elapsed"
    hover: Callable[[str], str] | None = None
    gpu: str = ""


def over_time(theme: Theme, *, y_title: str, axis: Axis = "elapsed", height: int = 320) -> go.Figure:
    """Return an empty figure for a `TimeChart`."""
    return blank(theme, x_title=TITLES[axis], y_title=y_title, x_hover=HOVERS[axis], height=height)


def blank(theme: Theme, *, x_title: str, y_title: str, x_hover: str = "%{x}", height: int = 320) -> go.Figure:
    """Return an empty figure in the house style; `x_hover` is the line above the values on hover."""
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
            "xaxis": {"title": axis_title(x_title), "unifiedhovertitle": {"text": x_hover}, **axis},
            "yaxis": {"title": axis_title(y_title), "rangemode": "tozero", "automargin": True, **axis},
        }
    )
    figure.layout.template = None  # Plotly takes twice as long to draw with a template, even an empty one
    return figure


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


def median_band(name: str, x: Any, groups: pd.DataFrame, colour: str, **attributes: Any) -> Iterator[Trace]:
    """Yield the median of groups (n, median_ms, p95_ms) as a line, and a band up to their 95th percentile."""
    median = line(f"{name}median", x, groups["median_ms"], colour, "ms", **attributes)
    n = {"customdata": groups["n"].to_numpy(), "hovertemplate": "%{y:,.4~g} ms (n = %{customdata:,})"}
    yield median | n
    band = {"fill": "tonexty", "fillcolor": faint(colour, 0.25), "line": {"width": 0.8}}
    yield line(f"{name}95th percentile", x, groups["p95_ms"], faint(colour), "ms", **attributes | band)


def area(name: str, x: Any, y: Any, colour: str, unit: str) -> Trace:
    """Return one layer of a stack, all on the same x. Its edge is thin, so that a thin layer is visible."""
    return line(name, x, y, colour, unit, stackgroup="one", fillcolor=faint(colour), line={"width": 0.8})


def bar(name: str, rows: Any, values: Any, colour: str, hover: str, **attributes: Any) -> Trace:
    """Return horizontal bars, one per row; `marker` adds to their colour."""
    return dict(
        type="bar",
        name=name,
        orientation="h",
        y=rows,
        x=values,
        marker={"color": colour, **attributes.pop("marker", {})},
        hovertemplate=hover,
        **attributes,
    )


def pattern(shape: str, theme: Theme) -> dict[str, object]:
    """Return how a bar is hatched: colour alone never carries a meaning."""
    return {
        "shape": shape,
        "fillmode": "overlay",
        "fgcolor": theme.background,
        "fgopacity": 0.6,
        "solidity": 0.2,
        "size": 7,
    }


def marks(name: str, x: Any, y: Any, colour: str, symbol: str, size: int, hover: str, **attributes: Any) -> Trace:
    """Return a mark at each point; `edge` is the line around it."""
    edge = {"line": attributes.pop("edge")} if "edge" in attributes else {}
    return dict(
        type="scatter",
        name=name,
        x=x,
        y=y,
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": size, **edge},
        hovertemplate=hover,
        **attributes,
    )


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
    style = {"color": theme.text, "width": 1.6, "dash": "dash"}
    # Plotly's `add_hline` does the same, but takes five times as long.
    figure.add_shape(type="line", x0=0, x1=1, y0=value, y1=value, line=style, **position)
    figure.add_annotation(
        text=text,
        font={"color": theme.text},
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
    return f"min-max of {counted(lines.samples_count, 'sample')}" if lines.thinned else ""


def faint(colour: str, opacity: float = 0.45) -> str:
    """Return the colour, partly transparent."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
