"""The findings on data loading, kind by kind: sentence, evidence and advice. `verdict` decides which apply."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from collector.diagnosis.loading.core_waits import core_waits, cores_of_other_threads
from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import BUSY_IDLE, Pace, WorkerPace, is_tail, steady_fetches
from collector.diagnosis.loading.worker_limit import SLOW_RATIO, worker_limit
from collector.diagnosis.run.columns import floats
from collector.diagnosis.run.training import step_at
from collector.diagnosis.stalls.advice import (
    advise_fetches,
    advise_inline,
    advise_stragglers,
    cheaper_collate,
    fault_of_fetches,
)
from collector.diagnosis.stalls.case import LoadingCase, loop_locus
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, confidence
from collector.diagnosis.stalls.hand_over import HAND_OVER_SECONDS, HandOver
from collector.diagnosis.stalls.shard_skew import ShardSkew
from collector.diagnosis.tuning.what_if import Forecast, forecast
from collector.findings import Advice, Evidence, Finding, advise, cannot_tell, extended, fact, measurements
from collector.units import counted, duration, number, percent

_SPARE_IDLE_RATIO = 0.10  # share of its time that a worker with time to spare idles
_LISTED_BATCHES = 50
MOST_TAIL = 0.2  # share of the batches that may be slow ones
_LEAST_TIME_OF_TAIL = 0.5  # share of the fetches' time from which a few slow batches are named
_TRANSFER_RATIO = 0.05  # share of the loop's time from which a summary names the transfer
_BUSY_THREADS = 0.5  # cores that other threads use from which they may hold the loop up
_MOVE_THREADS = Advice(
    text="Find the thread of the training process that computes (`tidegauge stacks`), and move its work to another "
    "process",
    expected="the loop goes on as soon as a batch is there; other numbers of workers change little until then",
)
_NO_OBJECTS = Advice(
    text="Let collate_fn return a few large tensors, or arrays of numbers and bytes, in place of Python objects",
    expected="tensors come in shared memory; the training process unpickles objects, one by one, while it waits",
    effect="changes results",
)


def too_short(loop: Loop, missing: str, steady_batches: int) -> Finding:
    """Return a finding for a loop with too few records to judge."""
    evidence = (
        *measurements(len(loop.batches), "after the ramp-up", steady_batches=steady_batches),
        *measurements(len(loop.batches), "whole loop", fetches=len(loop.fetches)),
    )
    return _cannot_tell(loop, missing, evidence)


def no_cause(case: LoadingCase, missing: str) -> Finding:
    """Return a finding for measured waits without a known cause; `missing` says why the cause is not known."""
    evidence = (*case.pace_evidence, *case.measured(worker_idle_ratio=case.steady.idle_ratio))
    return _cannot_tell(case.loop, missing, evidence)


def slow_transfer(case: LoadingCase) -> Finding:
    """Return a finding for waits between worker and loop that neither sampler nor the bytes of a batch explain."""
    steady = case.steady
    has_bytes = np.isfinite(floats(case.loop.batches, "payload_bytes")).any()
    size = "the bytes of a batch do not explain that"
    if not has_bytes:
        size = "the bytes of a batch are not known, since it consists of Python objects or of many tensors"
    missing = (
        f"the loop waits {percent(steady.wait_ratio)} of its time for batches that the workers have made already "
        f"({duration(steady.transfer)} per batch between worker and loop), and {size}; a fetch takes "
        f"{duration(steady.fetch_mean)}"
    )
    measured, cores = {"fetch_seconds": steady.fetch_mean}, cores_of_other_threads(case.loop, steady)
    advice = advise_inline(steady, duration(steady.transfer), steady.transfer)
    if not has_bytes:
        advice = (_NO_OBJECTS, *advice)
    if cores >= _BUSY_THREADS:
        missing += (
            f". Meanwhile other threads of the training process, those that send indices to workers among them, "
            f"use {percent(cores)} of a core, and the loop can't go on while one of them holds the interpreter"
        )
        measured["other_threads_cores_count"] = cores
        advice = (_MOVE_THREADS,) if steady.fetch_mean >= HAND_OVER_SECONDS else advice
    finding, loss = no_cause(case, missing), case.loss(steady.transfer - steady.fetch_mean)
    evidence = (*finding.evidence, *case.measured(**measured))
    if cores >= _BUSY_THREADS or steady.fetch_mean >= HAND_OVER_SECONDS or loss.ratio < LEAST_LOST_RATIO:
        return dataclasses.replace(finding, evidence=evidence, advice=advice)
    return Finding(  # a batch is made in less time than any transfer takes
        kind="copy-bound",
        summary=f"The workers of loader {case.loop.loader} cost more than they save: a batch is made in "
        f"{duration(steady.fetch_mean)}, and its transfer takes {duration(steady.transfer)}. {loss.words}",
        evidence=(*loss.evidence(), *evidence),
        advice=advice,
        fault="your settings",
        **case.facts("main", loss),
    )


def _cannot_tell(loop: Loop, missing: str, evidence: tuple[Evidence, ...]) -> Finding:
    summary = f"It is not known whether loader {loop.loader} keeps up: {missing}."
    return cannot_tell(summary, *evidence, locus=loop_locus(loop))


def compute_bound(case: LoadingCase) -> Finding:
    """Return a finding for a loop that does not starve, with the time of its transfers."""
    steady = case.steady
    if case.loop.num_workers:
        spare = "have time to spare" if not steady.idle_ratio < _SPARE_IDLE_RATIO else "just keep up"
        how = f"its workers {spare} ({percent(steady.idle_ratio)} idle)"
        second = case.measured(worker_idle_ratio=steady.idle_ratio)
    else:
        how = f"a batch is made in {duration(steady.fetch_mean)}"
        second = case.measured(fetch_seconds=steady.fetch_mean)
    transfer_ratio = steady.wait_ratio - steady.starved_ratio
    if transfer_ratio >= _TRANSFER_RATIO:
        ratio = core_waits(case.loop).in_workers
        how += (
            f". Another {percent(transfer_ratio)} goes into their transfer: {duration(steady.transfer)} per batch"
            + (f"; workers that do not sleep wait for a core {percent(ratio)} of their time" if ratio > 0.5 else "")
        )
    return Finding(
        kind="compute-bound",
        summary=f"Data loading keeps up: batches of loader {case.loop.loader} are made in time (the loop waits "
        f"{percent(steady.starved_ratio)} of its time for one), and {how}.",
        evidence=(*case.pace_evidence, *second),
        **case.facts(None),
    )


def inline_loading(case: LoadingCase) -> Finding:
    """Return a finding for a training process that makes its batches itself."""
    loop, steady = case.loop, case.steady
    limit, facts, fault = worker_limit(loop), case.facts("main"), None
    if steady.fetch_mean < HAND_OVER_SECONDS:
        facts["severity"] = "info"
        what = ". Workers would not help: handing a batch over costs as much."
        advice: tuple[Advice, ...] = advise(
            text="Keep num_workers=0 and make the batch cheaper: hold the data as one tensor and index whole "
            "batches (`__getitems__` or your own slicing), or use a larger batch",
            expected=f"up to {percent(steady.wait_ratio)} less time per step; workers would add about "
            f"{duration(HAND_OVER_SECONDS)} to each batch of {duration(steady.fetch_mean)}",
            effect="changes results",
        )
    else:
        what = f", while the model computes nothing; {limit.because}."
        outlook = forecast(loop)
        advice, fault = advise_fetches(case, limit, outlook), fault_of_fetches(limit, outlook)
    slow, slowest = _slow_batches(case)
    return Finding(
        kind="inline-loading",
        summary=f"The training process makes its batches itself (num_workers=0): {percent(steady.wait_ratio)} of "
        f"the loop's time, {duration(steady.fetch_mean)} per batch{what}{slow}",
        evidence=(
            *case.waiting_evidence,
            *case.measured(fetch_seconds=steady.fetch_mean),
            *slowest,
            *limit.evidence,
        ),
        advice=advice,
        limited_by=limit.by if limit.by in ("oversubscribed", "affinity") else None,
        fault=fault,
        **facts,
    )


def workers_too_slow(case: LoadingCase) -> Finding:
    """Return a finding for workers that together cannot keep up."""
    loop, steady = case.loop, case.steady
    limit, outlook = worker_limit(loop), forecast(loop)
    slow, slowest = _slow_batches(case)
    in_common, tests = _in_common(outlook)
    knows_loop = loop.waits == "recorded"  # else the loop's own time per batch is not known
    capacity = {"capacity_ratio": steady.capacity_ratio} if knows_loop else {}
    subject, idle = f"All {loop.num_workers} workers of loader {loop.loader} are", "workers idle"
    if loop.num_workers == 2:
        subject = f"Both workers of loader {loop.loader} are"
    elif loop.num_workers == 1:
        subject, idle = f"The one worker of loader {loop.loader} is", "worker idles"
    is_idle = bool(slow) and steady.idle_ratio > BUSY_IDLE
    joint, why = ("although", ", since only a few batches are slow") if is_idle else ("and", "")
    return Finding(
        kind="workers-too-slow",
        summary=f"{subject} too slow: the loop waits {waits_in_words(steady)} {joint} the {idle} "
        f"{percent(steady.idle_ratio)}{why}; {limit.because}.{slow}{in_common}",
        evidence=(
            *case.waiting_evidence,
            *case.measured(
                worker_idle_ratio=steady.idle_ratio,
                fetch_seconds=steady.fetch_mean,
                **capacity,
            ),
            *slowest,
            *limit.evidence,
            *tests,
        ),
        advice=advise_fetches(case, limit, outlook),
        limited_by=limit.by,
        fault=fault_of_fetches(limit, outlook),
        **case.facts("worker"),
    )


def _slow_batches(case: LoadingCase) -> tuple[str, tuple[Evidence, ...]]:
    """Return a sentence on a few slow batches that take most of the time of all, and them; empty without such."""
    fetches, tail_ratio = steady_fetches(case.loop), case.steady.tail_ratio
    if fetches.empty:
        return "", ()
    slow = fetches[is_tail(fetches)]
    in_slow = float(slow["fetch_ns"].sum() / fetches["fetch_ns"].sum())
    if not (tail_ratio <= MOST_TAIL and in_slow >= _LEAST_TIME_OF_TAIL):
        return "", ()
    of_what = "the workers' time" if case.loop.num_workers else "the time for all of them"
    words = (
        f" {percent(tail_ratio)} of the batches are slow ones (over 3 times the usual) and take "
        f"{percent(in_slow)} of {of_what}."
    )
    return words, (*case.measured(straggler_ratio=tail_ratio), _slowest_batches(slow))


def _in_common(outlook: Forecast | str) -> tuple[str, tuple[Evidence, ...]]:
    """Return a sentence on what the workers wait for in common, and the tests for that; empty if for nothing."""
    sharing = outlook.measured.sharing if isinstance(outlook, Forecast) else None
    if sharing is None or not sharing.because:
        return "", ()
    tests = {
        "fetches_alike_sigmas": sharing.correlation_sigmas,
        "fetches_beside_sigmas": sharing.slowdown_sigmas,
        "fetches_turn_sigmas": sharing.queue_sigmas,
    }
    wait = "wait" if sharing.is_shared else "may wait"
    words = f" They {wait} for one thing in common: {sharing.because}."
    return words, measurements(len(sharing.service), "recent fetches", **tests)


def collate_bound(case: LoadingCase) -> Finding:
    """Return a finding for workers that are too slow because of `collate_fn`."""
    finding, limit, steady = workers_too_slow(case), worker_limit(case.loop), case.steady
    interval = max(steady.consumer, (steady.fetch_mean - steady.collate_mean) / case.loop.num_workers)
    now = number(1 / steady.interval)
    return dataclasses.replace(
        finding,
        kind="collate-bound",
        fault=None,
        summary=f"Putting the samples of a batch together (collate_fn) takes the workers of loader "
        f"{case.loop.loader} {duration(steady.collate_mean)} of {duration(steady.fetch_mean)} per batch, and the "
        f"loop waits {waits_in_words(steady)}; {limit.because}.",
        evidence=(
            *case.waiting_evidence,
            *case.measured(
                collate_ratio=steady.collate_mean / steady.fetch_mean,
                collate_seconds=steady.collate_mean,
                worker_idle_ratio=steady.idle_ratio,
            ),
            *limit.evidence,
        ),
        advice=(
            Advice(
                text=cheaper_collate(case),
                expected=f"up to {_batches_per_second(interval)} without collate_fn, instead of {now}",
                effect="changes results",
            ),
            *finding.advice,
        ),
    )


def slow_worker(case: LoadingCase, worker: WorkerPace) -> Finding:
    """Return a finding for one worker that holds up the others."""
    loop, steady, name = case.loop, case.steady, worker.worker
    others = [other for other in steady.workers if other is not worker]
    usual = float(np.median([other.fetch_median for other in others]))
    idle = float(np.median([other.idle_ratio for other in others]))
    limit, ratio = worker_limit(loop, name), worker.fetch_median / usual
    next_slow = max(others, key=lambda other: other.fetch_median)
    interval = max(steady.consumer, next_slow.fetch_median / loop.num_workers)
    after = ""
    if interval > max(SLOW_RATIO * usual / loop.num_workers, steady.consumer):
        after = f" Worker {next_slow.worker} is slow, too: {duration(next_slow.fetch_median)}."
    fetches, window = worker.fetches, case.waited.window
    more_workers = Advice(
        text=f"Until then, set num_workers={2 * loop.num_workers}",
        expected=f"worker {name} makes one batch in {2 * loop.num_workers} instead of one in {loop.num_workers}",
        effect="changes memory",
    )
    is_one = len(others) == 1
    the_others = f"worker {others[0].worker}" if is_one else "the others"
    return Finding(
        kind="slow-worker",
        summary=f"Worker {name} of loader {loop.loader} holds up the training: its batches take "
        f"{duration(worker.fetch_median)}, {number(ratio)} times as long as those of {the_others} "
        f"({duration(usual)}), which {'idles' if is_one else 'idle'} {percent(idle)} of the time; "
        f"{limit.because}.{after}",
        evidence=(
            *case.waiting_evidence,
            *measurements(fetches, window, worker_fetch_ratio=ratio, worker_idle_ratio=worker.idle_ratio),
            *case.measured(other_workers_idle_ratio=idle),
            *measurements(fetches, window, worker_blame_ratio=worker.blame_ratio),
            *limit.evidence,
        ),
        advice=(
            Advice(
                text=f"Look at what worker {name} alone does: its shard, its mount, its CPU affinity, code that "
                "depends on `get_worker_info().id`. `tidegauge run --investigate -- COMMAND` names the lines",
                expected=f"up to {_batches_per_second(interval)} instead of {number(1 / steady.interval)} when it "
                f"is as fast as {the_others}",
            ),
            Advice(
                text="If the order of batches may change, give the DataLoader `in_order=False` (torch >= 2.7)",
                expected="training takes each batch when it is made, and no longer waits for this worker's",
                effect="changes results",
            ),
            case.split or more_workers,
        ),
        limited_by=limit.by,
        fault=limit.fault,
        **case.facts("worker", worker=name),
    )


def straggler_samples(case: LoadingCase) -> Finding:
    """Return a finding for a few batches that take far longer; it lists the slowest by epoch and index."""
    loop, steady = case.loop, case.steady
    fetches = steady_fetches(loop)
    return Finding(
        kind="straggler-samples",
        summary=f"A few batches hold up the training: {percent(steady.tail_ratio)} of the batches of loader "
        f"{loop.loader} take over 3 times the usual and cause {percent(steady.tail_wait_ratio)} of the waiting; no "
        "worker is slow in itself.",
        evidence=(
            *case.waiting_evidence,
            *case.measured(
                straggler_ratio=steady.tail_ratio,
                straggler_wait_ratio=steady.tail_wait_ratio,
                worker_idle_ratio=steady.idle_ratio,
            ),
            _slowest_batches(fetches[is_tail(fetches)]),
        ),
        advice=advise_stragglers(case),
        **case.facts("worker"),
    )


def _slowest_batches(slow: pd.DataFrame) -> Evidence:
    """Return the slowest batches by epoch and index, of the fetches that take over 3 times the usual."""
    slowest = slow.nlargest(_LISTED_BATCHES, "fetch_ns").sort_values("time_ns")[["epoch", "index"]]
    batches = ", ".join(f"{epoch}:{index}" for epoch, index in slowest.astype(int).itertuples(index=False))
    listed = f"epoch:index, at most the {_LISTED_BATCHES} slowest"
    return fact("straggler_batches", batches, listed, n=len(slow))


def sampler_bound(case: LoadingCase, waits: HandOver) -> Finding:
    """Return a finding for a sampler that the workers wait for."""
    steady, sampler = case.steady, case.loop.setting.get("sampler") or "sampler"
    loss = case.loss(waits.sampler_seconds)
    advice = Advice(
        text="Make the sampler (or batch_sampler) cheap: draw the indices of a whole epoch at once, as an "
        "array or list, and let the dataset look up what an index means",
        expected=f"up to {_batches_per_second(steady.interval - waits.sampler_seconds)} instead of "
        f"{number(1 / steady.interval)}; more workers do not help",
    )
    return Finding(
        kind="sampler-bound",
        summary=f"The sampler takes {duration(waits.after_queue_seconds)} per batch in the training "
        f"process ({sampler} of loader {case.loop.loader}), while the workers idle "
        f"{percent(steady.idle_ratio)} for lack of indices. {loss.words}",
        evidence=(
            *loss.evidence(),
            *measurements(
                waits.batches,
                loss.window,
                sampler_seconds=waits.after_queue_seconds,
                data_wait_ratio=steady.wait_ratio,
                worker_idle_ratio=steady.idle_ratio,
            ),
        ),
        advice=(advice,),
        **case.facts("main", loss),
    )


def copy_bound(case: LoadingCase, waits: HandOver) -> Finding:
    """Return a finding for batches whose copies from the workers take too long."""
    loss = case.loss(waits.copy_seconds)
    values = {
        "hand_over_seconds": waits.transfer_seconds,
        "made_before_asked_ratio": waits.made_ratio,
        "ready_batches_count": waits.ready_batches,
        "payload_bytes": waits.payload_bytes,
    }
    values = {name: value for name, value in values.items() if np.isfinite(value)}
    advice = Advice(
        text="Let default_collate make the batch, or call it in your collate_fn: it writes straight into "
        "shared memory. Also transfer less: smaller dtypes (uint8 images), cropped samples, padding to the longest "
        "sample of the batch at most, scaled on the device",
        expected=f"{_without_copies(case.steady, waits)} if nothing is copied twice",
        effect="changes results",
    )
    instead_of = f"{duration(waits.transfer_seconds)} for its transfer"
    return Finding(
        kind="copy-bound",
        summary=f"Copying the batches of loader {case.loop.loader} from its workers takes too long: {waits.words}. "
        f"{loss.words}",
        evidence=(*loss.evidence(), *measurements(waits.batches, loss.window, **values)),
        advice=(advice, *advise_inline(case.steady, instead_of, waits.transfer_seconds)),
        **case.facts("main", loss),
    )


def pin_bound(case: LoadingCase, waits: HandOver, pinned_bytes: float) -> Finding:
    """Return a finding for a thread that pins batches too slowly, where default_collate leaves nothing to copy."""
    finding, loss = copy_bound(case, waits), case.loss(waits.copy_seconds)
    pinned = measurements(waits.batches, loss.window, pinned_allocated_bytes=pinned_bytes)
    advice = Advice(
        text="Transfer less: smaller dtypes (uint8 images), cropped samples, scaled on the device; then "
        "compare with a short run with pin_memory=False",
        expected=f"{_without_copies(case.steady, waits)} if pinning costs nothing",
        effect="changes results",
    )
    return dataclasses.replace(
        finding,
        kind="pin-bound",
        summary=f"The one thread that pins the batches of loader {case.loop.loader} does not keep up: "
        f"{waits.words}, and default_collate leaves nothing else to copy. {loss.words}",
        evidence=(*finding.evidence, *pinned),
        advice=(advice,),
    )


def copy_or_pin_bound(case: LoadingCase, waits: HandOver) -> Finding:
    """Return a finding for batches whose copies or pinning take too long."""
    finding = copy_bound(case, waits)
    compare = Advice(
        text="Set pin_memory=False for a short run and compare",
        expected="if the wait disappears, pinning caused it",
    )
    return extended(
        finding,
        "It is not known whether copying or pinning takes the time: the pinning thread is part of the transfer, "
        "and is not measured by itself.",
        advice=(compare,),
        kind="cannot-tell",
        severity="info",
    )


def shard_skew(case: LoadingCase, skew: ShardSkew, loss: Loss) -> Finding:
    """Return a finding for workers of an iterable dataset that run out of samples before the others."""
    which = "one worker" if skew.worker is None else f"worker {skew.worker}"
    advice = Advice(
        text="Share the samples out evenly over get_worker_info().num_workers: by sample (every n-th), or "
        "in shards of equal size whose number is a multiple of the workers",
        expected=f"all workers end together: about {duration(loss.seconds / skew.epochs)} less per epoch",
        effect="changes results",
    )
    return Finding(
        kind="shard-skew",
        severity=loss.severity,
        confidence=confidence(skew.tail_batches, 10 * case.loop.ramp),
        summary=f"The dataset of loader {case.loop.loader} is shared out unevenly: {which} has "
        f"{number(skew.share)} times its even share, and works on when others are done. That costs "
        f"{duration(loss.seconds)} in {counted(skew.epochs, 'epoch')}, {percent(loss.ratio)} of the run.",
        locus=dataclasses.replace(loop_locus(case.loop, "worker"), worker=skew.worker),
        since_step=step_at(case.loop.tables, case.loop.main, floats(case.loop.batches, "time_ns")[0]),
        evidence=loss.evidence(largest_share_ratio=skew.share, tail_batches_count=skew.tail_batches / skew.epochs),
        advice=(advice,),
    )


def waits_in_words(steady: Pace) -> str:
    """Return the share of its time that the loop waits, in words, split at the time when the batch was made."""
    transfer_ratio = steady.wait_ratio - steady.starved_ratio
    if transfer_ratio < _TRANSFER_RATIO:
        return f"{percent(steady.wait_ratio)} of its time"
    parts = f"{percent(steady.starved_ratio)} for a batch to be made, {percent(transfer_ratio)} for it to arrive"
    return f"{percent(steady.wait_ratio)} of its time ({parts})"


def _without_copies(steady: Pace, waits: HandOver) -> str:
    """Return the throughput without what the bytes take of a transfer for certain, and without all of it."""
    spared = (waits.copy_seconds, waits.excess_seconds)
    bounds = dict.fromkeys(number(1 / max(steady.interval - less, 1e-6)) for less in spared)
    return f"{' to '.join(bounds)} batches/s instead of {number(1 / steady.interval)}"


def _batches_per_second(interval: float) -> str:
    return f"{number(1 / max(interval, 1e-6))} batches/s"
