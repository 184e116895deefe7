"""The pace of a run: its start, its end against its beginning, and against another run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pandas as pd

from collector.diagnosis.loading.core_waits import queued_ratio
from collector.diagnosis.loading.worker_limit import cores_used
from collector.diagnosis.run.columns import SECOND_NS, WRITER, by_process, finite, floats, median, origin_ns
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.statistics.rates import rate_ratio

#: Parts of a run whose rates show its scatter, and steps that each of them needs.
_PARTS_COUNT, _LEAST_STEPS_PER_PART = 20, 2
#: Steps of which the first and the last fifth are compared, at least; and how much longer the last must take.
_STEPS_TO_COMPARE, _SLOWER_RATIO = 50, 1.25
#: Phase of a step -> its column.
_PHASES = {
    "data wait": "data_wait_ns",
    "copies to the device": "h2d_ns",
    "forward": "forward_ns",
    "backward": "backward_ns",
    "the optimizer": "optimizer_ns",
    "the rest of the step": "other_ns",
}
_CORE_WAIT = "waiting for a core"


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


class Start(TypedDict):
    """The time from the start of the command to the end of its first step, or first batch without steps.

    `cores_used` is the number of cores that the run's processes used meanwhile, None if a host has too few
    samples of that time.
    """

    seconds: float
    cores_used: float | None


def start(tables: RunTables) -> Start | None:
    """Return how long the run took until its first step; None without steps, or without a command of its own."""
    life, first_ns = lifecycle_of(tables), tables.first_ns("step") or tables.first_ns("batch")
    if first_ns is None or life.command is None or life.watched:
        return None
    begin_ns = origin_ns(tables)
    hosts = sorted(set(tables.stream("process")["host"]))
    used = [cores_used(tables, host, begin_ns, first_ns) for host in hosts]
    return {"seconds": (first_ns - begin_ns) / SECOND_NS, "cores_used": sum(used) if used and all(used) else None}


class Slowdown(TypedDict):
    """Steps that became slower, in seconds: the median step at first and at the end, the phase that grew most.

    The phase is `waiting for a core` if the steps take no longer without such waits.
    """

    first_seconds: float
    last_seconds: float
    phase: str
    phase_growth_seconds: float


def slowdown(tables: RunTables) -> Slowdown | None:
    """Return how much slower the steps of the training process with the most steps became; None if they did not.

    Their last fifth is compared with their first one, without the warm-up. They became slower if three quarters of
    them, in both halves of the last fifth, take longer than three quarters of those in the first.
    """
    rows = _steady_steps(tables)
    if len(rows) < _STEPS_TO_COMPARE:
        return None
    fifth = len(rows) // 5
    first, last = rows.iloc[:fifth], rows.iloc[-fifth:]
    usual = float(np.quantile(floats(first, "duration_ns"), 0.75))
    halves = np.array_split(floats(last, "duration_ns"), 2)
    before, now = (median(floats(part, "duration_ns")) for part in (first, last))
    if any(np.quantile(half, 0.25) <= usual for half in halves) or now < _SLOWER_RATIO * before:
        return None
    growths = {
        phase: np.nan_to_num(median(floats(last, column)) - median(floats(first, column)))
        for phase, column in _PHASES.items()
    }
    queued = [_queued_ratio(tables, part) for part in (first, last)]
    if now * (1 - queued[1]) < _SLOWER_RATIO * before * (1 - queued[0]):
        growths = {_CORE_WAIT: now * queued[1] - before * queued[0]}
    phase = max(growths, key=lambda name: growths[name])
    return {
        "first_seconds": before / SECOND_NS,
        "last_seconds": now / SECOND_NS,
        "phase": phase,
        "phase_growth_seconds": float(growths[phase]) / SECOND_NS,
    }


def _queued_ratio(tables: RunTables, steps: pd.DataFrame) -> float:
    """Return the share of the time of these steps in which their thread waited for a core, 0 if unknown."""
    times, (host, pid, ticks) = floats(steps, "time_ns"), steps[WRITER].iloc[0]
    return queued_ratio(tables, (str(host), int(pid), int(ticks)), times[0], times[-1])[0]


def throughput_ratio(tables: RunTables, baseline: RunTables) -> ThroughputRatio:
    """Return the throughput of a run over that of a baseline. Pure.

    It is that of the training process with the most steps, without the first tenth of them, in samples per second,
    or in steps if one of the runs did not record its samples.
    """
    processes = [len(lifecycle_of(each).mains) for each in (tables, baseline)]
    if processes[0] != processes[1]:
        return ThroughputRatio(reason=f"{processes[0]} training processes, {processes[1]} in the baseline")
    rows = [_steady_steps(each) for each in (tables, baseline)]
    steps = [(floats(each, "duration_ns"), floats(each, "samples_count")) for each in rows]
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


def _steady_steps(tables: RunTables) -> pd.DataFrame:
    """Return the steps of the process with the most, without the first tenth of them."""
    rows = lifecycle_of(tables).of_last_attempt(tables.stream("step"))
    rows = rows[floats(rows, "duration_ns") > 0]
    if len(rows):
        rows = max((of_one for _, of_one in by_process(rows, WRITER)), key=len)
    return rows.iloc[len(rows) // 10 :]


def _rates(durations_ns: Floats, counts: Floats) -> Floats:
    parts = zip(np.array_split(counts, _PARTS_COUNT), np.array_split(durations_ns, _PARTS_COUNT), strict=True)
    return np.array([part.sum() / spans.sum() for part, spans in parts])
