"""Findings about loading loops: the words, evidence and advice for the decisions of `verdict`."""

from __future__ import annotations

import dataclasses

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loader_settings
from collector.diagnosis.loading.names import pid_if_shared
from collector.diagnosis.loading.steady_state import Pace, WorkerPace, is_tail, steady_fetches
from collector.diagnosis.loading.worker_limit import WorkerLimit, cores_per_rank, worker_limit
from collector.diagnosis.run.columns import origin_ns, step_at, window_text
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.advice import (
    SHARING_OUT,
    advise_inline,
    advise_slow_worker,
    advise_tail,
    advise_too_slow,
)
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, confidence, lost_ratio, measurement, severity
from collector.diagnosis.tuning.shared_resource import Sharing
from collector.diagnosis.tuning.what_if import Forecast, forecast
from collector.findings import Advice, Evidence, Finding, Locus, Severity
from collector.units import duration, number, percent

_SPARE_IDLE_RATIO = 0.10  # share of its time that a worker with time to spare idles
_LISTED_BATCHES = 50
_TRANSFER_RATIO = 0.05  # share of the loop's time from which a summary names the transfer


def slow_transfer(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for waits between worker and loop that neither sampler nor the bytes of a batch explain."""
    missing = (
        f"it waits {percent(steady.wait_ratio)} of its time for batches that the workers have made already "
        f"({duration(steady.transfer)} per batch between worker and loop), and the bytes of a batch do not "
        f"explain that; a fetch takes {duration(steady.fetch_mean)}"
    )
    advice: tuple[Advice, ...] = ()
    if steady.fetch_mean < steady.transfer:
        advice = (
            Advice(
                text="Set num_workers=0",
                expected=f"about {duration(steady.fetch_mean)} per batch instead of {duration(steady.transfer)}",
            ),
        )
    finding = no_cause(tables, loop, steady, missing)
    fetch = _seconds("fetch_seconds", steady.fetch_mean, steady, tables)
    return dataclasses.replace(finding, evidence=(*finding.evidence, fetch), advice=advice)


def no_cause(tables: RunTables, loop: Loop, steady: Pace, missing: str) -> Finding:
    """Return a finding for measured waits without a known cause; `missing` says why the cause is not known."""
    idle = _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables)
    return _cannot_tell(tables, loop, missing, (*_pace_evidence(steady, tables), idle))


def too_short(tables: RunTables, loop: Loop, missing: str, steady_batches: int) -> Finding:
    """Return a finding for a loop with too few records to judge."""
    return _cannot_tell(
        tables,
        loop,
        missing,
        (
            measurement("steady_batches", steady_batches, "count", len(loop.batches), "after the ramp-up"),
            measurement("fetches", len(loop.fetches), "count", len(loop.batches), "whole loop"),
        ),
    )


def _cannot_tell(tables: RunTables, loop: Loop, missing: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=1.0,
        summary=f"Whether loader {loop.loader} keeps up cannot be told: {missing}.",
        locus=_locus(tables, loop),
        evidence=evidence,
    )


def compute_bound(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for a loop that does not starve, with the time of its transfers."""
    if loop.num_workers:
        how = f"its workers have time to spare ({percent(steady.idle_ratio)} idle)"
        second = _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables)
        if steady.idle_ratio < _SPARE_IDLE_RATIO:
            how = f"its workers just keep up ({percent(steady.idle_ratio)} idle)"
    else:
        how = f"a batch is made in {duration(steady.fetch_mean)}"
        second = _seconds("fetch_seconds", steady.fetch_mean, steady, tables)
    transfer_ratio = steady.wait_ratio - steady.starved_ratio
    if transfer_ratio >= _TRANSFER_RATIO:
        how += (
            f". Another {percent(transfer_ratio)} goes into their transfer: {duration(steady.transfer)} per batch"
        )
    return Finding(
        kind="compute-bound",
        severity="info",
        confidence=_confidence(steady),
        summary=f"Data loading keeps up: {percent(steady.starved_ratio)} of the loop's time goes into waiting "
        f"for batches of loader {loop.loader} that are not made yet, and {how}.",
        locus=_locus(tables, loop),
        since_step=_since(tables, loop, steady),
        evidence=(*_pace_evidence(steady, tables), second),
    )


def inline_loading(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for a training process that makes its batches itself."""
    limit = worker_limit(tables, loop)
    cores = cores_per_rank(tables, loop.main[0])
    condition = _condition_of_workers(tables, loop)
    small, advice = advise_inline(steady, limit, cores, forecast(tables, loop), condition=condition)
    return Finding(
        kind="inline-loading",
        severity="info" if small else _severity(tables, loop, steady),
        confidence=_confidence(steady),
        summary=(
            f"The training process makes its batches itself (num_workers=0): {percent(steady.wait_ratio)} of "
            "the loop's time, "
            f"{duration(steady.fetch_mean)} per batch"
            + (
                ". Workers would not help: handing a batch over costs as much."
                if small
                else f", while the model computes nothing; {limit.because}."
            )
        ),
        locus=_locus(tables, loop, role="main"),
        since_step=_since(tables, loop, steady),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _seconds("fetch_seconds", steady.fetch_mean, steady, tables),
            *limit.evidence,
        ),
        advice=advice,
        limited_by=limit.by if limit.by in ("oversubscribed", "affinity") else None,
    )


def too_slow(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for workers that together cannot keep up."""
    limit = worker_limit(tables, loop)
    outlook = forecast(tables, loop)
    shared = outlook.measured.shared if isinstance(outlook, Forecast) else None
    likely = "" if shared and shared.is_sure else " most likely"
    subject, idle = f"All {loop.num_workers} workers of loader {loop.loader} are", "workers idle"
    if loop.num_workers == 1:
        subject, idle = f"The one worker of loader {loop.loader} is", "worker idles"
    return Finding(
        kind="workers-too-slow",
        severity=_severity(tables, loop, steady),
        confidence=_confidence(steady),
        summary=(
            f"{subject} too slow: the loop waits {_waits(steady)} and the {idle} "
            f"{percent(steady.idle_ratio)}; {limit.because}."
            + (f" They{likely} wait for one thing in common: {shared.because}." if shared else "")
        ),
        locus=_locus(tables, loop, role="worker"),
        since_step=_since(tables, loop, steady),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables),
            _seconds("fetch_seconds", steady.fetch_mean, steady, tables),
            _ratio("capacity_ratio", steady.capacity_ratio, steady, tables),
            *limit.evidence,
            *(_sharing_evidence(shared) if shared else ()),
        ),
        advice=advise_too_slow(
            loop,
            limit,
            cores_per_rank(tables, loop.main[0]),
            outlook,
            condition=_condition_of_workers(tables, loop),
        ),
        limited_by=limit.by,
    )


def collate_bound(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for workers that are too slow because of `collate_fn`."""
    finding, limit = too_slow(tables, loop, steady), worker_limit(tables, loop)
    share = steady.collate_mean / steady.fetch_mean
    rest = steady.fetch_mean - steady.collate_mean
    interval = max(steady.consumer, rest / loop.num_workers)
    return dataclasses.replace(
        finding,
        kind="collate-bound",
        summary=(
            f"Putting the samples of a batch together (collate_fn) takes the workers of loader {loop.loader} "
            f"{duration(steady.collate_mean)} of {duration(steady.fetch_mean)} per batch, and the loop waits "
            f"{_waits(steady)}; {limit.because}."
        ),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _ratio("collate_ratio", share, steady, tables),
            _seconds("collate_seconds", steady.collate_mean, steady, tables),
            _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables),
            *limit.evidence,
        ),
        advice=(
            Advice(
                text="Make collate_fn cheaper: pad and convert in __getitem__ or ahead of time, bucket "
                "samples of like length, call torch.stack once instead of loops over samples",
                expected=f"up to {number(1 / max(interval, 1e-6))} batches/s instead of "
                f"{number(1 / steady.interval)} without it",
            ),
            *finding.advice,
        ),
    )


def slow_worker(tables: RunTables, loop: Loop, steady: Pace, worker: WorkerPace) -> Finding:
    """Return a finding for one worker that holds up the others."""
    others = [other for other in steady.workers if other is not worker]
    usual = float(np.median([other.fetch_median for other in others]))
    limit: WorkerLimit = worker_limit(tables, loop, worker.worker)
    idle = float(np.median([other.idle_ratio for other in others]))
    ratio = worker.fetch_median / usual
    return Finding(
        kind="slow-worker",
        severity=_severity(tables, loop, steady),
        confidence=_confidence(steady),
        summary=(
            f"Worker {worker.worker} of loader {loop.loader} holds up the training: its fetch takes "
            f"{number(ratio)} times "
            f"the others' ({duration(worker.fetch_median)} against {duration(usual)}), which idle {percent(idle)}; "
            f"{limit.because}."
        ),
        locus=_locus(tables, loop, role="worker", worker=worker.worker),
        since_step=_since(tables, loop, steady),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _worker("worker_fetch_ratio", ratio, worker, steady, tables),
            _worker("worker_idle_ratio", worker.idle_ratio, worker, steady, tables),
            _ratio("other_workers_idle_ratio", idle, steady, tables),
            _worker("worker_blame_ratio", worker.blame_ratio, worker, steady, tables),
            *limit.evidence,
        ),
        advice=advise_slow_worker(loop, steady, worker.worker, usual),
        limited_by=limit.by,
    )


def straggler_samples(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """Return a finding for a few batches that take far longer; it lists the slowest by epoch and index."""
    fetches = steady_fetches(loop)
    slow = fetches[is_tail(fetches)]
    slowest = slow.nlargest(_LISTED_BATCHES, "fetch_ns").sort_values("time_ns")[["epoch", "index"]]
    batches = ", ".join(f"{epoch}:{index}" for epoch, index in slowest.astype(int).itertuples(index=False))
    return Finding(
        kind="straggler-samples",
        severity=_severity(tables, loop, steady),
        confidence=_confidence(steady),
        summary=(
            f"A few batches hold up the training: {percent(steady.tail_ratio)} of the batches of loader "
            f"{loop.loader} take over 3 times the usual and cause {percent(steady.tail_wait_ratio)} of the "
            "waiting; no worker is slow in itself."
        ),
        locus=_locus(tables, loop, role="worker"),
        since_step=_since(tables, loop, steady),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _ratio("straggler_ratio", steady.tail_ratio, steady, tables),
            _ratio("straggler_wait_ratio", steady.tail_wait_ratio, steady, tables),
            _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables),
            Evidence(
                name="straggler_batches",
                value=batches,
                unit="text",
                n=len(slow),
                window=f"epoch:index, at most the {_LISTED_BATCHES} slowest",
            ),
        ),
        advice=advise_tail(loop, steady),
    )


def _condition_of_workers(tables: RunTables, loop: Loop) -> str:
    """Return the condition of more workers, in words: by itself, each iterates the whole dataset."""
    setting = loader_settings(tables).get((loop.main, loop.loader), {})
    return SHARING_OUT if setting.get("iterable") and loop.num_workers <= 1 else ""


def _waits(steady: Pace) -> str:
    """Return the share of its time that the loop waits, in words, split at the time when the batch was made."""
    transfer_ratio = steady.wait_ratio - steady.starved_ratio
    if transfer_ratio < _TRANSFER_RATIO:
        return f"{percent(steady.wait_ratio)} of its time"
    parts = f"{percent(steady.starved_ratio)} until a batch is made, {percent(transfer_ratio)} for its transfer"
    return f"{percent(steady.wait_ratio)} of its time ({parts})"


def _waiting_evidence(tables: RunTables, loop: Loop, steady: Pace) -> tuple[Evidence, ...]:
    loss = Loss(
        ratio=_lost_ratio(tables, loop, steady),
        seconds=steady.wait * len(loop.batches),
        n=steady.batches,
        window=_window(steady, tables),
    )
    return (*_pace_evidence(steady, tables), *loss.evidence)


def _pace_evidence(steady: Pace, tables: RunTables) -> tuple[Evidence, ...]:
    return (
        _ratio("starved_ratio", steady.starved_ratio, steady, tables),
        _ratio("data_wait_ratio", steady.wait_ratio, steady, tables),
        _seconds("hand_over_seconds", steady.transfer, steady, tables),
        _seconds("consumer_seconds", steady.consumer, steady, tables),
    )


def _sharing_evidence(shared: Sharing) -> tuple[Evidence, ...]:
    sigmas = {
        "alike": shared.correlation_sigmas,
        "beside": shared.slowdown_sigmas,
        "turn": shared.queue_sigmas,
    }
    return tuple(
        measurement(f"fetches_{name}_sigmas", value, "sigmas", len(shared.service), "recent fetches")
        for name, value in sigmas.items()
    )


def _ratio(name: str, value: float, steady: Pace, tables: RunTables) -> Evidence:
    return Evidence(
        name=name, value=round(value, 4), unit="ratio", n=steady.batches, window=_window(steady, tables)
    )


def _seconds(name: str, value: float, steady: Pace, tables: RunTables) -> Evidence:
    return Evidence(
        name=name, value=round(value, 6), unit="seconds", n=steady.batches, window=_window(steady, tables)
    )


def _worker(name: str, value: float, worker: WorkerPace, steady: Pace, tables: RunTables) -> Evidence:
    return Evidence(
        name=name, value=round(value, 4), unit="ratio", n=worker.fetches, window=_window(steady, tables)
    )


def _window(steady: Pace, tables: RunTables) -> str:
    return window_text(steady.first_ns, steady.last_ns, origin_ns(tables))


def _severity(tables: RunTables, loop: Loop, steady: Pace) -> Severity:
    """Return the severity of the time that the training process loses in this loop; `info` if it hardly starves."""
    return severity(_lost_ratio(tables, loop, steady)) if steady.starved_ratio >= LEAST_LOST_RATIO else "info"


def _lost_ratio(tables: RunTables, loop: Loop, steady: Pace) -> float:
    """Return the share of the run's time that the training process waits in this loop."""
    return lost_ratio(tables, steady.wait * len(loop.batches))


def _confidence(steady: Pace) -> float:
    return confidence(steady.batches, 10)


def _since(tables: RunTables, loop: Loop, steady: Pace) -> int | None:
    return step_at(tables, loop.main, steady.first_ns)


def _locus(tables: RunTables, loop: Loop, *, role: str | None = None, worker: int | None = None) -> Locus:
    return Locus(
        host=loop.main[0],
        rank=loop.rank,
        role=role,
        loader=loop.loader,
        worker=worker,
        pid=loop.main[1] if role == "main" else None,
        main_pid=None if role == "main" else pid_if_shared(tables, loop.main, loop.rank),
    )
