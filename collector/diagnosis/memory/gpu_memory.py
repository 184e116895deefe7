"""Find growth of a device's memory and of pinned host memory, and devices that will run out of memory.

There are four mechanisms of growth, each with two measurements that must agree:

- live tensors: their bytes and their number,
- unused memory of the allocator's cache, and holes, failed allocations or private pools,
- memory outside PyTorch: the driver's count for the run's processes, and for the whole device,
- the cache of pinned host memory: its own gauges, and the resident memory of the process.

The high-water mark of uneven batches makes the allocator's cache grow too, so without a witness it is no finding.

The demand on a device is the memory that the driver counts, less the part of the allocator's cache that it can
give back: not the holes between live blocks. The activations of a step are gone by the time the allocator is
recorded, so the peaks come on top.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.memory import resources
from collector.diagnosis.memory.exhaustion import FULL_RATIO, Course, exhaustion_finding, full_finding
from collector.diagnosis.memory.leak import (
    CONFIRMED,
    GrowingUse,
    Use,
    leak_finding,
    negligible_bytes,
    optimizer_bytes,
    optimizer_finding,
    rise_since,
    share_of,
    witnesses_of,
)
from collector.diagnosis.run.allocators import Allocator, capacity_of, devices
from collector.diagnosis.run.columns import floats, last, median, peak, sampled, seconds
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import while_training
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, Floats, Growth, warm_up_end
from collector.findings import Evidence, Finding, Limit, Locus, cannot_tell, extended, fact
from collector.units import size

#: Steps with failed allocations that count as evidence: one may be a library that tries what fits.
_MIN_RETRY_STEPS = 2
#: Fewest tensors that a step keeps if it keeps a graph with what that saved.
_TENSORS_OF_A_GRAPH = 3


def find_device_growth(tables: RunTables) -> list[Finding]:
    """Find `gpu-tensor-leak`, `gpu-fragmentation`, `pinned-cache-growth` and `gpu-non-pytorch-growth`."""
    findings: list[Finding] = []
    pinned: set[object] = set()
    for host, device, samples, ranks in devices(tables):
        for rank in ranks:
            holes = _fragmentation(tables, rank)
            findings += [t for t in _tensors(tables, rank) if not (holes and t.kind == "cannot-tell")] + holes
            if rank.key not in pinned and (cache := _pinned_cache(tables, rank)):
                pinned.add(rank.key)  # the records of each device show the same cache
                findings += cache
        if ranks:  # otherwise the memory that PyTorch holds is not known
            place = Locus(host=host, device=device)
            findings += _unrecorded(tables, place, samples) + _outside(tables, place, samples, ranks)
    return findings


def _beyond_reserved(ranks: list[Allocator], times: Floats, used: Floats) -> Floats:
    """Return the part of the driver's count `used` that the allocators did not reserve.

    The driver counts what PyTorch reserves at once, its records show that at the next step, which may follow a long
    evaluation. A sample between two records with other reserved memory is replaced by those around it.
    """
    beyond: Floats = used - np.sum(
        [np.zeros(len(times)), *(rank.at(times, "reserved_bytes") for rank in ranks)], axis=0
    )
    known = np.isfinite(beyond)
    steady = known.copy()
    for rank in ranks:
        reserved, after = rank.column("reserved_bytes"), np.searchsorted(rank.seconds, times, side="right")
        change = np.diff(reserved, prepend=reserved[:1], append=reserved[-1:])[after]
        steady &= np.abs(change) < negligible_bytes(reserved)
    if steady.any():
        beyond[known & ~steady] = np.interp(times[known & ~steady], times[steady], beyond[steady])
    return beyond


def _use_of(tables: RunTables, rank: Allocator, series: str, values: Floats) -> Use:
    """Return the use of a device's memory by one process, at the records of its allocator."""
    return Use(
        tables=tables,
        series=series,
        locus=rank.locus,
        key=rank.key,
        times=rank.seconds,
        values=values,
        steps=rank.steps,
    )


def tensors_of(tables: RunTables, rank: Allocator) -> Use:
    """Return the memory of live tensors, without gradients and state of optimizers."""
    kept = optimizer_bytes(tables, rank.key, rank.seconds, rank.locus.device)
    return _use_of(tables, rank, "allocated", rank.column("allocated_bytes") - kept)


def step_peak_of(tables: RunTables, rank: Allocator) -> Use:
    """Return how far the highest peak so far is above what stays after a step: what the steps take for a while."""
    in_step = rank.column("allocated_peak_bytes") - rank.column("allocated_bytes")
    return _use_of(tables, rank, "step_peak", in_step)


def _tensors(tables: RunTables, rank: Allocator) -> list[Finding]:
    """Return the growth of live tensors; without a witness if their number does not grow, or is not known."""
    use, allocated = tensors_of(tables, rank), rank.column("allocated_bytes")
    trend = use.growth()
    if trend is None:
        where = f"Memory of tensors on GPU {rank.locus.device} grows"
        finding = optimizer_finding(use, allocated - use.values, negligible_bytes(allocated), grows=where)
        return [finding] if finding is not None else []
    is_single = _keeps_single(rank.column("allocation_count")[rank.seconds >= trend.since_seconds])
    resource = resources.SINGLE_TENSORS if is_single else resources.TENSORS
    return [leak_finding(resource, GrowingUse(use, trend, more_tensors(tables, rank, trend)))]


def _keeps_single(counts: Floats) -> bool:
    """Return whether the tensors that stay came one or two at a time, by their number after each step.

    False where that is not known, or hidden by tensors that come and go.
    """
    if not len(counts) or not np.isfinite(counts).all():
        return False
    staying = np.minimum.accumulate(counts[::-1])[::-1]
    came = np.sort(np.diff(staying))
    half = np.searchsorted(np.cumsum(came), came.sum() / 2)  # half of them came in larger numbers
    passing = float(np.median(counts - staying))
    return bool(came.sum() > 0 and max(came[half], passing) < _TENSORS_OF_A_GRAPH)


def more_tensors(tables: RunTables, rank: Allocator, trend: Growth) -> tuple[Evidence, ...]:
    """Return the evidence that tensors are kept: their number rises.

    `cudaMallocAsync` does not count them. There the memory that the driver reserves must rise. What a step takes
    for a while must not, as it does with larger batches and with a tensor that is made again, each time larger.
    """
    if np.isfinite(rank.column("allocation_count")).any():
        # Counts are whole numbers: the least trend is one more in each of the fewest blocks.
        counts = _use_of(tables, rank, "allocation", rank.column("allocation_count")).growth(BLOCK_COUNTS[-1])
        if counts is None:
            return ()
        return (fact("allocation_rise_count", round(counts.rise), "same window", n=counts.n),)
    if not share_of(rank.seconds, step_peak_of(tables, rank).values, trend) < CONFIRMED:  # or not known
        return ()
    return witnesses_of(trend, {"reserved_rise_bytes": (rank.seconds, rank.column("reserved_bytes"))})


def _fragmentation(tables: RunTables, rank: Allocator) -> list[Finding]:
    """Return the growth of unused memory, or else that of the holes, which PyTorch can't release."""
    reserved, split = rank.column("reserved_bytes"), rank.column("inactive_split_bytes")
    unused = reserved - rank.column("active_bytes")
    use = _use_of(tables, rank, "unused", unused)
    trend = use.growth(negligible_bytes(reserved))
    witnesses: tuple[Evidence, ...] = ()
    if trend is not None:
        if share_of(rank.seconds, step_peak_of(tables, rank).values, trend) >= CONFIRMED:
            return []  # steps need it: their batches grow
        pools = {"private_pool_rise_bytes": (rank.seconds, rank.column("private_pool_bytes"))}
        if witnesses := witnesses_of(trend, pools):
            return [leak_finding(resources.PRIVATE_POOLS, GrowingUse(use, trend, witnesses))]
        witnesses = witnesses_of(trend, {"inactive_split_rise_bytes": (rank.seconds, split)})
        steps = _retry_steps(rank, trend.since_seconds)
        if steps >= _MIN_RETRY_STEPS:
            witnesses = (*witnesses, fact("alloc_retry_steps_count", steps, "same window", n=trend.n))
    if not witnesses:
        # Without a witness it is the high-water mark of uneven sizes, unless the holes grow by themselves.
        use = _use_of(tables, rank, "inactive_split", split)
        trend = use.growth(negligible_bytes(reserved))
        witnesses = () if trend is None else witnesses_of(trend, {"unused_rise_bytes": (rank.seconds, unused)})
    if trend is None or not witnesses:
        return []
    return [leak_finding(resources.FRAGMENTATION, GrowingUse(use, trend, witnesses))]


def _retry_steps(rank: Allocator, since_seconds: float) -> int:
    """Return the number of steps since then in which an allocation succeeded only after the cache was flushed."""
    failed = np.diff(rank.column("alloc_retry_count")) > np.nan_to_num(np.diff(rank.column("oom_count")))
    return int((failed & (rank.seconds[1:] >= since_seconds)).sum())


def _pinned_cache(tables: RunTables, rank: Allocator) -> list[Finding]:
    """Return the growth of unused pinned memory; of all pinned memory where its use is not known."""
    pinned, active = rank.column("pinned_allocated_bytes"), rank.column("pinned_active_bytes")
    knows_use = bool(2 * np.isfinite(pinned - active).sum() > np.isfinite(pinned).sum())
    use = dataclasses.replace(
        _use_of(tables, rank, "pinned_cache" if knows_use else "pinned", pinned - active if knows_use else pinned),
        locus=dataclasses.replace(rank.locus, device=None),
    )
    trend = use.growth(negligible_bytes(pinned))
    if trend is None:
        return []
    rows = while_training(tables, sampled(tables, rank.key))
    witnesses = witnesses_of(trend, {"rss_rise_bytes": (seconds(rows), floats(rows, "rss_bytes"))})
    if witnesses and knows_use:
        in_use = round(rise_since(rank.seconds, active, trend))
        witnesses = (*witnesses, fact("pinned_active_rise_bytes", in_use, "same window", n=trend.n))
    resource = resources.PINNED_CACHE if knows_use else resources.PINNED_MEMORY
    return [leak_finding(resource, GrowingUse(use, trend, witnesses))]


def _unrecorded(tables: RunTables, locus: Locus, samples: pd.DataFrame) -> list[Finding]:
    """Return the growth of processes of the run that do not record their allocator: it may be PyTorch's memory."""
    used, recorded = (floats(samples, name) for name in ("process_used_bytes", "recorded_used_bytes"))
    use = Use.of(tables, "unrecorded_processes", locus, seconds(samples), used - recorded)
    trend = use.growth()
    return [leak_finding(resources.UNRECORDED, GrowingUse(use, trend))] if trend is not None else []


def _outside(tables: RunTables, locus: Locus, samples: pd.DataFrame, ranks: list[Allocator]) -> list[Finding]:
    """Return the growth of used memory that PyTorch is not known to reserve, in the run's processes."""
    times, recorded = seconds(samples), floats(samples, "recorded_used_bytes")
    recorded = np.where(np.isfinite(recorded), recorded, floats(samples, "process_used_bytes"))  # of an older run
    is_covered = times <= max(rank.seconds[-1] for rank in ranks)  # later it may be PyTorch that grows
    run, whole_device = (
        np.where(is_covered, _beyond_reserved(ranks, times, used), np.nan)
        for used in (recorded, floats(samples, "used_bytes"))
    )
    has_run = bool(np.isfinite(run).any())
    use = Use.of(tables, "outside_pytorch", locus, times, run if has_run else whole_device)
    trend = use.growth()
    if trend is None:
        return []
    if not has_run:
        return [leak_finding(resources.UNATTRIBUTED, GrowingUse(use, trend))]
    witnesses = witnesses_of(trend, {"device_outside_pytorch_rise_bytes": (times, whole_device)})
    return [leak_finding(resources.OUTSIDE_PYTORCH, GrowingUse(use, trend, witnesses))]


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
        demand=Use.of(tables, "demand", locus, times, _beyond_reserved(ranks, times, used) + held),
        witnesses={**of_pytorch, **of_device, "process_used_rise_bytes": run},
        peak_bytes=peak(used),
        used=used,
        library=_beyond_reserved(ranks, times, run) if ranks else None,
        unrecorded=run - floats(samples, "recorded_used_bytes") if ranks else None,
        others=floats(samples, "other_used_bytes"),
    )


def _share_of_device(tables: RunTables, rank: Allocator, share: float) -> _Memory:
    """Return a process's use of the share of the device that it may use (`set_per_process_memory_fraction`)."""
    return _Memory(
        what=f"The share of GPU {rank.device} that pid {rank.key[1]} may use",
        limit=Limit(name=f"its share of GPU {rank.device}", value=share, unit="bytes"),
        demand=_use_of(tables, rank, "demand", rank.held_bytes),
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
        return _by_retries(ranks, memory, math.nan)
    trend = demand.growth()
    if trend is None:
        return _by_retries(ranks, memory, memory.peak_bytes)
    others = _confirmed(memory, {"other_processes_rise_bytes": memory.others}, trend)
    witnesses = others or _confirmed(memory, memory.witnesses, trend)
    resource = resources.GPU_MEMORY if ranks else resources.GPU_WITHOUT_RECORDS
    if others:
        resource = resources.GPU_OF_OTHERS
    elif unrecorded := _confirmed(memory, {"unrecorded_processes_rise_bytes": memory.unrecorded}, trend):
        resource, witnesses = resources.GPU_OF_UNRECORDED, (*witnesses, *unrecorded)
    elif [witness.name for witness in witnesses] == ["device_used_rise_bytes"]:
        resource = resources.GPU_UNATTRIBUTED
    use = dataclasses.replace(demand, values=_use_at_limit(memory, trend, ranks))
    growing = GrowingUse(use, trend, witnesses)
    course = Course(what=memory.what, resource=resource, growing=growing, limit=limit)
    if not witnesses or not course.is_relevant:
        return _by_retries(ranks, memory, memory.peak_bytes)
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


def _by_retries(ranks: list[Allocator], memory: _Memory, used: float) -> Finding | None:
    """Return the finding that allocations failed after the warm-up until the cache was given back."""
    limit, locus = memory.limit, memory.demand.locus
    steps = sum(
        _retry_steps(rank, float(rank.seconds[warm_up_end(rank.column("allocated_bytes"))]))
        for rank in ranks
        if len(rank.rows) > 1
    )
    is_full = used >= FULL_RATIO * limit.value
    if steps < _MIN_RETRY_STEPS or (math.isfinite(used) and not is_full):
        return None
    n = sum(len(rank.rows) for rank in ranks)
    retries = fact("alloc_retry_steps_count", steps, "after the warm-up", n=n)
    if not is_full:
        return cannot_tell(
            f"In {steps} steps an allocation on GPU {locus.device} found no room, and PyTorch released its cache "
            "and tried again. It is not known whether memory runs out: the use of the device is not known, and "
            "where NVML fails, PyTorch counts no errors, so the second try may have ended in one that the training "
            "caught.",
            retries,
            locus=locus,
            confidence=0.9,
        )
    unused = sum(
        peak(rank.column("reserved_peak_bytes")) - peak(rank.column("allocated_peak_bytes")) for rank in ranks
    )
    others, unrecorded = _held_when_full(memory, memory.others), _held_when_full(memory, memory.unrecorded)
    # Without any of these the device would not be full; the largest comes first.
    reliefs = (
        (unused, resources.GPU_FULL_OF_CACHE, fact("unused_at_peak_bytes", unused, "run", n=n)),
        (others, resources.GPU_FULL_OF_OTHERS, fact("other_processes_bytes", others, "while it was full")),
        (
            unrecorded,
            resources.GPU_FULL_OF_UNRECORDED,
            fact("run_processes_bytes", unrecorded, "while it was full"),
        ),
    )
    enough = [each for each in reliefs if used - each[0] < FULL_RATIO * limit.value]
    _, resource, *further = max(enough, key=lambda each: each[0]) if enough else (0.0, resources.GPU_MEMORY)
    evidence = (retries, fact("device_used_peak_bytes", used, "run", n=n), *further)
    return full_finding(
        resource, limit, used, locus, evidence, steps=steps, others=size(others), unrecorded=size(unrecorded)
    )


def _held_when_full(memory: _Memory, held: Floats | None) -> float:
    """Return the median of what some processes held while the device was full, NaN if it is not known."""
    if held is None or memory.used is None:
        return math.nan
    return median(held[memory.used >= FULL_RATIO * memory.limit.value])
