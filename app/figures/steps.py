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
    count, most = int(steps["n"].sum()), int(steps["n"].max())
    mean_ms, wait_ratio = mean_and_wait(steps)
    if wait_ratio is None:
        title, rest = "How long does a step take?", "step"
        caption = f"{quantity(mean_ms, 'ms')} on average of {count:,} steps. No DataLoader was seen in them."
    else:
        title, rest = "How much of a step is waiting for data?", "rest of the step"
        caption = f"{percent(wait_ratio)} of the time in {count:,} steps is data wait."
        figure.add_trace(area("data wait", steps["step"], steps["wait_ms"].fillna(0), theme.wait, "ms"))
    figure.add_trace(area(rest, steps["step"], steps["rest_ms"], theme.latency, "ms"))
    if most > 1:
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
        caption += f" Each point is the mean of up to {most:,} steps, the dotted line the slowest of them."
    if (bound := bound_ms([steps])) is not None:
        figure.update_yaxes(range=[0, bound])
        caption += f" The axis is cut at {quantity(bound, 'ms')}. Above it: {above(steps, bound)}."
    return Chart(title=title, figure=figure, caption=caption)


def mean_and_wait(steps: pd.DataFrame) -> tuple[float, float | None]:
    """The mean time of a step (ms), and the share of it that is data wait: None where no DataLoader was seen."""
    wait, rest = ((steps[name] * steps["n"]).sum(min_count=1) for name in ("wait_ms", "rest_ms"))
    total = rest if pd.isna(wait) else wait + rest
    return total / steps["n"].sum(), None if pd.isna(wait) else wait / total


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
