"""CUDA out of memory, post mortem: what was asked for, what there was, who held it, and what led there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.diagnosis.device_account import account
from collector.diagnosis.device_growth import tensor_leak
from collector.diagnosis.device_rows import allocators, devices, record_at
from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus, Severity
from collector.diagnosis.frames import floats, key_of, whole, written
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import fact, rank_of
from collector.diagnosis.witnesses import Leak
from collector.quantities import plain_text, size
from collector.store.runs import ProcessKey

#: Figures of the event, each a measurement: the observer's own integers, and the allocator's gauges.
_TOLD = ("requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes")
#: Name of the evidence -> part of the device's account.
_AROUND = {"outside_pytorch_bytes": "non-PyTorch", "other_processes_bytes": "other processes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What is known of one error.

    Attributes:
        event: the `cuda-oom` event; of a caught error, its gauges tell of the end of the step.
        figures: name -> bytes, what is known of `_TOLD` and `_AROUND`.
        growth: the tensors that had been getting more before, None if they had not.
        batch_bytes: the last batch, and the largest before it; NaN if not known.
        phase: of the framework, None if it tells none.

    """

    event: Mapping[str, Any]
    figures: Mapping[str, float]
    growth: Leak | None
    batch_bytes: tuple[float, float]
    phase: str | None

    def of(self, name: str) -> float:
        """A figure, NaN if it is not known."""
        return self.figures.get(name, math.nan)

    @property
    def caught(self) -> bool:
        """Whether the training went on."""
        return self.event.get("caught") is True

    @property
    def cached_bytes(self) -> float:
        """What the allocator held and no tensor used, at the error."""
        return math.nan if self.caught else self.of("reserved_bytes") - self.of("allocated_bytes")


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
    figures = {name: float(event[name]) for name in _TOLD if whole(event.get(name)) is not None}
    for host, number, samples, ranks in devices(tables):
        if (host, number) == (key[0], device):
            parts = account(record_at(samples, at_ns), [record_at(rank.rows, at_ns) for rank in ranks])
            known = parts.parts if parts else {}
            figures |= {name: known[part] for name, part in _AROUND.items() if part in known}
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


def _summary(key: ProcessKey, scene: _Scene) -> str:
    asked = scene.of("requested_bytes")
    text = f"CUDA memory ran out in the training process (pid {key[1]})"
    text += f" in its {scene.phase} phase" if scene.phase else ""
    if math.isfinite(asked):
        text += f": {size(asked)} were asked for, {size(scene.of('free_bytes'))} were free"
    if math.isfinite(scene.cached_bytes):
        text += f", tensors held {size(scene.of('allocated_bytes'))}"
        text += f" and the allocator {size(scene.cached_bytes)} more"
    return text + (". The training caught the error and went on." if scene.caught else ".")


def _evidence(scene: _Scene) -> tuple[Evidence, ...]:
    when = "at the end of that step" if scene.caught else "at the error"
    last, before = scene.batch_bytes
    named = (
        ("batch_payload_bytes", last, "last batch before it"),
        ("earlier_batch_payload_peak_bytes", before, "run"),
        *((name, value, when) for name, value in scene.figures.items()),
    )
    found = [fact(name, value, window, unit="bytes") for name, value, window in named if math.isfinite(value)]
    found.append(fact("errors_count", whole(scene.event.get("errors_count")) or 1, "since the last such event"))
    if scene.event.get("message"):
        found.append(fact("exception", plain_text(str(scene.event["message"]))[:300], "uncaught", unit="text"))
    else:
        found.append(fact("caught", str(scene.event.get("caught")), "by the training", unit="text"))
    if scene.growth is not None:
        rise, n = round(scene.growth.growth.rise), scene.growth.growth.n
        found.append(Evidence(name="allocated_rise_bytes", value=rise, unit="bytes", n=n, window="before it"))
    return tuple(found)


def _advice(scene: _Scene) -> tuple[Advice, ...]:
    """What the figures speak for, the surest first; smaller steps always help."""
    asked, others = scene.of("requested_bytes"), scene.of("other_processes_bytes")
    last, before = scene.batch_bytes
    found = []
    if scene.growth is not None:
        found.append(
            Advice(
                text="Live tensors had been getting more until then: see gpu-tensor-leak before you look at sizes",
                expected=f"the {size(scene.growth.growth.rise)} by which they grew are free",
            )
        )
    if scene.cached_bytes >= asked:
        found.append(
            Advice(
                text="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator held as much as was "
                "asked for, in pieces that were too small",
                expected=f"up to {size(scene.cached_bytes)} become usable",
            )
        )
    if others >= asked:
        found.append(
            Advice(
                text="End the other processes on this device, or use another",
                expected=f"{size(others)} become free",
            )
        )
    if last > before:
        found.append(
            Advice(
                text="Bound the size of a batch (sort or bucket by length, crop, limit the tokens per batch): the "
                "last one was the largest so far",
                expected=f"no batch above {size(before)}, which fitted",
            )
        )
    found.append(
        Advice(
            text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` "
            "finds the largest that fits), activation checkpointing, bfloat16",
            expected="activations shrink in proportion to the batch",
        )
    )
    return tuple(found)
