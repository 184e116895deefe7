"""A leak: a growth, and the other measurements that confirm it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.memory.exhaustion import rate
from collector.diagnosis.run.columns import MIB, SECOND_NS, origin_ns, step_at, window_text
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.findings import Advice, Evidence, Finding, Locus, Severity
from collector.store import ProcessKey

#: A rise below this comes from the interpreter and the allocator themselves.
NEGLIGIBLE_BYTES = 16 * MIB
#: The same as a share of the memory that the process holds.
_NEGLIGIBLE_RATIO = 0.01
#: Share of the growth that a witness must show at least.
CONFIRMED = 0.5
#: Growth that lasts less than this may still end by itself; without iterations, the data may still be loading.
_MOMENT_NS = 10 * SECOND_NS
_LOADING_NS = 120 * SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """The growth of a series (of a process, a host or a device), with the evidence that confirms it."""

    growth: Growth
    series: str
    unit: str = "bytes"
    witnesses: tuple[Evidence, ...]
    begin_ns: float
    end_ns: float

    @classmethod
    def of(cls, trend: Growth, series: str, witnesses: tuple[Evidence, ...], end_seconds: float, unit: str) -> Leak:
        """Return the leak with this growth, from its begin to `end_seconds`."""
        return cls(
            growth=trend,
            series=series,
            unit=unit,
            witnesses=witnesses,
            begin_ns=trend.since_seconds * SECOND_NS,
            end_ns=end_seconds * SECOND_NS,
        )


def witness_of(name: str, times: Floats, values: Floats, trend: Growth) -> Evidence | None:
    """Return the rise of another series of bytes as evidence, if it confirms the growth."""
    if not share_of(times, values, trend) >= CONFIRMED:
        return None
    n = int((np.isfinite(values) & (times >= trend.since_seconds)).sum())
    rise = rise_since(times, values, trend)
    return Evidence(name=name, value=round(rise), unit="bytes", n=n, window="same window")


def share_of(times: Floats, values: Floats, trend: Growth) -> float:
    """Return the share of a growth that another series shows, NaN if it has too few samples.

    A series that is seldom read does not cover the window, so only the growth between its readings counts.
    """
    seconds = rise_since(times, np.where(np.isfinite(values), times, np.nan), trend)
    expected = min(trend.rise, trend.slope * seconds)
    return rise_since(times, values, trend) / expected if expected > 0 else float("nan")


def cumulative_rise(values: Floats, restarts: Floats) -> Floats:
    """Join the segments of a series between restarts: a fork shares pages, so private dirty drops there."""
    finite = np.flatnonzero(np.isfinite(values))
    result = np.full(len(values), np.nan)
    if not len(finite):
        return result
    changes = np.diff(values[finite])
    changes[np.diff(restarts[finite]) != 0] = 0.0
    result[finite] = values[finite[0]] + np.concatenate([[0.0], np.cumsum(changes)])
    return result


def rise_since(times_seconds: Floats, values: Floats, trend: Growth) -> float:
    """Return the rise of another series over the window of a growth, NaN if it has too few samples."""
    inside = values[np.isfinite(values) & (times_seconds >= trend.since_seconds)]
    if len(inside) < 4:
        return float("nan")
    edge = max(1, len(inside) // 6)
    return float(np.median(inside[-edge:]) - np.median(inside[:edge]))


def half_slopes(times_seconds: Floats, values: Floats, trend: Growth) -> tuple[float, float]:
    """Return the slope in the first and the second half of the window of a growth, units per second."""
    is_inside = np.isfinite(values) & (times_seconds >= trend.since_seconds)
    times, inside = times_seconds[is_inside], values[is_inside]
    half = len(times) // 2
    if half < 2:
        return float("nan"), float("nan")
    return (
        float(np.polyfit(times[:half] - times[0], inside[:half], 1)[0]),
        float(np.polyfit(times[half:] - times[0], inside[half:], 1)[0]),
    )


def negligible_bytes(values: Floats) -> float:
    """Return the rise of this series below which it is of no interest."""
    finite = values[np.isfinite(values)]
    return max(NEGLIGIBLE_BYTES, _NEGLIGIBLE_RATIO * float(np.median(finite))) if len(finite) else NEGLIGIBLE_BYTES


def rise_evidence(tables: RunTables, leak: Leak) -> Evidence:
    """Return the rise of the leaking series as evidence."""
    return Evidence(
        name=f"{leak.series}_rise_{leak.unit}",
        value=round(leak.growth.rise),
        unit=leak.unit,
        n=leak.growth.n,
        window=window_text(leak.begin_ns, leak.end_ns, origin_ns(tables)),
    )


def severity(tables: RunTables, leak: Leak, *, iterates: bool = True) -> Severity:
    """Return "warning", or "info" for a growth without a witness, or one that is recent while the run goes on.

    Growth that ends by itself begins in the same way. A process without iterations may still be loading its data.
    If a limit is near, the risk of meeting it is a warning of its own.
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
    """Return the finding of a leak; without a witness it is `cannot-tell`, and `summary` names what is missing."""
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
