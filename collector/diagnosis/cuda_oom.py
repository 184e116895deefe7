"""CUDA out of memory, post mortem: what was asked for, what there was, what held it, and what led there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.diagnosis.device_growth import tensor_leak
from collector.diagnosis.device_rows import allocators, devices, record_at
from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus, Severity
from collector.diagnosis.frames import floats, key_of, whole, written
from collector.diagnosis.oom_message import first_sentences, message_figures
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import fact, rank_of
from collector.diagnosis.witnesses import Leak
from collector.quantities import plain_text, size
from collector.store.runs import ProcessKey

#: Figures of the observer and the allocator at the moment of the error.
_AT_ERROR = ("requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes")
_TOTAL = "device_total_bytes"
#: Figures of PyTorch's message are rounded to 0.01 GiB.
_ROUNDED_BYTES = 0.01 * (1 << 30)
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """One error, at its own moment.

    Attributes:
        event: the `cuda-oom` event.
        figures: name -> bytes: those of `_AT_ERROR`, `device_total_bytes`, and the memory that this process's
            PyTorch did not have: `outside_pytorch_bytes` and `other_processes_bytes`, or `unattributed_bytes` where
            they can't be told apart.
        growth: the tensors that had been growing before, None if they had not.
        batch_bytes: the last batch, and the largest before it; NaN if not known.
        phase: of the framework, None if it tells none.

    """

    event: Mapping[str, Any]
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
        return self.event.get("caught") is True

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
    """The last error of each process and device; one that ended the training goes before those that it caught."""
    last: dict[tuple[ProcessKey, int | None], Mapping[str, Any]] = {}
    for event in sorted(tables.events_of("cuda-oom"), key=lambda event: event.get("caught") is not True):
        if (key := key_of(event)) is not None:
            last[key, whole(event.get("device"))] = event
    return [_finding(tables, key, device, event) for (key, device), event in last.items()]


def ended_by_cuda_oom(tables: RunTables) -> frozenset[ProcessKey]:
    """The training processes that such an error ended."""
    events = [event for event in tables.events_of("cuda-oom") if event.get("caught") is False]
    return frozenset(key for event in events if (key := key_of(event)))


def _finding(tables: RunTables, key: ProcessKey, device: int | None, event: Mapping[str, Any]) -> Finding:
    scene = _scene(tables, key, device, event)
    severity: Severity = "info" if scene.caught else "critical" if event.get("caught") is False else "warning"
    limit = scene.of("limit_bytes")
    return Finding(
        kind="cuda-oom",
        severity=severity,
        confidence=0.97,
        summary=_summary(key, scene),
        locus=Locus(host=key[0], rank=rank_of(tables, key), device=device, role="main", pid=key[1]),
        since_step=whole(event.get("step")),
        evidence=_evidence(scene),
        limit=Limit(name="CUDA memory", value=limit, unit="bytes") if math.isfinite(limit) else None,
        advice=_advice(scene),
    )


def _scene(tables: RunTables, key: ProcessKey, device: int | None, event: Mapping[str, Any]) -> _Scene:
    at_ns = float(event.get("error_time_ns") or event["time_ns"])
    figures = _figures(tables, key, device, event, at_ns)
    everyones = allocators(tables.stream("device_memory"))
    mine = [one.before(at_ns) for one in everyones if (one.key, one.device) == (key, device)]
    batches = written(tables, "batch", key)
    payload = floats(batches[floats(batches, "time_ns") <= at_ns], "payload_bytes")
    phases = [e for e in tables.events_of("phase") if key_of(e) == key and e["time_ns"] <= at_ns]
    return _Scene(
        event=event,
        figures=figures,
        growth=tensor_leak(mine[0]) if mine else None,
        batch_bytes=(
            float(payload[-1]) if len(payload) else math.nan,
            float(np.nanmax(payload[:-1])) if np.isfinite(payload[:-1]).any() else math.nan,
        ),
        phase=str(phases[-1]["phase"]) if phases else None,
    )


def _figures(
    tables: RunTables, key: ProcessKey, device: int | None, event: Mapping[str, Any], at_ns: float
) -> dict[str, float]:
    """Return the figures of `_Scene`: those of the moment itself, then those of the message, which are rounded."""
    said = message_figures(str(event.get("message") or ""))
    figures = {name: float(event[name]) for name in _AT_ERROR if whole(event.get(name)) is not None}
    figures = {name: said[name] for name in ("requested_bytes", "free_bytes") if name in said} | figures
    limits = [said[name] for name in ("allowed_bytes", "total_bytes") if name in said]
    if limits:
        figures.setdefault("limit_bytes", min(limits))
    if "allocated_bytes" not in figures and "allocated_bytes" in said:
        figures["allocated_bytes"] = said["allocated_bytes"]
        if "unallocated_bytes" in said:
            figures["reserved_bytes"] = said["allocated_bytes"] + said["unallocated_bytes"]
    sample: Mapping[str, float | None] = {}
    for host, number, samples, _ in devices(tables):
        if (host, number) == (key[0], device):
            sample = record_at(samples, at_ns)
    total = sample.get("total_bytes") or said.get("total_bytes")
    if total is None:
        return figures
    figures[_TOTAL] = total
    return figures | _elsewhere(figures, total, sample, said.get("process_used_bytes"))


def _elsewhere(
    figures: Mapping[str, float], total: float, sample: Mapping[str, float | None], process_used: float | None
) -> dict[str, float]:
    """Return where the memory was that this process's PyTorch did not have; what is not known is not there.

    All that was in use is the device's total less what was free at the error. Of that, the message says what this
    process had. Without it the driver's last sample says what processes of others hold: no step of this one changes
    that.
    """
    reserved, free = figures.get("reserved_bytes"), figures.get("free_bytes")
    if reserved is None or free is None:
        return {}
    outside = total - free - reserved - (sample.get("reserved_bytes") or 0.0)
    others = sample.get("other_used_bytes")
    if process_used is not None:
        others = outside - (process_used - reserved)
        others = others if others > 2 * _ROUNDED_BYTES else 0.0
    if others is None:
        return {"unattributed_bytes": max(0.0, outside)}
    return {"outside_pytorch_bytes": max(0.0, outside - others), "other_processes_bytes": others}


def _summary(key: ProcessKey, scene: _Scene) -> str:
    asked = scene.of("requested_bytes")
    text = f"CUDA memory ran out in the training process (pid {key[1]})"
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
            if name != _TOTAL or scene.is_limited
        ),
    )
    found = [fact(name, value, window, unit="bytes") for name, value, window in named if math.isfinite(value)]
    found.append(fact("errors_count", whole(scene.event.get("errors_count")) or 1, "since the last such event"))
    if scene.event.get("message"):
        message = first_sentences(plain_text(str(scene.event["message"])))
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
        more = scene.of(_TOTAL) - scene.of("limit_bytes")
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
    found.sort(key=lambda each: -each[0])
    smaller = Advice(
        text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` "
        "finds the largest that fits), activation checkpointing, bfloat16",
        expected="activations shrink in proportion to the batch",
    )
    return (*(advice for _, advice in found), smaller)
