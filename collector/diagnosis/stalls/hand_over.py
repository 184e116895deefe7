"""Waits for batches that are made already: for the transfer of the batch, or for the sampler's next indices.

`next()` of a loader with workers takes a batch from the result queue. Then it asks the sampler for the indices of a
later batch. So its time has three parts: starving until a worker has made the batch, the transfer until the batch
comes out of the queue (serialising, shared memory, pinning), and the rest, in which the sampler runs. With
`num_workers=0` a fetch is all of `next()`, sampler included.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loader_settings
from collector.diagnosis.loading.steady_state import BUSY_IDLE, Pace, starved_ns, without_pauses
from collector.diagnosis.run.columns import GIB, SECOND_NS, floats, mean, origin_ns, step_at, window_text, written
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.advice import HAND_OVER_SECONDS
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, confidence, lost_ratio, measurement
from collector.findings import Advice, Evidence, Finding, Locus
from collector.units import duration, number, percent, size

#: Rate of a batch of tensors through a queue, bytes/s: 0.6 to 1 GiB/s were measured (12 and 32 MB, 2 cores).
_TRANSFER_RATE = GIB
#: Share of a transfer that its bytes must explain. A slower one waits for a core, or for the interpreter lock.
_EXPLAINED_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Waits for steady batches that are made already; means per batch.

    Attributes:
        batches: number of steady batches.
        after_queue_seconds: time in `next()` after the batch left the queue: sending indices, and the sampler.
        transfer_seconds: time until the batch left the queue, after it was made.
        made_ratio: share of the batches that were made before the loop asked for them.
        ready_batches: batches in the result queue, NaN if not known.
        payload_bytes: size of a batch, NaN if not known.

    """

    batches: int
    after_queue_seconds: float
    transfer_seconds: float
    made_ratio: float
    ready_batches: float
    payload_bytes: float

    @property
    def sampler_seconds(self) -> float:
        """Time of the sampler. Sending indices is taken to cost as much as the transfer of a small batch."""
        return self.after_queue_seconds - max(HAND_OVER_SECONDS, self.transfer_seconds - self.copy_seconds)

    @property
    def copy_seconds(self) -> float:
        """Time of the transfer beyond a small batch's that the bytes take; 0 if they explain too little of it."""
        excess = self.transfer_seconds - HAND_OVER_SECONDS
        by_bytes = min(excess, np.nan_to_num(self.payload_bytes) / _TRANSFER_RATE)
        return by_bytes if by_bytes >= _EXPLAINED_RATIO * excess else 0.0


def hand_over(loop: Loop) -> HandOver:
    """Measure how the steady batches of a loop came from their workers."""
    rows = loop.batches[floats(loop.batches, "index") >= loop.ramp]
    waits, times = floats(rows, "wait_ns"), floats(rows, "time_ns")
    starved = starved_ns(loop, rows, times, waits)
    blocked = np.maximum(np.minimum(floats(rows, "blocked_ns"), waits), starved)
    return HandOver(
        batches=len(rows),
        after_queue_seconds=mean(without_pauses(waits - blocked)) / SECOND_NS,
        transfer_seconds=mean(without_pauses(blocked - starved)) / SECOND_NS,
        made_ratio=mean((starved <= 0).astype(float)),
        ready_batches=mean(floats(rows, "ready_count")),
        payload_bytes=mean(floats(loop.batches, "payload_bytes")),
    )


def find_hand_overs(tables: RunTables, loop: Loop, steady: Pace) -> list[Finding]:
    """Find `sampler-bound`, and `copy-bound` or `pin-bound`, in a loop with workers.

    A sampler that runs while all workers are busy costs nothing: the batch would not come earlier without it.
    """
    if not loop.num_workers:
        return []
    setting = loader_settings(tables).get((loop.main, loop.loader), {})
    waits, findings = hand_over(loop), []
    workers_idle = steady.idle_ratio >= BUSY_IDLE and not setting.get("iterable")
    if workers_idle and waits.sampler_seconds >= LEAST_LOST_RATIO * steady.interval:
        findings.append(_sampler_bound(tables, loop, steady, waits, str(setting.get("sampler") or "sampler")))
    if waits.copy_seconds >= LEAST_LOST_RATIO * steady.interval:
        make = _copy_bound
        if setting.get("pin_memory") and pinned_bytes(tables, loop) > 0:
            make = _pin_bound if setting.get("collate") == "default_collate" else _copy_or_pin_bound
        findings.append(make(tables, loop, steady, waits))
    return findings


def pinned_bytes(tables: RunTables, loop: Loop) -> float:
    """Return the peak pinned memory of the training process in bytes; 0 if nothing was pinned or recorded."""
    pinned = floats(written(tables, "device_memory", loop.main), "pinned_allocated_bytes")
    return float(np.nanmax(pinned, initial=0.0))


def _sampler_bound(tables: RunTables, loop: Loop, steady: Pace, waits: HandOver, sampler: str) -> Finding:
    seconds = waits.sampler_seconds * len(loop.batches)
    window = _window(tables, steady)
    return _finding(
        "sampler-bound",
        tables,
        loop,
        steady,
        seconds,
        summary=f"Choosing the samples of a batch takes {duration(waits.after_queue_seconds)} in the training "
        f"process ({sampler} or the batch sampler of loader {loop.loader}), while the workers idle "
        f"{percent(steady.idle_ratio)} for lack of indices",
        evidence=(
            measurement("sampler_seconds", waits.after_queue_seconds, "seconds", waits.batches, window),
            measurement("data_wait_ratio", steady.wait_ratio, "ratio", waits.batches, window),
            measurement("worker_idle_ratio", steady.idle_ratio, "ratio", waits.batches, window),
        ),
        advice=Advice(
            text="Make the sampler (or batch_sampler) cheap: draw the indices of a whole epoch at once, as "
            "an array or list, and let the dataset look up what an index means",
            expected=f"{_rate(steady, waits.sampler_seconds)}; more workers do not help",
        ),
    )


def _copy_bound(tables: RunTables, loop: Loop, steady: Pace, waits: HandOver) -> Finding:
    inline = Advice(
        text="Set num_workers=0",
        expected=f"about {duration(steady.fetch_mean)} per batch instead of {duration(waits.transfer_seconds)} for "
        "handing it over",
    )
    finding = _finding(
        "copy-bound",
        tables,
        loop,
        steady,
        waits.copy_seconds * len(loop.batches),
        summary=f"Batches of loader {loop.loader} are copied too slowly from its workers: "
        f"{size(waits.payload_bytes)} take {duration(waits.transfer_seconds)} after they are made "
        f"({_speed(waits)})",
        evidence=_copy_evidence(tables, steady, waits),
        advice=Advice(
            text="Let default_collate make the batch, or call it in your collate_fn: it writes straight into "
            "shared memory. And hand over less: smaller dtypes (uint8 images), cropped samples, scaled on the "
            "device",
            expected=f"{_rate(steady, waits.copy_seconds)} if nothing is copied twice",
        ),
    )
    if steady.fetch_mean < waits.transfer_seconds:
        return dataclasses.replace(finding, advice=(*finding.advice, inline))
    return finding


def _pin_bound(tables: RunTables, loop: Loop, steady: Pace, waits: HandOver) -> Finding:
    pinned = pinned_bytes(tables, loop)
    return _finding(
        "pin-bound",
        tables,
        loop,
        steady,
        waits.copy_seconds * len(loop.batches),
        summary=f"The one thread that pins the batches of loader {loop.loader} does not keep up: "
        f"{size(waits.payload_bytes)} take {duration(waits.transfer_seconds)} after they are made "
        f"({_speed(waits)}), and default_collate leaves nothing else to copy",
        evidence=(
            *_copy_evidence(tables, steady, waits),
            measurement("pinned_allocated_bytes", pinned, "bytes", waits.batches, _window(tables, steady)),
        ),
        advice=Advice(
            text="Hand over less: smaller dtypes (uint8 images), cropped samples, scaled on the device; and "
            "compare with a short run with pin_memory=False",
            expected=f"{_rate(steady, waits.copy_seconds)} if pinning costs nothing",
        ),
    )


def _copy_or_pin_bound(tables: RunTables, loop: Loop, steady: Pace, waits: HandOver) -> Finding:
    finding = _copy_bound(tables, loop, steady, waits)
    return dataclasses.replace(
        finding,
        kind="cannot-tell",
        severity="info",
        summary=f"{finding.summary} Whether copying or pinning takes it cannot be told: the pinning thread lies "
        "on the way too and has no measurement of its own.",
        advice=(
            Advice(
                text="Set pin_memory=False for a short run and compare",
                expected="if the wait goes, it was pinning",
            ),
            *finding.advice,
        ),
    )


def _copy_evidence(tables: RunTables, steady: Pace, waits: HandOver) -> tuple[Evidence, ...]:
    window = _window(tables, steady)
    values = (
        ("hand_over_seconds", waits.transfer_seconds, "seconds"),
        ("made_before_asked_ratio", waits.made_ratio, "ratio"),
        ("ready_batches_count", waits.ready_batches, "count"),
        ("payload_bytes", waits.payload_bytes, "bytes"),
    )
    return tuple(
        measurement(name, value, unit, waits.batches, window) for name, value, unit in values if np.isfinite(value)
    )


def _finding(
    kind: str,
    tables: RunTables,
    loop: Loop,
    steady: Pace,
    seconds: float,
    *,
    summary: str,
    evidence: tuple[Evidence, ...],
    advice: Advice,
) -> Finding:
    ratio = lost_ratio(tables, seconds)
    loss = Loss(ratio=ratio, seconds=seconds, n=steady.batches, window=_window(tables, steady))
    return Finding(
        kind=kind,
        severity=loss.severity,
        confidence=confidence(steady.batches, 10),
        summary=f"{summary}: {duration(seconds)}, {percent(ratio)} of the run.",
        locus=Locus(host=loop.main[0], rank=loop.rank, role="main", loader=loop.loader, pid=loop.main[1]),
        since_step=step_at(tables, loop.main, steady.first_ns),
        evidence=(*loss.evidence, *evidence),
        advice=(advice,),
    )


def _window(tables: RunTables, steady: Pace) -> str:
    return window_text(steady.first_ns, steady.last_ns, origin_ns(tables))


def _speed(waits: HandOver) -> str:
    return f"{size(waits.payload_bytes / max(waits.transfer_seconds, 1e-9))}/s"


def _rate(steady: Pace, less_seconds: float) -> str:
    faster = 1 / max(steady.interval - less_seconds, 1e-6)
    return f"about {number(faster)} batches/s instead of {number(1 / steady.interval)}"
