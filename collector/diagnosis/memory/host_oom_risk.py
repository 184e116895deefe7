"""Find out whether the host will run out of memory, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from collector.diagnosis.memory.exhaustion import (
    FULL_RATIO,
    Course,
    current_level,
    exhaustion_finding,
    full_finding,
)
from collector.diagnosis.memory.leak import GrowingUse, Use, filling_of, growth_of, rise_since
from collector.diagnosis.memory.resources import (
    GIVE_BACK_FREED,
    HOST_MEMORY,
    HOST_MEMORY_OF_LOADING,
    HOST_MEMORY_OF_OTHERS,
    HOST_MEMORY_WITHOUT_WORKERS,
    LOOK_ELSEWHERE,
    Resource,
)
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    finite,
    floats,
    held_bytes,
    host_samples,
    peak,
    resident_bytes,
    seconds,
    worker_samples,
    written,
)
from collector.diagnosis.run.host_memory import binding_limit, demand_series, kernel_bytes, sum_of_processes
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import (
    after_training_ns,
    may_be_loading,
    training_end_ns,
    training_start_ns,
)
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.findings import Evidence, Finding, Limit, Locus, extended, fact
from collector.store import ProcessKey
from collector.units import size
from training_harness.records import ROLE_MAIN, ROLE_WORKER

#: Share of the limit that is critical.
_CRITICAL_RATIO = 0.98
#: PSI memory pressure, full: tasks stand still a tenth of the time.
_HIGH_PRESSURE_RATIO = 0.10
_NEGLIGIBLE_BYTES = 32 * MIB
#: Share of memory, and of its growth, below which other programs have more of it than the run. Growth of theirs
#: matters once `_NEAR_RATIO` of the limit is in use.
_RUN_SHARE_RATIO = 0.5
_NEAR_RATIO = 0.8
#: Share of the freed memory of all processes that one must have to be named alone.
_ONE_PROCESS_RATIO = 0.9
#: Share of a growth from which on the freed memory of a process counts.
_LEAST_PART_RATIO = 0.02
#: Samples after the training that show whether memory still grows.
_LEAST_REST_SAMPLES = 5


def find_host_risk(tables: RunTables, copies: Sequence[Finding]) -> list[Finding]:
    """Find `host-oom-risk`, at most once per host; `copies` are the run's findings of growth to a known plateau."""
    hosts = pd.unique(tables.stream("host")["host"])
    findings = [
        _host_risk(tables, str(host), [f for f in copies if f.locus.host in (None, str(host))]) for host in hosts
    ]
    return [finding for finding in findings if finding is not None]


def _host_risk(tables: RunTables, host: str, copies: Sequence[Finding]) -> Finding | None:
    name, limit = binding_limit(tables, host)
    times, demand = demand_series(tables, host)
    is_known = np.isfinite(demand)
    if not math.isfinite(limit) or limit <= 0 or not is_known.any():
        return None
    use = Use.of(tables, "demand", Locus(host=host), times, demand)
    bound = Limit(name=name, value=limit, unit="bytes")
    for begin, end in _phases(tables):
        course = _course(tables, host, use.where(is_known & (times >= begin) & (times <= end)), bound)
        if course is not None and course.is_relevant and _matters(course, copies):
            risk = _with_freed(exhaustion_finding(course), course.growing)
            if course.resource is HOST_MEMORY_OF_OTHERS:
                risk = extended(risk, "Less than half of the growth is the run's.")
            is_over = after_training_ns(tables) is not None  # until then a long step may be under way
            if risk.severity == "critical" and is_over and _rests(use.where(is_known & (times > end)), course):
                return extended(risk, "Since the last step or batch it has hardly grown.", severity="warning")
            return risk
    if peak(demand) >= FULL_RATIO * limit:
        return _nearly_full(use.where(is_known), bound)
    return None


def _phases(tables: RunTables) -> Iterator[tuple[float, float]]:
    """Yield begin and end of the times to judge, in seconds: what follows the training first, unless it ended."""
    after = after_training_ns(tables)
    if after is not None and lifecycle_of(tables).status() != "finished":
        yield after[0] / SECOND_NS, after[1] / SECOND_NS
    begin, end = training_start_ns(tables) / SECOND_NS, training_end_ns(tables) / SECOND_NS
    yield (begin, end) if math.isfinite(begin) else (-math.inf, math.inf)


def _rests(later: Use, course: Course) -> bool:
    """Return whether the use since a phase grew less than half as fast as it did in that phase."""
    if len(later.times) < _LEAST_REST_SAMPLES:
        return False
    rise, seconds = float(later.values[-1] - later.values[0]), float(later.times[-1] - later.times[0])
    return rise < _RUN_SHARE_RATIO * course.growing.trend.slope * seconds


def _course(tables: RunTables, host: str, use: Use, bound: Limit) -> Course | None:
    """Return the course of the host's memory towards its limit, if it grows and does not end before."""
    negligible, reserve = max(_NEGLIGIBLE_BYTES, 0.002 * bound.value), kernel_bytes(tables, host)
    trend = use.growth(negligible)
    filling = filling_of(use, trend, negligible)
    if filling is not None:
        trend = growth_of(filling) if filling.end + reserve > bound.value else None
    if trend is None:
        return None
    growing = GrowingUse(use, trend)
    run_bytes = _run_bytes(use)
    run_rise = rise_since(use.times, run_bytes, trend)
    is_of_others = run_rise < _RUN_SHARE_RATIO * trend.rise or _has_stopped(use, run_bytes, trend)
    witnesses = _pressure(tables, host)
    if math.isfinite(run_rise):
        witnesses = (fact("run_processes_rise_bytes", round(run_rise), growing.window, n=trend.n), *witnesses)
    return Course(
        what="Host memory",
        resource=HOST_MEMORY_OF_OTHERS if is_of_others else _resource(tables, host),
        growing=replace(growing, witnesses=witnesses),
        limit=bound,
        reserve=reserve,
        filling=filling,
    )


def _has_stopped(use: Use, run_bytes: Floats, trend: Growth) -> bool:
    """Return whether the run's growth ended while that of the host went on: little of it is in the second half.

    Pages that a fork shares make the sum of PSS uneven: the resident memory of the training processes counts too.
    """
    middle = (trend.since_seconds + float(use.times[-1])) / 2
    later = replace(trend, since_seconds=middle)
    process = use.tables.stream("process")
    mains = process[(process["host"] == use.locus.host) & (floats(process, "role") == ROLE_MAIN)]
    resident = sum_of_processes(mains, use.times, resident_bytes)[0]
    rises = [rise_since(use.times, values, later) for values in (run_bytes, resident)]
    least = _RUN_SHARE_RATIO * trend.slope * (float(use.times[-1]) - middle)
    return all(rise < least for rise in rises)


def _resource(tables: RunTables, host: str) -> Resource:
    if may_be_loading(tables):
        return HOST_MEMORY_OF_LOADING
    has_workers = (worker_samples(tables)["host"] == host).any()
    return HOST_MEMORY if has_workers else HOST_MEMORY_WITHOUT_WORKERS


def _matters(course: Course, copies: Sequence[Finding]) -> bool:
    trend, limit, used = course.growing.trend, course.limit.value, current_level(course.growing.use.values)
    copy_rate = sum(finding.rate.value for finding in copies if finding.rate)
    uncopied_bytes = sum(
        max(0.0, finding.limit.value - (finding.value_of("worker_copied_bytes") or 0.0))
        for finding in copies
        if finding.limit
    )
    if copy_rate >= _RUN_SHARE_RATIO * trend.slope and used + uncopied_bytes < limit:
        return False  # copying ends before the limit
    return course.resource is not HOST_MEMORY_OF_OTHERS or used >= _NEAR_RATIO * limit


def _run_bytes(use: Use) -> Floats:
    """Return the memory of the run's processes on a host at the times of its demand, NaN where none was sampled.

    Shared memory counts once (`held_bytes`). Workers that end with their epoch free what they took, so it is the
    processes' sum that may grow, not each of them.
    """
    tables, host, times = use.tables, use.locus.host, use.times

    def held(samples: pd.DataFrame) -> Floats:
        values = held_bytes(samples)
        is_worker = (floats(samples, "role") == ROLE_WORKER).any()
        if not is_worker or np.isfinite(floats(samples, "pss_bytes")).any():
            return values
        # The resident memory of a new worker is nearly all its parent's; what it takes later is its own.
        own: Floats = values - finite(values)[:1].sum()
        return own

    def find() -> Floats:
        process = tables.stream("process")
        return sum_of_processes(process[process["host"] == host], times, held)[0]

    return tables.once((_run_bytes, host, float(times[0]), len(times)), find)


def _with_freed(risk: Finding, growing: GrowingUse) -> Finding:
    """Return a risk with the freed memory that training processes do not give back, if that is most of the growth.

    The C library keeps it: between the blocks that were freed lie small ones that stay.
    """
    tables, trend = growing.use.tables, growing.trend
    life, rises, n = lifecycle_of(tables), dict[ProcessKey, float](), 0
    for key in life.mains:
        heap = written(tables, "heap", key)
        rise = rise_since(seconds(heap), floats(heap, "free_bytes"), trend)
        if key[0] == growing.use.locus.host and rise >= _LEAST_PART_RATIO * trend.rise:
            rises[key] = rise
            n += int((seconds(heap) >= trend.since_seconds).sum())
    freed = sum(rises.values())
    if not rises or freed < _RUN_SHARE_RATIO * trend.rise:
        return risk
    key, most = max(rises.items(), key=lambda item: item[1])
    are_several = most < _ONE_PROCESS_RATIO * freed
    process = f"{len(rises)} training processes" if are_several else life.name(key)
    return extended(
        risk,
        f"{size(freed)} of the growth is freed memory in {process}: small objects that stay keep the C library "
        "from giving it back.",
        fact("freed_rise_bytes", round(freed), "same window", n=n),
        advice=(GIVE_BACK_FREED,),
    )


def _nearly_full(use: Use, limit: Limit) -> Finding | None:
    tables, host, at = use.tables, str(use.locus.host), int(np.argmax(use.values))
    pressure = _pressure(tables, host)
    if not pressure:
        return None
    highest, of_run = float(use.values[at]), float(_run_bytes(use)[at])
    evidence = [fact("demand_peak_ratio", round(highest / limit.value, 4), "run", n=len(use.values))]
    if math.isfinite(of_run):
        evidence.append(fact("run_held_bytes", round(of_run), "same sample"))
    has_pressure = any(
        e.name == "memory_full_pressure_ratio" and float(e.value) >= _HIGH_PRESSURE_RATIO for e in pressure
    )
    is_critical = has_pressure or highest >= _CRITICAL_RATIO * limit.value
    full = full_finding(
        _resource(tables, host),
        limit,
        highest,
        Locus(host=host),
        (*evidence, *pressure),
        severity="critical" if is_critical else "warning",
        verb="is" if lifecycle_of(tables).status() == "running" else "was",
    )
    if of_run < _RUN_SHARE_RATIO * highest:
        return extended(full, f"The run's processes held {size(of_run)} of it.", advice=(LOOK_ELSEWHERE,))
    return full


def _pressure(tables: RunTables, host: str) -> tuple[Evidence, ...]:
    """Return the kernel's own figures: memory pressure, failed reclaims, available memory and peak use."""
    samples = host_samples(tables, host)
    ooms = finite(floats(samples, "cgroup_oom_count"))
    measures = {
        "memory_full_pressure_ratio": peak(floats(samples, "memory_full_avg10_ratio")),
        "cgroup_oom_count": float(ooms[-1] - ooms[0]) if len(ooms) else math.nan,
        "memory_available_low_bytes": -peak(-floats(samples, "memory_available_bytes")),
        "cgroup_usage_peak_bytes": peak(floats(samples, "cgroup_usage_bytes")),
    }
    return tuple(
        fact(name, round(value, 4), "run", n=len(samples))
        for name, value in measures.items()
        if math.isfinite(value)
    )
