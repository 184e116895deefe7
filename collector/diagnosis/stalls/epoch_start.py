"""Cost of the beginnings of epochs: starting workers, and filling empty queues.

Prefetching never crosses the end of an epoch, so each epoch pays for its own start. Only the starts after the first
one count: the first start of a run can't be saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import Pace, fetch_ns, starved_ns
from collector.diagnosis.run.columns import SECOND_NS, floats, key_of, mean, median, whole
from collector.diagnosis.run.tables import RunTables

#: Newest epochs that are measured; earlier ones are assumed to cost the same.
RECENT_EPOCHS = 1000


class _Start(NamedTuple):
    """Times when an epoch's iterator began to be created and was created, and when one of its workers was ready."""

    begun_ns: float
    created_ns: float
    ready_ns: float


def passes(tables: RunTables, loop: Loop, steady: Pace | None) -> pd.DataFrame:
    """Return the recent epochs of a loop with workers whose first batch is recorded, in order of time.

    Returns:
        first_ns: time of the first batch; the other columns are in seconds.
        startup: wait of the loop for its workers to start, 0 if they stayed from the epoch before.
        ready: time until the worker of the first batch was ready, by its own clock; NaN if it stayed.
        refill: starving at the first batches, without `startup` and the usual starving.
        first_fetch: time of the worker for the first batch.
        batches: number of batches yielded.
        seconds: time from the first batch to the last.

    """
    recent = np.unique(floats(loop.batches, "epoch"))[-RECENT_EPOCHS:]
    batches, fetches = (rows[rows["epoch"].isin(recent)] for rows in (loop.batches, loop.fetches))
    counts = batches["epoch"].value_counts().to_dict()
    ends = batches.groupby("epoch")["time_ns"].max().to_dict()
    waits = floats(batches, "wait_ns")
    starved = starved_ns(loop, batches, floats(batches, "time_ns"), waits)
    index, times = floats(batches, "index"), floats(batches, "time_ns")
    ramps = np.flatnonzero(index < loop.ramp)
    first = fetches[floats(fetches, "index") == 0]
    first_fetches = dict(zip(first["epoch"], zip(fetch_ns(first), first["pid"], strict=True), strict=True))
    starts, usual_ns = _starts(tables, loop), _usual_ns(loop, steady)
    rows = []
    epochs = batches["epoch"].iloc[ramps]
    for epoch, places in epochs.groupby(epochs).indices.items():
        ramp = ramps[places]
        if epoch not in first_fetches or index[ramp[0]] != 0:
            continue
        first_ns, (first_fetch_ns, pid) = times[ramp[0]], first_fetches[epoch]
        startup_ns, ready_ns, waited_ns = _startup(starts.get(int(pid), []), first_ns, waits[ramp[0]])
        refill_ns = max(0.0, float(np.nansum(starved[ramp])) - waited_ns - len(ramp) * usual_ns)
        rows.append(
            {
                "first_ns": float(first_ns),
                "startup": startup_ns / SECOND_NS,
                "ready": ready_ns / SECOND_NS,
                "refill": refill_ns / SECOND_NS,
                "first_fetch": float(first_fetch_ns) / SECOND_NS,
                "batches": counts[epoch],
                "seconds": float(ends[epoch] - first_ns) / SECOND_NS,
            }
        )
    columns = ["first_ns", "startup", "ready", "refill", "first_fetch", "batches", "seconds"]
    return pd.DataFrame(rows, columns=columns).sort_values("first_ns", kind="stable")


def _starts(tables: RunTables, loop: Loop) -> dict[int, list[_Start]]:
    """Return the starts of each worker's epochs, by its pid, in order of time."""
    ready = {
        key[1]: float(event["time_ns"])
        for event in tables.events_of("worker-ready")
        if (key := key_of(event)) is not None and key[0] == loop.main[0]
    }
    starts: dict[int, list[_Start]] = {}
    for event in tables.events_of("epoch-start"):
        if key_of(event) == loop.main:
            created_ns = float(event["time_ns"])
            begun_ns = float(whole(event.get("begun_ns")) or created_ns)
            for pid in map(whole, event.get("worker_pids") or ()):
                if pid is not None:
                    starts.setdefault(pid, []).append(_Start(begun_ns, created_ns, ready.get(pid, math.nan)))
    return starts


def _usual_ns(loop: Loop, steady: Pace | None) -> float:
    """Return the ns that the loop starves per batch in the steady state: as measured, or by the workers' pace."""
    gaps = np.diff(floats(loop.batches, "time_ns"), prepend=np.nan) - floats(loop.batches, "wait_ns")
    gaps[np.diff(floats(loop.batches, "epoch"), prepend=np.nan) != 0] = np.nan
    allowed = mean(fetch_ns(loop.fetches)) / loop.num_workers - np.nan_to_num(median(gaps))
    return float(np.nanmax([0.0, allowed, 0.0 if steady is None else steady.starved * SECOND_NS]))


def _startup(starts: list[_Start], first_ns: float, wait_ns: float) -> tuple[float, float, float]:
    """Return the ns that an epoch lost to starting workers, until its first worker was ready, and the loop waited.

    Args:
        starts: the starts of the worker of the first batch, in order of time.
        first_ns: time of the first batch.
        wait_ns: wait for the first batch.

    """
    before_count = bisect_right(starts, first_ns, key=lambda start: start.created_ns)
    start = starts[before_count - 1] if before_count else None
    if start is None or not start.begun_ns <= start.ready_ns <= first_ns:
        return 0.0, math.nan, 0.0
    ready_ns = start.ready_ns - start.begun_ns
    waited_ns = float(np.clip(start.ready_ns - (first_ns - wait_ns), 0.0, wait_ns))
    return min(ready_ns, max(0.0, start.created_ns - start.begun_ns) + waited_ns), ready_ns, waited_ns
