"""Find growth of a device's memory, and of pinned host memory.

There are four mechanisms, each with two measurements that must agree:

- live tensors: their bytes and their number,
- unused memory of the allocator's cache, and holes, failed allocations or the pools of CUDA graphs,
- memory outside PyTorch: the driver's count for the run's processes, and for the whole device,
- the cache of pinned host memory: its own gauges, and the resident memory of the process.

The high-water mark of uneven batches makes the allocator's cache grow too, so without a witness it is no finding.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from collector.diagnosis.memory import resources
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
from collector.diagnosis.run.allocators import Allocator, devices
from collector.diagnosis.run.columns import floats, sampled, seconds
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import while_training
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, Floats, Growth
from collector.findings import Evidence, Finding, Locus, fact

#: Steps with failed allocations that count as evidence: one may be a library that tries what fits.
MIN_RETRY_STEPS = 2
#: Tensors by which a step adds at least to those kept, if it keeps a graph with what that saved.
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


def beyond_reserved(ranks: list[Allocator], times: Floats, used: Floats) -> Floats:
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


def use_of(tables: RunTables, rank: Allocator, series: str, values: Floats) -> Use:
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
    return use_of(tables, rank, "allocated", rank.column("allocated_bytes") - kept)


def step_peak_of(tables: RunTables, rank: Allocator) -> Use:
    """Return how far the highest peak so far is above what stays after a step: what the steps take for a while."""
    in_step = rank.column("allocated_peak_bytes") - rank.column("allocated_bytes")
    return use_of(tables, rank, "step_peak", in_step)


def _tensors(tables: RunTables, rank: Allocator) -> list[Finding]:
    """Return the growth of live tensors; without a witness if their number does not grow, or is not known."""
    use, allocated = tensors_of(tables, rank), rank.column("allocated_bytes")
    trend = use.growth()
    if trend is None:
        where = f"Memory of tensors on GPU {rank.locus.device} grows"
        finding = optimizer_finding(use, allocated - use.values, negligible_bytes(allocated), grows=where)
        return [finding] if finding is not None else []
    counts = np.diff(rank.column("allocation_count")[rank.seconds >= trend.since_seconds])
    is_single = (counts > 0).any() and np.median(counts[counts > 0]) < _TENSORS_OF_A_GRAPH
    resource = resources.SINGLE_TENSORS if is_single else resources.TENSORS
    return [leak_finding(resource, GrowingUse(use, trend, more_tensors(tables, rank, trend)))]


def more_tensors(tables: RunTables, rank: Allocator, trend: Growth) -> tuple[Evidence, ...]:
    """Return the evidence that tensors are kept: their number rises.

    `cudaMallocAsync` does not count them. There the memory that the driver reserves must rise. What a step takes
    for a while must not, as it does with larger batches and with a tensor that is made again, each time larger.
    """
    if np.isfinite(rank.column("allocation_count")).any():
        # Counts are whole numbers: the least trend is one more in each of the fewest blocks.
        counts = use_of(tables, rank, "allocation", rank.column("allocation_count")).growth(BLOCK_COUNTS[-1])
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
    use = use_of(tables, rank, "unused", unused)
    trend = use.growth(negligible_bytes(reserved))
    witnesses: tuple[Evidence, ...] = ()
    if trend is not None:
        if share_of(rank.seconds, step_peak_of(tables, rank).values, trend) >= CONFIRMED:
            return []  # steps need it: their batches grow
        pools = {"private_pool_rise_bytes": (rank.seconds, rank.column("private_pool_bytes"))}
        if witnesses := witnesses_of(trend, pools):
            return [leak_finding(resources.GRAPH_POOLS, GrowingUse(use, trend, witnesses))]
        witnesses = witnesses_of(trend, {"inactive_split_rise_bytes": (rank.seconds, split)})
        steps = retry_steps(rank, trend.since_seconds)
        if steps >= MIN_RETRY_STEPS:
            witnesses = (*witnesses, fact("alloc_retry_steps_count", steps, "same window", n=trend.n))
    if not witnesses:
        # Without a witness it is the high-water mark of uneven sizes, unless the holes grow by themselves.
        use = use_of(tables, rank, "inactive_split", split)
        trend = use.growth(negligible_bytes(reserved))
        witnesses = () if trend is None else witnesses_of(trend, {"unused_rise_bytes": (rank.seconds, unused)})
    if trend is None or not witnesses:
        return []
    return [leak_finding(resources.FRAGMENTATION, GrowingUse(use, trend, witnesses))]


def retry_steps(rank: Allocator, since_seconds: float) -> int:
    """Return the number of steps since then in which an allocation succeeded only after the cache was flushed."""
    failed = np.diff(rank.column("alloc_retry_count")) > np.nan_to_num(np.diff(rank.column("oom_count")))
    return int((failed & (rank.seconds[1:] >= since_seconds)).sum())


def _pinned_cache(tables: RunTables, rank: Allocator) -> list[Finding]:
    """Return the growth of unused pinned memory; of all pinned memory where its use is not known."""
    pinned, active = rank.column("pinned_allocated_bytes"), rank.column("pinned_active_bytes")
    knows_use = bool(2 * np.isfinite(pinned - active).sum() > np.isfinite(pinned).sum())
    use = dataclasses.replace(
        use_of(tables, rank, "pinned_cache" if knows_use else "pinned", pinned - active if knows_use else pinned),
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
        np.where(is_covered, beyond_reserved(ranks, times, used), np.nan)
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
