"""Verdicts on loading loops: the cause of the waits of each loop.

The timing of the loop alone does not distinguish slow workers from one slow worker. The workers' idle time does:
workers that cannot keep up never idle; if one worker is slow, all others do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from collector.diagnosis.loading.core_waits import core_waits
from collector.diagnosis.loading.loaders import Loop, loops
from collector.diagnosis.loading.steady_state import (
    BUSY_IDLE,
    MIN_BATCHES,
    Change,
    Pace,
    WorkerPace,
    change_within_epochs,
    pace,
    since_change,
)
from collector.diagnosis.loading.worker_limit import SLOW_RATIO, wait_in_next
from collector.diagnosis.run.columns import floats, written
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls import catalogue
from collector.diagnosis.stalls.advice import advise_ended
from collector.diagnosis.stalls.case import MIN_PASSES, EpochStarts, LoadingCase
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss
from collector.diagnosis.stalls.cpu_contention import find_contention, is_contention
from collector.diagnosis.stalls.epoch_start import (
    epoch_refill,
    first_batch_of_epochs,
    passes,
    sampler_at_epochs,
    startup_of_short_run,
    worker_startup,
)
from collector.diagnosis.stalls.hand_over import HandOver, hand_over
from collector.diagnosis.stalls.shard_skew import (
    idle_workers,
    idle_workers_finding,
    more_shards,
    shard_skew,
    while_shared,
)
from collector.diagnosis.stalls.uneven_pace import slow_in_spells, too_slow_at_times
from collector.findings import Advice, Finding, extended
from collector.units import percent

MIN_FETCHES = 2  # per worker
_HEALTHY_STARVED_RATIO = 0.05  # share of the loop's time
_NEGLIGIBLE_RATIO = 0.01  # share of the run's time below which a transfer or a sampler is no finding
_TRANSFER_RATIO = 0.4  # share of the loop's time from which the transfer is what it waits for
_IDLE_MARGIN = 0.10  # how much more of their time the others must idle than a slow worker
_MAIN_CAUSE = 0.5  # share of the waits, or of a fetch, that makes a cause the main one
_SLOW_GAIN = 0.5  # share of the waits that must go if the slow worker were like the others
_LEAST_TAIL_WAIT = 0.5  # share of the starving that the slow batches must cause
_WAITS_FOR_THREAD = (
    " A thread of its own iterates the loader ahead of the training. So the wait is an upper bound: the time "
    "outside the step in which the training computes nothing."
)
_MIN_STARTS = 2  # epochs that show that starts recur; each start is measured, a refill only inferred


def find_stalls(tables: RunTables) -> list[Finding]:
    """Judge every loading loop. A loop too short to judge is reported only if there is no other finding."""
    findings: list[Finding] = []
    too_short_loops: list[Finding] = []
    for loop in loops(tables):
        idle, before = idle_workers(loop), len(findings)
        split = more_shards(loop) if idle else None
        judged, at_epochs, too_short = _judge_loop(loop, loop.num_workers - len(idle), split)
        findings += judged
        if too_short is not None and not at_epochs:
            too_short_loops.append(too_short)
        findings += at_epochs
        if idle:
            others_too_slow = any(finding.kind == "workers-too-slow" for finding in findings[before:])
            findings.append(idle_workers_finding(loop, idle, split, others_too_slow=others_too_slow))
    return without_repeats(findings) or too_short_loops[:1]


def _judge_loop(
    whole_loop: Loop, num_workers: int, split: Advice | None
) -> tuple[list[Finding], list[Finding], Finding | None]:
    """Return the findings on a loop's steady state, those on its epochs, and one that it is too short to judge.

    It is judged since its last change or without a spell of slow fetches, and as a whole if that is too short.
    """
    whose = _WAITS_FOR_THREAD if whole_loop.waits == "estimated" else ""
    change = since_change(whole_loop)
    for since in (change, None) if change else (None,):
        loop = dataclasses.replace(since.since if since else whole_loop, num_workers=num_workers)
        steady = pace(loop)
        missing = _missing(loop, steady)
        at_epochs = _epoch_costs(whole_loop, None if missing else steady)
        if steady is None or missing:
            continue
        case = LoadingCase(loop=loop, steady=steady, waited_seconds=steady.wait, split=split)
        judged = _judge(case, at_epochs)
        if since is None:
            is_healthy = all(finding.is_healthy for finding in judged)
            within = "" if is_healthy else change_within_epochs(loop)
            return [extended(finding, f"{within}{whose}") for finding in judged], at_epochs, None
        findings = _with_earlier(judged, since, case)
        return [extended(finding, whose) for finding in findings], at_epochs, None
    return [], at_epochs, catalogue.too_short(loop, missing, 0 if steady is None else steady.batches)


def without_repeats(findings: list[Finding]) -> list[Finding]:
    """Keep the costliest finding on each process's wait for a core: all its loops lose the same time."""
    ordered = sorted(findings, key=lambda f: (f.severity != "warning", -(f.value_of("lost_seconds") or 0.0)))
    waits = {(f.locus.host, f.locus.pid): f for f in reversed(ordered) if is_contention(f)}
    return [f for f in findings if not is_contention(f) or f in waits.values()]


def _with_earlier(judged: list[Finding], change: Change, case: LoadingCase) -> list[Finding]:
    """Return findings on a loop since a change, with the time lost by the same cause before.

    Causes that ended then are listed if they cost a part of the run. Those of the first epoch are information: a
    longer run loses no more by them.
    """
    loop = dataclasses.replace(change.before, num_workers=case.loop.num_workers)
    steady, causes = pace(loop), list[Finding]()
    if steady is not None and not _missing(loop, steady) and steady.starved_ratio >= _HEALTHY_STARVED_RATIO:
        causes = _judge(LoadingCase(loop=loop, steady=steady, waited_seconds=steady.starved), [])
    earlier, findings = {(cause.kind, cause.locus.worker): cause for cause in causes}, []
    for finding in judged:
        cause = earlier.pop((finding.kind, finding.locus.worker), None)
        if finding.is_healthy and change.kind != "first epoch":
            findings.append(finding)
            continue
        words = change.words(is_new=not causes and change.worker in (None, finding.locus.worker))
        lost_seconds = finding.value_of("lost_seconds")
        if cause is None or steady is None or lost_seconds is None:
            findings.append(extended(finding, words))
            continue
        seconds = lost_seconds + (cause.value_of("lost_seconds") or 0.0)
        parts = steady, case.steady  # a spell lies within the other part
        span_ns = min(part.first_ns for part in parts), max(part.last_ns for part in parts)
        loss = Loss.of(case.loop.tables, seconds, steady.batches + case.steady.batches, span_ns)
        both = {item.name: item for item in loss.evidence()}
        evidence = tuple(both.get(item.name, item) for item in finding.evidence)
        finding = dataclasses.replace(finding, evidence=evidence, severity=loss.severity)
        findings.append(extended(finding, f"{words} The time lost is that of all batches."))
    is_first = change.kind == "first epoch"
    over = [
        extended(
            dataclasses.replace(cause, advice=advise_ended(cause, loop, is_first=is_first)),
            change.end_words,
            severity="info" if is_first else cause.severity,
        )
        for cause in earlier.values()
        if not cause.is_healthy and (cause.value_of("lost_wall_ratio") or 0.0) >= LEAST_LOST_RATIO
    ]
    if over and not is_first:
        words = change.words(is_new=False)
        findings = [extended(finding, words) if finding.is_healthy else finding for finding in findings]
    return findings + over


def _judge(case: LoadingCase, at_epochs: Sequence[Finding]) -> list[Finding]:
    """Find causes of waits in the steady state; call a loop healthy only if its epochs are, too."""
    healthy = all(finding.severity == "info" for finding in at_epochs)
    steady, (skews, even) = case.steady, _shard_skew(case)
    waits = hand_over(case.loop) if case.loop.num_workers else None
    others = [*skews, *(_hand_overs(case, waits) if waits else ())]
    if steady.starved_ratio < _HEALTHY_STARVED_RATIO:
        # Some of a transfer may be a wait for a core, which has no part in one that is seen to be for a lock.
        with_core = 1.0 if wait_in_next(case.loop) == "lock" else 1 - core_waits(case.loop).in_workers
        transfer_ratio = steady.transfer / steady.interval
        is_transfer = transfer_ratio * with_core >= _TRANSFER_RATIO
        keeps_up = not (at_epochs or others) and transfer_ratio < _TRANSFER_RATIO
        contention = find_contention(case, keeps_up=keeps_up)
        if others or not healthy:
            return [*others, *contention]
        if is_transfer:
            return [*contention, catalogue.slow_transfer(case)]
        return contention or [catalogue.compute_bound(case)]
    if case.loop.waits == "unknown":
        missing = (
            "a thread of the training process iterates it ahead of the thread that trains, and the time that the "
            "training waits for that thread is not recorded"
        )
        return [catalogue.no_cause(case, missing)]
    if even is not None:  # the waits before a worker ran out of samples may have a cause of their own
        before = pace(even)
        if before is None or _missing(even, before) or before.starved_ratio < _HEALTHY_STARVED_RATIO:
            return others
        case = dataclasses.replace(case, loop=even, steady=before, waited_seconds=before.starved)
        return [*(cause for cause in _starving(case) if case.waited.ratio >= LEAST_LOST_RATIO), *others]
    if any(finding.kind in ("copy-bound", "pin-bound", "cannot-tell") for finding in others):
        case = dataclasses.replace(case, waited_seconds=steady.starved)  # the rest is a wait for the transfer
    return [*_starving(case), *others]


def _starving(case: LoadingCase) -> list[Finding]:
    loop, steady = case.loop, case.steady
    if loop.num_workers == 0:
        return [catalogue.inline_loading(case)]
    slow = slow_workers(steady)
    if slow:
        return [catalogue.slow_worker(case, worker) for worker in slow]
    has_tail = steady.tail_ratio <= catalogue.MOST_TAIL and steady.tail_wait_ratio >= _LEAST_TAIL_WAIT
    if has_tail and (spells := slow_in_spells(case)):
        return [spells]
    if steady.idle_ratio <= BUSY_IDLE or steady.capacity_ratio >= 1.0:
        is_collate = _is_collate_bound(loop, steady)
        return [catalogue.collate_bound(case) if is_collate else catalogue.workers_too_slow(case)]
    if has_tail:
        return [catalogue.straggler_samples(case)]
    if finding := too_slow_at_times(case):
        return [finding]
    missing = (
        f"the loop starves {percent(steady.starved_ratio)} of its time, yet the workers idle "
        f"{percent(steady.idle_ratio)} and no worker or sample stands out; a longer run or a larger "
        "prefetch_factor would show the cause"
    )
    return [catalogue.no_cause(case, missing)]


def _shard_skew(case: LoadingCase) -> tuple[list[Finding], Loop | None]:
    """Find `shard-skew`; return it with the loop as far as all workers have samples."""
    loop = case.loop
    even = while_shared(loop) if loop.num_workers >= 2 and loop.setting.get("iterable") else None
    if even is None:
        return [], None
    before = pace(even)
    slow = () if before is None else [worker.worker for worker in slow_workers(before)]
    skew, times = shard_skew(loop, even, slow), floats(loop.batches, "time_ns")
    loss = Loss.of(loop.tables, skew.seconds, skew.epochs, (times[0], times[-1]))
    return ([catalogue.shard_skew(case, skew, loss)], even) if loss.ratio >= LEAST_LOST_RATIO else ([], None)


def _hand_overs(case: LoadingCase, waits: HandOver) -> list[Finding]:
    """Find `sampler-bound`, and `copy-bound` or `pin-bound`, in a loop with workers.

    A sampler that runs while all workers are busy costs nothing: the batch would not come earlier without it.
    """
    findings = []
    workers_idle = case.steady.idle_ratio >= BUSY_IDLE and not case.loop.setting.get("iterable")
    if workers_idle and _is_costly(case, waits.sampler_seconds):
        findings.append(catalogue.sampler_bound(case, waits))
    if _is_costly(case, waits.copy_seconds):
        pinned = floats(written(case.loop.tables, "device_memory", case.loop.main), "pinned_allocated_bytes")
        pinned_bytes = float(np.nanmax(pinned, initial=0.0))
        is_pinned = bool(case.loop.setting.get("pin_memory")) and pinned_bytes > 0
        if is_pinned and not case.is_collated_in_place:
            findings.append(catalogue.copy_or_pin_bound(case, waits))
        elif is_pinned:
            findings.append(catalogue.pin_bound(case, waits, pinned_bytes))
        elif not case.is_collated_in_place:
            findings.append(catalogue.copy_bound(case, waits))
    return findings


def _is_costly(case: LoadingCase, seconds: float) -> bool:
    """Return whether a time per batch is a part of the loop's time, and the whole of it a part of the run's."""
    return seconds >= LEAST_LOST_RATIO * case.steady.interval and case.loss(seconds).ratio >= _NEGLIGIBLE_RATIO


def _epoch_costs(loop: Loop, steady: Pace | None) -> list[Finding]:
    """Find time that this loop loses at the starts of epochs, the most expensive first."""
    if not loop.num_workers and steady is None:
        return []
    epochs = passes(loop, steady)
    later, epochs_count = epochs.iloc[1:], len(np.unique(floats(loop.batches, "epoch"))) - 1
    costs: list[tuple[float, Finding]] = []
    causes = (
        (worker_startup, ["startup", "warming"], _MIN_STARTS, later[later["ready"].notna()]),
        (sampler_at_epochs, ["sampler"], _MIN_STARTS, later),
        (epoch_refill, ["refill"], MIN_PASSES, later),
    )
    for finding_of, columns, least, rows in (
        causes if loop.num_workers else ((first_batch_of_epochs, ["refill"], _MIN_STARTS, later),)
    ):
        seconds = rows[columns].to_numpy(dtype=np.float64).sum(axis=1)
        # The mean is certain if it is more than twice its standard error.
        if len(rows) >= least and seconds.mean() > 2 * seconds.std(ddof=1) / math.sqrt(len(seconds)):
            starts = EpochStarts.of(loop, rows, float(seconds.sum()) * epochs_count / len(later))
            if starts.loss.ratio >= LEAST_LOST_RATIO:
                costs.append((starts.loss.ratio, finding_of(starts)))
    starting = epochs[epochs["ready"].notna()]
    if len(starting) and not any(finding.kind == "worker-startup" for _, finding in costs):
        starts = EpochStarts.of(loop, starting, sum(starting["startup"]))
        if starts.loss.ratio >= LEAST_LOST_RATIO:
            workers_stay = len(epochs) > len(starting) == 1
            finding = startup_of_short_run(starts, workers_stay=workers_stay)
            costs.append((starts.loss.ratio, finding))
    return [finding for _, finding in sorted(costs, key=lambda ranked: -ranked[0])]


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
        slower = math.log(max(worker.fetch_median, 1e-9) / max(usual, 1e-9)) > math.log(SLOW_RATIO) + error
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
        return f"the verdict needs {MIN_BATCHES} batches after the first {loop.ramp} of each epoch, it has {have}"
    if loop.num_workers and len(steady.workers) < loop.num_workers:
        return f"{len(steady.workers)} of {loop.num_workers} workers have recorded fetches in the steady state"
    if loop.num_workers and min(worker.fetches for worker in steady.workers) < MIN_FETCHES:
        return f"one worker has fewer than {MIN_FETCHES} fetches after the ramp-up"
    return ""
