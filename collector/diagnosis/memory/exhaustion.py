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
from scipy.special import stdtrit

from collector.diagnosis.run.columns import (
    SECOND_NS,
    key_of,
    median,
    origin_ns,
    step_at,
    step_numbers,
    whole,
    window_text,
)
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.first_passage import FUTURES_COUNT, first_passage_times, unevenness
from collector.diagnosis.statistics.growth import MIN_POINTS, Floats, Growth
from collector.findings import Advice, Eta, Evidence, Finding, Limit, Locus, Rate, Severity
from collector.store import ProcessKey
from collector.units import count, duration, quantity, size, until

#: Time to a limit, at the present rate, above which there is no forecast.
RELEVANT_SECONDS = 24 * 3600.0
_CRITICAL_SECONDS = 15 * 60.0
#: Headroom that is critical, as a share of the limit.
_CRITICAL_HEADROOM_RATIO = 0.05
_PERCENTILES = (5.0, 50.0, 95.0)
#: Odds that a growth goes by steps rather than seconds, where it is equally even on both clocks.
_STEP_ODDS = 4.0
#: Smaller unevenness is sampling noise.
_LEAST_UNEVENNESS = 0.01
_PARTS_COUNT = 4
#: One-sided confidence that the pace has a trend.
_CONFIDENCE = 0.975
#: Largest error of a pace, as the logarithm of its factor.
_MAX_LOG_ERROR = 3.0
#: Share of the futures in which a changing pace goes on changing.
_CHANGING_RATIO = 2 / 3
#: Longest time for which it does, as a multiple of the time observed.
_MAX_CHANGE_RATIO = 1.0
#: Smallest pace in a future, as a share of the newest.
_MIN_PACE_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A use that grows towards a limit.

    Attributes:
        what: its name, at the beginning of a sentence.
        growth: its growth, in units of `limit` per second.
        times: times of the samples, seconds.
        values: use at these times, in the unit of `limit`; NaN where not known.
        limit: the limit that it grows towards.
        max_headroom_ratio: headroom above which there is no warning, as a multiple of the observed rise.
        reserve: part of the limit that is in use and not counted in the values.

    """

    what: str
    growth: Growth
    times: Floats
    values: Floats
    limit: Limit
    max_headroom_ratio: float = math.inf
    reserve: float = 0.0

    @property
    def headroom(self) -> float:
        """The unused part of the limit."""
        return max(self.limit.value - current_level(self.values), 0.0)

    @property
    def is_far(self) -> bool:
        """True if too little of the growth was seen to warn."""
        return self.headroom > self.max_headroom_ratio * self.growth.rise

    @property
    def is_relevant(self) -> bool:
        """True if the limit is met within `RELEVANT_SECONDS` at the present rate."""
        return self.headroom / self.growth.slope <= RELEVANT_SECONDS


def exhaustion_finding(
    tables: RunTables,
    kind: str,
    course: Course,
    *,
    locus: Locus,
    witnesses: tuple[Evidence, ...],
    advice: tuple[Advice, ...],
    key: ProcessKey | None = None,
) -> Finding:
    """Return the finding that a limit will be met, or would have been met if the run had not ended."""
    trend, limit, headroom = course.growth, course.limit, course.headroom
    seconds, steps = _times_to_limit(tables, course, key or str(locus.host))
    eta = _eta(seconds, steps)
    status = Lifecycle(tables).status()
    severity: Severity = "warning"
    if course.is_far:
        severity = "info"
    elif status != "finished" and (
        (eta is not None and eta.mid_seconds <= _CRITICAL_SECONDS)
        or headroom < _CRITICAL_HEADROOM_RATIO * limit.value
    ):
        severity = "critical"
    summary = _summary(course, eta, is_running=status == "running")
    chances = _chance_before_end(tables, steps) if status == "running" else ()
    for chance in chances:
        share = quantity(chance.value, chance.unit)
        summary += f" In {share} of the futures it is met before the end, {chance.window}."
    window = window_text(trend.since_seconds * SECOND_NS, float(course.times[-1]) * SECOND_NS, origin_ns(tables))
    return Finding(
        kind=kind,
        severity=severity,
        confidence=round(min(0.95, 0.6 + 0.35 * min(1.0, trend.low / trend.slope)), 2),
        summary=summary,
        locus=locus,
        since_step=step_at(tables, key, trend.since_seconds * SECOND_NS),
        evidence=(
            Evidence(
                name="demand_slope", value=round(trend.slope, 3), unit=f"{limit.unit}/s", n=trend.n, window=window
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
        rate=rate(trend, limit.unit),
        limit=limit,
        eta=eta,
        advice=advice,
    )


def _summary(course: Course, eta: Eta | None, *, is_running: bool) -> str:
    left = amount(course.headroom, course.limit.unit)
    of_limit = f"{amount(course.limit.value, course.limit.unit)} ({course.limit.name})"
    if course.is_far:
        rise = amount(course.growth.rise, course.limit.unit)
        return f"{course.what} grew by {rise} so far; {left} are left of {of_limit}, too far away to say more."
    if not is_running:
        enough = (
            "for how long is not known" if eta is None else f"enough for about {duration(eta.mid_seconds)} more"
        )
        return f"{course.what} was running out when the run ended: {left} were left of {of_limit}, {enough}."
    if eta is None:
        return f"{course.what} is running out, too unevenly to say when: {left} left of {of_limit}."
    low, mid, high = until(eta.low_seconds), until(eta.mid_seconds), until(eta.high_seconds)
    return f"{course.what} runs out in about {mid} ({low} to {high}): {left} left of {of_limit}."


def _chance_before_end(tables: RunTables, steps: Floats | None) -> tuple[Evidence, ...]:
    """Return how likely the limit is met before the training ends, if its length is known."""
    left = steps_left(tables)
    if steps is None or left is None:
        return ()
    share = round(float((steps <= left).mean()), 2)
    window = f"{count(left)} steps away"
    return (Evidence(name="limit_met_before_end_ratio", value=share, unit="ratio", n=len(steps), window=window),)


def rate(trend: Growth, unit: str = "bytes") -> Rate:
    """Return the growth as a rate of `unit` per second."""
    return Rate(value=trend.slope, low=trend.low, high=trend.high, unit=f"{unit}/s")


def amount(value: float, unit: str) -> str:
    """Return a number of bytes, or a count, as text."""
    return size(value) if unit == "bytes" else count(value)


def current_level(values: Floats) -> float:
    """Return the median of the last three finite values, NaN if there are none."""
    return median(values[np.isfinite(values)][-3:])


def _times_to_limit(tables: RunTables, course: Course, where: ProcessKey | str) -> tuple[Floats, Floats | None]:
    """Return the seconds, and steps, from now until the limit is met in each future.

    A leak in a step does not depend on the pace of the steps, and a leak in a thread does not depend on their
    number. So each future is simulated on one of the two clocks, more often on that with the more even growth.
    """
    used = np.isfinite(course.values) & (course.times >= course.growth.since_seconds)
    if used.sum() < MIN_POINTS:  # the growth began just now
        used = np.isfinite(course.values)
    times, values = course.times[used], course.values[used]
    limit = max(course.limit.value - course.reserve, float(values.max()))  # use above it was given back
    now = max(tables.now_ns / SECOND_NS, float(times[-1])) if tables.goes_on else float(times[-1])
    seconds = first_passage_times(times, values, limit) - (now - times[-1])
    all_steps = step_numbers(tables, where, course.times)
    steps, pace = all_steps[used], StepPace.of(course.times, all_steps)
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
    if not parameters or not phases or (key := key_of(phases[-1])) is None:
        return None
    planned = _planned_steps(parameters[-1]["values"], phases)
    moments = np.array([phases[-1]["time_ns"], tables.now_ns]) / SECOND_NS
    left = planned - phases[-1]["step"] - float(np.diff(step_numbers(tables, key, moments))[0])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPace:
    """The pace of a training's steps, without its first ones, which are slower.

    Attributes:
        seconds: observed time.
        steps: number of steps in that time.
        parts: seconds per step in each quarter of these steps.

    """

    seconds: float
    steps: float
    parts: Floats

    @classmethod
    def of(cls, times: Floats, steps: Floats) -> StepPace | None:
        """Return the pace from samples of the step number, at times in seconds; None if there are too few steps."""
        finite = np.isfinite(steps)
        times, steps = times[finite], steps[finite]
        if not len(steps):
            return None
        begin = max(int(np.searchsorted(steps, steps[0], side="right")) - 1, 0)  # samples precede the first step
        begin += (len(times) - begin) // 10
        count = float(steps[-1] - steps[begin])
        if len(times) - begin <= _PARTS_COUNT or not count > 0:
            return None
        moving = np.append(True, np.diff(steps[begin:]) > 0)
        edges = np.linspace(steps[begin], steps[-1], _PARTS_COUNT + 1)
        seconds = np.diff(np.interp(edges, steps[begin:][moving], times[begin:][moving]))
        return cls(seconds=float(seconds.sum()), steps=count, parts=seconds / (count / _PARTS_COUNT))

    def draw(self, horizons: Floats) -> Floats:
        """Draw the mean seconds per step of each future.

        If the quarters show a trend, the pace stays at its newest value or goes on changing. Otherwise it is that
        of the whole training, of its later half or of its last quarter, or it follows the slight trend.

        Args:
            horizons: lengths of the futures, as multiples of the observed time.

        """
        generator = np.random.default_rng(0)
        x = (np.arange(_PARTS_COUNT) + 0.5) / _PARTS_COUNT
        slope, level = np.polyfit(x, self.parts, 1)
        residuals = self.parts - (level + slope * x)
        freedom = _PARTS_COUNT - 2
        variance, x_spread = float(residuals @ residuals) / freedom, float(((x - 0.5) ** 2).sum())
        last, overall = float(self.parts[-1]), self.seconds / self.steps
        middle = 1 + np.minimum(horizons, _MAX_CHANGE_RATIO) / 2
        changing = np.maximum(level + slope * middle, _MIN_PACE_RATIO * last)
        if abs(slope) > stdtrit(freedom, _CONFIDENCE) * math.sqrt(variance / x_spread):
            error = np.sqrt(variance * (1 + 1 / _PARTS_COUNT + (middle - 0.5) ** 2 / x_spread))
            steady = [last]
            changing_ratio = _CHANGING_RATIO
        else:
            freedom = _PARTS_COUNT - 1
            error = np.full(FUTURES_COUNT, self.parts.std(ddof=1) * math.sqrt(1 + 1 / _PARTS_COUNT))
            steady = [overall, float(self.parts[_PARTS_COUNT // 2 :].mean()), last]
            changing_ratio = 1 / (len(steady) + 1)
        is_changing = generator.random(FUTURES_COUNT) < changing_ratio
        means = np.where(is_changing, changing, generator.choice(steady, size=FUTURES_COUNT))
        log_errors = error / overall * generator.standard_t(freedom, size=FUTURES_COUNT)
        paces: Floats = means * np.exp(np.clip(log_errors, -_MAX_LOG_ERROR, _MAX_LOG_ERROR))
        return paces
