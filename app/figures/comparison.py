"""Several runs on the same axes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from app.figures.axis import Axis
from app.figures.base import Chart, blank, line
from app.figures.samples import sample_line
from app.format import byte_axis
from app.theme import Theme
from collector.quantities import percent, quantity, size

#: Each run has its own clock, so these axes are not exchanged as those of one run are.
X_TITLES: dict[Axis, str] = {"elapsed": "elapsed in each run (s)", "step": "step of each run"}
_DASHES = ("solid", "dash", "dot", "dashdot")


def step_times(runs: Mapping[str, pd.DataFrame], theme: Theme, *, axis: Axis, revision: str) -> Chart:
    """Time per step of each run.

    Args:
        runs: name -> `queries.steps`, with the place on the axis as x.
        theme: colours.
        axis: what x is.
        revision: the runs.

    """
    figure = blank(theme, x_title=X_TITLES[axis], y_title="time per step (ms)", revision=revision)
    captions = []
    for number, (name, steps) in enumerate(runs.items()):
        total = steps["wait_ms"] + steps["rest_ms"]
        style = {"dash": _DASHES[number % len(_DASHES)]}
        figure.add_trace(line(name, steps["x"], total, theme.series[number], "ms", line=style))
        mean, wait = ((part * steps["n"]).sum() / steps["n"].sum() for part in (total, steps["wait_ms"]))
        captions.append(
            f"{name}: mean {quantity(mean, 'ms')}, {percent(wait / mean)} of it data wait "
            f"(n = {int(steps['n'].sum()):,})"
        )
    highest = max(float((steps["wait_ms"] + steps["rest_ms"]).quantile(0.99)) for steps in runs.values())
    figure.update_yaxes(range=[0, 1.3 * highest])
    return Chart(title="Is a step faster?", figure=figure, caption=f"{'; '.join(captions)}.")


def host_memory(runs: Mapping[str, pd.DataFrame], theme: Theme, *, axis: Axis, metric: str, revision: str) -> Chart:
    """Memory of all processes of each run.

    Args:
        runs: name -> x, bytes.
        theme: colours.
        axis: what x is.
        metric: in words.
        revision: the runs.

    """
    scale, unit = byte_axis(max((float(total["bytes"].max()) for total in runs.values()), default=0.0))
    figure = blank(theme, x_title=X_TITLES[axis], y_title=f"{metric} ({unit})", revision=revision)
    for number, (name, total) in enumerate(runs.items()):
        style = {"dash": _DASHES[number % len(_DASHES)]}
        y = total["bytes"] / scale
        figure.add_trace(sample_line(name, total["x"], y, theme.series[number], unit, line=style))
    peaks = "; ".join(
        f"{name}: peak {size(total['bytes'].max())} of {len(total):,} moments" for name, total in runs.items()
    )
    return Chart(
        title="Does it take less host memory?",
        figure=figure,
        caption=f"{metric} summed over the processes of each run. {peaks}.",
    )
