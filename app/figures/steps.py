"""Figures of step time, for one run or for several on the same axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

import pandas as pd

from app.figures.base import (
    DASHES,
    HOVER_SECONDS,
    Axis,
    Chart,
    TimeChart,
    Trace,
    area,
    blank,
    line,
    marks,
    median_band,
    over_time,
)
from app.figures.samples import sample_line
from app.format import byte_axis
from app.theme import Theme
from collector.units import after_steps, percent, quantity, size

#: Points of a run that are cut off, at most. A caption names each.
_MAX_CUT_POINTS = 3
#: Points below which no point of a run is cut off.
_MIN_POINTS_TO_CUT = 20
#: Multiples of the slowest step that is not cut off: the axis is cut if a step exceeds the first, and then ends at
#: the second.
_CUT_FACTOR, _BOUND_FACTOR = 4, 1.25
#: Dash of a run's line -> symbol of its points.
_SYMBOLS = dict(zip(DASHES, ("circle", "diamond", "cross", "square"), strict=True))
#: The x axes of a comparison, in which each run has its own clock: title, and x on hover.
_OF_EACH: dict[Axis, tuple[str, str]] = {
    "elapsed": ("elapsed in each run (s)", HOVER_SECONDS),
    "step": ("step of each run", "%{x}"),
}


def split(steps: pd.DataFrame, theme: Theme) -> TimeChart:
    """Draw step time over steps (`queries.steps`), with data wait below.

    Single steps are points; groups of steps are areas of means that add up, under a line of 95th percentiles.
    """
    figure = over_time(theme, y_title="time per step (ms)", axis="step")
    count, most, x = int(steps["n"].sum()), int(steps["n"].max()), steps["step"]
    mean_ms, wait_ratio = mean_and_wait(steps)
    if wait_ratio is None:
        title, rest = "How long does a step take?", "step, mean"
        caption = f"{quantity(mean_ms, 'ms')} on average of {count:,} steps. No DataLoader was seen in them."
    else:
        title, rest = "How much of a step is waiting for data?", "rest of the step"
        caption = f"{percent(wait_ratio)} of the time in {count:,} steps is data wait."
        figure.add_trace(area("data wait", x, steps["wait_ms"].fillna(0), theme.lost, "ms"))
    if most > 1:
        high = line(
            "step, 95th percentile", x, steps["p95_ms"], theme.text, "ms", line={"dash": "dot", "width": 1.2}
        )
        n = {"customdata": steps["n"].to_numpy(), "hovertemplate": "%{y:,.4~g} ms (n = %{customdata:,})"}
        figure.add_traces([area(rest, x, steps["rest_ms"].fillna(0), theme.main, "ms"), high | n])
        slowest = steps.iloc[int(steps["slowest_ms"].to_numpy().argmax())]
        caption += (
            f" Areas: means of up to {most:,} steps. "
            f"Slowest: {quantity(slowest['slowest_ms'], 'ms')}, {_about(slowest['step'])}."
        )
    else:
        hover = "%{y:,.4~g} ms"
        figure.add_trace(marks("step", x, steps["median_ms"], theme.main, "circle", 5, hover))
    if (bound := bound_ms([steps])) is not None:
        figure.update_yaxes(range=[0, bound])
        caption += f" The axis is cut at {quantity(bound, 'ms')}. Above it: {above(steps, bound)}."
    return TimeChart(title=title, figure=figure, caption=caption, axis="step")


def mean_and_wait(steps: pd.DataFrame) -> tuple[float, float | None]:
    """Return the mean time of a step (ms), and data wait as a share of it: None if no DataLoader was seen."""
    wait, rest = ((steps[name] * steps["n"]).sum(min_count=1) for name in ("wait_ms", "rest_ms"))
    total = rest if pd.isna(wait) else wait + rest
    return total / steps["n"].sum(), None if pd.isna(wait) else wait / total


def bound_ms(runs: Iterable[pd.DataFrame]) -> float | None:
    """Return where to cut the axis (ms), None to show it whole, for `queries.steps` of each run on it.

    It is cut if a few slow steps, mostly the first, would press the others flat. No run loses more than a handful
    of points.
    """
    tops = [steps["p95_ms"] for steps in runs]
    rest = max(
        float(top.nlargest(_MAX_CUT_POINTS + 1).iloc[-1] if len(top) >= _MIN_POINTS_TO_CUT else top.max())
        for top in tops
    )
    slowest = max(float(top.max()) for top in tops)
    return _BOUND_FACTOR * rest if slowest > _CUT_FACTOR * rest else None


def above(steps: pd.DataFrame, bound: float, *, of: str = "") -> str:
    """Return the points above a bound (ms): `2 of 50 points (3 s, in the first step; 1 s, after 12 steps)`.

    Empty if there is none.
    """
    over = steps[steps["p95_ms"] > bound]
    names = [
        f"{quantity(value, 'ms')}, {after_steps(step) if count == 1 else _about(step)}"
        for step, count, value in over[["step", "n", "p95_ms"]].itertuples(index=False)
    ]
    return f"{len(over):,} of {len(steps):,} points{of} ({'; '.join(names)})" if names else ""


def _about(step: float) -> str:
    """Return where a point for several steps is, in words, from the number of the first of them."""
    return f"after about {step:,.0f} steps" if step > 1 else "in the first steps"


def step_times(runs: Mapping[str, pd.DataFrame], theme: Theme, *, axis: Axis) -> Chart:
    """Draw the time per step of each run: name -> `queries.steps`, with the position on the axis as x."""
    x_title, x_hover = _OF_EACH[axis]
    figure = blank(theme, x_title=x_title, y_title="time per step (ms)", x_hover=x_hover)
    for number, (name, steps) in enumerate(runs.items()):
        for trace in _step_traces(name, steps, theme.series[number], DASHES[number % len(DASHES)]):
            figure.add_trace(trace)
    caption = f"{'; '.join(_in_words(name, steps) for name, steps in runs.items())}."
    most = max(int(steps["n"].max()) for steps in runs.values())
    if most > 1:
        caption += f" Line and band: mean and 95th percentile of up to {most:,} steps."
    if (bound := bound_ms(runs.values())) is not None:
        figure.update_yaxes(range=[0, bound])
        points = [words for name, steps in runs.items() if (words := above(steps, bound, of=f" of {name}"))]
        caption += f" The axis is cut at {quantity(bound, 'ms')}. Above it: {', '.join(points)}."
    return Chart(title="Is a step faster?", figure=figure, caption=caption)


def _step_traces(name: str, steps: pd.DataFrame, colour: str, dash: str) -> Iterator[Trace]:
    """Yield the points of a run, or a line with a band if they stand for several steps."""
    shown_name = escape(name, quote=False)
    if int(steps["n"].max()) == 1:
        yield marks(shown_name, steps["x"], steps["median_ms"], colour, _SYMBOLS[dash], 4, "%{y:,.4~g} ms")
        return
    # A worker that delays every fourth step changes the mean, not the median.
    groups = steps.assign(median_ms=steps["rest_ms"].add(steps["wait_ms"], fill_value=0))
    mean, band = median_band(f"{name}, ", steps["x"], groups, colour, line={"dash": dash}, legendgroup=name)
    yield mean | {"name": shown_name}
    yield band | {"showlegend": False}


def _in_words(name: str, steps: pd.DataFrame) -> str:
    mean_ms, wait_ratio = mean_and_wait(steps)
    waits = "no DataLoader seen" if wait_ratio is None else f"{percent(wait_ratio)} of it data wait"
    return (
        f"{name}: mean {quantity(mean_ms, 'ms')}, {waits}, slowest "
        f"{quantity(steps['slowest_ms'].max(), 'ms')} (n = {int(steps['n'].sum()):,})"
    )


def host_memory(runs: Mapping[str, pd.DataFrame], theme: Theme, *, axis: Axis, metric: str) -> Chart:
    """Draw the memory of the training's processes of each run.

    Args:
        runs: name -> columns elapsed_seconds, which is the position on the axis, and value, in bytes.
        theme: colours.
        axis: the axis of x.
        metric: name of the memory metric in words.
    """
    scale, unit = byte_axis(max((float(total["value"].max()) for total in runs.values()), default=0.0))
    x_title, x_hover = _OF_EACH[axis]
    figure = blank(theme, x_title=x_title, y_title=f"{metric} ({unit})", x_hover=x_hover)
    for number, (name, total) in enumerate(runs.items()):
        style = {"dash": DASHES[number % len(DASHES)]}
        figure.add_trace(sample_line(name, total, theme.series[number], unit, scale=scale, line=style))
    peaks = "; ".join(
        f"{name}: peak {size(total['value'].max())} (n = {len(total):,})" for name, total in runs.items()
    )
    return Chart(
        title="Does it take less host memory?",
        figure=figure,
        caption=f"{metric} summed over the processes of each run. {peaks}.",
    )
