"""The figures of a run that a budget limits. A figure that is not known has a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from collector.diagnosis import RunTables, Verdict, machine_of, negligible_bytes, throughput_ratio
from collector.findings import Finding
from collector.report.results import machine_words
from collector.units import size

#: Checks of a verdict on growing memory (`diagnosis.checks`). Without the first one growth is not judged.
MEMORY_CHECKS = ("training process's memory", "workers' memory", "/dev/shm", "GPU memory")
#: Checks that do not apply to every run -> the reason that says so.
_ABSENT = ("no workers", "no GPU in use")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedRun:
    """A run with its tables and the verdict on it."""

    run_id: str
    tables: RunTables
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run.

    Attributes:
        value: in the unit of its measure; None if it is not known, or if nothing was found (`note`).
        low, high: interval of an estimate; None of a measured value.
        n: number of observations.
        note: what was looked for and not found.
        reason: why the figure is not known; empty if it is.
        finding: the finding that explains it best.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    note: str = ""
    reason: str = ""
    finding: Finding | None = None


def figures_of(run: ExaminedRun, baseline: ExaminedRun | None, names: Iterable[str]) -> dict[str, Figure]:
    """Return the figures of these names (`budget.MEASURES`); `baseline` is the run to compare with. Pure."""
    return {name: FIGURES[name](run, baseline) for name in names}


def _peak(run: ExaminedRun, _: ExaminedRun | None, *, on_gpu: bool = False) -> Figure:
    peak = run.verdict.summary["peak"]["device_reserved_bytes" if on_gpu else "run_pss_bytes"]
    lacks = "no memory of a GPU was recorded" if on_gpu else "the memory of its processes was not read"
    return Figure(
        value=peak,
        n=None if peak is None else run.tables.rows_count("device_memory" if on_gpu else "process"),
        reason="" if peak is not None else lacks,
        finding=_first(run, "memory leak", "memory forecast", on_gpu=on_gpu),
    )


def _growth(run: ExaminedRun, _: ExaminedRun | None) -> Figure:
    """Return the largest leak per step. Growth that may yet turn out a leak leaves the figure unknown."""
    verdict = run.verdict
    if not verdict.steps:
        return Figure(reason="no steps were recorded")
    growing = [
        (each.rate, each)
        for each in verdict.findings
        if each.rate is not None and each.rate.unit == "bytes/s" and each.known is None
    ]
    leaks = [pair for pair in growing if pair[1].group == "memory leak"]
    if leaks:
        rate, leak = max(leaks, key=lambda pair: pair[0].value)
        pace = verdict.summary["throughput"]["steps_per_second"]
        if not pace:
            return Figure(reason="the pace of its steps is not known", finding=leak)
        value, low, high = (each / pace for each in (rate.value, rate.low, rate.high))
        return Figure(value=value, low=low, high=high, n=leak.evidence[0].n, finding=leak)
    if unclear := next((each for _, each in growing if each.kind == "cannot-tell"), None):
        return Figure(reason=unclear.summary, finding=unclear)
    checks = {check.name: check for check in verdict.checks if check.name in MEMORY_CHECKS}
    missing = {name: each.reason for name, each in checks.items() if each.status == "not judged"}
    if reason := missing.pop(MEMORY_CHECKS[0], ""):
        return Figure(reason=reason)
    peaks_bytes = np.array([verdict.summary["peak"]["main_rss_bytes"]], dtype=float)
    visible = size(negligible_bytes(peaks_bytes))
    note = f"none found (it shows from {visible} in {verdict.steps:,} steps on)"
    unknown = [f"{name}: {reason}" for name, reason in missing.items() if reason not in _ABSENT]
    return Figure(n=verdict.steps, note=f"{note}; not judged: {', '.join(unknown)}" if unknown else note)


def _data_wait(run: ExaminedRun, _: ExaminedRun | None) -> Figure:
    ratio = run.verdict.summary["data_wait_ratio"]
    return Figure(
        value=ratio,
        n=None if ratio is None else run.verdict.steps or run.verdict.batches,
        reason="" if ratio is not None else "no DataLoader seen",
        finding=_first(run, "data loading"),
    )


def _throughput(run: ExaminedRun, baseline: ExaminedRun | None) -> Figure:
    if baseline is None:
        return Figure(reason="there is no baseline")
    machine, other = (machine_words(machine_of(each.tables)) for each in (run, baseline))
    if machine != other:
        return Figure(
            reason=f"the baseline ran on another machine: {other or 'unknown'}, not {machine or 'unknown'}"
        )
    found = throughput_ratio(run.tables, baseline.tables)
    return Figure(
        value=found.value,
        low=found.low,
        high=found.high,
        n=found.n,
        reason=found.reason,
        finding=_first(run, "data loading", "training"),
    )


def _first(run: ExaminedRun, *groups: str, on_gpu: bool | None = None) -> Finding | None:
    """Return the gravest finding of these groups, on a GPU or not."""
    for finding in run.verdict.findings:
        if finding.is_healthy or finding.group not in groups:
            continue
        if on_gpu is None or on_gpu == (finding.locus.device is not None):
            return finding
    return None


#: Name of a measure -> its figure of a run.
FIGURES: dict[str, Callable[[ExaminedRun, ExaminedRun | None], Figure]] = {
    "max_peak": _peak,
    "max_gpu_peak": partial(_peak, on_gpu=True),
    "max_growth": _growth,
    "max_data_wait": _data_wait,
    "min_throughput": _throughput,
}
