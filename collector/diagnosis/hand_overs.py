"""Waiting for batches that are made already: for the sampler's next indices, or for the batch to be handed over.

`next()` of a loader with workers takes a batch from the result queue, then asks the sampler for the indices of a
later one. So its time splits into: until a worker had made the batch (*starved*), until it came out of the queue
(*copied*: serialising, shared memory, pinning), and the rest, in which the sampler runs. With `num_workers=0` a
fetch is all of `next()`, sampler included.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.costs import TELL, confidence, costly, lost_ratio, measured
from collector.diagnosis.findings import Advice, Evidence, Finding, Locus
from collector.diagnosis.frames import (
    GIB,
    SECOND_NS,
    floats,
    mean,
    origin_ns,
    step_at,
    window_text,
    written,
)
from collector.diagnosis.loops import Loop, loader_settings
from collector.diagnosis.pace import BUSY_IDLE, Pace, starved_ns, without_pauses
from collector.diagnosis.stall_advice import HAND_OVER_SECONDS
from collector.diagnosis.tables import RunTables
from collector.quantities import duration, number, percent, size

#: A batch of tensors goes through a queue at 0.6 to 1 GiB/s (12 and 32 MB, 2 cores). What goes slower than 1/4
#: of that waits for something else than its bytes: a core, or the interpreter lock.
_COPY_BYTES = GIB
_EXPLAINED = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The wait of the steady batches that no worker is to blame for; seconds per batch.

    Attributes:
        sampler: in `next()`, but neither on the queue nor for a fetch.
        copied: on the queue, after the batch was made.
        made_ratio: share of the batches that were made before the loop asked for them.
        ready: batches that stood in the result queue, NaN if not known.
        payload_bytes: of a batch, NaN if not known.

    """

    batches: int
    sampler: float
    copied: float
    made_ratio: float
    ready: float
    payload_bytes: float

    @property
    def choosing(self) -> float:
        """What choosing the samples takes: sending off their indices costs as much as a small batch's way back."""
        return self.sampler - max(HAND_OVER_SECONDS, self.copied - self.copying)

    @property
    def copying(self) -> float:
        """What its bytes take, of the time beyond what any batch costs; 0 if they do not explain most of that."""
        excess = self.copied - HAND_OVER_SECONDS
        by_bytes = min(excess, np.nan_to_num(self.payload_bytes) / _COPY_BYTES)
        return by_bytes if by_bytes >= _EXPLAINED * excess else 0.0


def hand_over(loop: Loop) -> HandOver:
    """How the steady batches of a loop came from their workers."""
    rows = loop.batches[floats(loop.batches, "index") >= loop.ramp]
    waits, times = floats(rows, "wait_ns"), floats(rows, "time_ns")
    starved = starved_ns(loop, rows, times, waits)
    blocked = np.maximum(np.minimum(floats(rows, "blocked_ns"), waits), starved)
    return HandOver(
        batches=len(rows),
        sampler=mean(without_pauses(waits - blocked)) / SECOND_NS,
        copied=mean(without_pauses(blocked - starved)) / SECOND_NS,
        made_ratio=mean((starved <= 0).astype(float)),
        ready=mean(floats(rows, "ready_count")),
        payload_bytes=mean(floats(loop.batches, "payload_bytes")),
    )


def find_hand_overs(tables: RunTables, loop: Loop, steady: Pace) -> list[Finding]:
    """`sampler-bound`, and `copy-bound` or `pin-bound`, where they cost a loop with workers enough.

    A sampler that runs while all workers are busy costs nothing: the batch would not come earlier without it.
    """
    if not loop.num_workers:
        return []
    setting = loader_settings(tables).get((loop.main, loop.loader), {})
    seen, found = hand_over(loop), []
    free = steady.idle_ratio >= BUSY_IDLE and not setting.get("iterable")
    if free and seen.choosing >= TELL * steady.interval:
        found.append(_sampler_bound(tables, loop, steady, seen, str(setting.get("sampler") or "sampler")))
    if seen.copying >= TELL * steady.interval:
        make = _copy_bound
        if setting.get("pin_memory") and pinned_bytes(tables, loop) > 0:
            make = _pin_bound if setting.get("collate") == "default_collate" else _copied_or_pinned
        found.append(make(tables, loop, steady, seen))
    return found


def pinned_bytes(tables: RunTables, loop: Loop) -> float:
    """Pinned memory that the training process came to own, 0 if none is known: without it nothing was pinned."""
    known = floats(written(tables, "device_memory", loop.main), "pinned_allocated_bytes")
    return float(np.nanmax(known, initial=0.0))


def _sampler_bound(tables: RunTables, loop: Loop, steady: Pace, seen: HandOver, sampler: str) -> Finding:
    seconds = seen.choosing * len(loop.batches)
    window = _window(tables, steady)
    return _finding(
        "sampler-bound",
        tables,
        loop,
        steady,
        seconds,
        summary=f"Choosing the samples of a batch takes {duration(seen.sampler)} in the training process "
        f"({sampler} or the batch sampler of loader {loop.loader}), while the workers idle "
        f"{percent(steady.idle_ratio)} for lack of indices",
        evidence=(
            measured("sampler_seconds", seen.sampler, "seconds", seen.batches, window),
            measured("data_wait_ratio", steady.wait_ratio, "ratio", seen.batches, window),
            measured("worker_idle_ratio", steady.idle_ratio, "ratio", seen.batches, window),
        ),
        advice=Advice(
            text="Make the sampler (or batch_sampler) cheap: draw the indices of a whole epoch at once, as "
            "an array or list, and let the dataset look up what an index means",
            expected=f"{_rate(steady, seen.choosing)}; more workers do not help",
        ),
    )


def _copy_bound(tables: RunTables, loop: Loop, steady: Pace, seen: HandOver) -> Finding:
    inline = Advice(
        text="Set num_workers=0",
        expected=f"about {duration(steady.fetch_mean)} per batch instead of {duration(seen.copied)} for "
        "handing it over",
    )
    found = _finding(
        "copy-bound",
        tables,
        loop,
        steady,
        seen.copying * len(loop.batches),
        summary=f"Batches of loader {loop.loader} are copied too slowly from its workers: "
        f"{size(seen.payload_bytes)} take {duration(seen.copied)} after they are made "
        f"({_speed(seen)})",
        evidence=_copy_evidence(tables, steady, seen),
        advice=Advice(
            text="Let default_collate make the batch, or call it in your collate_fn: it writes straight into "
            "shared memory. And hand over less: smaller dtypes (uint8 images), cropped samples, scaled on the "
            "device",
            expected=f"{_rate(steady, seen.copying)} if nothing is copied twice",
        ),
    )
    if steady.fetch_mean < seen.copied:
        return dataclasses.replace(found, advice=(*found.advice, inline))
    return found


def _pin_bound(tables: RunTables, loop: Loop, steady: Pace, seen: HandOver) -> Finding:
    pinned = pinned_bytes(tables, loop)
    return _finding(
        "pin-bound",
        tables,
        loop,
        steady,
        seen.copying * len(loop.batches),
        summary=f"The one thread that pins the batches of loader {loop.loader} does not keep up: "
        f"{size(seen.payload_bytes)} take {duration(seen.copied)} after they are made "
        f"({_speed(seen)}), and default_collate leaves nothing else to copy",
        evidence=(
            *_copy_evidence(tables, steady, seen),
            measured("pinned_allocated_bytes", pinned, "bytes", seen.batches, _window(tables, steady)),
        ),
        advice=Advice(
            text="Hand over less: smaller dtypes (uint8 images), cropped samples, scaled on the device; and "
            "compare with a short run with pin_memory=False",
            expected=f"{_rate(steady, seen.copying)} if pinning costs nothing",
        ),
    )


def _copied_or_pinned(tables: RunTables, loop: Loop, steady: Pace, seen: HandOver) -> Finding:
    found = _copy_bound(tables, loop, steady, seen)
    return dataclasses.replace(
        found,
        kind="cannot-tell",
        severity="info",
        summary=f"{found.summary} Whether copying or pinning takes it cannot be told: the pinning thread lies "
        "on the way too and has no measurement of its own.",
        advice=(
            Advice(
                text="Set pin_memory=False for a short run and compare",
                expected="if the wait goes, it was pinning",
            ),
            *found.advice,
        ),
    )


def _copy_evidence(tables: RunTables, steady: Pace, seen: HandOver) -> tuple[Evidence, ...]:
    window = _window(tables, steady)
    known = (
        ("hand_over_seconds", seen.copied, "seconds"),
        ("made_before_asked_ratio", seen.made_ratio, "ratio"),
        ("ready_batches_count", seen.ready, "count"),
        ("payload_bytes", seen.payload_bytes, "bytes"),
    )
    return tuple(
        measured(name, value, unit, seen.batches, window) for name, value, unit in known if np.isfinite(value)
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
    return costly(
        kind,
        ratio,
        seconds,
        n=steady.batches,
        window=_window(tables, steady),
        certainty=confidence(steady.batches, 10),
        summary=f"{summary}: {duration(seconds)}, {percent(ratio)} of the run.",
        locus=Locus(host=loop.main[0], rank=loop.rank, role="main", loader=loop.loader, pid=loop.main[1]),
        since_step=step_at(tables, loop.main, steady.first_ns),
        evidence=evidence,
        advice=(advice,),
    )


def _window(tables: RunTables, steady: Pace) -> str:
    return window_text(steady.first_ns, steady.last_ns, origin_ns(tables))


def _speed(seen: HandOver) -> str:
    return f"{size(seen.payload_bytes / max(seen.copied, 1e-9))}/s"


def _rate(steady: Pace, less_seconds: float) -> str:
    faster = 1 / max(steady.interval - less_seconds, 1e-6)
    return f"about {number(faster)} batches/s instead of {number(1 / steady.interval)}"
