"""Verdicts on loading loops: the cause of the waits of each loop.

The timing of the loop alone does not distinguish slow workers from one slow worker. The workers' idle time does:
workers that cannot keep up never idle; if one worker is slow, all others do.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loops
from collector.diagnosis.loading.steady_state import BUSY_IDLE, Pace, WorkerPace, fetch_ns, pace
from collector.diagnosis.run.columns import floats
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.cpu_contention import find_contention, is_contention
from collector.diagnosis.stalls.epoch_start import find_epoch_costs
from collector.diagnosis.stalls.findings import (
    collate_bound,
    compute_bound,
    inline_loading,
    no_cause,
    slow_transfer,
    slow_worker,
    straggler_samples,
    too_short,
    too_slow,
)
from collector.diagnosis.stalls.hand_over import find_hand_overs
from collector.diagnosis.stalls.shard_skew import shard_skew
from collector.findings import Finding
from collector.units import duration, percent

MIN_BATCHES = 10
MIN_FETCHES = 2  # per worker
_HEALTHY_STARVED_RATIO = 0.05  # share of the loop's time
_TRANSFER_RATIO = 0.4  # share of the loop's time from which the transfer is what it waits for
_IDLE_MARGIN = 0.10  # how much more of their time the others must idle than a slow worker
_SLOW_RATIO = 1.25  # fetch time of a slow worker over the others', beyond the error
_MAIN_CAUSE = 0.5  # share of the waits, or of a fetch, that makes a cause the main one
_SLOW_GAIN = 0.5  # share of the waits that must go if the slow worker were like the others
_REGIME_RATIO = 1.5  # of fetch times in the first epoch and since, beyond the error
_MOST_TAIL = 0.2  # share of the batches that may be slow ones
_LEAST_TAIL_WAIT = 0.5  # share of the starving that the slow batches must cause


def find_stalls(tables: RunTables) -> list[Finding]:
    """Judge every loading loop. A loop too short to judge is reported only if there is no other finding."""
    findings: list[Finding] = []
    too_short_loops: list[Finding] = []
    for whole_loop in loops(tables):
        loop, change = without_odd_first_epoch(whole_loop)
        steady = pace(loop)
        missing = _missing(loop, steady)
        at_epochs = find_epoch_costs(tables, whole_loop, None if missing else steady)
        if steady is not None and not missing:
            healthy = all(finding.severity == "info" for finding in at_epochs)
            findings += [
                dataclasses.replace(finding, summary=f"{finding.summary}{change}")
                for finding in _judge(tables, loop, steady, healthy=healthy)
            ]
        elif not at_epochs:
            batches = 0 if steady is None else steady.batches
            too_short_loops.append(too_short(tables, loop, missing or "no batch after the ramp-up", batches))
        findings += at_epochs
    return without_repeats(findings) or too_short_loops[:1]


def without_repeats(findings: list[Finding]) -> list[Finding]:
    """Keep the costliest finding on each process's wait for a core: all its loops lose the same time."""
    ordered = sorted(findings, key=lambda f: (f.severity != "warning", -(f.value_of("lost_seconds") or 0.0)))
    waits = {(f.locus.host, f.locus.pid): f for f in reversed(ordered) if is_contention(f)}
    return [f for f in findings if not is_contention(f) or f in waits.values()]


def without_odd_first_epoch(loop: Loop) -> tuple[Loop, str]:
    """Return the loop without a first epoch whose fetches took another time, and a sentence that says so.

    A cache that fills in the first epoch gives it another pace. Otherwise, return the loop as it is, and "".
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
    """Find causes of waits in the steady state; call a loop healthy only if nothing else is wrong."""
    others = [*shard_skew(tables, loop), *find_hand_overs(tables, loop, steady)]
    if steady.starved_ratio < _HEALTHY_STARVED_RATIO:
        is_transfer = steady.transfer >= _TRANSFER_RATIO * steady.interval
        keeps_up = healthy and not others and not is_transfer
        contention = find_contention(tables, loop, steady, keeps_up=keeps_up)
        if others or not healthy:
            return [*others, *contention]
        if is_transfer:
            return [*contention, slow_transfer(tables, loop, steady)]
        return contention or [compute_bound(tables, loop, steady)]
    skews = (finding for finding in others if finding.kind == "shard-skew")
    explained = sum(finding.value_of("lost_seconds") or 0.0 for finding in skews)
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
        return [(collate_bound if _is_collate_bound(loop, steady) else too_slow)(tables, loop, steady)]
    if steady.tail_ratio <= _MOST_TAIL and steady.tail_wait_ratio >= _LEAST_TAIL_WAIT:
        return [straggler_samples(tables, loop, steady)]
    missing = (
        f"it starves {percent(steady.starved_ratio)} of its time, yet the workers idle "
        f"{percent(steady.idle_ratio)} and no worker or sample stands out; a longer run or a larger "
        "prefetch_factor would tell"
    )
    return [no_cause(tables, loop, steady, missing)]


def _is_collate_bound(loop: Loop, steady: Pace) -> bool:
    """Return whether collating is most of a fetch, and most of the starving would go without it."""
    without = max(steady.consumer, (steady.fetch_mean - steady.collate_mean) / loop.num_workers)
    return (
        steady.collate_mean >= _MAIN_CAUSE * steady.fetch_mean
        and steady.interval - without >= _MAIN_CAUSE * steady.starved
    )


def slow_workers(steady: Pace) -> list[WorkerPace]:
    """Return the workers that hold up the others: saturated and slower, while the others have time to spare.

    There are none if most of the waits would stay without them: then all workers together are too slow.
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
        if slower and worker.idle_ratio <= BUSY_IDLE and idle >= worker.idle_ratio + _IDLE_MARGIN:
            suspects.append(worker)
    if not suspects or len(suspects) == len(workers):
        return []
    rest = float(np.median([worker.fetch_mean for worker in workers if worker not in suspects]))
    count = len(workers)
    healed_seconds = max(count * steady.consumer, rest)
    starved_seconds = count * steady.starved
    gain = (count * steady.interval - healed_seconds) / starved_seconds if starved_seconds else 0.0
    return suspects if gain >= _SLOW_GAIN else []


def _missing(loop: Loop, steady: Pace | None) -> str:
    """Return the reason why there is no verdict, empty if there is one."""
    if steady is None or steady.batches < MIN_BATCHES:
        have = 0 if steady is None else steady.batches
        return f"{have} batches after the first {loop.ramp} of each epoch, {MIN_BATCHES} are needed"
    if loop.num_workers and len(steady.workers) < loop.num_workers:
        return f"{len(steady.workers)} of {loop.num_workers} workers have recorded fetches in the steady state"
    if loop.num_workers and min(worker.fetches for worker in steady.workers) < MIN_FETCHES:
        return f"a worker with fewer than {MIN_FETCHES} fetches after the ramp-up"
    return ""
