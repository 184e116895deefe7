"""Will the host run out of memory, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus
from collector.diagnosis.forecast import RELEVANT_SECONDS, Course, exhaustion, present
from collector.diagnosis.frames import (
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
from collector.diagnosis.host_memory import binding_limit, demand_series, kernel_bytes
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats, Growth, growth
from collector.quantities import size

FULL_RATIO = 0.95
_CRITICAL_RATIO = 0.98
_PRESSED_RATIO = 0.10  # PSI memory, full: tasks stand still a tenth of the time
_NEGLIGIBLE_BYTES = 32 * MIB
_OWN_SHARE = 0.5  # of the growth must be the run's own, or the limit be near
_NEAR_RATIO = 0.8
_MIN_READINGS = 4
#: What others do on the host, and what warms up, rises too: a twentieth of the way must have been seen.
_FARTHEST = 20.0


def find_host_risk(tables: RunTables, copies: Sequence[Finding] = ()) -> list[Finding]:
    """One finding at most per host.

    Args:
        tables: the run.
        copies: its copy-on-read findings: growth that ends at a known plateau.

    """
    hosts = pd.unique(tables.stream("host")["host"])
    found = [
        _host_risk(tables, str(host), [f for f in copies if f.locus.host in (None, str(host))]) for host in hosts
    ]
    return [finding for finding in found if finding is not None]


def _host_risk(tables: RunTables, host: str, copies: Sequence[Finding]) -> Finding | None:
    name, limit = binding_limit(tables, host)
    times, demand = demand_series(tables, host)
    known = np.isfinite(demand)
    if not math.isfinite(limit) or limit <= 0 or not known.any():
        return None
    start, end = training_start_ns(tables) / SECOND_NS, training_end_ns(tables) / SECOND_NS
    steady = known & ((times >= start) & (times <= end) if math.isfinite(start) else True)
    grown = growth(
        times[steady],
        demand[steady],
        negligible=max(_NEGLIGIBLE_BYTES, 0.002 * limit),
        steps=step_numbers(tables, host, times[steady]),
    )
    if grown is not None and _matters(tables, host, grown, present(demand[steady]), limit, copies):
        bound = Limit(name=name, value=limit, unit="bytes")
        course = Course(
            what="Host memory",
            grown=grown,
            times=times[steady],
            values=demand[steady],
            limit=bound,
            farthest=_FARTHEST,
            reserve=kernel_bytes(tables, host),
        )
        return _by_trend(tables, host, course)
    if peak(demand) >= FULL_RATIO * limit:
        highest = Limit(name=name, value=limit, unit="bytes")
        running = Lifecycle(tables).status() == "running"
        return _by_level(tables, host, peak(demand), highest, int(known.sum()), running=running)
    return None


def _matters(
    tables: RunTables, host: str, grown: Growth, used: float, limit: float, copies: Sequence[Finding]
) -> bool:
    if (limit - used) / grown.slope > RELEVANT_SECONDS:
        return False
    copying = sum(finding.rate.value for finding in copies if finding.rate)
    to_come = sum(_to_come(finding) for finding in copies)
    if copying >= _OWN_SHARE * grown.slope and used + to_come < limit:
        return False  # it ends before the limit
    own = own_rise(tables, host, grown)
    return not own < _OWN_SHARE * grown.rise or used >= _NEAR_RATIO * limit


def _to_come(finding: Finding) -> float:
    grown = sum(float(e.value) for e in finding.evidence if e.name == "worker_copied_bytes")
    return max(0.0, finding.limit.value - grown) if finding.limit else 0.0


def own_rise(tables: RunTables, host: str, grown: Growth) -> float:
    """How much the run's own processes grew meanwhile (`held_bytes`, which adds up), NaN if it was not sampled."""
    since_ns = grown.since_seconds * SECOND_NS
    return tables.once((own_rise, host, since_ns), lambda: _own_rise(tables, host, since_ns))


def _own_rise(tables: RunTables, host: str, since_ns: float) -> float:
    process = tables.stream("process")
    process = process[process["host"] == host]
    rises, count = [], 0
    for _, rows in process.groupby(["process_pid", "process_start_ticks"]):
        held = held_bytes(rows)[floats(rows, "time_ns") >= since_ns]
        known = held[np.isfinite(held)]
        count += len(known)
        rises.append(float(known[-1] - known[0]) if len(known) else 0.0)
    return sum(rises) if count >= _MIN_READINGS else float("nan")


def _by_trend(tables: RunTables, host: str, course: Course) -> Finding:
    grown, end_ns = course.grown, float(course.times[-1]) * SECOND_NS
    own = own_rise(tables, host, grown)
    window = window_text(grown.since_seconds * SECOND_NS, end_ns, origin_ns(tables))
    risen = (
        (Evidence(name="run_processes_rise_bytes", value=round(own), unit="bytes", n=grown.n, window=window),)
        if math.isfinite(own)
        else ()
    )
    return exhaustion(
        tables,
        "host-oom-risk",
        course,
        locus=Locus(host=host),
        witnesses=(*risen, *_pressure(tables, host)),
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
    pressed = any(e.name == "memory_full_pressure_ratio" and float(e.value) >= _PRESSED_RATIO for e in pressure)
    critical = pressed or highest >= _CRITICAL_RATIO * limit.value
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
    """What the kernel itself says about memory: pressure, failed reclaims, what is available."""
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
    known = values[np.isfinite(values)]
    return float(known[-1] - known[0]) if len(known) else float("nan")
