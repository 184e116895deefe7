"""Where the time of a training step goes."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from app.figures.base import Chart, area, blank, line
from app.theme import Theme
from collector.quantities import percent, quantity

#: At most so many points of a run are cut off, each of which is named.
_MOST_ABOVE = 3
#: Of no more points than this, none is.
_FEWEST = 20
#: The axis is cut where the slowest is so many times as slow as the rest, and ends so much above these.
_TIMES_SLOWER, _ROOM = 4, 1.25


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
        caption += (
            f" Each point is the mean of up to {int(weights.max()):,} steps, the dotted line the slowest of them."
        )
    if (bound := bound_ms([steps])) is not None:
        figure.update_yaxes(range=[0, bound])
        caption += f" The axis is cut at {quantity(bound, 'ms')}. Above it: {above(steps, bound)}."
    return Chart(title="How much of a step is waiting for data?", figure=figure, caption=caption)


def bound_ms(runs: Iterable[pd.DataFrame]) -> float | None:
    """Where to cut the axis (ms) if a few slow steps, the first mostly, would press the others flat; else None.

    Args:
        runs: `queries.steps` of each run on the axis. Of none more than a handful of points is lost.

    """
    tops = [steps["slowest_ms"] for steps in runs]
    rest = max(float(top.nlargest(_MOST_ABOVE + 1).iloc[-1] if len(top) >= _FEWEST else top.max()) for top in tops)
    slowest = max(float(top.max()) for top in tops)
    return _ROOM * rest if slowest > _TIMES_SLOWER * rest else None


def above(steps: pd.DataFrame, bound: float, *, of: str = "") -> str:
    """The points above a bound (ms): `2 of 50 points (3 s, at step 0; 1 s, at step 12)`; empty if none is."""
    over = steps[steps["slowest_ms"] > bound]
    named = [
        # what stands for several steps is named by the first of them
        f"{quantity(slowest, 'ms')}, {'at' if count == 1 else 'about'} step {int(step):,}"
        for step, count, slowest in over[["step", "n", "slowest_ms"]].itertuples(index=False)
    ]
    return f"{len(over):,} of {len(steps):,} points{of} ({'; '.join(named)})" if named else ""
