"""Where the time of a training step goes."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from app.figures.base import Chart, area, blank, line
from app.theme import Theme
from collector.quantities import percent, quantity


def split(steps: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """Step time as data wait below and the rest above, over steps.

    Args:
        steps: `queries.steps`: step, n, wait_ms, rest_ms, slowest_ms.
        theme: colours.
        revision: the run.

    """
    figure = blank(theme, x_title="step", y_title="time per step (ms)", revision=revision)
    grouped = int(steps["n"].max()) > 1
    figure.add_trace(area("data wait", steps["step"], steps["wait_ms"], theme.wait, "ms"))
    figure.add_trace(area("rest of the step", steps["step"], steps["rest_ms"], theme.latency, "ms"))
    if grouped:
        figure.add_trace(
            line(
                "slowest step",
                steps["step"],
                steps["slowest_ms"],
                theme.quiet,
                "ms",
                line={"width": 1, "dash": "dot"},
            )
        )
    weights = steps["n"]
    wait = (steps["wait_ms"] * weights).sum()
    total = wait + (steps["rest_ms"] * weights).sum()
    caption = f"{percent(wait / total)} of the time in {int(weights.sum()):,} steps is data wait."
    if grouped:
        caption += f" Each point is the mean of up to {int(steps['n'].max()):,} steps."
    caption += _cut(figure, steps)
    return Chart(title="How much of a step is waiting for data?", figure=figure, caption=caption)


def _cut(figure: go.Figure, steps: pd.DataFrame) -> str:
    """Cut the axis if a few slow steps (the first, mostly) would press the others flat, and say so."""
    usual = float(steps["slowest_ms"].quantile(0.95))
    slowest = steps.iloc[int(steps["slowest_ms"].to_numpy().argmax())]
    if len(steps) < 20 or slowest["slowest_ms"] <= 4 * usual:
        return ""
    figure.update_yaxes(range=[0, 1.6 * usual])
    return (
        f" The axis is cut: the slowest step took {quantity(slowest['slowest_ms'], 'ms')}, at step "
        f"{int(slowest['step']):,}."
    )
