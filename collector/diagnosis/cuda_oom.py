"""CUDA out of memory, post mortem: what was asked for, what there was, what held it, and what led there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.cuda_errors import TOTAL, CudaError, cuda_errors, figures_at
from collector.diagnosis.device_growth import tensor_leak
from collector.diagnosis.device_rows import allocators
from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Severity
from collector.diagnosis.frames import floats, key_of, whole, written
from collector.diagnosis.oom_message import first_sentences
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import fact
from collector.diagnosis.witnesses import Leak
from collector.quantities import plain_text, size
from collector.store.runs import ProcessKey

_SENTENCE = "CUDA out of memory"
_MESSAGE_CHARACTERS = 500
_LEAST_GAIN = 0.01  # smallest gain of an advice worth giving, as a share of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """One error, at its own moment.

    Attributes:
        error: its process, device and event.
        figures: name -> bytes, of `figures_at`.
        growth: the tensors that had been growing before, None if they had not.
        batch_bytes: the last batch, and the largest before it; NaN if not known.
        phase: of the framework, None if it tells none.

    """

    error: CudaError
    figures: Mapping[str, float]
    growth: Leak | None
    batch_bytes: tuple[float, float]
    phase: str | None

    def of(self, name: str) -> float:
        """Return a figure, NaN if it is not known."""
        return self.figures.get(name, math.nan)

    @property
    def caught(self) -> bool:
        """Whether the training went on."""
        return self.error.event.get("caught") is True

    @property
    def unallocated_bytes(self) -> float:
        """Memory that the allocator held and no tensor used."""
        return self.of("reserved_bytes") - self.of("allocated_bytes")

    @property
    def is_limited(self) -> bool:
        """True if the process reached its own share of the device, while the device had room.

        The allocator refuses then what would take it beyond its limit (c10/cuda/CUDACachingAllocator.cpp,
        `alloc_block`).
        """
        asked, held = self.of("requested_bytes"), np.fmax(self.of("reserved_bytes"), self.of("allocated_bytes"))
        return bool(held + asked > self.of("limit_bytes") and self.of("free_bytes") >= asked)


def find_cuda_ooms(tables: RunTables) -> list[Finding]:
    """`cuda-oom`, one finding per process and device: its last error, or the one that ended the training."""
    return [_finding(tables, error) for error in cuda_errors(tables)]


def ended_by_cuda_oom(tables: RunTables) -> frozenset[ProcessKey]:
    """The training processes that such an error ended."""
    events = [event for event in tables.events_of("cuda-oom") if event.get("caught") is False]
    return frozenset(key for event in events if (key := key_of(event)))


def _finding(tables: RunTables, error: CudaError) -> Finding:
    scene = _scene(tables, error)
    event = error.event
    severity: Severity = "info" if scene.caught else "critical" if event.get("caught") is False else "warning"
    limit = scene.of("limit_bytes")
    return Finding(
        kind="cuda-oom",
        severity=severity,
        confidence=0.97,
        summary=_summary(scene),
        locus=error.locus(tables),
        since_step=whole(event.get("step")),
        evidence=_evidence(scene),
        limit=Limit(name="CUDA memory", value=limit, unit="bytes") if math.isfinite(limit) else None,
        advice=_advice(scene),
    )


def _scene(tables: RunTables, error: CudaError) -> _Scene:
    key, at_ns = error.key, error.at_ns
    everyones = allocators(tables.stream("device_memory"))
    mine = [one.before(at_ns) for one in everyones if (one.key, one.device) == (key, error.device)]
    batches = written(tables, "batch", key)
    payload = floats(batches[floats(batches, "time_ns") <= at_ns], "payload_bytes")
    phases = [e for e in tables.events_of("phase") if key_of(e) == key and e["time_ns"] <= at_ns]
    return _Scene(
        error=error,
        figures=figures_at(tables, error),
        growth=tensor_leak(mine[0]) if mine else None,
        batch_bytes=(
            float(payload[-1]) if len(payload) else math.nan,
            float(np.nanmax(payload[:-1])) if np.isfinite(payload[:-1]).any() else math.nan,
        ),
        phase=str(phases[-1]["phase"]) if phases else None,
    )


def _summary(scene: _Scene) -> str:
    asked, error = scene.of("requested_bytes"), scene.error
    who = f"the training process (pid {error.key[1]})"
    if error.slot is not None:
        main, loader, worker = error.slot
        who = f"DataLoader worker {worker}"
        who += (
            f" of loader {loader} (pid {error.key[1]})"
            if error.key != main
            else f" of the process with pid {main[1]}"
        )
    text = f"CUDA memory ran out in {who}"
    text += f" in its {scene.phase} phase" if scene.phase else ""
    if math.isfinite(asked):
        text += f": {size(asked)} were asked for, {size(scene.of('free_bytes'))} were free"
        if scene.is_limited:
            text += f" on the device, but the process may use {size(scene.of('limit_bytes'))} of it"
    if math.isfinite(scene.unallocated_bytes):
        text += f". Tensors held {size(scene.of('allocated_bytes'))}"
        text += f", the allocator {size(scene.unallocated_bytes)} more"
    return text + (". The training caught the error and went on." if scene.caught else ".")


def _evidence(scene: _Scene) -> tuple[Evidence, ...]:
    last, before = scene.batch_bytes
    named = (
        ("batch_payload_bytes", last, "last batch before it"),
        ("earlier_batch_payload_peak_bytes", before, "run"),
        *(
            (name, value, "at the error")
            for name, value in scene.figures.items()
            if name != TOTAL or scene.is_limited
        ),
    )
    found = [fact(name, value, window, unit="bytes") for name, value, window in named if math.isfinite(value)]
    found.append(
        fact("errors_count", whole(scene.error.event.get("errors_count")) or 1, "since the last such event")
    )
    if scene.error.event.get("message"):
        message = plain_text(str(scene.error.event["message"]))
        message = first_sentences(message[max(message.rfind(_SENTENCE), 0) :])  # a worker's comes with a traceback
        found.append(fact("exception", message[:_MESSAGE_CHARACTERS], "uncaught", unit="text"))
    else:
        went_on = "yes, the training went on" if scene.caught else "not known, the process ended after it"
        found.append(fact("caught", went_on, "the error", unit="text"))
    if scene.growth is not None:
        rise, n = round(scene.growth.growth.rise), scene.growth.growth.n
        found.append(Evidence(name="allocated_rise_bytes", value=rise, unit="bytes", n=n, window="before it"))
    return tuple(found)


def _advice(scene: _Scene) -> tuple[Advice, ...]:
    """Return what the figures speak for, what gains most first; a smaller step always helps, and comes last."""
    asked, others = scene.of("requested_bytes"), scene.of("other_processes_bytes")
    last, before = scene.batch_bytes
    found: list[tuple[float, Advice]] = []
    if scene.growth is not None:
        rise = scene.growth.growth.rise
        advice = Advice(
            text="Live tensors had been growing until then: see gpu-tensor-leak before you look at sizes",
            expected=f"the {size(rise)} by which they grew are free",
        )
        found.append((rise, advice))
    if scene.is_limited:
        more = scene.of(TOTAL) - scene.of("limit_bytes")
        advice = Advice(
            text="Give the process a larger share of the device: torch.cuda.set_per_process_memory_fraction",
            expected=f"up to {size(min(more, scene.of('free_bytes')))} become usable",
        )
        found.append((more, advice))
    if scene.unallocated_bytes >= asked:
        advice = Advice(
            text="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator held as much as was "
            "asked for, in pieces that were too small",
            expected=f"up to {size(scene.unallocated_bytes)} become usable",
        )
        found.append((scene.unallocated_bytes, advice))
    if others >= asked:
        advice = Advice(
            text="End the other processes on this device, or use another",
            expected=f"{size(others)} become free",
        )
        found.append((others, advice))
    if last > before:
        advice = Advice(
            text="Bound the size of a batch (sort or bucket by length, crop, limit the tokens per batch): the "
            "last one was the largest so far",
            expected=f"no batch above {size(before)}, which fitted",
        )
        found.append((last - before, advice))
    siblings = np.fmax(scene.of("run_processes_bytes"), scene.of("rest_of_run_bytes"))
    if scene.error.slot is not None and siblings >= asked:
        advice = Advice(
            text="Keep CUDA out of the DataLoader workers: make tensors on the CPU there, and move batches to the "
            "device in the training process",
            expected=f"no context and no cache of each worker: up to {size(siblings)} become free",
        )
        found.append((siblings, advice))
    least = _LEAST_GAIN * scene.of("limit_bytes")
    found = sorted((each for each in found if not each[0] < least), key=lambda each: -each[0])
    smaller = Advice(
        text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` "
        "finds the largest that fits), activation checkpointing, bfloat16",
        expected="activations shrink in proportion to the batch",
    )
    return (*(advice for _, advice in found), smaller)
