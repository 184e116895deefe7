"""The settings that `tidegauge tune` tries: the most promising first, and none that can no longer gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import pace
from collector.diagnosis.loading.worker_limit import cores_per_rank
from collector.diagnosis.tuning.calibration import setting_of
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.what_if import MOST_WORKERS, USUAL_PREFETCH, WORTH, Forecast, Option, forecast

#: Trials in a row, in one direction, after which that direction is left alone if none of them gained.
_MISSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a trial: batches per second, NaN if it gave none; `fits` is False if memory ran out."""

    setting: Setting
    batches_per_second: float
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting to try, and its prediction, if any."""

    setting: Setting
    predicted: Option | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings to try after the run's own, the most promising first.

    Attributes:
        candidates: the settings.
        smaller: settings with fewer workers, to try if none so far fits into memory.
        current: prediction for the run's own setting; None without a prediction.
        why_unpredicted: the reason why there is no prediction, in words; empty if there is one.
    """

    candidates: tuple[Candidate, ...]
    smaller: tuple[Candidate, ...] = ()
    current: Option | None = None
    why_unpredicted: str = ""

    def next(self, outcomes: Sequence[Outcome]) -> Candidate | None:
        """Return what to try next, None if nothing more can gain; the first outcome is that of the run's own."""
        last_resort = () if any(outcome.fits for outcome in outcomes) else self.smaller
        return next((one for one in (*self.candidates, *last_resort) if _may_gain(one, outcomes)), None)


def plan_trials(loop: Loop) -> Plan:
    """Plan trials: by the replay of this run, or with more and with fewer workers if it cannot predict."""
    outlook = forecast(loop)
    own = setting_of(loop)
    nearby = [Candidate(setting=one) for one in nearby_settings(own, cores_per_rank(loop.tables, loop.main[0]))]
    if isinstance(outlook, Forecast):
        smaller = tuple(one for one in nearby if one.setting.num_workers < own.num_workers)
        candidates = (*_without_workers(loop, own), *_promising(outlook))
        return Plan(candidates=candidates, smaller=smaller, current=outlook.current)
    return Plan(candidates=tuple(nearby), why_unpredicted=outlook)


def _without_workers(loop: Loop, own: Setting) -> list[Candidate]:
    """Return the setting without workers, which no replay predicts, if transfer takes longer than a fetch."""
    steady = pace(loop) if own.num_workers else None
    if steady is None or not steady.fetch_mean < steady.transfer:
        return []
    return [Candidate(setting=Setting(num_workers=0, prefetch_factor=1, in_order=own.in_order))]


def _promising(outlook: Forecast) -> list[Candidate]:
    """Return the recommendation, then the front of throughput and memory, the fastest first."""
    best = [] if outlook.best is None else [outlook.best]
    front = sorted(outlook.front, key=lambda option: -option.batches_per_second)
    options = [*best, *(option for option in front if option not in best and option is not outlook.current)]
    return [Candidate(setting=option.setting, predicted=option) for option in options]


def nearby_settings(own: Setting, cores: float) -> list[Setting]:
    """Return settings with twice the workers again and again, and with half of them down to none.

    Fewer workers come first if the workers and the training process are more than the cores.
    """
    prefetch = own.prefetch_factor if own.num_workers else USUAL_PREFETCH
    powers = range(1, MOST_WORKERS.bit_length() + 1)
    more = (
        [own.num_workers << power for power in powers] if own.num_workers else [1 << power - 1 for power in powers]
    )
    fewer = [own.num_workers >> power for power in range(1, own.num_workers.bit_length() + 1)]
    counts = [*fewer, *more] if own.num_workers + 1 > cores else [*more, *fewer]
    return [
        Setting(num_workers=count, prefetch_factor=prefetch if count else 1, in_order=own.in_order)
        for count in counts
        if count <= MOST_WORKERS
    ]


def _may_gain(candidate: Candidate, outcomes: Sequence[Outcome]) -> bool:
    """Return False if a setting was tried, needs memory that ran out, or lies in a direction without gains."""
    own, setting = outcomes[0].setting, candidate.setting
    if any(outcome.setting == setting for outcome in outcomes):
        return False
    too_large = [outcome.setting for outcome in outcomes if not outcome.fits]
    if any(setting.num_workers >= one.num_workers and setting.in_flight >= one.in_flight for one in too_large):
        return False
    direction, gains = _direction(setting, own), _gains(outcomes)
    if direction and (-direction, True) in gains:
        return False
    recent = [has_gained for way, has_gained in gains if way == direction][-_MISSES:]
    return recent != [False] * _MISSES


def _direction(setting: Setting, own: Setting) -> int:
    """Return 1 for more workers than the run's own setting, -1 for fewer, 0 for another `prefetch_factor`."""
    return (setting.num_workers > own.num_workers) - (setting.num_workers < own.num_workers)


def _gains(outcomes: Sequence[Outcome]) -> list[tuple[int, bool]]:
    """Return the direction of each trial, and True if it was faster than all before by what makes it worth it."""
    own, fastest, gains = outcomes[0].setting, 0.0, []
    for outcome in outcomes:
        gains.append((_direction(outcome.setting, own), outcome.batches_per_second >= WORTH * fastest))
        fastest = max(fastest, outcome.batches_per_second)  # `max` ignores a throughput that is not known (NaN)
    return gains[1:]
