"""A growing process and the other measurements that confirm it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.findings import Advice, Evidence, Finding, Locus, Severity
from collector.diagnosis.forecast import rate
from collector.diagnosis.frames import MIB, SECOND_NS, origin_ns, step_at, window_text
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats, Growth
from collector.store.runs import ProcessKey

#: A rise below this is the interpreter's and the allocator's own.
NEGLIGIBLE_BYTES = 16 * MIB
_NEGLIGIBLE_RATIO = 0.01  # of what the process holds
CONFIRMED = 0.5  # a witness must show at least this share of the growth
_MOMENT_NS = 10 * SECOND_NS
_LOADING_NS = 120 * SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A growing series (of a process, a host or a device) with what confirms it."""

    growth: Growth
    series: str
    unit: str = "bytes"
    witnesses: tuple[Evidence, ...]
    begin_ns: float
    end_ns: float

    @classmethod
    def of(cls, grown: Growth, series: str, witnesses: tuple[Evidence, ...], end_seconds: float, unit: str) -> Leak:
        """The leak that this growth is."""
        return cls(
            growth=grown,
            series=series,
            unit=unit,
            witnesses=witnesses,
            begin_ns=grown.since_seconds * SECOND_NS,
            end_ns=end_seconds * SECOND_NS,
        )


def witness_of(name: str, times: Floats, values: Floats, grown: Growth) -> Evidence | None:
    """Another series of bytes over the window of a growth, if it confirms it."""
    if not share_of(times, values, grown) >= CONFIRMED:
        return None
    n = int((np.isfinite(values) & (times >= grown.since_seconds)).sum())
    rise = rise_since(times, values, grown)
    return Evidence(name=name, value=round(rise), unit="bytes", n=n, window="same window")


def share_of(times: Floats, values: Floats, grown: Growth) -> float:
    """What share of a growth another series shows, NaN if it was not sampled enough.

    A series that is seldom read does not cover the window: the growth counts for the time between its readings.
    """
    at = rise_since(times, np.where(np.isfinite(values), times, np.nan), grown)
    expected = min(grown.rise, grown.slope * at)
    return rise_since(times, values, grown) / expected if expected > 0 else float("nan")


def cumulative_rise(values: Floats, restarts: Floats) -> Floats:
    """A series put together from its segments: a fork shares pages, which takes them from private dirty."""
    known = np.flatnonzero(np.isfinite(values))
    result = np.full(len(values), np.nan)
    if not len(known):
        return result
    segment = restarts[known]
    steps = np.diff(values[known])
    steps[np.diff(segment) != 0] = 0.0
    result[known] = values[known[0]] + np.concatenate([[0.0], np.cumsum(steps)])
    return result


def rise_since(times_seconds: Floats, values: Floats, grown: Growth) -> float:
    """How much another series rose over the window of a growth, NaN if it was not sampled enough."""
    inside = np.isfinite(values) & (times_seconds >= grown.since_seconds)
    known = values[inside]
    if len(known) < 4:
        return float("nan")
    edge = max(1, len(known) // 6)
    return float(np.median(known[-edge:]) - np.median(known[:edge]))


def half_slopes(times_seconds: Floats, values: Floats, grown: Growth) -> tuple[float, float]:
    """The slope in the first and the second half of the window of a growth, units per second."""
    inside = np.isfinite(values) & (times_seconds >= grown.since_seconds)
    times, known = times_seconds[inside], values[inside]
    half = len(times) // 2
    if half < 2:
        return float("nan"), float("nan")
    return (
        float(np.polyfit(times[:half] - times[0], known[:half], 1)[0]),
        float(np.polyfit(times[half:] - times[0], known[half:], 1)[0]),
    )


def negligible_bytes(values: Floats) -> float:
    """A rise of this series that is of no interest."""
    known = values[np.isfinite(values)]
    return max(NEGLIGIBLE_BYTES, _NEGLIGIBLE_RATIO * float(np.median(known))) if len(known) else NEGLIGIBLE_BYTES


def rise_evidence(tables: RunTables, leak: Leak) -> Evidence:
    """The rise of the series in which the growth was found."""
    return Evidence(
        name=f"{leak.series}_rise_{leak.unit}",
        value=round(leak.growth.rise),
        unit=leak.unit,
        n=leak.growth.n,
        window=window_text(leak.begin_ns, leak.end_ns, origin_ns(tables)),
    )


def severity(tables: RunTables, leak: Leak, *, iterates: bool = True) -> Severity:
    """Return a warning, but for a growth that was seen for a moment only while the run goes on.

    Much that ends begins so. A process without iterations may be loading its data all the while. If a limit is
    near, the risk of meeting it is a warning of its own.
    """
    if not leak.witnesses:
        return "info"
    lasted_ns = leak.end_ns - leak.begin_ns
    if not iterates:
        return "info" if lasted_ns < _LOADING_NS else "warning"
    return "info" if tables.goes_on and lasted_ns < _MOMENT_NS else "warning"


def leak_finding(
    tables: RunTables,
    kind: str,
    leak: Leak,
    *,
    summary: str,
    locus: Locus,
    advice: tuple[Advice, ...],
    confidence: float = 0.9,
    key: ProcessKey | None = None,
    iterates: bool = True,
) -> Finding:
    """The finding that says so; without a witness it is `cannot-tell`, and `summary` names what is missing."""
    return Finding(
        kind=kind if leak.witnesses else "cannot-tell",
        severity=severity(tables, leak, iterates=iterates),
        confidence=confidence,
        summary=summary,
        locus=locus,
        since_step=step_at(tables, key, leak.begin_ns),
        evidence=(rise_evidence(tables, leak), *leak.witnesses),
        rate=rate(leak.growth, leak.unit),
        advice=advice if leak.witnesses else (),
    )
