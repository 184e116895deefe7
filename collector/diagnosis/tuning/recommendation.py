"""The setting that each loop should get, within the memory and the cores that the others leave.

The loop that waits longest comes first. Ranks get one setting, that of the rank whose loop waits longest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loader_setting, loops
from collector.diagnosis.run.columns import floats
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.tuning.calibration import Calibration, calibrate, setting_of
from collector.diagnosis.tuning.what_if import Forecast, Limits, Option, forecast

#: Batches that a recommendation rests on, at least.
LEAST_BATCHES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The setting that a loop should get.

    Attributes:
        loop: the loop.
        is_iterable: whether its dataset is iterable: then only `prefetch_factor` may change.
        measured: its throughput, None if it is not known yet.
        best: the setting to set, None to leave it as it is.
        reason: why it is left, in words; empty with `best`.
        is_certain: False if more batches may change the answer.

    """

    loop: Loop
    is_iterable: bool
    measured: Calibration | None
    best: Option | None = None
    reason: str = ""
    is_certain: bool = False


def recommendations(tables: RunTables) -> list[Recommendation]:
    """Return the recommendation for each loop, the one that waits longest first."""
    found: list[Recommendation] = []
    of_ranks: dict[tuple[object, ...], Recommendation] = {}
    taken: dict[str, Limits] = {}
    for loop in sorted(loops(tables), key=lambda loop: -loop.wait_seconds):
        host, rank_group = loop.main[0], (loop.main[0], loop.loader, setting_of(loop))
        leader = of_ranks.get(rank_group) if loop.rank is not None else None
        if leader is not None:
            found.append(dataclasses.replace(leader, loop=loop, measured=_measured(tables, loop)))
            continue
        one, taken[host] = _recommend(tables, loop, taken.get(host, Limits()))
        of_ranks[rank_group] = one
        found.append(one)
    return found


def _recommend(tables: RunTables, loop: Loop, taken: Limits) -> tuple[Recommendation, Limits]:
    """Return the recommendation for a loop, and what the loops before it and this one take."""
    own, is_iterable = setting_of(loop), bool(loader_setting(tables, loop).get("iterable"))
    limits = dataclasses.replace(taken, taken_cores=_cores_of_others(tables, loop))
    if is_iterable:
        limits = dataclasses.replace(limits, least_workers=own.num_workers, most_workers=own.num_workers)
    outlook = forecast(tables, loop, limits)
    if isinstance(outlook, Forecast) and not own.num_workers and outlook.best is not None:
        # The memory of a worker is not known yet: it needs no more than the process that it is forked from.
        fitting = outlook.memory.room / outlook.memory.held if outlook.memory.held > 0 else math.nan
        if not math.isfinite(fitting):
            outlook = "the memory of the training process was not sampled yet"
        elif fitting < outlook.best.setting.num_workers:
            outlook = forecast(tables, loop, dataclasses.replace(limits, most_workers=max(0, int(fitting))))
    measured = _measured(tables, loop)
    one = Recommendation(loop=loop, is_iterable=is_iterable, measured=measured)
    if isinstance(outlook, str):
        return dataclasses.replace(one, reason=outlook), taken
    if measured is None:
        count = len(outlook.measured.batches)
        return dataclasses.replace(one, reason=f"it needs {LEAST_BATCHES} batches, this run has {count}"), taken
    best = outlook.best
    if best is None:
        reason = "no other setting is predicted to be 5 % faster within the memory and cores that are left"
        return dataclasses.replace(one, reason=reason, is_certain=True), taken
    if best.low <= measured.batches_per_second:
        return dataclasses.replace(one, reason="it is not certain yet that another setting is faster"), taken
    held = outlook.memory.held
    more = best.most_bytes - held if own.num_workers else best.setting.num_workers * held
    shm = outlook.memory.prefetched(best.setting) - outlook.memory.prefetched(own)
    return dataclasses.replace(one, best=best, is_certain=True), dataclasses.replace(
        taken,
        taken_bytes=taken.taken_bytes + max(0.0, float(np.nan_to_num(more))),
        taken_shm_bytes=taken.taken_shm_bytes + max(0.0, float(np.nan_to_num(shm))),
    )


def _measured(tables: RunTables, loop: Loop) -> Calibration | None:
    """Return the measured throughput of a loop, None with too few batches."""
    measured = calibrate(tables, loop)
    return measured if isinstance(measured, Calibration) and len(measured.batches) >= LEAST_BATCHES else None


def _cores_of_others(tables: RunTables, loop: Loop) -> float:
    """Return the cores that the workers of other loops of the process use while this one runs."""
    times = floats(loop.batches, "time_ns")
    span_ns = float(times[-1] - times[0])
    spent_ns = 0.0
    for other in loops(tables):
        if other.main == loop.main and other.loader != loop.loader and other.num_workers:
            made = floats(other.fetches, "time_ns")
            inside = (made >= times[0]) & (made <= times[-1])
            spent_ns += float(np.nansum(floats(other.fetches, "cpu_ns")[inside]))
    return spent_ns / span_ns if span_ns > 0 else 0.0
