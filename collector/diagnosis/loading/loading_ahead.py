"""Loops that a thread iterates ahead of the one that trains, and hands the batches over in a queue of its own.

Such a thread waits in `next()` in place of the training. The training waits for the thread, in its time outside the
step that it does not compute.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import floats

#: Waits of a loop are recorded if the thread that trains waits in `next()`. Where another thread loads ahead, they
#: are estimated, or not known.
Waits: TypeAlias = Literal["recorded", "estimated", "unknown"]
#: Share of a loop's waits that the steps of its process contain at least, if the thread that steps iterates it.
_SHARE_IN_STEPS = 0.5
#: Share of an epoch's steps after its last batch arrived, from which the training had batches in store.
_SHARE_IN_STORE = 0.2


def with_waits_of_training(batches: pd.DataFrame, steps: pd.DataFrame) -> tuple[Waits, pd.DataFrame]:
    """Return how the training's waits for the batches of a loop are known, and the batches with these waits."""
    ends, in_steps = floats(steps, "time_ns"), floats(steps, "data_wait_ns")
    if (floats(steps, "batches_count") > 0).any() and not np.isfinite(in_steps).any():
        return _with_waits_for_thread(batches, steps)
    if not np.isfinite(in_steps[1:]).any():
        return "recorded", batches
    times, waits = floats(batches, "time_ns"), floats(batches, "wait_ns")
    loop_ns = float(np.nansum(waits[(times > ends[0]) & (times <= ends[-1])]))
    is_part = float(np.nansum(in_steps[1:][ends[1:] > times[0]])) >= _SHARE_IN_STEPS * loop_ns
    return ("recorded" if is_part else "unknown"), batches


def _with_waits_for_thread(batches: pd.DataFrame, steps: pd.DataFrame) -> tuple[Waits, pd.DataFrame]:
    """Estimate the waits of a training for a thread; unknown if its computing outside the steps is not recorded.

    In all, they are at most the time outside the steps that the training did not compute. They are also at most
    what the thread waited more than it did something else: while it puts a batch into a full queue, no one waits
    for it. Each batch has its share. Where many steps follow the last batch of an epoch, the training had batches
    in store.
    """
    waits, times = np.fmax(floats(batches, "wait_ns"), 0.0), floats(batches, "time_ns")
    epochs = batches["epoch"].to_numpy()
    begins = np.flatnonzero(np.append(True, epochs[1:] != epochs[:-1]))
    firsts, lasts = times[begins], times[np.append(begins[1:], len(times)) - 1]

    ends = floats(steps, "time_ns")
    rows, ends = steps[ends > firsts[0]], ends[ends > firsts[0]]
    is_during = ends <= lasts[np.searchsorted(firsts, ends) - 1]
    idle = (floats(rows, "other_ns") - floats(rows, "outside_cpu_ns"))[is_during]
    if not np.isfinite(idle).any():
        return "unknown", batches
    total_ns = max(float(waits.sum()), 1.0)
    elsewhere_ns = float((lasts - firsts).sum()) - total_ns + float(waits[begins].sum())
    waited_ns = min(float(np.nanmean(idle)) * len(idle), total_ns - max(0.0, elsewhere_ns))
    share = max(0.0, waited_ns) / total_ns if is_during.mean() > 1 - _SHARE_IN_STORE else 0.0
    waits, blocked = waits * share, floats(batches, "blocked_ns")
    return "estimated", batches.assign(wait_ns=waits, blocked_ns=np.minimum(blocked, waits))
