"""Turn a growth and its limit into a finding: the rate, the time at which the limit is met, and the severity.

The time follows from the pace of the steps. Where the framework recorded how many are planned, the finding also
says how likely the limit is met before the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.diagnosis.memory.leak import GrowingUse
from collector.diagnosis.memory.resources import WITH_CHECKPOINT, Resource
from collector.diagnosis.run.columns import SECOND_NS, finite, median, whole
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.run.training import step_numbers
from collector.diagnosis.statistics.first_passage import FUTURES_COUNT, first_passage_times, unevenness
from collector.diagnosis.statistics.growth import MIN_POINTS, Floats
from collector.diagnosis.statistics.saturation import Saturation
from collector.diagnosis.statistics.step_pace import StepPace
from collector.findings import Eta, Evidence, Finding, Limit, Locus, Severity, fact
from collector.units import count, duration, quantity, size, until

#: Share of a limit that is nearly full.
FULL_RATIO = 0.95
#: Time to a limit, at the present rate, above which there is no forecast.
_RELEVANT_SECONDS = 24 * 3600.0
_CRITICAL_SECONDS = 15 * 60.0
#: Headroom that is critical, as a share of the limit.
_CRITICAL_HEADROOM_RATIO = 0.05
_PERCENTILES = (5.0, 50.0, 95.0)
#: Odds that a growth goes by steps rather than seconds, where it is equally even on both clocks.
_STEP_ODDS = 4.0
#: Smaller unevenness is sampling noise.
_LEAST_UNEVENNESS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A use that grows towards a limit.

    Attributes:
        what: its name, at the beginning of a sentence.
        resource: the resource that is used.
        growing: its use, in the unit of `limit`, and the growth of that.
        reserve: part of the limit that is in use and not counted in the use.
        filling: the growth as one that ends, beyond the limit, if it decelerates.
    """

    what: str
    resource: Resource
    growing: GrowingUse
    limit: Limit
    reserve: float = 0.0
    filling: Saturation | None = None

    @property
    def headroom(self) -> float:
        """The unused part of the limit at the last sample."""
        use = self.growing.use.where(np.isfinite(self.growing.use.values))
        # The median of the last three is one sample old where all of them rise.
        since = float(np.diff(use.times[-2:]).sum())
        level = min(current_level(use.values) + self.growing.trend.slope * since, float(use.values[-3:].max()))
        return max(self.limit.value - level, 0.0)

    @property
    def is_far(self) -> bool:
        """True if too little of the growth was seen to warn."""
        return self.headroom > self.resource.max_headroom_ratio * self.growing.trend.rise

    @property
    def is_relevant(self) -> bool:
        """True if the limit is met within `_RELEVANT_SECONDS` at the present rate."""
        return self.headroom / self.growing.trend.slope <= _RELEVANT_SECONDS


def exhaustion_finding(course: Course) -> Finding:
    """Return the finding that a limit will be met, or would have been met if the run had not ended."""
    growing, trend, limit = course.growing, course.growing.trend, course.limit
    tables = growing.use.tables
    seconds, steps = _times_to_limit(tables, course)
    eta, status = _eta(seconds, steps), lifecycle_of(tables).status()
    severity: Severity = "warning"
    if course.is_far:
        severity = "info"
    elif status != "finished" and (
        (eta is not None and eta.mid_seconds <= _CRITICAL_SECONDS)
        or course.headroom < _CRITICAL_HEADROOM_RATIO * limit.value
    ):
        severity = "critical"
    summary = _summary(course, eta, is_running=status == "running")
    chances = _chance_before_end(tables, steps) if status == "running" else ()
    for chance in chances:
        share = quantity(chance.value, chance.unit)
        summary += f" In {share} of the simulated futures the limit is met before the end, {chance.window}."
    headroom = fact(f"headroom_{limit.unit}", round(course.headroom), "last samples", n=len(growing.use.times))
    return Finding(
        kind=course.resource.risk,
        severity=severity,
        confidence=round(min(0.95, 0.6 + 0.35 * min(1.0, trend.low / trend.slope)), 2),
        summary=summary,
        locus=growing.use.locus,
        since_step=growing.since_step,
        evidence=(
            fact("demand_slope", round(trend.slope, 3), growing.window, unit=f"{limit.unit}/s", n=trend.n),
            headroom,
            *chances,
            *growing.witnesses,
        ),
        rate=growing.rate,
        limit=limit,
        eta=eta,
        advice=tuple(
            each if _acts_before_oom(tables) else WITH_CHECKPOINT.get(each, each)
            for each in course.resource.risk_advice
        ),
    )


def _acts_before_oom(tables: RunTables) -> bool:
    """Return whether something is done before a limit is met: by `--before-oom`, or a function of the training."""
    has_option = any(event.get("acts_before_oom") for event in tables.events_of("collector-start"))
    return has_option or bool(tables.events_of("risk-listener"))


def full_finding(
    resource: Resource,
    limit: Limit,
    used: float,
    locus: Locus,
    evidence: tuple[Evidence, ...],
    *,
    severity: Severity = "warning",
    **words: object,
) -> Finding:
    """Return the finding that a resource is nearly used up, although its use does not grow.

    `words` are for the sentence `resource.full`, besides those of the level and the locus.
    """
    level = {
        "used": amount(used, limit.unit),
        "limit": amount(limit.value, limit.unit),
        "named_limit": _named(limit, resource.full),
    }
    return Finding(
        kind=resource.risk,
        severity=severity,
        confidence=0.9,
        summary=resource.full.format(**{**dataclasses.asdict(locus), **level, **words}),
        locus=locus,
        evidence=evidence,
        limit=limit,
        advice=resource.full_advice,
    )


def _named(limit: Limit, words: str) -> str:
    """Return a limit in words, with its name unless these words have it already."""
    name = "" if limit.name.lower() in words.lower() else f" ({limit.name})"
    return f"{amount(limit.value, limit.unit)}{name}"


def _summary(course: Course, eta: Eta | None, *, is_running: bool) -> str:
    what, limit = course.what, course.limit
    left, of_limit = amount(course.headroom, limit.unit), _named(limit, what)
    if course.is_far:
        rise = amount(course.growing.trend.rise, limit.unit)
        if left == amount(limit.value, limit.unit):  # 23.5 GiB of 23.5 GiB
            return f"{what} grew by {rise} so far; nearly all of {of_limit} is left, too much for a warning."
        return f"{what} grew by {rise} so far; {left} are left of {of_limit}, too much for a warning."
    if not is_running:
        rest = f"{left} were left of {of_limit} when the run ended."
        if eta is None:
            return f"{what} was being used up, too unevenly for a forecast: {rest}"
        return f"{what} would have lasted about {duration(eta.mid_seconds)} more: {rest}"
    if eta is None:
        return f"{what} is running out, too unevenly for a forecast: {left} are left of {of_limit}."
    low, mid, high = until(eta.low_seconds), until(eta.mid_seconds), until(eta.high_seconds)
    return f"{what} runs out in about {mid} ({low} to {high}): {left} are left of {of_limit}."


def _chance_before_end(tables: RunTables, steps: Floats | None) -> tuple[Evidence, ...]:
    """Return how likely the limit is met before the training ends, if its length is known."""
    left = steps_left(tables)
    if steps is None or left is None:
        return ()
    share = round(float((steps <= left).mean()), 2)
    return (fact("limit_met_before_end_ratio", share, f"{count(left)} steps away", n=len(steps)),)


def amount(value: float, unit: str) -> str:
    """Return a number of bytes, or a count, as text."""
    return size(value) if unit == "bytes" else count(value)


def current_level(values: Floats) -> float:
    """Return the median of the last three finite values, NaN if there are none."""
    return median(finite(values)[-3:])


def _times_to_limit(tables: RunTables, course: Course) -> tuple[Floats, Floats | None]:
    """Return the seconds, and steps, from now until the limit is met in each future.

    A leak in a step does not depend on the pace of the steps, and a leak in a thread does not depend on their
    number. So each future is simulated on one of the two clocks, more often on that with the more even growth.
    """
    use = course.growing.use
    is_known = np.isfinite(use.values)
    part = use.where(is_known & (use.times >= course.growing.trend.since_seconds))
    if len(part.times) < MIN_POINTS:  # the growth began just now
        part = use.where(is_known)
    times, values = part.times, part.values
    limit = max(course.limit.value - course.reserve, float(values.max()))  # use above it was given back
    now = max(tables.now_ns / SECOND_NS, float(times[-1])) if tables.goes_on else float(times[-1])
    if course.filling is not None:
        seconds = np.maximum(course.filling.times_to(limit) - (now - times[-1]), 0.0)
        return seconds, None
    seconds = first_passage_times(times, values, limit) - (now - times[-1])
    where = use.key or str(use.locus.host)
    all_steps, steps = (step_numbers(tables, where, clock) for clock in (use.times, times))
    pace = StepPace.of(use.times, all_steps)
    if pace is None:
        return np.maximum(seconds, 0.0), None
    step_now = float(step_numbers(tables, where, np.array([now]))[0])
    by_step = np.maximum(first_passage_times(steps, values, limit) - (step_now - steps[-1]), 0.0)
    by_step_variance, by_time_variance = (
        max(unevenness(clock, values), _LEAST_UNEVENNESS) ** 2 for clock in (steps, times)
    )
    odds = _STEP_ODDS * by_time_variance / by_step_variance
    is_by_step = np.random.default_rng(1).random(FUTURES_COUNT) < odds / (1 + odds)
    seconds = np.where(is_by_step, by_step * pace.draw(by_step / pace.steps), np.maximum(seconds, 0.0))
    return seconds, np.where(is_by_step, by_step, seconds / pace.draw(seconds / pace.seconds))


def _eta(seconds: Floats, steps: Floats | None) -> Eta | None:
    """Return the time to the limit; None where most futures never meet it, so it is not known."""
    low, mid, high = np.percentile(seconds, _PERCENTILES, method="inverted_cdf")
    if not math.isfinite(mid):
        return None
    eta = Eta(low_seconds=float(low), mid_seconds=float(mid), high_seconds=float(high))
    if steps is None:
        return eta
    low, mid, high = np.percentile(steps, _PERCENTILES, method="inverted_cdf")
    return dataclasses.replace(eta, low_steps=float(low), mid_steps=float(mid), high_steps=float(high))


def steps_left(tables: RunTables) -> float | None:
    """Return the steps until the planned end; None unless a callback of the framework recorded it (docs/events.md).

    A framework goes on counting from a checkpoint's count, so its count is taken where it entered a phase.
    """
    parameters, phases = tables.events_of("hyper-parameters"), tables.events_of("phase")
    if not parameters or not phases:
        return None
    planned = _planned_steps(parameters[-1]["values"], phases)
    moments = np.array([phases[-1]["time_ns"], tables.now_ns]) / SECOND_NS
    left = planned - phases[-1]["step"] - float(np.diff(step_numbers(tables, writer_of(phases[-1]), moments))[0])
    return max(left, 0.0) if math.isfinite(left) else None


def _planned_steps(values: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> float:
    """Return the planned steps by the framework's count, from its epochs once one is over; NaN if unknown."""
    steps, epochs = whole(values.get("max_steps")), whole(values.get("max_epochs", values.get("num_train_epochs")))
    if steps is not None and steps > 0:
        return steps
    later = [phase for phase in phases if phase["phase"] == "train" and phase["epoch"] > 0]
    if epochs is None or epochs <= 0 or not later:
        return math.nan
    return float(epochs * later[-1]["step"] / later[-1]["epoch"])
