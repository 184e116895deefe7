"""Time in which threads of a loop were ready to run but had no core.

The kernel counts it for each thread (`/proc/PID/schedstat`). It is read for the main thread of a training process
at each sample, and for a worker over each fetch, but not while a batch is handed over. So a thread is taken to wait
for a core then as much as at other times at which it does not sleep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import Pace
from collector.diagnosis.run.columns import between, floats, sampled
from collector.diagnosis.run.tables import RunTables
from collector.store import ProcessKey

_MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class CoreWaits:
    """Shares of the time in which a thread does not sleep that it waits for a core; 0 where not known.

    Attributes:
        in_loop: of the training's main thread, outside the result queue.
        in_workers: of the workers' threads.
    """

    in_loop: float
    in_workers: float


def core_waits(loop: Loop) -> CoreWaits:
    """Return how much the threads of a loop wait for a core, over its batches."""
    times, waits, blocked = (floats(loop.batches, name) for name in ("time_ns", "wait_ns", "blocked_ns"))
    queued, _ = queued_ratio(loop.tables, loop.main, float(times.min()), float(times.max()))
    asleep_ns = float(np.nansum(np.minimum(blocked, waits)))
    span_ns = float(np.ptp(times))
    awake_ns = max(span_ns - asleep_ns, queued * span_ns, 1.0)
    run_queue, cpu = floats(loop.fetches, "run_queue_ns"), floats(loop.fetches, "cpu_ns")
    known = np.isfinite(run_queue) & np.isfinite(cpu)
    ready_ns = float((run_queue[known] + cpu[known]).sum())
    return CoreWaits(
        in_loop=queued * span_ns / awake_ns,
        in_workers=float(run_queue[known].sum()) / ready_ns if ready_ns else 0.0,
    )


def queued_ratio(tables: RunTables, main: ProcessKey, begin_ns: float, end_ns: float) -> tuple[float, int]:
    """Return (share of the window that a main thread waited for a core, number of samples); (0, 0) if unknown."""
    return spent_ratio(between(sampled(tables, main), begin_ns, end_ns), "run_queue_ns", _MIN_SAMPLES)


def cores_of_other_threads(loop: Loop, steady: Pace) -> float:
    """Return the cores that other threads of the training process use while its loop waits for batches.

    The thread of the loop itself computes at most while it does not wait. 0 if unknown.
    """
    samples = between(sampled(loop.tables, loop.main), steady.first_ns, steady.last_ns)
    cores = spent_ratio(samples, "cpu_ns", _MIN_SAMPLES)[0]
    return max(0.0, cores - (1 - steady.wait_ratio)) / max(steady.wait_ratio, 1e-9)


def spent_ratio(samples: pd.DataFrame, column: str, least: int) -> tuple[float, int]:
    """Return how fast a counter of ns grew from its first reading to its last, and the number of readings.

    (0, 0) with fewer than the `least` readings.
    """
    rows = samples[np.isfinite(floats(samples, column))]
    if len(rows) < least:
        return 0.0, 0
    (begin, end), (before, now) = (floats(rows, name)[[0, -1]] for name in ("time_ns", column))
    return float((now - before) / max(end - begin, 1.0)), len(rows)
