"""The comparison of runs with a baseline, the first of them: figures, different settings, conditions on changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from collector.diagnosis import ROWS_PER_STREAM, Verdict
from collector.errors import TidegaugeError
from collector.report.terminal import plain_table
from collector.store.queries import collector_health, loading, process_memory, spans, training_steps
from collector.units import MISSING, is_known, number, quantity

#: Time that a run's id begins with.
_TIME_OF_ID = re.compile(r"^(\d{8}-\d{6}-)")
_CONDITION = re.compile(r"(?P<name>\w+)\s*(?P<sign>[<>])\s*(?P<percent>[-+]?\d+(\.\d+)?)\s*%?")


#: Name -> label, unit, and scope: each step, each batch, or the whole run (empty).
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
    "lasted": ("Duration", "seconds", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a run with its number of observations; None if that is unknown."""

    label: str
    value: float | None
    unit: str
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition: `step_p50>5`, a figure has grown by more than 5 %; `samples<-5`, it has shrunk by more."""

    text: str
    name: str
    sign: str
    percent: float

    def holds(self, change_ratio: float) -> bool:
        """Return whether a change, as a ratio of the baseline's value, meets the condition."""
        change_percent = 100 * change_ratio
        return change_percent > self.percent if self.sign == ">" else change_percent < self.percent


def measures(snapshot: spans.Queryable, span: spans.Span, verdict: Verdict | None) -> dict[str, Measure]:
    """Return the figures of a run, as `FIGURES` names them; steps and batches are those of the span."""
    step = training_steps.step_summary(snapshot, span)
    summary = verdict.summary if verdict else None
    rates = loading.throughput(snapshot, span, summary["throughput"]["training_loaders"] if summary else None)
    values: dict[str, float | None] = {
        **dict.fromkeys(FIGURES),
        "step_p50": step["p50_ms"],
        "step_p95": step["p95_ms"],
        "samples": rates["samples_per_second"],
        "batches": rates["batches_per_second"],
    }
    if verdict is not None:  # It has the figures of the whole run.
        peak = verdict.summary["peak"]
        values |= {
            "data_wait": verdict.summary["data_wait_ratio"],
            "host_peak": peak["run_pss_bytes"],
            "shm_peak": peak["shm_used_bytes"],
            "allocated_peak": peak["device_allocated_bytes"],
            "reserved_peak": peak["device_reserved_bytes"],
            "steps": verdict.steps,
            "lasted": verdict.duration_seconds,
        }
    in_span = {"step": int(step["n"]), "batch": int(rates["n"])}
    in_run = {**collector_health.sample_counts(snapshot, ROWS_PER_STREAM), "lasted": 1}
    return {
        name: Measure(
            label=label,
            value=values[name],
            unit=unit,
            n=in_span[scope] if scope else in_run[name] if is_known(values[name]) else None,
        )
        for name, (label, unit, scope) in FIGURES.items()
    }


def baseline_words(run_id: str) -> str:
    """Return the name of the baseline in a heading."""
    return f"{run_id} (baseline)"


def change_ratio(measure: Measure, first: Measure) -> float | None:
    """Return the change against the baseline, as a ratio of its value; None if either is unknown or that is 0."""
    if not is_known(measure.value) or not is_known(first.value) or not first.value:
        return None
    return measure.value / first.value - 1


def words(measure: Measure, first: Measure | None = None) -> str:
    """Return a figure in words: `61.2 ms (+3.1%, n = 1,200)`."""
    change = None if first is None else change_ratio(measure, first)
    details = []
    if change is not None and first is not None:  # Shares differ in points: 577 % more than 2 % says little.
        points = 100 * ((measure.value or 0.0) - (first.value or 0.0))
        details.append(f"{points:+z.1f} points" if measure.unit == "ratio" else f"{change:+z.1%}")
    details += [f"n = {measure.n:,}"] if measure.n is not None else []
    base, _, per = measure.unit.partition("/")  # the label says of what the rate is
    text = quantity(measure.value, f"/{per}" if per else base)
    return f"{text} ({', '.join(details)})" if details else text


def settings(snapshot: spans.Queryable, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded settings of a run, in words."""
    texts = {
        "command": shlex.join(map(str, manifest.get("argv") or ())),
        "folder": str(manifest.get("cwd", MISSING)),
        "git commit": str(manifest.get("git_commit") or MISSING),
        "host": str(manifest.get("host", MISSING)),
        "Python": str(manifest.get("python", MISSING)),
        **_with_prefix("environment", manifest.get("environment")),
        **_with_prefix("tag", manifest.get("tags")),
    }
    for loader in loading.loaders(snapshot).drop_duplicates("loader").to_dict("records"):
        for field in ("num_workers", "prefetch_factor", "batch_size", "dataset"):
            value = loader[field]
            texts[f"loader {loader['loader']}: {field.replace('_', ' ')}"] = (
                value if isinstance(value, str) else number(value)
            )
    for row in process_memory.host_limits(snapshot).to_dict("records"):
        texts[f"{row['limit']} capacity"] = quantity(row["capacity_bytes"], "bytes")
    return texts


def _with_prefix(prefix: str, values: Mapping[str, Any] | None) -> dict[str, str]:
    return {f"{prefix} {name}": str(value) for name, value in (values or {}).items()}


def differences(runs: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs: setting -> its value in each run."""
    runs = list(runs)
    names = dict.fromkeys(name for run in runs for name in run)
    values = {name: [run.get(name, MISSING) for run in runs] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def parse_condition(text: str) -> Condition:
    """Parse a condition as a user types it.

    Raises:
        ValueError: the text is no condition, or names an unknown figure.
    """
    match = _CONDITION.fullmatch(text.strip())
    if match is None or match["name"] not in FIGURES:
        raise ValueError(
            f"{text!r} is no METRIC>PERCENT or METRIC<PERCENT such as step_p50>5; METRIC is one of "
            f"{', '.join(FIGURES)}"
        )
    return Condition(text=text, name=match["name"], sign=match["sign"], percent=float(match["percent"]))


def violations(conditions: Iterable[Condition], runs: Mapping[str, Mapping[str, Measure]]) -> list[str]:
    """Return one line for each condition that a run meets against the baseline.

    Raises:
        TidegaugeError: a figure was not measured in one of the runs.
    """
    (first_id, first), *others = runs.items()
    lines = []
    for condition in conditions:
        base = first[condition.name]
        for run_id, figures in others:
            other = figures[condition.name]
            change = change_ratio(other, base)
            if change is None:
                raise TidegaugeError(
                    f"{condition.name} cannot be compared: it is {words(base)} in {first_id} and {words(other)} in "
                    f"{run_id}; name another METRIC"
                )
            if condition.holds(change):
                change_text = f"{base.label} of {run_id} is {words(other, base)}"
                lines.append(f"{condition.text}: {change_text}, of the baseline {first_id} {words(base)}")
    return lines


def as_json(runs: Mapping[str, Mapping[str, Measure]], differing: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the comparison as JSON, from figures and differing settings; an unknown value is null."""
    baseline, first = next(iter(runs.items()))
    return {
        "schema": 1,
        "baseline": baseline,
        "runs": [
            {
                "run_id": run_id,
                "measures": {
                    name: {
                        "value": measure.value if is_known(measure.value) else None,
                        "unit": measure.unit,
                        "n": measure.n,
                        "change_ratio": change_ratio(measure, first[name]),
                    }
                    for name, measure in figures.items()
                },
                "settings": {name: values[index] for name, values in differing.items()},
            }
            for index, (run_id, figures) in enumerate(runs.items())
        ],
    }


def table(runs: Mapping[str, Mapping[str, Measure]]) -> Table:
    """Draw the figures, one column per run, that of the baseline first."""
    rows = plain_table("")
    baseline, first = next(iter(runs.items()))
    for run_id in runs:
        rows.add_column(baseline_words(run_id) if run_id == baseline else run_id)
    for name, measure in first.items():
        if any(is_known(figures[name].value) for figures in runs.values()):
            others = [words(figures[name], measure) for figures in list(runs.values())[1:]]
            rows.add_row(measure.label, words(measure), *others)
    return rows


def settings_table(run_ids: Sequence[str], differing: Mapping[str, Sequence[str]]) -> Table:
    """Draw the settings that differ, one row per setting and run."""
    rows = plain_table("setting", "run", "value")
    for name, values in differing.items():
        for run_id, value in zip(run_ids, values, strict=True):
            rows.add_row(name, run_id, value)
    return rows


def split_headings(rows: Table) -> Table:
    """Break each run's id in its heading after its time, so that columns fit into a terminal."""
    for column in rows.columns:
        column.header = _TIME_OF_ID.sub(r"\1\n", str(column.header)).replace(" (", "\n(")
    return rows
