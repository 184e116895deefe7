"""What the training loop waits for: one verdict per loading loop.

Timing the loop alone can't tell slow workers from one slow worker. The workers' idle time can: workers that cannot
keep up never idle; beside one slow worker, all others do.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from collector.diagnosis.contention import find_contention
from collector.diagnosis.epochs import find_epoch_costs
from collector.diagnosis.findings import Finding
from collector.diagnosis.frames import floats
from collector.diagnosis.hand_overs import find_hand_overs
from collector.diagnosis.loops import Loop, loops
from collector.diagnosis.pace import BUSY_IDLE, Pace, WorkerPace, fetch_ns, pace
from collector.diagnosis.shards import shard_skew
from collector.diagnosis.stall_findings import (
    collate_bound,
    compute_bound,
    hand_over,
    inline_loading,
    no_cause,
    slow_worker,
    straggler_samples,
    too_short,
    too_slow,
)
from collector.diagnosis.tables import RunTables
from collector.quantities import duration, percent

MIN_BATCHES = 10
MIN_FETCHES = 2  # per worker
_HEALTHY_WAIT = 0.05  # of the loop's time, until the batch was made
_HAND_OVER = 0.4  # of the loop's time, after it was made
_FREE_IDLE_MARGIN = 0.10
_SLOW_RATIO = 1.25
_MAIN_CAUSE = 0.5  # of the waiting, or of a fetch
_SLOW_GAIN = 0.5  # of the waiting would go if the slow worker were like the others
_REGIME_RATIO = 1.5  # beyond its error, between the fetches of the first epoch and those since
_TAIL_RATIO = 0.2
_TAIL_WAIT = 0.5


def find_stalls(tables: RunTables) -> list[Finding]:
    """The verdict on every loading loop; loops too short to judge matter only if no other can be judged."""
    found: list[Finding] = []
    short: list[Finding] = []
    for whole_loop in loops(tables):
        loop, change = settled(whole_loop)
        steady = pace(loop)
        thin = _missing(loop, steady)
        at_epochs = find_epoch_costs(tables, whole_loop, None if thin else steady)
        if steady is not None and not thin:
            found += [
                dataclasses.replace(finding, summary=f"{finding.summary}{change}")
                for finding in _judge(
                    tables, loop, steady, healthy=all(each.severity == "info" for each in at_epochs)
                )
            ]
        elif not at_epochs:
            batches = 0 if steady is None else steady.batches
            short.append(too_short(tables, loop, thin or "no batch after the ramp-up", batches))
        found += at_epochs
    return found or short[:1]


def settled(loop: Loop) -> tuple[Loop, str]:
    """The loop without its first epoch, and a sentence that says so, if that one's fetches took another time.

    A cache that fills in the first epoch makes its pace that of another run.
    """
    fetches, first = loop.fetches, loop.batches["epoch"].min()
    cost = np.log(np.fmax(fetch_ns(fetches), 1.0))
    early = floats(fetches, "epoch") == first
    before, since = cost[early & np.isfinite(cost)], cost[~early & np.isfinite(cost)]
    later = loop.batches[loop.batches["epoch"] != first]
    if min(len(before), len(since)) < MIN_BATCHES or (floats(later, "index") >= loop.ramp).sum() < MIN_BATCHES:
        return loop, ""
    change = float(np.median(since) - np.median(before))
    error = 3 * 1.25 * math.hypot(*(float(part.std()) / math.sqrt(len(part)) for part in (before, since)))
    if abs(change) <= math.log(_REGIME_RATIO) + error:
        return loop, ""
    usual = [duration(math.exp(float(np.median(part))) / 1e9) for part in (before, since)]
    return dataclasses.replace(loop, batches=later, fetches=fetches[~early]), (
        f" Judged without the first epoch: a fetch took {usual[0]} in it and takes {usual[1]} since."
    )


def _judge(tables: RunTables, loop: Loop, steady: Pace, *, healthy: bool) -> list[Finding]:
    """What holds up the steady state; a loop without a fault is called healthy only if nothing else is wrong."""
    others = [*shard_skew(tables, loop), *find_hand_overs(tables, loop, steady)]
    if steady.starved_ratio < _HEALTHY_WAIT:
        crowded = find_contention(tables, loop, steady)
        if others or crowded or not healthy:
            return [*others, *crowded]
        return [(hand_over if _handing_over(steady) else compute_bound)(tables, loop, steady)]
    explained = sum(each.value_of("lost_seconds") or 0.0 for each in others if each.kind == "shard-skew")
    if explained >= _MAIN_CAUSE * steady.starved * steady.batches:
        return others
    return [*_starving(tables, loop, steady), *others]


def _starving(tables: RunTables, loop: Loop, steady: Pace) -> list[Finding]:
    if loop.num_workers == 0:
        return [inline_loading(tables, loop, steady)]
    slow = slow_workers(steady)
    if slow:
        return [slow_worker(tables, loop, steady, worker) for worker in slow]
    if steady.idle_ratio <= BUSY_IDLE or steady.capacity_ratio >= 1.0:
        return [(collate_bound if _collating(loop, steady) else too_slow)(tables, loop, steady)]
    if steady.tail_ratio <= _TAIL_RATIO and steady.tail_wait_ratio >= _TAIL_WAIT:
        return [straggler_samples(tables, loop, steady)]
    missing = (
        f"it starves {percent(steady.starved_ratio)} of its time, yet the workers idle "
        f"{percent(steady.idle_ratio)} and no worker or sample stands out; a longer run or a larger "
        "prefetch_factor would tell"
    )
    return [no_cause(tables, loop, steady, missing)]


def _collating(loop: Loop, steady: Pace) -> bool:
    """Whether collating is most of a fetch, and most of the starving would go without it."""
    without = max(steady.consumer, (steady.fetch_mean - steady.collate_mean) / loop.num_workers)
    return (
        steady.collate_mean >= _MAIN_CAUSE * steady.fetch_mean
        and steady.interval - without >= _MAIN_CAUSE * steady.starved
    )


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
        if slower and worker.idle_ratio <= BUSY_IDLE and idle >= worker.idle_ratio + _FREE_IDLE_MARGIN:
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
