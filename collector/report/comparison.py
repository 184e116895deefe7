"""The comparison of runs with a baseline, the first of them: figures, different settings, conditions on changes."""

from __future__ import annotations

import re
import shlex
import textwrap
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
_TIME_OF_ID = re.compile(r"^\d{8}-\d{6}-")
#: Percent from which a change has no decimals; 9.95 would be written as 10.0.
_WHOLE_FROM = 9.95
#: Characters of a line of a heading, where the figures are narrower.
_LEAST_HEADING = 13
_CONDITION = re.compile(r"(?P<name>\w+)\s*(?P<sign>[<>])\s*(?P<percent>[-+]?\d+(\.\d+)?)\s*%?")


#: Name -> label, unit, and scope: each step, each batch, or the whole run (empty).
FIGURES = {
    "samples": ("Samples per second", "samples/second", "batch"),
    "batches": ("Batches per second", "batches/second", "batch"),
    "step_p50": ("Step p50", "ms", "step"),
    "step_p95": ("Step p95", "ms", "step"),
    "data_wait": ("Data wait", "ratio", ""),
    "host_peak": ("Peak host memory", "bytes", ""),
    "shm_peak": ("Peak /dev/shm (host)", "bytes", ""),
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
    """Return a figure in words, with its change against the baseline: `61.2 ms (+3.1%, n = 1,200)`."""
    change = "" if first is None else _change_words(measure, first)
    has_n = measure.n is not None and measure.unit not in ("count", "seconds")  # those are one observation
    details = [*filter(None, [change]), *([f"n = {measure.n:,}"] if has_n else [])]
    return f"{_value_words(measure)} ({', '.join(details)})" if details else _value_words(measure)


def _value_words(measure: Measure) -> str:
    base, _, per = measure.unit.partition("/")  # the label says of what the rate is
    return quantity(measure.value, f"/{per}" if per else base)


def _change_words(measure: Measure, first: Measure) -> str:
    change = change_ratio(measure, first)
    if change is None:
        return ""
    if measure.unit == "ratio":  # Shares differ in points: 577 % more than 2 % says little.
        return f"{_signed(100 * ((measure.value or 0.0) - (first.value or 0.0)))} points"
    return f"{_signed(100 * change)}%"


def _signed(percent: float) -> str:
    return f"{percent:+z,.{0 if abs(percent) >= _WHOLE_FROM else 1}f}"


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


def headings(run_ids: Sequence[str], *, short: bool = False) -> list[str]:
    """Return the name of each run in a heading; a short one lacks the time, unless two would be the same."""
    names = [_TIME_OF_ID.sub("", run_id) for run_id in run_ids]
    return names if short and len(set(names)) == len(names) else [*run_ids]


def table(runs: Sequence[Mapping[str, Measure]], names: Sequence[str]) -> Table:
    """Draw the figures, one column per run, that of the baseline first."""
    first = runs[0]
    known = [name for name in first if any(is_known(figures[name].value) for figures in runs)]
    rows = plain_table("")
    rows.add_column(baseline_words(names[0]))
    columns = [[first[name].label for name in known], [_value_words(first[name]) for name in known]]
    for figures, name in zip(runs[1:], names[1:], strict=True):
        rows.add_column(name)
        pairs = [(_value_words(figures[each]), _change_words(figures[each], first[each])) for each in known]
        width = max((len(f"{value} {change}") for value, change in pairs), default=0)
        columns.append([value + change.rjust(width - len(value)) for value, change in pairs])
    for row in zip(*columns, strict=True):
        rows.add_row(*row)
    return rows


def settings_table(names: Sequence[str], differing: Mapping[str, Sequence[str]]) -> Table:
    """Draw the settings that differ, one row per setting and run."""
    rows = plain_table("setting", "run", "value")
    for setting, values in differing.items():
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            rows.add_row("" if place else setting, name, value)
    return rows


def wrap_headings(rows: Table) -> Table:
    """Break the headings of runs so that they are hardly wider than the figures below."""
    for column in rows.columns[1:]:
        width = max(_LEAST_HEADING, *(len(str(cell).rstrip()) for cell in column.cells))
        parts = str(column.header).split(" ")
        column.header = "\n".join(line for part in parts for line in textwrap.wrap(part, width))
    return rows
