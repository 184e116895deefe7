"""The findings about loading loops: words, evidence and advice for what `stalls` decided."""

from __future__ import annotations

import dataclasses

import numpy as np

from collector.diagnosis.costs import TELL, confidence, cost, lost_ratio, measured, severity
from collector.diagnosis.findings import Advice, Evidence, Finding, Locus, Severity
from collector.diagnosis.frames import origin_ns, step_at, window_text
from collector.diagnosis.limits import WorkerLimit, cores_per_rank, worker_limit
from collector.diagnosis.loops import Loop
from collector.diagnosis.naming import pid_if_shared
from collector.diagnosis.pace import Pace, WorkerPace, is_tail, steady_fetches
from collector.diagnosis.sharing import Sharing
from collector.diagnosis.stall_advice import advise_inline, advise_slow_worker, advise_tail, advise_too_slow
from collector.diagnosis.tables import RunTables
from collector.diagnosis.tuning import Forecast, forecast
from collector.quantities import duration, number, percent

_SPARE_IDLE = 0.10
_LISTED = 50  # of the slow batches
_HANDED = 0.05  # of the loop's time: worth telling apart from the time until a batch is made


def hand_over(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """The waiting lies between worker and loop, and neither sampler nor the bytes of a batch explain it."""
    missing = (
        f"it waits {percent(steady.wait_ratio)} of its time for batches that the workers have made already "
        f"({duration(steady.hand_over)} per batch between worker and loop), and the bytes of a batch do not "
        f"explain that; a fetch takes {duration(steady.fetch_mean)}"
    )
    advice: tuple[Advice, ...] = ()
    if steady.fetch_mean < steady.hand_over:
        advice = (
            Advice(
                text="Set num_workers=0",
                expected=f"about {duration(steady.fetch_mean)} per batch instead of {duration(steady.hand_over)}",
            ),
        )
    found = no_cause(tables, loop, steady, missing)
    fetch = _seconds("fetch_seconds", steady.fetch_mean, steady, tables)
    return dataclasses.replace(found, evidence=(*found.evidence, fetch), advice=advice)


def no_cause(tables: RunTables, loop: Loop, steady: Pace, missing: str) -> Finding:
    """What it waits is measured, and `missing` says what would be needed to tell why."""
    idle = _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables)
    return _cannot_tell(tables, loop, missing, (*_pace_evidence(steady, tables), idle))


def too_short(tables: RunTables, loop: Loop, missing: str, steady_batches: int) -> Finding:
    """Too little of this loop is recorded to judge it."""
    return _cannot_tell(
        tables,
        loop,
        missing,
        (
            measured("steady_batches", steady_batches, "count", len(loop.batches), "after the ramp-up"),
            measured("fetches", len(loop.fetches), "count", len(loop.batches), "whole loop"),
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
    """Return that the loop does not starve, and what it takes to receive batches that are made."""
    if loop.num_workers:
        how = f"its workers have time to spare ({percent(steady.idle_ratio)} idle)"
        second = _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables)
        if steady.idle_ratio < _SPARE_IDLE:
            how = f"its workers just keep up ({percent(steady.idle_ratio)} idle)"
    else:
        how = f"a batch is made in {duration(steady.fetch_mean)}"
        second = _seconds("fetch_seconds", steady.fetch_mean, steady, tables)
    received = steady.wait_ratio - steady.starved_ratio
    if received >= _HANDED:
        how += f". Another {percent(received)} goes into their transfer: {duration(steady.hand_over)} per batch"
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
    """The training process makes its batches itself."""
    limit = worker_limit(tables, loop)
    cores = cores_per_rank(tables, loop.main[0])
    small, advice = advise_inline(steady, limit, cores, forecast(tables, loop))
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
    """All workers together cannot keep up."""
    limit = worker_limit(tables, loop)
    outlook = forecast(tables, loop)
    common = outlook.measured.common if isinstance(outlook, Forecast) else None
    likely = "" if common and common.is_sure else " most likely"
    return Finding(
        kind="workers-too-slow",
        severity=_severity(tables, loop, steady),
        confidence=_confidence(steady),
        summary=(
            f"All {loop.num_workers} workers of loader {loop.loader} are too slow: the loop waits "
            f"{_waits(steady)} and the workers idle {percent(steady.idle_ratio)}; {limit.because}."
            + (f" They{likely} wait for one thing in common: {common.because}." if common else "")
        ),
        locus=_locus(tables, loop, role="worker"),
        since_step=_since(tables, loop, steady),
        evidence=(
            *_waiting_evidence(tables, loop, steady),
            _ratio("worker_idle_ratio", steady.idle_ratio, steady, tables),
            _seconds("fetch_seconds", steady.fetch_mean, steady, tables),
            _ratio("capacity_ratio", steady.capacity_ratio, steady, tables),
            *limit.evidence,
            *(_sharing_evidence(common) if common else ()),
        ),
        advice=advise_too_slow(loop, limit, cores_per_rank(tables, loop.main[0]), outlook),
        limited_by=limit.by,
    )


def collate_bound(tables: RunTables, loop: Loop, steady: Pace) -> Finding:
    """The workers are too slow because of what they do to put samples together."""
    found, limit = too_slow(tables, loop, steady), worker_limit(tables, loop)
    share = steady.collate_mean / steady.fetch_mean
    rest = steady.fetch_mean - steady.collate_mean
    pace = max(steady.consumer, rest / loop.num_workers)
    return dataclasses.replace(
        found,
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
                expected=f"up to {number(1 / max(pace, 1e-6))} batches/s instead of {number(1 / steady.interval)} "
                "without it",
            ),
            *found.advice,
        ),
    )


def slow_worker(tables: RunTables, loop: Loop, steady: Pace, worker: WorkerPace) -> Finding:
    """One worker holds up the others."""
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
    """A few batches take far longer than the rest: these, the slowest of them by epoch and index."""
    fetches = steady_fetches(loop)
    slow = fetches[is_tail(fetches)]
    listed = slow.nlargest(_LISTED, "fetch_ns").sort_values("time_ns")[["epoch", "index"]]
    batches = ", ".join(f"{epoch}:{index}" for epoch, index in listed.astype(int).itertuples(index=False))
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
                window=f"epoch:index, at most the {_LISTED} slowest",
            ),
        ),
        advice=advise_tail(loop, steady),
    )


def _waits(steady: Pace) -> str:
    """Say how long the loop waits, and for which part of it the batch was made already."""
    handed = steady.wait_ratio - steady.starved_ratio
    if handed < _HANDED:
        return f"{percent(steady.wait_ratio)} of its time"
    parts = f"{percent(steady.starved_ratio)} until a batch is made, {percent(handed)} for its transfer"
    return f"{percent(steady.wait_ratio)} of its time ({parts})"


def _waiting_evidence(tables: RunTables, loop: Loop, steady: Pace) -> tuple[Evidence, ...]:
    seconds = steady.wait * len(loop.batches)
    lost = cost(_lost_ratio(tables, loop, steady), seconds, steady.batches, _window(steady, tables))
    return (*_pace_evidence(steady, tables), *lost)


def _pace_evidence(steady: Pace, tables: RunTables) -> tuple[Evidence, ...]:
    return (
        _ratio("starved_ratio", steady.starved_ratio, steady, tables),
        _ratio("data_wait_ratio", steady.wait_ratio, steady, tables),
        _seconds("hand_over_seconds", steady.hand_over, steady, tables),
        _seconds("consumer_seconds", steady.consumer, steady, tables),
    )


def _sharing_evidence(common: Sharing) -> tuple[Evidence, ...]:
    found = {"alike": common.alike_sigmas, "beside": common.beside_sigmas, "turn": common.turn_sigmas}
    return tuple(
        measured(f"fetches_{name}_sigmas", value, "sigmas", len(common.service), "recent fetches")
        for name, value in found.items()
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
    """A loop that starves is worth a warning only if the training process as a whole loses time in it."""
    return severity(_lost_ratio(tables, loop, steady)) if steady.starved_ratio >= TELL else "info"


def _lost_ratio(tables: RunTables, loop: Loop, steady: Pace) -> float:
    """Share of the training process's time, from its first to its last record, that it waits in this loop."""
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
