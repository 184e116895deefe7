"""Find out whether a device will run out of memory, and when.

Demand is the memory that the driver counts, less the part of the allocator's cache that it can give back: not the
holes between live blocks. The activations of a step are gone by the time the allocator is recorded, so the peaks
come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.memory import resources
from collector.diagnosis.memory.exhaustion import FULL_RATIO, Course, exhaustion_finding, full_finding
from collector.diagnosis.memory.gpu_growth import MIN_RETRY_STEPS, beyond_reserved, retry_steps, use_of
from collector.diagnosis.memory.leak import CONFIRMED, GrowingUse, Use, share_of, witnesses_of
from collector.diagnosis.run.allocators import Allocator, capacity_of, devices
from collector.diagnosis.run.columns import floats, last, peak, seconds
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth, warm_up_end
from collector.findings import Evidence, Finding, Limit, Locus, cannot_tell, extended, fact


def find_device_risk(tables: RunTables) -> list[Finding]:
    """Find `gpu-oom-risk`, at most once per device, and per process that may use only a share of it."""
    findings: list[Finding | None] = []
    for host, device, samples, ranks in devices(tables):
        capacities = [capacity_of(tables, rank) for rank in ranks]
        total = max([last(floats(samples, "total_bytes")), *(total for total, _ in capacities)], key=np.nan_to_num)
        shares = [(rank, share) for rank, (_, share) in zip(ranks, capacities, strict=True) if share < total]
        on_shares = [_judge(_share_of_device(tables, rank, share), [rank]) for rank, share in shares]
        findings += on_shares
        if not any(on_shares):  # a share is used up before the device is
            findings.append(_judge(_whole_device(tables, host, device, samples, ranks, total), ranks))
    return [finding for finding in findings if finding is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The use of one limit of device memory over time.

    Attributes:
        what: its name, at the beginning of a sentence.
        demand: memory that can't be given back, between two steps.
        witnesses: other series of bytes that would grow with it, at the same times.
        peak_bytes: the highest use, NaN if not known.
        used, library, unrecorded, others: bytes that the driver counts: all, those of the run's processes outside
            PyTorch, of its processes without records, and of other processes; None where it does not report them.
    """

    what: str
    limit: Limit
    demand: Use
    witnesses: Mapping[str, Floats]
    peak_bytes: float
    used: Floats | None = None
    library: Floats | None = None
    unrecorded: Floats | None = None
    others: Floats | None = None


def _whole_device(
    tables: RunTables, host: str, device: int, samples: pd.DataFrame, ranks: list[Allocator], total: float
) -> _Memory:
    """Return the use that the driver counts, or without it that of PyTorch, which is less."""
    used, run = floats(samples, "used_bytes"), floats(samples, "process_used_bytes")
    has_driver = bool(np.isfinite(used).any())
    times = seconds(samples) if has_driver else ranks[0].seconds
    reserved, allocated, holes = (
        np.sum([np.zeros(len(times)), *(rank.at(times, name) for rank in ranks)], axis=0)
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    held = allocated + np.nan_to_num(holes)
    what, locus = f"The memory of GPU {device}", Locus(host=host, device=device)
    limit = Limit(name=f"GPU {device}", value=total, unit="bytes")
    of_pytorch = {"allocated_rise_bytes": allocated, "inactive_split_rise_bytes": holes} if ranks else {}
    if not has_driver:
        return _Memory(
            what=f"{what}, counting PyTorch alone because NVML reports nothing,",
            limit=limit,
            demand=Use.of(tables, "demand", locus, times, held),
            witnesses={**of_pytorch, "reserved_rise_bytes": reserved},
            peak_bytes=math.nan,
        )
    of_device = {"device_used_rise_bytes": used} if ranks else {}
    return _Memory(
        what=what,
        limit=limit,
        demand=Use.of(tables, "demand", locus, times, beyond_reserved(ranks, times, used) + held),
        witnesses={**of_pytorch, **of_device, "process_used_rise_bytes": run},
        peak_bytes=peak(used),
        used=used,
        library=beyond_reserved(ranks, times, run) if ranks else None,
        unrecorded=run - floats(samples, "recorded_used_bytes") if ranks else None,
        others=floats(samples, "other_used_bytes"),
    )


def _share_of_device(tables: RunTables, rank: Allocator, share: float) -> _Memory:
    """Return a process's use of the share of the device that it may use (`set_per_process_memory_fraction`)."""
    return _Memory(
        what=f"The share of GPU {rank.device} that pid {rank.key[1]} may use",
        limit=Limit(name=f"its share of GPU {rank.device}", value=share, unit="bytes"),
        demand=use_of(tables, rank, "demand", rank.held_bytes),
        witnesses={
            "allocated_rise_bytes": rank.column("allocated_bytes"),
            "inactive_split_rise_bytes": rank.column("inactive_split_bytes"),
            "reserved_rise_bytes": rank.column("reserved_bytes"),
        },
        peak_bytes=peak(rank.column("reserved_peak_bytes")),
    )


def _judge(memory: _Memory, ranks: list[Allocator]) -> Finding | None:
    demand, limit = memory.demand, memory.limit
    if not limit.value > 0 or not np.isfinite(demand.values).any():
        return _by_retries(ranks, demand.locus, limit, math.nan)
    trend = demand.growth()
    if trend is None:
        return _by_retries(ranks, demand.locus, limit, memory.peak_bytes)
    others = _confirmed(memory, {"other_processes_rise_bytes": memory.others}, trend)
    witnesses = others or _confirmed(memory, memory.witnesses, trend)
    resource = resources.GPU_MEMORY if ranks else resources.GPU_WITHOUT_RECORDS
    if others:
        resource = resources.GPU_OF_OTHERS
    elif unrecorded := _confirmed(memory, {"unrecorded_processes_rise_bytes": memory.unrecorded}, trend):
        resource, witnesses = resources.GPU_OF_UNRECORDED, (*witnesses, *unrecorded)
    elif [witness.name for witness in witnesses] == ["device_used_rise_bytes"]:
        resource = resources.GPU_UNATTRIBUTED
    use = replace(demand, values=_use_at_limit(memory, trend, ranks))
    growing = GrowingUse(use, trend, witnesses)
    course = Course(what=memory.what, resource=resource, growing=growing, limit=limit)
    if not witnesses or not course.is_relevant:
        return _by_retries(ranks, demand.locus, limit, memory.peak_bytes)
    risk = exhaustion_finding(course)
    return extended(risk, "Other processes grow there, not this run.") if others else risk


def _confirmed(memory: _Memory, series: Mapping[str, Floats | None], trend: Growth) -> tuple[Evidence, ...]:
    times = memory.demand.times
    return witnesses_of(trend, {name: (times, values) for name, values in series.items() if values is not None})


def _use_at_limit(memory: _Memory, trend: Growth, ranks: list[Allocator]) -> Floats:
    """Return the use that meets the limit: demand at the peaks of the steps, or all used bytes if a library grows.

    The driver refuses a library memory even while PyTorch could still give back its cache.
    """
    demand, library, used = memory.demand, memory.library, memory.used
    if library is not None and used is not None and share_of(demand.times, library, trend) >= CONFIRMED:
        return used
    return np.sum([demand.values, *(rank.peaks_above(demand.times) for rank in ranks)], axis=0)  # type: ignore[no-any-return]


def _by_retries(ranks: list[Allocator], locus: Locus, limit: Limit, used: float) -> Finding | None:
    """Return the finding that allocations failed after the warm-up until the cache was given back."""
    steps = sum(
        retry_steps(rank, float(rank.seconds[warm_up_end(rank.column("allocated_bytes"))]))
        for rank in ranks
        if len(rank.rows) > 1
    )
    is_full = used >= FULL_RATIO * limit.value
    if steps < MIN_RETRY_STEPS or (math.isfinite(used) and not is_full):
        return None
    n = sum(len(rank.rows) for rank in ranks)
    retries = fact("alloc_retry_steps_count", steps, "after the warm-up", n=n)
    if is_full:
        unused = sum(
            peak(rank.column("reserved_peak_bytes")) - peak(rank.column("allocated_peak_bytes")) for rank in ranks
        )
        evidence: tuple[Evidence, ...] = retries, fact("device_used_peak_bytes", used, "run", n=n)
        if used - unused < FULL_RATIO * limit.value:
            evidence = *evidence, fact("unused_at_peak_bytes", unused, "run", n=n)
            return full_finding(resources.GPU_FULL_OF_CACHE, limit, used, locus, evidence, steps=steps)
        return full_finding(resources.GPU_MEMORY, limit, used, locus, evidence, steps=steps)
    return cannot_tell(
        f"In {steps} steps an allocation on GPU {locus.device} found no room, and PyTorch released its cache and "
        "tried again. It is not known whether memory runs out: the use of the device is not known, and where NVML "
        "fails, PyTorch counts no errors, so the second try may have ended in one that the training caught.",
        retries,
        locus=locus,
        confidence=0.9,
    )
