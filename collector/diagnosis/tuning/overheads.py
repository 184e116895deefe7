"""Costs of passing batches and indices between a loop and its workers.

One thread of a worker sends a batch. Another one passes the file descriptors of the batch's tensors when the loop
unpickles them (torch.multiprocessing, `file_descriptor` strategy). Both need the worker's GIL. If the worker
computes in Python meanwhile, they wait up to 5 ms for it each time (`sys.getswitchinterval`). So taking a batch
from a busy worker takes several times as long as from an idle one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.steady_state import without_pauses
from collector.diagnosis.run.columns import SECOND_NS, finite
from collector.diagnosis.statistics.growth import Floats

_READY_NS = 1e6  # a batch that was made this long before it was asked for only had to be taken
_SATURATED_NS = 2e6  # a worker that waits less for an index had it already
_MIN_SAMPLES = 5
#: Seconds where they were not measured: values of small batches of two tensors.
_ASSUMED_GAP, _ASSUMED_DISPATCH, _ASSUMED_TRANSFER, _ASSUMED_HAND_OVER = 2e-4, 3e-4, 4e-4, 1.2e-3
#: Seconds for one thread to get the GIL from another that computes, where they were not measured.
_ASSUMED_SWITCH = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Costs of passing batches and indices between the loop and its workers; seconds.

    Attributes:
        gap: time between two fetches of a worker that has its next index.
        dispatch: time from a yield until a worker that waits for an index begins its next fetch.
        transfer: time from the end of a fetch until the loop can take the batch.
        hand_over: time that the loop needs to take a batch. While it waits for a batch, it takes batches that come
            out of order, so they cost nothing later (torch parks them in `_task_info`).
        busy_hand_over: how much longer taking takes, at most, while the worker that made the batch computes its
            next one: threads of that worker send the batch and its file descriptors, and wait for its GIL.
    """

    gap: Floats | float = 0.0
    dispatch: Floats | float = 0.0
    transfer: Floats | float = 0.0
    hand_over: Floats | float = 0.0
    busy_hand_over: float = 0.0


NO_OVERHEADS = Overheads()


def overheads(rows: pd.DataFrame, *, prefetch_factor: int, computing_ratio: float) -> Overheads:
    """Measure the costs of passing batches that workers made.

    `rows` are batches with their fetches, in the order of yields: epoch, worker and times (`_ns`). A share of the
    fetch time, `computing_ratio`, computes.
    """
    gap, dispatch = _before_fetches(rows, prefetch_factor)
    made, asked, yields = (rows[name].to_numpy(dtype=float) for name in ("made_ns", "asked_ns", "yield_ns"))
    drained = np.concatenate([[-np.inf], np.maximum.accumulate(np.where(made > asked, yields, -np.inf))[:-1]])
    is_taken = made > drained  # the loop took the others while it waited for an earlier batch
    begun = np.maximum(asked, made)
    took, busy = yields - begun, np.zeros_like(made)
    if prefetch_factor > 1:  # else a worker has no index until its batch is yielded
        busy = _busy_ns(rows, begun)
    is_idle = is_taken & (busy == 0)
    waiting, ready = took[is_idle & (made > asked)], took[is_idle & (made < asked - _READY_NS)]
    crossing = _usual(waiting, math.nan)
    hand_over = _usual(ready, _ASSUMED_HAND_OVER if math.isnan(crossing) else crossing)
    transfer = _ASSUMED_TRANSFER if math.isnan(crossing) else max(0.0, crossing - hand_over)
    is_busy = is_taken & (busy > 0)
    switching = assumed_overheads(computing_ratio).busy_hand_over
    if is_busy.sum() >= _MIN_SAMPLES:
        base = np.where(made > asked, transfer + hand_over, hand_over) * SECOND_NS
        switching = _cap_for_mean(busy[is_busy], (took - base)[is_busy]) / SECOND_NS
    return Overheads(gap=gap, dispatch=dispatch, transfer=transfer, hand_over=hand_over, busy_hand_over=switching)


def assumed_overheads(computing_ratio: float) -> Overheads:
    """Return the overheads of workers that have not run yet; see `overheads`."""
    return Overheads(
        gap=_ASSUMED_GAP,
        dispatch=_ASSUMED_DISPATCH,
        transfer=_ASSUMED_TRANSFER,
        hand_over=_ASSUMED_HAND_OVER,
        busy_hand_over=_ASSUMED_SWITCH * computing_ratio,
    )


def _before_fetches(rows: pd.DataFrame, prefetch_factor: int) -> tuple[float, float]:
    """Return the seconds between the fetches of a worker that has its next index, and from a yield to a fetch.

    A worker gets an index when one of its own batches is yielded, the one `prefetch_factor` before.
    """
    ordered = rows.sort_values("made_ns")
    of_worker = ordered.groupby(["epoch", "worker"])
    begun, free = ordered["made_ns"] - ordered["fetch_ns"], of_worker["made_ns"].shift()
    sent = of_worker["yield_ns"].shift(prefetch_factor)
    has_index = ((sent < free) & (ordered["idle_ns"] < _SATURATED_NS)).to_numpy()
    waited = (sent > free).to_numpy()
    gap = _usual((begun - free).to_numpy(dtype=float)[has_index], _ASSUMED_GAP)
    return gap, _usual((begun - sent).to_numpy(dtype=float)[waited], _ASSUMED_DISPATCH)


def _busy_ns(rows: pd.DataFrame, moments: Floats) -> Floats:
    """Return the ns that the worker of each batch still needs for its current fetch at a moment; 0 if it idles.

    The current fetch is the last one that began before the batch was yielded.
    """
    by = ["epoch", "worker"]
    fetches = rows[[*by, "made_ns"]].assign(begun_ns=(rows["made_ns"] - rows["fetch_ns"]).astype(float))
    yields = rows[by].assign(yield_ns=rows["yield_ns"].astype(float), row=np.arange(len(rows)))
    current = pd.merge_asof(
        yields.sort_values("yield_ns"),
        fetches.sort_values("begun_ns"),
        left_on="yield_ns",
        right_on="begun_ns",
        by=by,
        allow_exact_matches=False,
    ).sort_values("row")
    left: Floats = np.maximum(np.nan_to_num(current["made_ns"].to_numpy(dtype=float)) - moments, 0.0)
    return left


def _cap_for_mean(values: Floats, wanted: Floats) -> float:
    """Return x such that min(x, values) has the mean of `wanted` without pauses; at most the largest value."""
    mean, low, high = float(without_pauses(wanted).mean()), 0.0, float(values.max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(values, middle).mean() < mean else (low, middle)
    return (low + high) / 2


def _usual(durations_ns: Floats, default: float) -> float:
    """Return the mean in seconds without the rare long durations; `default` if there are few."""
    known = finite(durations_ns)
    return max(0.0, float(without_pauses(known).mean())) / SECOND_NS if len(known) >= _MIN_SAMPLES else default
