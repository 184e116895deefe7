"""The setting that each loop should get, within the memory and the cores that the others leave.

The loop that waits longest comes first. Ranks get one setting, that of the rank whose loop waits longest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loops
from collector.diagnosis.loading.names import loader_name
from collector.diagnosis.run.columns import between, floats
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.tuning.calibration import calibrate, setting_of
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.what_if import NO_LIMITS, WORTH, Forecast, Limits, Option, forecast

#: Batches that a recommendation rests on, at least.
LEAST_BATCHES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The setting that a loop should get.

    Attributes:
        measured: its throughput in batches per second; None if too few batches are recorded.
        setting: the setting, which may be its own; None if it is not known, or not known yet.
        best: the prediction for another setting.
        reason: why there is no other setting, in words; empty with one.
    """

    loop: Loop
    measured: float | None
    setting: Setting | None = None
    best: Option | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form (docs/report.md)."""
        host, pid, start_ticks = self.loop.main
        workers = None if self.setting is None else self.setting.num_workers
        expected = None
        if self.best is not None:
            expected = {
                "batches_per_second": self.best.batches_per_second,
                "low": self.best.low,
                "high": self.best.high,
            }
        return {
            "host": host,
            "pid": pid,
            "start_ticks": start_ticks,
            "rank": self.loop.rank,
            "loader": self.loop.loader,
            "loader_name": loader_name(self.loop.setting) or None,
            "num_workers": workers,
            "prefetch_factor": self.setting.prefetch_factor if self.setting is not None and workers else None,
            "is_change": self.best is not None,
            "reason": self.reason or None,
            "batches_per_second": self.measured,
            "expected": expected,
        }


def settings_json(tables: RunTables) -> list[dict[str, Any]]:
    """Return the recommendations in their JSON form."""
    return [one.as_json() for one in recommendations(tables)]


def recommendations(tables: RunTables) -> list[Recommendation]:
    """Return the recommendation for each loop, the one that waits longest first."""
    found: list[Recommendation] = []
    of_ranks: dict[tuple[object, ...], Recommendation] = {}
    taken: dict[str, Limits] = {}
    for loop in sorted(loops(tables), key=lambda loop: -loop.wait_seconds):
        host, rank_group = loop.main[0], (loop.main[0], loop.loader, setting_of(loop))
        leader = of_ranks.get(rank_group) if loop.rank is not None else None
        if leader is not None:
            found.append(dataclasses.replace(leader, loop=loop, measured=_measured(loop)))
            continue
        limits = taken.get(host, NO_LIMITS)
        try:
            one, taken[host] = _recommend(loop, limits)
        except Exception as error:  # noqa: BLE001
            one = Recommendation(loop=loop, measured=None, reason=f"it failed: {type(error).__name__}: {error}")
        of_ranks[rank_group] = one
        found.append(one)
    return found


def _recommend(loop: Loop, taken: Limits) -> tuple[Recommendation, Limits]:
    """Return the recommendation for a loop, and the memory that the loops before it and this one take."""
    own, measured = setting_of(loop), _measured(loop)
    one = Recommendation(loop=loop, measured=measured)
    if loop.setting.get("iterable"):
        reason = "its dataset is iterable, so each worker may have its own part of the samples"
        return dataclasses.replace(one, reason=reason), taken
    limits = dataclasses.replace(taken, taken_cores=_cores_of_others(loop))
    outlook = forecast(loop, limits)
    if isinstance(outlook, Forecast) and not own.num_workers:
        outlook = _within_memory(loop, limits, outlook)
    if isinstance(outlook, str):
        return dataclasses.replace(one, reason=outlook), taken
    if measured is None:
        reason = f"it needs {LEAST_BATCHES} recorded batches, this run has {len(outlook.measured.batches)}"
        return dataclasses.replace(one, reason=reason), taken
    best = outlook.best
    if best is None:
        reason = f"no setting that fits is predicted to be {WORTH - 1:.0%} faster"
        return dataclasses.replace(one, setting=own, reason=reason), taken
    if best.low <= measured:
        reason = f"num_workers={best.setting.num_workers} is predicted to be faster, but not with certainty"
        return dataclasses.replace(one, reason=reason), taken
    held = outlook.memory.held
    more = best.most_bytes - held if own.num_workers else best.setting.num_workers * held
    shm = outlook.memory.prefetched(best.setting) - outlook.memory.prefetched(own)
    return dataclasses.replace(one, setting=best.setting, best=best), dataclasses.replace(
        taken,
        taken_bytes=taken.taken_bytes + max(0.0, float(np.nan_to_num(more))),
        taken_shm_bytes=taken.taken_shm_bytes + max(0.0, float(np.nan_to_num(shm))),
    )


def _within_memory(loop: Loop, limits: Limits, outlook: Forecast) -> Forecast | str:
    """Return the forecast for as many workers as fit if each needs as much as the process that it is forked from.

    That is the most that a worker can need at its start; the run does not show what it does need.
    """
    if outlook.best is None:
        return outlook
    fitting = outlook.memory.room / outlook.memory.held if outlook.memory.held > 0 else math.nan
    if not math.isfinite(fitting):
        return "the memory of the training process was not sampled yet"
    if fitting >= outlook.best.setting.num_workers:
        return outlook
    return forecast(loop, dataclasses.replace(limits, most_workers=max(0, int(fitting))))


def _measured(loop: Loop) -> float | None:
    """Return the measured throughput of a loop, None with too few batches."""
    measured = calibrate(loop)
    if isinstance(measured, str) or len(measured.batches) < LEAST_BATCHES:
        return None
    return measured.batches_per_second


def _cores_of_others(loop: Loop) -> float:
    """Return the cores that the workers of other loops of the process use while this one runs."""
    times = floats(loop.batches, "time_ns")
    span_ns = float(times[-1] - times[0])
    spent_ns = 0.0
    for other in loops(loop.tables):
        if other.main == loop.main and other.loader != loop.loader and other.num_workers:
            spent_ns += float(np.nansum(floats(between(other.fetches, times[0], times[-1]), "cpu_ns")))
    return spent_ns / span_ns if span_ns > 0 else 0.0
