"""Several runs on the same axes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from app.figures.base import Chart, blank, line
from app.figures.memory import ELAPSED
from app.format import GIB
from app.theme import Theme
from collector.wording import percent, quantity, size

_DASHES = ("solid", "dash", "dot", "dashdot")


def step_times(runs: Mapping[str, pd.DataFrame], theme: Theme, *, revision: str) -> Chart:
    """Time per step of each run, at equal step.

    Args:
        runs: name -> `queries.steps`.
        theme: colours.
        revision: the runs.

    """
    figure = blank(theme, x_title="step", y_title="time per step (ms)", revision=revision)
    captions = []
    for number, (name, steps) in enumerate(runs.items()):
        total = steps["wait_ms"] + steps["rest_ms"]
        style = {"dash": _DASHES[number % len(_DASHES)]}
        figure.add_trace(line(name, steps["step"], total, theme.series[number], "ms", line=style))
        mean, wait = ((part * steps["n"]).sum() / steps["n"].sum() for part in (total, steps["wait_ms"]))
        captions.append(
            f"{name}: mean {quantity(mean, 'ms')}, {percent(wait / mean)} of it data wait "
            f"(n = {int(steps['n'].sum()):,})"
        )
    highest = max(float((steps["wait_ms"] + steps["rest_ms"]).quantile(0.99)) for steps in runs.values())
    figure.update_yaxes(range=[0, 1.3 * highest])
    return Chart(title="Is a step faster?", figure=figure, caption=f"{'; '.join(captions)}.")


def host_memory(runs: Mapping[str, pd.DataFrame], theme: Theme, *, metric: str, revision: str) -> Chart:
    """Memory of all processes of each run, at equal time since it was made.

    Args:
        runs: name -> elapsed_seconds, bytes.
        theme: colours.
        metric: in words.
        revision: the runs.

    """
    figure = blank(theme, x_title=ELAPSED, y_title=f"{metric} (GiB)", revision=revision)
    for number, (name, total) in enumerate(runs.items()):
        style = {"dash": _DASHES[number % len(_DASHES)]}
        x, y = total["elapsed_seconds"], total["bytes"] / GIB
        figure.add_trace(line(name, x, y, theme.series[number], "GiB", line=style))
    peaks = "; ".join(f"{name}: peak {size(total['bytes'].max())}" for name, total in runs.items())
    return Chart(
        title="Does it take less host memory?",
        figure=figure,
        caption=f"{metric} summed over the processes of each run. {peaks}.",
    )
