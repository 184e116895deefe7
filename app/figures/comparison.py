"""Several runs on the same axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from app.figures.axis import Axis
from app.figures.base import Chart, Trace, blank, faint, line
from app.figures.samples import sample_line
from app.figures.steps import above, bound_ms, mean_and_wait
from app.format import byte_axis
from app.theme import Theme
from collector.quantities import percent, quantity, size

#: Each run has its own clock, so these axes are not exchanged as those of one run are.
X_TITLES: dict[Axis, str] = {"elapsed": "elapsed in each run (s)", "step": "step of each run"}
#: Through a band one sees the lines of the other runs: in hexadecimal, a fifth.
_BAND_ALPHA = "33"
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
    for number, (name, steps) in enumerate(runs.items()):
        for trace in _of_steps(name, steps, theme.series[number], _DASHES[number % len(_DASHES)]):
            figure.add_trace(trace)
    caption = f"{'; '.join(_in_words(name, steps) for name, steps in runs.items())}."
    most = max(int(steps["n"].max()) for steps in runs.values())
    if most > 1:
        caption += (
            f" Each line is the mean of up to {most:,} steps, and the band above it reaches to the slowest of them."
        )
    if (bound := bound_ms(runs.values())) is not None:
        figure.update_yaxes(range=[0, bound])
        cut = [points for name, steps in runs.items() if (points := above(steps, bound, of=f" of {name}"))]
        caption += f" The axis is cut at {quantity(bound, 'ms')}. Above it: {', '.join(cut)}."
    return Chart(title="Is a step faster?", figure=figure, caption=caption)


def _of_steps(name: str, steps: pd.DataFrame, colour: str, dash: str) -> Iterator[Trace]:
    """The mean, and where a point stands for several steps, a band from there to the slowest."""
    mean = steps["wait_ms"].fillna(0) + steps["rest_ms"]
    yield line(name, steps["x"], mean, colour, "ms", line={"dash": dash}, legendgroup=name)
    if int(steps["n"].max()) > 1:
        band = {"fill": "tonexty", "fillcolor": f"{colour}{_BAND_ALPHA}", "line": {"width": 1}}
        of_run = {"legendgroup": name, "showlegend": False}
        yield line(f"{name}, slowest", steps["x"], steps["slowest_ms"], faint(colour), "ms", **band, **of_run)


def _in_words(name: str, steps: pd.DataFrame) -> str:
    mean_ms, wait_ratio = mean_and_wait(steps)
    waits = "no DataLoader seen" if wait_ratio is None else f"{percent(wait_ratio)} of it data wait"
    return (
        f"{name}: mean {quantity(mean_ms, 'ms')}, {waits}, slowest "
        f"{quantity(steps['slowest_ms'].max(), 'ms')} (n = {int(steps['n'].sum()):,})"
    )


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
