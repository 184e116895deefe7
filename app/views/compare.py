"""Compare: two to four runs beside each other, what was set otherwise, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from collector.quantities import MISSING, number
from collector.store import memory_queries, moment_queries, queries

NO_OTHER = Note(
    text="No other run is chosen above to compare with. To record one with one change, and a tag that says which:",
    command="tidegauge run --tag change=workers-8 -- python train.py",
)
#: Steps of which the samples differ by no more than this are alike: batches need not all be of one size.
_ALIKE_RATIO = 0.01
#: Figure -> what is said of more, of less and of the same.
_SPEED = {"step_p50": ("more time in the median step", "less time in the median step", "as long a median step")}
_RATE = {"samples": ("more samples per second", "fewer samples per second", "as many samples per second")}
_MEMORY = {"host_peak": ("more host memory", "less host memory", "as much host memory")}


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
        caption=f"In brackets by how much it differs from {moment.run_id}, and n: steps or batches in the chosen "
        "window. Data wait, peaks, steps and how long it lasted are over the whole run: n steps of all ranks, or "
        "samples of processes (host memory) and hosts (/dev/shm).",
        download=f"{moment.run_id}-compared",
    )


def settings(moment: Moment) -> Iterator[Block]:
    """What was set otherwise."""
    if not moment.others:
        return
    runs = {one.run_id: _settings(one) for one in (moment, *moment.others)}
    unlike = differing(runs.values())
    if cautions := list(_cautions(moment, unlike)):
        yield Note(text=" ".join(cautions), icon=":material/balance:")
    if not unlike:
        yield Note(
            text="Nothing that is recorded was set otherwise: command, versions, loaders and host are the same."
        )
        return
    columns = {name: [values[position] for values in unlike.values()] for position, name in enumerate(runs)}
    yield Table(
        frame=pd.DataFrame({"Setting": list(unlike), **columns}),
        caption="The settings that differ.",
        download=f"{moment.run_id}-settings",
    )


def _cautions(moment: Moment, unlike: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What cannot be compared, or not by itself."""
    runs = [other.run_id for other in moment.others if _unlike_steps(moment, other)]
    if runs:
        yield (
            f"The steps or batches of {', '.join(runs)} are of another number of samples: compare samples per "
            "second rather than steps."
        )
    capacities = [name for name in unlike if name.endswith("capacity")]
    if capacities:
        yield f"The runs differ in {', '.join(capacities)}: the same bytes are another share of it."
    if "host" in unlike:
        yield "The runs were on different hosts, which by themselves may be faster or slower."


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
    return moment.once("measures", lambda: measures(moment.snapshot, moment.span, moment.verdict))


def _settings(moment: Moment) -> dict[str, str]:
    return settings_of(moment.snapshot, moment.manifest)


def _revision(moment: Moment) -> str:
    return " ".join(one.run_id for one in (moment, *moment.others))


def _answer(moment: Moment) -> str:
    against = [f"against {other.run_id}{_compared(moment, other)}" for other in moment.others]
    said = "; ".join(against)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _compared(moment: Moment, other: Moment) -> str:
    """By how much a run differs from one other.

    Speed is that of samples, where it is known: a median step tells neither of a worker that holds up each fourth,
    nor of steps that are not alike.
    """
    unlike = _unlike_steps(moment, other)
    mine, others = _measures(moment), _measures(other)
    speed = _RATE if unlike or change_ratio(mine["samples"], others["samples"]) is not None else _SPEED
    parts = []
    for name, (more, less, same) in {**speed, **_MEMORY}.items():
        if (ratio := change_ratio(mine[name], others[name])) is not None:
            change = round(ratio, 3)
            parts.append(f"{abs(change):,.1%} {more if change > 0 else less}" if change else same)
        elif name in _RATE:
            parts.append("no samples per second to compare")
    return f"{unlike}: {', '.join(parts) or 'nothing was measured in both'}"


def _unlike_steps(moment: Moment, other: Moment) -> str:
    """That the steps of two runs are not made of as many samples, in brackets; empty if they are alike."""
    mine, others = _samples(moment), _samples(other)
    if mine and others and abs(mine / others - 1) > _ALIKE_RATIO:
        return f" ({number(mine)} samples per step, there {number(others)})"
    own, there = _settings(moment), _settings(other)
    sized = [name for name in own if name.endswith("batch size") and MISSING not in (own[name], there.get(name))]
    return " (with another batch size)" if any(own[name] != there.get(name, own[name]) for name in sized) else ""


def _samples(moment: Moment) -> float | None:
    """Of each step."""
    return moment.once("samples per step", lambda: queries.step_samples(moment.snapshot, moment.span))


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
