"""From a growth and its limit to a finding: how fast, when the limit is met, and how grave that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.findings import Advice, Eta, Evidence, Finding, Limit, Locus, Rate, Severity
from collector.diagnosis.frames import SECOND_NS, bytes_text, median, origin_ns, step_at, step_numbers, window_text
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.passage import first_passage, unevenness
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import MIN_POINTS, Floats, Growth
from collector.store.runs import ProcessKey

RELEVANT_SECONDS = 24 * 3600.0
_CRITICAL_SECONDS = 15 * 60.0
_CRITICAL_HEADROOM = 0.05  # of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What runs towards a limit.

    Attributes:
        what: its name, at the beginning of a sentence.
        grown: the growth, in units of `limit` per second.
        times: of the samples, seconds.
        values: what was used of the limit then, NaN where it is not known.
        limit: what it runs into.
        farthest: a forecast over more than so many times the rise that was seen warns nobody.

    """

    what: str
    grown: Growth
    times: Floats
    values: Floats
    limit: Limit
    farthest: float = math.inf

    @property
    def headroom(self) -> float:
        """What is left."""
        return max(self.limit.value - present(self.values), 0.0)

    @property
    def is_relevant(self) -> bool:
        """Whether the limit is met within a day."""
        return self.headroom / self.grown.slope <= RELEVANT_SECONDS


def exhaustion(
    tables: RunTables,
    kind: str,
    course: Course,
    *,
    locus: Locus,
    witnesses: tuple[Evidence, ...],
    advice: tuple[Advice, ...],
    key: ProcessKey | None = None,
) -> Finding:
    """The finding that a limit will be met; of a run that has ended, that it would have been."""
    grown, limit, headroom = course.grown, course.limit, course.headroom
    when = _eta(tables, course, key or str(locus.host))
    status = Lifecycle(tables).status()
    severity: Severity = "warning"
    if headroom > course.farthest * grown.rise:
        severity = "info"
    elif status != "finished" and (
        when.mid_seconds <= _CRITICAL_SECONDS or headroom < _CRITICAL_HEADROOM * limit.value
    ):
        severity = "critical"
    of_limit = f"{amount(limit.value, limit.unit)} ({limit.name})"
    summary = (
        f"{course.what} was running out when the run ended: {amount(headroom, limit.unit)} were left of "
        f"{of_limit}, enough for about {_duration(when.mid_seconds)} more."
    )
    if status == "running":
        summary = (
            f"{course.what} runs out in about {_duration(when.mid_seconds)} ({_duration(when.low_seconds)} to "
            f"{_duration(when.high_seconds)}): {amount(headroom, limit.unit)} left of {of_limit}."
        )
    window = window_text(grown.since_seconds * SECOND_NS, float(course.times[-1]) * SECOND_NS, origin_ns(tables))
    return Finding(
        kind=kind,
        severity=severity,
        confidence=round(min(0.95, 0.6 + 0.35 * min(1.0, grown.low / grown.slope)), 2),
        summary=summary,
        locus=locus,
        since_step=step_at(tables, key, grown.since_seconds * SECOND_NS),
        evidence=(
            Evidence(
                name="demand_slope", value=round(grown.slope, 3), unit=f"{limit.unit}/s", n=grown.n, window=window
            ),
            Evidence(
                name=f"headroom_{limit.unit}",
                value=round(headroom),
                unit=limit.unit,
                n=len(course.times),
                window="last samples",
            ),
            *witnesses,
        ),
        rate=rate(grown, limit.unit),
        limit=limit,
        eta=when,
        advice=advice,
    )


def rate(grown: Growth, unit: str = "bytes") -> Rate:
    """The growth as a rate of `unit` per second."""
    return Rate(value=grown.slope, low=grown.low, high=grown.high, unit=f"{unit}/s")


def amount(value: float, unit: str) -> str:
    """So many bytes, or so many of anything else, for people."""
    return bytes_text(value) if unit == "bytes" else f"{value:,.0f}"


def present(values: Floats) -> float:
    """What is used now: the median of the last three samples, NaN if there is none."""
    return median(values[np.isfinite(values)][-3:])


def _eta(tables: RunTables, course: Course, where: ProcessKey | str) -> Eta:
    """On the clock, steps or seconds, on which it grows more evenly: what a step leaks it leaks at any pace."""
    known = np.isfinite(course.values) & (course.times >= course.grown.since_seconds)
    if known.sum() < MIN_POINTS:  # the growth began just now
        known = np.isfinite(course.values)
    times, values, limit = course.times[known], course.values[known], course.limit.value
    steps = step_numbers(tables, where, times)
    paces = _paces(times, steps)
    if len(paces) and unevenness(steps, values) < unevenness(times, values):
        low, mid, high = first_passage(steps, values, limit)
        return _eta_of((low * paces.min(), mid * paces[-1], high * paces.max()), (low, mid, high))
    low, mid, high = first_passage(times, values, limit)
    if not len(paces):
        return _eta_of((low, mid, high), (None, None, None))
    return _eta_of((low, mid, high), (low / paces.max(), mid / paces[-1], high / paces.min()))


def _paces(times: Floats, steps: Floats) -> Floats:
    """Seconds per step in each quarter in which there were steps: the pace may go back to what it was."""
    edges = np.linspace(0, len(times) - 1, 5).astype(int)
    seconds, made = np.diff(times[edges]), np.diff(steps[edges])
    quarters: Floats = seconds[made > 0] / made[made > 0]
    return quarters


def _eta_of(seconds: Sequence[float], steps: Sequence[float | None]) -> Eta:
    return Eta(
        low_seconds=seconds[0],
        mid_seconds=seconds[1],
        high_seconds=seconds[2],
        low_steps=steps[0],
        mid_steps=steps[1],
        high_steps=steps[2],
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
