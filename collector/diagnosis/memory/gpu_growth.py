"""Find growth of a device's memory, and of pinned host memory.

There are four mechanisms, each with two measurements that must agree:

- live tensors: their bytes and their number,
- fragmentation of the allocator's cache: growing unused memory, and holes or failed allocations,
- memory outside PyTorch: the driver's count for the run's processes, and for the whole device,
- the cache of pinned host memory: its own gauges, and the resident memory of the process.

The high-water mark of uneven batches makes the allocator's cache grow too, so without a witness it is no finding.
"""

from __future__ import annotations

import numpy as np

from collector.diagnosis.memory.leak import Leak, leak_finding, negligible_bytes, rise_since, witness_of
from collector.diagnosis.run.allocators import Allocator, devices
from collector.diagnosis.run.columns import SECOND_NS, floats, sampled, step_numbers, while_training
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, Floats, growth
from collector.findings import Advice, Evidence, Finding, Locus
from collector.units import size

#: Steps with failed allocations that count as evidence: one may be a library that tries what fits.
MIN_RETRY_STEPS = 2
_TENSOR_ADVICE = (
    Advice(
        text="Look for what keeps a tensor per step: losses or outputs kept with their graph (use .item() or "
        ".detach()), hooks that store activations, metrics that gather on the GPU",
        expected="allocated memory stays where it is",
    ),
)
_HOLES_ADVICE = (
    Advice(
        text="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; if it is set, max_split_size_mb instead",
        expected="the unused memory is one piece and can be used",
    ),
    Advice(
        text="Make sizes repeat: pad batches to a few lengths, allocate what is kept before the training",
        expected="blocks are used again",
    ),
)
_OUTSIDE_ADVICE = (
    Advice(
        text="Look at what takes CUDA memory without PyTorch: NCCL communicators and streams made anew, CUDA "
        "extensions, other libraries (CuPy, DALI, RAPIDS) without a bound on their pools",
        expected="the driver's count follows what PyTorch reserves",
    ),
)
_PINNED_ADVICE = (
    Advice(
        text="Make pinned batches alike in size: the cache rounds up to powers of two and gives nothing back",
        expected="buffers are used again",
    ),
    Advice(
        text="Have fewer pinned copies under way: a smaller prefetch_factor, synchronise before the next "
        "non_blocking copy",
        expected="the cache ends at what is in use at once",
    ),
)


def find_device_growth(tables: RunTables) -> list[Finding]:
    """Find `gpu-tensor-leak`, `gpu-fragmentation`, `pinned-cache-growth` and `gpu-non-pytorch-growth`."""
    findings: list[Finding | None] = []
    pinned: set[object] = set()
    for host, device, samples, ranks in devices(tables):
        for rank in ranks:
            holes = _fragmentation(tables, rank)
            tensors = _tensors(tables, rank)
            if tensors is not None and not (holes and tensors.kind == "cannot-tell"):
                findings.append(tensors)
            findings.append(holes)
            if rank.key not in pinned and (cache := _pinned_cache(tables, rank)):
                pinned.add(rank.key)  # the records of each device show the same cache
                findings.append(cache)
        if not ranks:
            continue  # the memory that PyTorch holds is not known
        seconds = floats(samples, "time_ns") / SECOND_NS
        reserved = np.sum([rank.at(seconds, "reserved_bytes") for rank in ranks], axis=0)
        run, whole_device = (floats(samples, name) - reserved for name in ("process_used_bytes", "used_bytes"))
        findings.append(_outside(tables, Locus(host=host, device=device), seconds, run, whole_device))
    return [finding for finding in findings if finding is not None]


def tensor_leak(rank: Allocator) -> Leak | None:
    """Return the growth of live tensors; without a witness if their number does not grow, or is not known."""
    allocated, counts = rank.column("allocated_bytes"), rank.column("allocation_count")
    trend = growth(rank.seconds, allocated, negligible=negligible_bytes(allocated), steps=rank.steps)
    if trend is None:
        return None
    # Counts are whole numbers: the least trend is one more in each of the fewest blocks.
    count_trend = growth(rank.seconds, counts, negligible=BLOCK_COUNTS[-1], steps=rank.steps)
    witnesses: tuple[Evidence, ...] = ()
    if count_trend is not None:
        rise, n = round(count_trend.rise), count_trend.n
        witnesses = (Evidence(name="allocation_rise_count", value=rise, unit="count", n=n, window="same window"),)
    return Leak.of(trend, "allocated", witnesses, float(rank.seconds[-1]), "bytes")


def _tensors(tables: RunTables, rank: Allocator) -> Finding | None:
    leak = tensor_leak(rank)
    if leak is None:
        return None
    rise, slope = size(leak.growth.rise), size(leak.growth.slope * 60)
    summary = (
        f"Tensors on GPU {rank.device} of pid {rank.key[1]} keep getting more: {rise} so far, {slope} per minute."
    )
    if not leak.witnesses:
        summary = (
            f"Tensors on GPU {rank.device} of pid {rank.key[1]} hold {rise} more than before, but their number "
            "does not grow or is not known: larger batches, or a tensor that is made anew ever larger."
        )
    return leak_finding(
        tables,
        "gpu-tensor-leak",
        leak,
        summary=summary,
        locus=_locus(rank),
        advice=_TENSOR_ADVICE,
        confidence=0.95,
        key=rank.key,
    )


def _fragmentation(tables: RunTables, rank: Allocator) -> Finding | None:
    unused = rank.column("reserved_bytes") - rank.column("active_bytes")
    negligible = negligible_bytes(rank.column("reserved_bytes"))
    trend = growth(rank.seconds, unused, negligible=negligible, steps=rank.steps)
    if trend is None:
        return None
    holes = witness_of("inactive_split_rise_bytes", rank.seconds, rank.column("inactive_split_bytes"), trend)
    count = retry_steps(rank, trend.since_seconds)
    retries = Evidence(name="alloc_retry_steps_count", value=count, unit="count", n=trend.n, window="same window")
    witnesses = (*((holes,) if holes else ()), *((retries,) if count >= MIN_RETRY_STEPS else ()))
    if not witnesses:
        return None  # the high-water mark of uneven sizes
    return leak_finding(
        tables,
        "gpu-fragmentation",
        Leak.of(trend, "unused", witnesses, float(rank.seconds[-1]), "bytes"),
        summary=(
            f"PyTorch's allocator on GPU {rank.device} (pid {rank.key[1]}) holds ever more that no tensor uses: "
            f"{size(trend.rise)} more, in pieces that do not fit what is asked for."
        ),
        locus=_locus(rank),
        advice=_HOLES_ADVICE,
        key=rank.key,
    )


def retry_steps(rank: Allocator, since_seconds: float) -> int:
    """Return in how many steps since then an allocation failed and was retried after the cache was flushed."""
    failed = np.diff(rank.column("alloc_retry_count")) > 0
    return int((failed & (rank.seconds[1:] >= since_seconds)).sum())


def _pinned_cache(tables: RunTables, rank: Allocator) -> Finding | None:
    pinned, active = rank.column("pinned_allocated_bytes"), rank.column("pinned_active_bytes")
    trend = growth(rank.seconds, pinned - active, negligible=negligible_bytes(pinned), steps=rank.steps)
    if trend is None:
        return None
    rows = while_training(tables, sampled(tables, rank.key))
    resident = witness_of("rss_rise_bytes", floats(rows, "time_ns") / SECOND_NS, floats(rows, "rss_bytes"), trend)
    witnesses: tuple[Evidence, ...] = ()
    summary = (
        f"Pinned host memory that nothing uses keeps growing (pid {rank.key[1]}): {size(trend.rise)} more, "
        "cached and never given back."
    )
    if resident is None:
        summary += " The resident memory of the process does not show it."
    else:
        in_use = rise_since(rank.seconds, active, trend)
        witnesses = (
            resident,
            Evidence(
                name="pinned_active_rise_bytes",
                value=round(in_use),
                unit="bytes",
                n=trend.n,
                window="same window",
            ),
        )
    return leak_finding(
        tables,
        "pinned-cache-growth",
        Leak.of(trend, "pinned_cache", witnesses, float(rank.seconds[-1]), "bytes"),
        summary=summary,
        locus=Locus(host=rank.key[0], rank=rank.rank, role="main", pid=rank.key[1]),
        advice=_PINNED_ADVICE,
        key=rank.key,
    )


def _outside(tables: RunTables, locus: Locus, seconds: Floats, run: Floats, whole_device: Floats) -> Finding | None:
    """Return the growth of used memory that PyTorch did not reserve, in the run's processes and on the device."""
    steps = step_numbers(tables, str(locus.host), seconds)
    trend = growth(seconds, run, negligible=negligible_bytes(run), steps=steps)
    if trend is None and not np.isfinite(run).any():
        return _not_attributed(tables, locus, seconds, steps, whole_device)
    if trend is None:
        return None
    witness = witness_of("device_outside_pytorch_rise_bytes", seconds, whole_device, trend)
    summary = (
        f"GPU {locus.device}: memory that PyTorch does not hold keeps growing in the run's processes: "
        f"{size(trend.rise)} so far, {size(trend.slope * 60)} per minute."
    )
    if witness is None:
        summary += " The device as a whole does not show it."
    leak = Leak.of(trend, "outside_pytorch", (witness,) if witness else (), float(seconds[-1]), "bytes")
    return leak_finding(
        tables, "gpu-non-pytorch-growth", leak, summary=summary, locus=locus, advice=_OUTSIDE_ADVICE
    )


def _not_attributed(
    tables: RunTables, locus: Locus, seconds: Floats, steps: Floats, whole_device: Floats
) -> Finding | None:
    trend = growth(seconds, whole_device, negligible=negligible_bytes(whole_device), steps=steps)
    if trend is None:
        return None
    return leak_finding(
        tables,
        "gpu-non-pytorch-growth",
        Leak.of(trend, "outside_pytorch", (), float(seconds[-1]), "bytes"),
        summary=(
            f"GPU {locus.device}: {size(trend.rise)} more are in use that PyTorch does not hold, and the "
            "driver does not tell by which processes: the run's libraries or somebody else's job."
        ),
        locus=locus,
        advice=(),
    )


def _locus(rank: Allocator) -> Locus:
    return Locus(host=rank.key[0], rank=rank.rank, device=rank.device, role="main", pid=rank.key[1])
