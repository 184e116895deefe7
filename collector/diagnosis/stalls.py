"""What the training loop waits for: one verdict per loading loop.

Timing the loop alone can't tell slow workers from one slow worker. The workers' idle time can: workers that cannot
keep up never idle; beside one slow worker, all others do.
"""

from __future__ import annotations

import math

import numpy as np

from collector.diagnosis.findings import Finding
from collector.diagnosis.loops import Loop, loops
from collector.diagnosis.pace import Pace, WorkerPace, pace
from collector.diagnosis.stall_findings import (
    cannot_tell,
    compute_bound,
    hand_over,
    inline_loading,
    slow_worker,
    straggler_samples,
    too_slow,
)
from collector.diagnosis.tables import RunTables

MIN_BATCHES = 10
MIN_FETCHES = 2  # per worker
_HEALTHY_WAIT = 0.05  # of the loop's time, until the batch was made
_HAND_OVER = 0.4  # of the loop's time, after it was made
_BUSY_IDLE = 0.15  # a worker that idles less has no time to spare
_FREE_IDLE_MARGIN = 0.10
_SLOW_RATIO = 1.25
_SLOW_GAIN = 0.5  # of the waiting would go if the slow worker were like the others
_TAIL_RATIO = 0.2
_TAIL_WAIT = 0.5


def find_stalls(tables: RunTables) -> list[Finding]:
    """The verdict on every loading loop; loops too short to judge matter only if no other can be judged."""
    found: list[Finding] = []
    short: list[Finding] = []
    for loop in loops(tables):
        steady = pace(loop)
        thin = _missing(loop, steady)
        if steady is None or thin:
            short.append(
                cannot_tell(loop, thin or "no batch after the ramp-up", 0 if steady is None else steady.batches)
            )
        else:
            found += _judge(tables, loop, steady)
    return found or short[:1]


def _judge(tables: RunTables, loop: Loop, steady: Pace) -> list[Finding]:
    if steady.starved_ratio < _HEALTHY_WAIT:
        return [hand_over(loop, steady) if _handing_over(steady) else compute_bound(tables, loop, steady)]
    if loop.num_workers == 0:
        return [inline_loading(tables, loop, steady)]
    slow = slow_workers(steady)
    if slow:
        return [slow_worker(tables, loop, steady, worker) for worker in slow]
    if steady.idle_ratio <= _BUSY_IDLE or steady.capacity_ratio >= 1.0:
        return [too_slow(tables, loop, steady)]
    if steady.tail_ratio <= _TAIL_RATIO and steady.tail_wait_ratio >= _TAIL_WAIT:
        return [straggler_samples(tables, loop, steady)]
    missing = (
        f"it starves {steady.starved_ratio:.0%} of its time, yet the workers idle {steady.idle_ratio:.0%} "
        "and no worker or "
        "sample stands out; a longer run or a larger prefetch_factor would tell"
    )
    return [cannot_tell(loop, missing, steady.batches)]


def _handing_over(steady: Pace) -> bool:
    return steady.hand_over >= _HAND_OVER * steady.interval


def slow_workers(steady: Pace) -> list[WorkerPace]:
    """The workers that hold up the others: saturated and slower, while the others have time to spare.

    They are named only if most of the waiting would go with them, else the workers are too slow as a whole.
    """
    workers = steady.workers
    suspects = []
    for worker in workers:
        others = [other for other in workers if other is not worker]
        if not others:
            continue
        usual = float(np.median([other.fetch_median for other in others]))
        error = 3 * math.hypot(worker.fetch_log_error, max(other.fetch_log_error for other in others))
        idle = float(np.median([other.idle_ratio for other in others]))
        slower = math.log(max(worker.fetch_median, 1e-9) / max(usual, 1e-9)) > math.log(_SLOW_RATIO) + error
        if slower and worker.idle_ratio <= _BUSY_IDLE and idle >= worker.idle_ratio + _FREE_IDLE_MARGIN:
            suspects.append(worker)
    if not suspects or len(suspects) == len(workers):
        return []
    rest = float(np.median([worker.fetch_mean for worker in workers if worker not in suspects]))
    count = len(workers)
    healed = max(count * steady.consumer, rest)
    waiting = count * steady.starved
    gain = (count * steady.interval - healed) / waiting if waiting else 0.0
    return suspects if gain >= _SLOW_GAIN else []


def _missing(loop: Loop, steady: Pace | None) -> str:
    """What is missing for a verdict, empty if nothing is."""
    if steady is None or steady.batches < MIN_BATCHES:
        have = 0 if steady is None else steady.batches
        return f"{have} batches after the first {loop.ramp} of each epoch, {MIN_BATCHES} are needed"
    if loop.num_workers and len(steady.workers) < loop.num_workers:
        return f"{len(steady.workers)} of {loop.num_workers} workers have recorded fetches in the steady state"
    if loop.num_workers and min(worker.fetches for worker in steady.workers) < MIN_FETCHES:
        return f"a worker with fewer than {MIN_FETCHES} fetches after the ramp-up"
    return ""
