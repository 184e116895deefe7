"""Compare: two to four runs beside each other, what was set otherwise, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from app.blocks import Block, Note, Table
from app.figures import comparison
from app.figures.axis import Axis, moved
from app.figures.memory import METRIC_WORDS
from app.moment import Moment, Panel, View
from app.panel import show
from collector.comparison import Measure, change_ratio, differing, measures, words
from collector.comparison import settings as settings_of
from collector.quantities import MISSING
from collector.store import memory_queries, moment_queries, queries

NO_OTHER = Note(
    text="No other run is chosen above to compare with. To record one with one change, and a tag that says which:",
    command="tidegauge run --tag change=workers-8 -- python train.py",
)
#: Settings on which the figures of a run depend by themselves: who compares should know that they differ.
_SCALES = ("batch size", "capacity", "host")


def deltas(moment: Moment) -> Iterator[Block]:
    """The figures of each run, and by how much they differ from those of the first."""
    if not moment.others:
        yield NO_OTHER
        return
    first = _measures(moment)
    columns = {moment.run_id: [words(measure) for measure in first.values()]}
    for other in moment.others:
        measured = _measures(other)
        columns[other.run_id] = [words(measured[name], first[name]) for name in first]
    table = pd.DataFrame({"Figure": [measure.label for measure in first.values()], **columns})
    yield Table(
        frame=table[(table[list(columns)] != MISSING).any(axis=1)],
        caption=f"In brackets by how much it differs from {moment.run_id}; n: observations in the chosen window. "
        "Peaks and data wait are over the whole run.",
        download=f"{moment.run_id}-compared",
    )


def settings(moment: Moment) -> Iterator[Block]:
    """What was set otherwise."""
    if not moment.others:
        return
    runs = {one.run_id: settings_of(one.snapshot, one.manifest) for one in (moment, *moment.others)}
    unlike = differing(runs.values())
    if not unlike:
        yield Note(
            text="Nothing that is recorded was set otherwise: command, versions, loaders and host are the same."
        )
        return
    scales = [name for name in unlike if name.endswith(_SCALES)]
    if scales:
        yield Note(
            text=f"The runs differ in {', '.join(scales)}: compare samples per second rather than steps, and "
            "shares of a capacity rather than bytes.",
            icon=":material/balance:",
        )
    columns = {name: [values[position] for values in unlike.values()] for position, name in enumerate(runs)}
    yield Table(
        frame=pd.DataFrame({"Setting": list(unlike), **columns}),
        caption="The settings that differ.",
        download=f"{moment.run_id}-settings",
    )


def step_times(moment: Moment) -> Iterator[Block]:
    """Time per step."""
    if not moment.others:
        return
    found = {}
    for one in (moment, *moment.others):
        steps = queries.steps(one.snapshot, one.span)
        if not steps.empty:
            found[one.run_id] = steps.assign(x=_place(one, "step", steps["step"]))
    if len(found) > 1:
        yield comparison.step_times(found, moment.theme, axis=moment.axis, revision=_revision(moment))


def host_memory(moment: Moment) -> Iterator[Block]:
    """Memory of all processes together."""
    if not moment.others:
        return
    found: dict[str, pd.DataFrame] = {}
    metrics = set()
    for one in (moment, *moment.others):
        metric = memory_queries.process_metric(one.snapshot, one.span, "pss_bytes")
        if metric is not None:
            grid = memory_queries.memory_by_role(one.snapshot, one.span, metric)
            total = grid.drop(columns="elapsed_seconds").sum(axis=1)
            x = _place(one, "elapsed", grid["elapsed_seconds"])
            found[one.run_id] = pd.DataFrame({"x": x, "bytes": total})
            metrics.add(METRIC_WORDS[metric])
    if len(found) > 1:
        word = " or ".join(sorted(metrics))
        yield comparison.host_memory(found, moment.theme, axis=moment.axis, metric=word, revision=_revision(moment))


def _place(moment: Moment, own: Axis, x: pd.Series) -> Any:
    return moved(x, own, moment.axis, moment_queries.step_clock(moment.snapshot, moment.span))


def _measures(moment: Moment) -> dict[str, Measure]:
    return measures(moment.snapshot, moment.span, moment.verdict)


def _revision(moment: Moment) -> str:
    return " ".join(one.run_id for one in (moment, *moment.others))


def _answer(moment: Moment) -> str:
    if not moment.others:
        return ""
    mine, other = _measures(moment), _measures(moment.others[0])
    parts = []
    for name, more, less, same in (
        ("step_p50", "slower per step", "faster per step", "as fast per step"),
        ("host_peak", "more host memory", "less host memory", "as much host memory"),
    ):
        if (ratio := change_ratio(mine[name], other[name])) is not None:
            change = round(ratio, 3)
            parts.append(f"{abs(change):.1%} {more if change > 0 else less}" if change else same)
    return f"Against {moment.others[0].run_id}: {', '.join(parts)}." if parts else ""


VIEW = View(
    name="compare",
    question="Did the change help?",
    answer=_answer,
    rows=(
        (Panel(name="Figures", build=deltas),),
        (Panel(name="Settings", build=settings),),
        (Panel(name="Step time", build=step_times, turn=1), Panel(name="Host memory", build=host_memory, turn=1)),
    ),
)

if __name__ == "__main__":
    show(VIEW)
