"""The cost of passing indices and batches between the loop and its workers, measured in a recorded stretch.

A worker sends a batch by a thread of its own, and another one hands out the file descriptors of its tensors when
the loop unpickles them (torch.multiprocessing, `file_descriptor` strategy). Both need the GIL of the worker. If it
computes in Python meanwhile, they wait for the GIL, up to 5 ms each time (`sys.getswitchinterval`): to take a batch
from a worker that is busy takes several times as long as from one that waits for its next index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS
from collector.diagnosis.pace import without_pauses
from collector.diagnosis.trends import Floats

_READY_NS = 1e6  # made so long before it was asked for, a batch only had to be taken
_SATURATED_NS = 2e6  # a worker that waits less for an index had it already
_FEW = 5
#: Seconds, assumed where they were not seen: as measured with small batches of two tensors.
_ASSUMED_GAP, _ASSUMED_DISPATCH, _ASSUMED_TRANSFER, _ASSUMED_HAND_OVER = 2e-4, 3e-4, 4e-4, 1.2e-3
#: Seconds for one thread to get the GIL from another that computes: assumed where it was not seen.
_ASSUMED_SWITCH = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds, named as in `replay.Trace`."""

    gap: float = _ASSUMED_GAP
    dispatch: float = _ASSUMED_DISPATCH
    transfer: float = _ASSUMED_TRANSFER
    hand_over: float = _ASSUMED_HAND_OVER
    busy_hand_over: float


def overheads(rows: pd.DataFrame, *, prefetch_factor: int, computing_ratio: float) -> Overheads:
    """Measure batches that workers made, each with its fetch.

    Args:
        rows: in the order of yields, with the epoch, worker and times of each batch (`_ns`).
        prefetch_factor: with which they were made.
        computing_ratio: of the fetches, the part of the time in which they compute.

    """
    gap, dispatch = _before_fetches(rows, prefetch_factor)
    made, asked, yields = (rows[name].to_numpy(dtype=float) for name in ("made_ns", "asked_ns", "yield_ns"))
    drained = np.concatenate([[-np.inf], np.maximum.accumulate(np.where(made > asked, yields, -np.inf))[:-1]])
    taken = made > drained  # the others were taken while the loop waited for one before
    begun = np.maximum(asked, made)
    took, busy = yields - begun, np.zeros_like(made)
    if prefetch_factor > 1:  # else a worker has no index until its batch is yielded
        busy = _busy_ns(rows, begun)
    is_idle = taken & (busy == 0)
    waiting, ready = took[is_idle & (made > asked)], took[is_idle & (made < asked - _READY_NS)]
    crossing = _usual(waiting, math.nan)
    hand_over = _usual(ready, _ASSUMED_HAND_OVER if math.isnan(crossing) else crossing)
    transfer = _ASSUMED_TRANSFER if math.isnan(crossing) else max(0.0, crossing - hand_over)
    is_busy = taken & (busy > 0)
    switching = assumed(computing_ratio).busy_hand_over
    if is_busy.sum() >= _FEW:
        base = np.where(made > asked, transfer + hand_over, hand_over) * SECOND_NS
        switching = _limit(busy[is_busy], (took - base)[is_busy]) / SECOND_NS
    return Overheads(gap=gap, dispatch=dispatch, transfer=transfer, hand_over=hand_over, busy_hand_over=switching)


def assumed(computing_ratio: float) -> Overheads:
    """Return what is taken for true of workers that have not run yet; see `overheads`."""
    return Overheads(busy_hand_over=_ASSUMED_SWITCH * computing_ratio)


def _before_fetches(rows: pd.DataFrame, prefetch_factor: int) -> tuple[float, float]:
    """Return the time between the fetches of a worker that has its next index, and from a yield to a fetch.

    A worker gets an index when one of its own batches is yielded, the one `prefetch_factor` before.
    """
    ordered = rows.sort_values("made_ns")
    of_worker = ordered.groupby(["epoch", "worker"])
    begun, free = ordered["made_ns"] - ordered["fetch_ns"], of_worker["made_ns"].shift()
    sent = of_worker["yield_ns"].shift(prefetch_factor)
    had_index = ((sent < free) & (ordered["idle_ns"] < _SATURATED_NS)).to_numpy()
    waited = (sent > free).to_numpy()
    gap = _usual((begun - free).to_numpy(dtype=float)[had_index], _ASSUMED_GAP)
    return gap, _usual((begun - sent).to_numpy(dtype=float)[waited], _ASSUMED_DISPATCH)


def _busy_ns(rows: pd.DataFrame, moments: Floats) -> Floats:
    """Return for how long after a moment the worker of each batch makes another one; 0 if it waits for an index.

    That other one is begun before the batch is yielded.
    """
    by = ["epoch", "worker"]
    fetches = rows[[*by, "made_ns"]].assign(begun_ns=(rows["made_ns"] - rows["fetch_ns"]).astype(float))
    yields = rows[by].assign(yield_ns=rows["yield_ns"].astype(float), row=np.arange(len(rows)))
    found = pd.merge_asof(
        yields.sort_values("yield_ns"),
        fetches.sort_values("begun_ns"),
        left_on="yield_ns",
        right_on="begun_ns",
        by=by,
        allow_exact_matches=False,
    ).sort_values("row")
    left: Floats = np.maximum(np.nan_to_num(found["made_ns"].to_numpy(dtype=float)) - moments, 0.0)
    return left


def _limit(longest: Floats, mean_of: Floats) -> float:
    """Return x such that min(x, longest) has the same mean as `mean_of`; at most the largest of `longest`."""
    wanted, low, high = float(without_pauses(mean_of).mean()), 0.0, float(longest.max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(longest, middle).mean() < wanted else (low, middle)
    return (low + high) / 2


def _usual(durations_ns: Floats, otherwise: float) -> float:
    """Return their mean without the rare long ones, in seconds; `otherwise` if there are few."""
    known = durations_ns[np.isfinite(durations_ns)]
    return max(0.0, float(without_pauses(known).mean())) / SECOND_NS if len(known) >= _FEW else otherwise
