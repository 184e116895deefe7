"""Find out whether the host will run out of memory, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from collector.diagnosis.memory.exhaustion import RELEVANT_SECONDS, Course, current_level, exhaustion_finding
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    floats,
    held_bytes,
    origin_ns,
    peak,
    step_numbers,
    training_end_ns,
    training_start_ns,
    window_text,
)
from collector.diagnosis.run.host_memory import binding_limit, demand_series, kernel_bytes
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth, growth
from collector.findings import Advice, Evidence, Finding, Limit, Locus
from collector.units import size

#: Share of a limit that is nearly full, and that is critical.
FULL_RATIO = 0.95
_CRITICAL_RATIO = 0.98
#: PSI memory pressure, full: tasks stand still a tenth of the time.
_HIGH_PRESSURE_RATIO = 0.10
_NEGLIGIBLE_BYTES = 32 * MIB
#: Share of the growth that must come from the run itself, unless `_NEAR_RATIO` of the limit is in use.
_RUN_SHARE_RATIO = 0.5
_NEAR_RATIO = 0.8
_MIN_READINGS = 4
#: Headroom above which there is no warning, as a multiple of the observed rise: other programs on the host and
#: warm-up rise too.
_MAX_HEADROOM_RATIO = 20.0


def find_host_risk(tables: RunTables, copies: Sequence[Finding] = ()) -> list[Finding]:
    """Return at most one `host-oom-risk` per host.

    Args:
        tables: the run.
        copies: its copy-on-read findings: growth that ends at a known plateau.

    """
    hosts = pd.unique(tables.stream("host")["host"])
    findings = [
        _host_risk(tables, str(host), [f for f in copies if f.locus.host in (None, str(host))]) for host in hosts
    ]
    return [finding for finding in findings if finding is not None]


def _host_risk(tables: RunTables, host: str, copies: Sequence[Finding]) -> Finding | None:
    name, limit = binding_limit(tables, host)
    times, demand = demand_series(tables, host)
    finite = np.isfinite(demand)
    if not math.isfinite(limit) or limit <= 0 or not finite.any():
        return None
    start, end = training_start_ns(tables) / SECOND_NS, training_end_ns(tables) / SECOND_NS
    steady = finite & ((times >= start) & (times <= end) if math.isfinite(start) else True)
    trend = growth(
        times[steady],
        demand[steady],
        negligible=max(_NEGLIGIBLE_BYTES, 0.002 * limit),
        steps=step_numbers(tables, host, times[steady]),
    )
    if trend is not None and _matters(tables, host, trend, current_level(demand[steady]), limit, copies):
        bound = Limit(name=name, value=limit, unit="bytes")
        course = Course(
            what="Host memory",
            growth=trend,
            times=times[steady],
            values=demand[steady],
            limit=bound,
            max_headroom_ratio=_MAX_HEADROOM_RATIO,
            reserve=kernel_bytes(tables, host),
        )
        return _by_trend(tables, host, course)
    if peak(demand) >= FULL_RATIO * limit:
        bound = Limit(name=name, value=limit, unit="bytes")
        running = Lifecycle(tables).status() == "running"
        return _by_level(tables, host, peak(demand), bound, int(finite.sum()), running=running)
    return None


def _matters(
    tables: RunTables, host: str, trend: Growth, used: float, limit: float, copies: Sequence[Finding]
) -> bool:
    if (limit - used) / trend.slope > RELEVANT_SECONDS:
        return False
    copy_rate = sum(finding.rate.value for finding in copies if finding.rate)
    uncopied_bytes = sum(_uncopied_bytes(finding) for finding in copies)
    if copy_rate >= _RUN_SHARE_RATIO * trend.slope and used + uncopied_bytes < limit:
        return False  # copying ends before the limit
    run_bytes = run_rise_bytes(tables, host, trend)
    return not run_bytes < _RUN_SHARE_RATIO * trend.rise or used >= _NEAR_RATIO * limit


def _uncopied_bytes(finding: Finding) -> float:
    copied = sum(float(e.value) for e in finding.evidence if e.name == "worker_copied_bytes")
    return max(0.0, finding.limit.value - copied) if finding.limit else 0.0


def run_rise_bytes(tables: RunTables, host: str, trend: Growth) -> float:
    """Return the rise of the run's processes over the window of a growth, NaN if they have too few samples.

    It is the sum of `held_bytes`, in which shared memory counts once.
    """
    since_ns = trend.since_seconds * SECOND_NS
    return tables.once((run_rise_bytes, host, since_ns), lambda: _run_rise_bytes(tables, host, since_ns))


def _run_rise_bytes(tables: RunTables, host: str, since_ns: float) -> float:
    process = tables.stream("process")
    process = process[process["host"] == host]
    rises, count = [], 0
    for _, rows in process.groupby(["process_pid", "process_start_ticks"]):
        held = held_bytes(rows)[floats(rows, "time_ns") >= since_ns]
        finite = held[np.isfinite(held)]
        count += len(finite)
        rises.append(float(finite[-1] - finite[0]) if len(finite) else 0.0)
    return sum(rises) if count >= _MIN_READINGS else float("nan")


def _by_trend(tables: RunTables, host: str, course: Course) -> Finding:
    trend, end_ns = course.growth, float(course.times[-1]) * SECOND_NS
    rise = run_rise_bytes(tables, host, trend)
    window = window_text(trend.since_seconds * SECOND_NS, end_ns, origin_ns(tables))
    witnesses = _pressure(tables, host)
    if math.isfinite(rise):
        name = "run_processes_rise_bytes"
        witnesses = (
            Evidence(name=name, value=round(rise), unit="bytes", n=trend.n, window=window),
            *witnesses,
        )
    return exhaustion_finding(
        tables,
        "host-oom-risk",
        course,
        locus=Locus(host=host),
        witnesses=witnesses,
        advice=(
            Advice(
                text="Fix what grows: see the leak findings for the process; checkpoint before the time named",
                expected="demand stays where it is",
            ),
            Advice(
                text="Fewer workers or a smaller prefetch_factor make room",
                expected="each worker less gives back its private memory and prefetched batches",
            ),
        ),
    )


def _by_level(
    tables: RunTables, host: str, highest: float, limit: Limit, n: int, *, running: bool
) -> Finding | None:
    pressure = _pressure(tables, host)
    if not pressure:
        return None
    has_pressure = any(
        e.name == "memory_full_pressure_ratio" and float(e.value) >= _HIGH_PRESSURE_RATIO for e in pressure
    )
    critical = has_pressure or highest >= _CRITICAL_RATIO * limit.value
    return Finding(
        kind="host-oom-risk",
        severity="critical" if critical else "warning",
        confidence=0.9,
        summary=(
            f"Host memory {'is' if running else 'was'} nearly full: "
            f"{size(highest)} of {size(limit.value)} "
            f"({limit.name}) at the peak, "
            "page cache not counted."
        ),
        locus=Locus(host=host),
        evidence=(
            Evidence(
                name="demand_peak_ratio", value=round(highest / limit.value, 4), unit="ratio", n=n, window="run"
            ),
            *pressure,
        ),
        limit=limit,
        advice=(
            Advice(
                text="Lower num_workers, prefetch_factor or what the dataset holds", expected="room below the limit"
            ),
            Advice(text="Raise the memory limit of the job", expected="room for the peak"),
        ),
    )


def _pressure(tables: RunTables, host: str) -> tuple[Evidence, ...]:
    """Return the kernel's own figures: memory pressure, failed reclaims, available memory and peak use."""
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    measures = (
        ("memory_full_pressure_ratio", peak(floats(samples, "memory_full_avg10_ratio")), "ratio"),
        ("cgroup_oom_count", _increase(floats(samples, "cgroup_oom_count")), "count"),
        ("memory_available_low_bytes", -peak(-floats(samples, "memory_available_bytes")), "bytes"),
        ("cgroup_usage_peak_bytes", peak(floats(samples, "cgroup_usage_bytes")), "bytes"),
    )
    return tuple(
        Evidence(name=name, value=round(value, 4), unit=unit, n=len(samples), window="run")
        for name, value, unit in measures
        if math.isfinite(value)
    )


def _increase(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1] - finite[0]) if len(finite) else float("nan")
