"""From a growth and its limit to a finding: how fast, when the limit is met, and how grave that is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.findings import Advice, Eta, Evidence, Finding, Limit, Locus, Rate, Severity
from collector.diagnosis.frames import SECOND_NS, median, origin_ns, step_at, step_numbers, window_text
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.passage import FUTURES_COUNT, passages, unevenness
from collector.diagnosis.plan import steps_left
from collector.diagnosis.progress import Progress
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import MIN_POINTS, Floats, Growth
from collector.quantities import count, duration, quantity, size, until
from collector.store.runs import ProcessKey

RELEVANT_SECONDS = 24 * 3600.0
_CRITICAL_SECONDS = 15 * 60.0
_CRITICAL_HEADROOM = 0.05  # of the limit
_QUANTILES = (5.0, 50.0, 95.0)
#: Odds that a growth goes by steps, where it is as even in seconds.
_STEP_ODDS = 4.0
_EVEN = 0.01  # smaller unevenness is noise of sampling


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
        reserve: of the limit, that is taken by what the values do not count.

    """

    what: str
    grown: Growth
    times: Floats
    values: Floats
    limit: Limit
    farthest: float = math.inf
    reserve: float = 0.0

    @property
    def headroom(self) -> float:
        """What is left."""
        return max(self.limit.value - present(self.values), 0.0)

    @property
    def is_far(self) -> bool:
        """Whether too little of the way was seen to warn."""
        return self.headroom > self.farthest * self.grown.rise

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
    seconds, steps = _futures(tables, course, key or str(locus.host))
    when = _eta(seconds, steps)
    status = Lifecycle(tables).status()
    severity: Severity = "warning"
    if course.is_far:
        severity = "info"
    elif status != "finished" and (
        (when is not None and when.mid_seconds <= _CRITICAL_SECONDS) or headroom < _CRITICAL_HEADROOM * limit.value
    ):
        severity = "critical"
    summary = _summary(course, when, is_running=status == "running")
    chances = _before_the_end(tables, steps) if status == "running" else ()
    for each in chances:
        summary += f" In {quantity(each.value, each.unit)} of the futures it is met before the end, {each.window}."
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
            *chances,
            *witnesses,
        ),
        rate=rate(grown, limit.unit),
        limit=limit,
        eta=when,
        advice=advice,
    )


def _summary(course: Course, when: Eta | None, *, is_running: bool) -> str:
    left = amount(course.headroom, course.limit.unit)
    of_limit = f"{amount(course.limit.value, course.limit.unit)} ({course.limit.name})"
    if course.is_far:
        rise = amount(course.grown.rise, course.limit.unit)
        return f"{course.what} grew by {rise} so far; {left} are left of {of_limit}, too far away to say more."
    if not is_running:
        enough = (
            "for how long is not known" if when is None else f"enough for about {duration(when.mid_seconds)} more"
        )
        return f"{course.what} was running out when the run ended: {left} were left of {of_limit}, {enough}."
    if when is None:
        return f"{course.what} is running out, too unevenly to say when: {left} left of {of_limit}."
    low, mid, high = (until(each) for each in (when.low_seconds, when.mid_seconds, when.high_seconds))
    return f"{course.what} runs out in about {mid} ({low} to {high}): {left} left of {of_limit}."


def _before_the_end(tables: RunTables, steps: Floats | None) -> tuple[Evidence, ...]:
    """How likely the limit is met before the training ends, where its length is known."""
    left = steps_left(tables)
    if steps is None or left is None:
        return ()
    share = round(float((steps <= left).mean()), 2)
    window = f"{count(left)} steps away"
    return (Evidence(name="limit_met_before_end_ratio", value=share, unit="ratio", n=len(steps), window=window),)


def rate(grown: Growth, unit: str = "bytes") -> Rate:
    """The growth as a rate of `unit` per second."""
    return Rate(value=grown.slope, low=grown.low, high=grown.high, unit=f"{unit}/s")


def amount(value: float, unit: str) -> str:
    """So many bytes, or so many of anything else, for people."""
    return size(value) if unit == "bytes" else count(value)


def present(values: Floats) -> float:
    """What is used now: the median of the last three samples, NaN if there is none."""
    return median(values[np.isfinite(values)][-3:])


def _futures(tables: RunTables, course: Course, where: ProcessKey | str) -> tuple[Floats, Floats | None]:
    """Return in how many seconds, and steps, from now on the limit is met in each future.

    What a step leaks it leaks at any pace, and what a thread leaks at any number of steps: a future is played on
    one of the two clocks, more often on the one on which the growth was more even.
    """
    known = np.isfinite(course.values) & (course.times >= course.grown.since_seconds)
    if known.sum() < MIN_POINTS:  # the growth began just now
        known = np.isfinite(course.values)
    times, values = course.times[known], course.values[known]
    limit = max(course.limit.value - course.reserve, float(values.max()))  # beyond it, something was given back
    now = max(tables.now_ns / SECOND_NS, float(times[-1])) if tables.goes_on else float(times[-1])
    seconds = passages(times, values, limit) - (now - times[-1])
    all_steps = step_numbers(tables, where, course.times)
    steps, progress = all_steps[known], Progress.of(course.times, all_steps)
    if progress is None:
        return np.maximum(seconds, 0.0), None
    step_now = float(step_numbers(tables, where, np.array([now]))[0])
    by_step = np.maximum(passages(steps, values, limit) - (step_now - steps[-1]), 0.0)
    doubts = [max(unevenness(clock, values), _EVEN) ** 2 for clock in (steps, times)]
    odds = _STEP_ODDS * doubts[1] / doubts[0]
    is_by_step = np.random.default_rng(1).random(FUTURES_COUNT) < odds / (1 + odds)
    seconds = np.where(is_by_step, by_step * progress.paces(by_step / progress.steps), np.maximum(seconds, 0.0))
    return seconds, np.where(is_by_step, by_step, seconds / progress.paces(seconds / progress.seconds))


def _eta(seconds: Floats, steps: Floats | None) -> Eta | None:
    """None where most futures never meet it: when it is met is not known then."""
    low, mid, high = np.percentile(seconds, _QUANTILES, method="inverted_cdf")
    if not math.isfinite(mid):
        return None
    eta = Eta(low_seconds=float(low), mid_seconds=float(mid), high_seconds=float(high))
    if steps is None:
        return eta
    low, mid, high = np.percentile(steps, _QUANTILES, method="inverted_cdf")
    return dataclasses.replace(eta, low_steps=float(low), mid_steps=float(mid), high_steps=float(high))
