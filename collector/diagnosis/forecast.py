"""From a growth and its limit to a finding: how fast, when the limit is met, and how grave that is."""

from __future__ import annotations

from dataclasses import dataclass

from collector.diagnosis.findings import Advice, Eta, Evidence, Finding, Limit, Locus, Rate, Severity
from collector.diagnosis.frames import SECOND_NS, bytes_text, origin_ns, step_at, step_seconds, window_text
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Growth
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
        present: what is used of the limit now.
        limit: what it runs into.
        end_ns: the last sample.
        n: samples.

    """

    what: str
    grown: Growth
    present: float
    limit: Limit
    end_ns: float
    n: int

    @property
    def headroom(self) -> float:
        """What is left."""
        return max(self.limit.value - self.present, 0.0)

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
    when = _eta(headroom, grown, step_seconds(tables, key))
    severity: Severity = "warning"
    if when.mid_seconds <= _CRITICAL_SECONDS or headroom < _CRITICAL_HEADROOM * limit.value:
        severity = "critical"
    of_limit = f"{amount(limit.value, limit.unit)} ({limit.name})"
    summary = (
        f"{course.what} was running out when the run ended: {amount(headroom, limit.unit)} were left of "
        f"{of_limit}, enough for about {_duration(when.mid_seconds)} more."
    )
    if Lifecycle(tables).status() == "running":
        summary = (
            f"{course.what} runs out in about {_duration(when.mid_seconds)} ({_duration(when.low_seconds)} to "
            f"{_duration(when.high_seconds)}): {amount(headroom, limit.unit)} left of {of_limit}."
        )
    window = window_text(grown.since_seconds * SECOND_NS, course.end_ns, origin_ns(tables))
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
                n=course.n,
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


def _eta(headroom: float, grown: Growth, pace: float) -> Eta:
    low, mid, high = (headroom / slope for slope in (max(grown.high, grown.slope), grown.slope, grown.low))
    steps = [seconds / pace if pace > 0 else None for seconds in (low, mid, high)]
    return Eta(
        low_seconds=low,
        mid_seconds=mid,
        high_seconds=high,
        low_steps=steps[0],
        mid_steps=steps[1],
        high_steps=steps[2],
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
