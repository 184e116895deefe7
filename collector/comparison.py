"""Runs beside each other: their figures, what was set otherwise, and what a change must not make worse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from collector.diagnosis.tables import ROWS_PER_STREAM
from collector.diagnosis.verdict import Verdict
from collector.errors import TidegaugeError
from collector.quantities import MISSING, known, number, quantity
from collector.store import loading_queries, memory_queries, queries

_CONDITION = re.compile(r"(?P<name>\w+)\s*(?P<sign>[<>])\s*(?P<percent>[-+]?\d+(\.\d+)?)\s*%?")


#: Name -> label, unit, and what it is taken over: each step, each batch, or the run as a whole.
FIGURES = {
    "step_p50": ("Step p50", "ms", "step"),
    "step_p95": ("Step p95", "ms", "step"),
    "data_wait": ("Data wait", "ratio", ""),
    "samples": ("Samples per second", "samples/second", "batch"),
    "batches": ("Batches per second", "batches/second", "batch"),
    "host_peak": ("Peak host memory (PSS)", "bytes", ""),
    "shm_peak": ("Peak /dev/shm", "bytes", ""),
    "allocated_peak": ("Peak GPU allocated", "bytes", ""),
    "reserved_peak": ("Peak GPU reserved", "bytes", ""),
    "steps": ("Steps", "count", ""),
    "lasted": ("Lasted", "seconds", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a run, and of how many observations it is; n None where it is not known."""

    label: str
    value: float | None
    unit: str
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`step_p50>5`: that a figure has grown by more than five percent; `samples<-5`: that it has shrunk by more."""

    text: str
    name: str
    sign: str
    percent: float

    def holds(self, change_ratio: float) -> bool:
        """Whether a change, as a ratio of the first run's value, is what is not wanted."""
        change_percent = 100 * change_ratio
        return change_percent > self.percent if self.sign == ">" else change_percent < self.percent


def measures(snapshot: queries.Queryable, span: queries.Span, verdict: Verdict | None) -> dict[str, Measure]:
    """The figures that a change is judged by, as `FIGURES` names them; steps and batches are those of the span."""
    step = queries.step_summary(snapshot, span)
    summary = verdict.summary if verdict else {}
    made = loading_queries.throughput(snapshot, span, summary.get("throughput", {}).get("training_loaders"))
    peak = summary.get("peak", {})
    values = {
        "step_p50": step["p50_ms"],
        "step_p95": step["p95_ms"],
        "data_wait": summary.get("data_wait_ratio"),
        "samples": made["samples_per_second"],
        "batches": made["batches_per_second"],
        "host_peak": peak.get("run_pss_bytes"),
        "shm_peak": peak.get("shm_used_bytes"),
        "allocated_peak": peak.get("device_allocated_bytes"),
        "reserved_peak": peak.get("device_reserved_bytes"),
        "steps": verdict.steps if verdict else None,
        "lasted": verdict.duration_seconds if verdict else None,
    }
    in_span = {"step": int(step["n"]), "batch": int(made["n"])}
    in_run = {**queries.observed(snapshot, ROWS_PER_STREAM), "lasted": 1}
    return {
        name: Measure(
            label=label,
            value=values[name],
            unit=unit,
            n=in_span[of] if of else in_run[name] if known(values[name]) else None,
        )
        for name, (label, unit, of) in FIGURES.items()
    }


def change_ratio(measure: Measure, first: Measure) -> float | None:
    """By how much it differs from the first run's, as a ratio of that; None where that cannot be told."""
    if not known(measure.value) or not known(first.value) or not first.value:
        return None
    return measure.value / first.value - 1


def words(measure: Measure, first: Measure | None = None) -> str:
    """`61.2 ms (+3.1%, n = 1,200)`."""
    change = None if first is None else change_ratio(measure, first)
    inside = []
    if change is not None and first is not None:  # shares differ in points: "577 %" more of 2 % says little
        points = 100 * ((measure.value or 0.0) - (first.value or 0.0))
        inside.append(f"{points:+z.1f} points" if measure.unit == "ratio" else f"{change:+z.1%}")
    inside += [f"n = {measure.n:,}"] if measure.n is not None else []
    text = quantity(measure.value, measure.unit)
    return f"{text} ({', '.join(inside)})" if inside else text


def settings(snapshot: queries.Queryable, manifest: Mapping[str, Any]) -> dict[str, str]:
    """What is recorded of how a run was set up, in words."""
    found = {
        "command": shlex.join(map(str, manifest.get("argv") or ())),
        "folder": str(manifest.get("cwd", MISSING)),
        "git commit": str(manifest.get("git_commit") or MISSING),
        "host": str(manifest.get("host", MISSING)),
        "Python": str(manifest.get("python", MISSING)),
        **_prefixed("environment", manifest.get("environment")),
        **_prefixed("tag", manifest.get("tags")),
    }
    for loader in loading_queries.loaders(snapshot).drop_duplicates("loader").to_dict("records"):
        for field in ("num_workers", "prefetch_factor", "batch_size", "dataset"):
            value = loader[field]
            found[f"loader {loader['loader']}: {field.replace('_', ' ')}"] = (
                value if isinstance(value, str) else number(value)
            )
    for row in memory_queries.host_limits(snapshot).to_dict("records"):
        found[f"{row['limit']} capacity"] = quantity(row["capacity_bytes"], "bytes")
    return found


def _prefixed(word: str, values: Mapping[str, Any] | None) -> dict[str, str]:
    return {f"{word} {name}": str(value) for name, value in (values or {}).items()}


def differing(runs: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs: setting -> its value in each."""
    each = list(runs)
    names = dict.fromkeys(name for run in each for name in run)
    values = {name: [run.get(name, MISSING) for run in each] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def parse_condition(text: str) -> Condition:
    """A condition as it is typed.

    Raises:
        ValueError: it is none, or of a figure that there is not.

    """
    match = _CONDITION.fullmatch(text.strip())
    if match is None or match["name"] not in FIGURES:
        raise ValueError(
            f"{text!r} is no METRIC>PERCENT or METRIC<PERCENT such as step_p50>5; METRIC is one of "
            f"{', '.join(FIGURES)}"
        )
    return Condition(text=text, name=match["name"], sign=match["sign"], percent=float(match["percent"]))


def broken(conditions: Iterable[Condition], runs: Mapping[str, Mapping[str, Measure]]) -> list[str]:
    """One line for each condition that holds in a run against the first.

    Raises:
        TidegaugeError: a figure was not measured in one of them.

    """
    (first_id, first), *others = runs.items()
    lines = []
    for condition in conditions:
        base = first[condition.name]
        for run_id, measured in others:
            other = measured[condition.name]
            change = change_ratio(other, base)
            if change is None:
                raise TidegaugeError(
                    f"{condition.name} cannot be compared: it is {words(base)} in {first_id} and {words(other)} in "
                    f"{run_id}; name another METRIC"
                )
            if condition.holds(change):
                lines.append(f"{condition.text}: {base.label} of {run_id} is {words(other, base)}")
    return lines


def as_json(runs: Mapping[str, Mapping[str, Measure]], unlike: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The comparison for programs; what is not known is null."""
    first = next(iter(runs.values()))
    return {
        "schema": 1,
        "runs": [
            {
                "run_id": run_id,
                "measures": {
                    name: {
                        "value": measure.value if known(measure.value) else None,
                        "unit": measure.unit,
                        "n": measure.n,
                        "change_ratio": change_ratio(measure, first[name]),
                    }
                    for name, measure in measured.items()
                },
                "settings": {name: values[position] for name, values in unlike.items()},
            }
            for position, (run_id, measured) in enumerate(runs.items())
        ],
    }


def table(runs: Mapping[str, Mapping[str, Measure]], unlike: Mapping[str, Sequence[str]]) -> Table:
    """Figures first, then the settings that differ; one column a run."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("", no_wrap=True)
    shown.add_column("metric", no_wrap=True, style="dim")
    for run_id in runs:
        shown.add_column(run_id, overflow="fold")
    first = next(iter(runs.values()))
    for name, measure in first.items():
        if any(known(measured[name].value) for measured in runs.values()):
            others = [words(measured[name], measure) for measured in list(runs.values())[1:]]
            shown.add_row(measure.label, name, words(measure), *others)
    if unlike:
        shown.add_row(Text())
        for name, values in unlike.items():
            shown.add_row(name, "", *values)
    return shown
