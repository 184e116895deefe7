"""The throughput of a run against that of another one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.run.columns import WRITER, by_process, finite, floats
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.statistics.rates import rate_ratio

#: Parts of a run whose rates show its scatter, and steps that each of them needs.
_PARTS_COUNT, _LEAST_STEPS_PER_PART = 20, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRatio:
    """The throughput of a run over that of another one: its 95 % interval, and the steps that it rests on.

    `reason` says why the two cannot be compared; the figures are None then.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    reason: str = ""


def throughput_ratio(tables: RunTables, baseline: RunTables) -> ThroughputRatio:
    """Return the throughput of a run over that of a baseline. Pure.

    It is that of the training process with the most steps, without the first tenth of them, in samples per second,
    or in steps if one of the runs did not record its samples.
    """
    processes = [len(lifecycle_of(each).mains) for each in (tables, baseline)]
    if processes[0] != processes[1]:
        return ThroughputRatio(reason=f"{processes[0]} training processes, {processes[1]} in the baseline")
    steps = [_steps(each) for each in (tables, baseline)]
    needed = _PARTS_COUNT * _LEAST_STEPS_PER_PART
    for (durations, _), whose in zip(steps, ("", " of the baseline"), strict=True):
        if len(durations) < needed:
            return ThroughputRatio(reason=f"{len(durations)} of the {needed} steps{whose} that it needs")
    has_samples = all(len(finite(samples)) and finite(samples).sum() > 0 for _, samples in steps)
    rates = [
        _rates(durations, np.nan_to_num(samples) if has_samples else np.ones(len(durations)))
        for durations, samples in steps
    ]
    if any((each <= 0).any() for each in rates):
        return ThroughputRatio(reason="no samples were recorded in a part of a run")
    value, low, high = rate_ratio(*rates)
    return ThroughputRatio(value=value, low=low, high=high, n=len(steps[0][0]))


def _steps(tables: RunTables) -> tuple[Floats, Floats]:
    """Return durations (ns) and samples of the steps after the warm-up, of the process with the most steps."""
    rows = lifecycle_of(tables).of_last_attempt(tables.stream("step"))
    rows = rows[floats(rows, "duration_ns") > 0]
    if rows.empty:
        return np.empty(0), np.empty(0)
    rows = max((of_one for _, of_one in by_process(rows, WRITER)), key=len)
    rows = rows.iloc[len(rows) // 10 :]
    return floats(rows, "duration_ns"), floats(rows, "samples_count")


def _rates(durations_ns: Floats, counts: Floats) -> Floats:
    parts = zip(np.array_split(counts, _PARTS_COUNT), np.array_split(durations_ns, _PARTS_COUNT), strict=True)
    return np.array([part.sum() / spans.sum() for part, spans in parts])
