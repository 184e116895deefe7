"""Time on the x axis, as seconds since the run was made or as optimizer steps: every figure can have either."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from app.figures.base import HOVERED_SECONDS, Chart, hovered
from app.figures.memory import ELAPSED

Axis = Literal["elapsed", "step"]
AXES: tuple[Axis, ...] = ("elapsed", "step")
_TITLES: dict[Axis, str] = {"elapsed": ELAPSED, "step": "step"}
#: From so many seconds on, elapsed time is told in another unit, of so many seconds.
_UNITS = ((2 * 3600, "h", 3600), (600, "min", 60))


def along(chart: Chart, axis: Axis, clock: pd.DataFrame) -> Chart:
    """The chart itself along that axis; one whose x is no time, or of a run without steps, stays as it is.

    Args:
        chart: a figure over elapsed seconds or steps.
        axis: what its x is to be.
        clock: `moment_queries.step_clock`, whose columns are called as the axes. What lies before the first step or
            after the last has no step, and is not drawn then.

    """
    own = own_axis(chart)
    if own is None or own == axis or len(clock) < 2:
        return chart
    for trace in chart.figure.data:
        trace.x = moved(trace.x, own, axis, clock)
    chart.figure.layout.xaxis.title.text = _TITLES[axis]
    chart.figure.layout.xaxis.unifiedhovertitle.text = hovered(_TITLES[axis])
    return chart


def in_unit(chart: Chart, seconds: float) -> Chart:
    """The chart itself with its elapsed time in minutes or hours, if the window of so many seconds asks for it."""
    title = chart.figure.layout.xaxis.title
    unit = next(((name, length) for least, name, length in _UNITS if seconds >= least), None)
    if unit is None or not str(title.text).startswith("elapsed"):
        return chart
    name, length = unit
    for trace in chart.figure.data:
        trace.x = np.asarray(trace.x, dtype=np.float64) / length
        if trace.hovertemplate:
            trace.hovertemplate = trace.hovertemplate.replace(HOVERED_SECONDS, f"%{{x:,.2f}} {name}")
    for mark in (*chart.figure.layout.shapes, *chart.figure.layout.annotations):
        if mark.xref == "x":
            for place in {"x", "x0", "x1"} & set(mark):
                mark[place] /= length
    if ends := chart.figure.layout.xaxis.range:
        chart.figure.layout.xaxis.range = [end / length for end in ends]
    chart.figure.layout.xaxis.unifiedhovertitle.text = f"%{{x:,.2f}} {name}"
    title.text = title.text.replace("(s)", f"({name})")
    return chart


def moved(x: Any, own: Axis, axis: Axis, clock: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Places along one axis as places along another, NaN before the first step and after the last.

    Of a long run the clock begins after some steps, the slowest perhaps among them: these stand where it begins.
    """
    values = np.asarray(x, dtype=np.float64)
    if own == axis or len(clock) < 2:
        return values
    known, wanted = clock[own].to_numpy(float), clock[axis].to_numpy(float)
    if own == "step":
        values = values.clip(known[0], known[-1])
    return np.asarray(np.interp(values, known, wanted, left=np.nan, right=np.nan))


def own_axis(chart: Chart) -> Axis | None:
    """What the x of a chart is; None if it is no time."""
    own = chart.figure.layout.xaxis.title.text
    return next((axis for axis, title in _TITLES.items() if title == own), None)
