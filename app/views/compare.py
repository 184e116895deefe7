"""Compare: two to four runs beside each other, what was set otherwise, and what came of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from app.blocks import Block, Note, Table
from app.figures import comparison
from app.figures.memory import METRIC_WORDS
from app.panel import Moment, Panel, View, show
from collector.store import loading_queries, memory_queries, queries
from collector.wording import MISSING, known, number, quantity

NO_OTHER = Note(
    text="No other run is chosen above to compare with. To record one with one change, and a tag that says which:",
    command="tidegauge run --tag change=workers-8 -- python train.py",
)
#: Settings on which the figures of a run depend by themselves: who compares should know that they differ.
_SCALES = ("batch size", "capacity", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a run, and of how many observations it is; n None where it is the only one."""

    value: float | None
    unit: str
    n: int | None = None


def deltas(moment: Moment) -> Iterator[Block]:
    """The figures of each run, and by how much they differ from those of the first."""
    if not moment.others:
        yield NO_OTHER
        return
    first = _measures(moment)
    columns = {moment.run_id: [_words(measure) for measure in first.values()]}
    for other in moment.others:
        measures = _measures(other)
        columns[other.run_id] = [_words(measures[name], first[name]) for name in first]
    yield Table(
        frame=pd.DataFrame({"Figure": list(first), **columns}),
        caption=f"In brackets by how much it differs from {moment.run_id}; n: observations in the chosen window. "
        "Peaks and data wait are over the whole run.",
    )


def settings(moment: Moment) -> Iterator[Block]:
    """What was set otherwise."""
    if not moment.others:
        return
    runs = {one.run_id: _settings(one) for one in (moment, *moment.others)}
    names = list(dict.fromkeys(name for each in runs.values() for name in each))
    differing = [name for name in names if len({each.get(name, MISSING) for each in runs.values()}) > 1]
    if not differing:
        yield Note(
            text="Nothing that is recorded was set otherwise: command, versions, loaders and host are the same."
        )
        return
    unlike = [name for name in differing if name.endswith(_SCALES)]
    if unlike:
        yield Note(
            text=f"The runs differ in {', '.join(unlike)}: compare samples per second rather than steps, and "
            "shares of a capacity rather than bytes.",
            icon=":material/balance:",
        )
    rows = {name: [each.get(setting, MISSING) for setting in differing] for name, each in runs.items()}
    yield Table(frame=pd.DataFrame({"Setting": differing, **rows}), caption="The settings that differ.")


def step_times(moment: Moment) -> Iterator[Block]:
    """Time per step, on the same steps."""
    found = {one.run_id: queries.steps(one.snapshot, one.span) for one in (moment, *moment.others)}
    found = {name: steps for name, steps in found.items() if not steps.empty}
    if len(found) > 1:
        yield comparison.step_times(found, moment.theme, revision=_revision(moment))


def host_memory(moment: Moment) -> Iterator[Block]:
    """Memory of all processes together."""
    found: dict[str, pd.DataFrame] = {}
    metrics = set()
    for one in (moment, *moment.others):
        metric = memory_queries.process_metric(one.snapshot, one.span, "pss_bytes")
        if metric is not None:
            grid = memory_queries.memory_by_role(one.snapshot, one.span, metric)
            total = grid.drop(columns="elapsed_seconds").sum(axis=1)
            found[one.run_id] = pd.DataFrame({"elapsed_seconds": grid["elapsed_seconds"], "bytes": total})
            metrics.add(METRIC_WORDS[metric])
    if len(found) > 1:
        word = " or ".join(sorted(metrics))
        yield comparison.host_memory(found, moment.theme, metric=word, revision=_revision(moment))


def _measures(moment: Moment) -> dict[str, Measure]:
    step = queries.step_summary(moment.snapshot, moment.span)
    made = loading_queries.throughput(moment.snapshot, moment.span)
    summary = moment.verdict.summary if moment.verdict else {}
    peak = summary.get("peak", {})
    steps, batches = int(step["n"]), int(made["n"])
    return {
        "Step p50": Measure(value=step["p50_ms"], unit="ms", n=steps),
        "Step p95": Measure(value=step["p95_ms"], unit="ms", n=steps),
        "Data wait": Measure(value=summary.get("data_wait_ratio"), unit="ratio"),
        "Samples per second": Measure(value=made["samples_per_second"], unit="samples/second", n=batches),
        "Batches per second": Measure(value=made["batches_per_second"], unit="batches/second", n=batches),
        "Peak host memory (PSS)": Measure(value=peak.get("run_pss_bytes"), unit="bytes"),
        "Peak /dev/shm": Measure(value=peak.get("shm_used_bytes"), unit="bytes"),
        "Peak GPU allocated": Measure(value=peak.get("device_allocated_bytes"), unit="bytes"),
        "Peak GPU reserved": Measure(value=peak.get("device_reserved_bytes"), unit="bytes"),
        "Steps": Measure(value=moment.verdict.steps if moment.verdict else None, unit="count"),
        "Lasted": Measure(value=moment.verdict.duration_seconds if moment.verdict else None, unit="seconds"),
    }


def _words(measure: Measure, first: Measure | None = None) -> str:
    text = quantity(measure.value, measure.unit)
    inside = []
    if first is not None and known(measure.value) and known(first.value) and first.value:
        inside.append(f"{measure.value / first.value - 1:+.1%}")
    if measure.n is not None:
        inside.append(f"n = {measure.n:,}")
    return f"{text} ({', '.join(inside)})" if inside else text


def _settings(moment: Moment) -> dict[str, str]:
    manifest = moment.manifest
    found = {
        "command": shlex.join(map(str, manifest.get("argv") or ())),
        "folder": str(manifest.get("cwd", MISSING)),
        "git commit": str(manifest.get("git_commit") or MISSING),
        "host": str(manifest.get("host", MISSING)),
        "Python": str(manifest.get("python", MISSING)),
        **_prefixed("environment", manifest.get("environment")),
        **_prefixed("tag", manifest.get("tags")),
    }
    for loader in loading_queries.loaders(moment.snapshot).drop_duplicates("loader").to_dict("records"):
        for field in ("num_workers", "prefetch_factor", "batch_size", "dataset"):
            value = loader[field]
            words = value if isinstance(value, str) else number(value)
            found[f"loader {loader['loader']}: {field.replace('_', ' ')}"] = words
    for row in memory_queries.host_limits(moment.snapshot).to_dict("records"):
        found[f"{row['limit']} capacity"] = quantity(row["capacity_bytes"], "bytes")
    return found


def _prefixed(word: str, values: Mapping[str, Any] | None) -> dict[str, str]:
    return {f"{word} {name}": str(value) for name, value in (values or {}).items()}


def _revision(moment: Moment) -> str:
    return " ".join(one.run_id for one in (moment, *moment.others))


def _answer(moment: Moment) -> str:
    if not moment.others:
        return ""
    mine, other = _measures(moment), _measures(moment.others[0])
    parts = []
    for name, more, less in (
        ("Step p50", "slower per step", "faster per step"),
        ("Peak host memory (PSS)", "more host memory", "less host memory"),
    ):
        here, there = mine[name].value, other[name].value
        if known(here) and known(there) and there:
            change = here / there - 1
            parts.append(f"{abs(change):.1%} {more if change > 0 else less}")
    return f"Against {moment.others[0].run_id}: {', '.join(parts)}." if parts else ""


VIEW = View(
    name="compare",
    question="Did the change help?",
    answer=_answer,
    rows=(
        (Panel(name="Figures", build=deltas),),
        (Panel(name="Settings", build=settings),),
        (Panel(name="Step time", build=step_times), Panel(name="Host memory", build=host_memory)),
    ),
)

if __name__ == "__main__":
    show(VIEW)
