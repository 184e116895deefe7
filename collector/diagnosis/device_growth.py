"""What keeps taking memory of a device, and the pinned host memory beside it.

Four mechanisms, each with two witnesses of its own: live tensors (bytes and allocations), the allocator's cache in
pieces that nothing fits into (unused memory that grows, with holes or failed allocations), what PyTorch does not
hold (by the driver's count of the run's processes and of the whole device), and the cache of pinned host memory
(its own gauges and the resident memory of the process). The high-water mark of uneven batches makes the cache grow
too: without its witness it is no finding.
"""

from __future__ import annotations

import numpy as np

from collector.diagnosis.device_rows import Allocator, devices
from collector.diagnosis.findings import Advice, Evidence, Finding, Locus
from collector.diagnosis.frames import SECOND_NS, floats, sampled, step_numbers, while_training
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import BLOCK_COUNTS, Floats, growth
from collector.diagnosis.witnesses import Leak, leak_finding, negligible_bytes, rise_since, witness_of
from collector.quantities import size

RETRIES_APART = 2  # failed allocations in so many steps: one may be a library that tries what fits
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
    """`gpu-tensor-leak`, `gpu-fragmentation`, `pinned-cache-growth`, `gpu-non-pytorch-growth`."""
    found: list[Finding] = []
    pinned: set[object] = set()
    for host, device, samples, ranks in devices(tables):
        for rank in ranks:
            holes = _fragmentation(tables, rank)
            tensors = _tensors(tables, rank)
            if tensors is not None and not (holes and tensors.kind == "cannot-tell"):
                found.append(tensors)
            found += [holes] if holes else []
            if rank.key not in pinned and (cache := _pinned_cache(tables, rank)):
                pinned.add(rank.key)  # each device's records tell of the same cache
                found.append(cache)
        if not ranks:
            continue  # what PyTorch holds is not known
        seconds = floats(samples, "time_ns") / SECOND_NS
        reserved = np.sum([rank.at(seconds, "reserved_bytes") for rank in ranks], axis=0)
        own, whole_device = (floats(samples, name) - reserved for name in ("process_used_bytes", "used_bytes"))
        outside = _outside(tables, Locus(host=host, device=device), seconds, own, whole_device)
        found += [outside] if outside else []
    return found


def tensor_leak(rank: Allocator) -> Leak | None:
    """Live tensors that get more; without a witness if their number does not grow, or is not known."""
    allocated, counts = rank.column("allocated_bytes"), rank.column("allocation_count")
    grown = growth(rank.seconds, allocated, negligible=negligible_bytes(allocated), steps=rank.steps)
    if grown is None:
        return None
    # Whole numbers: one more in each of the fewest blocks is the least that is a trend.
    counted = growth(rank.seconds, counts, negligible=BLOCK_COUNTS[-1], steps=rank.steps)
    witnesses: tuple[Evidence, ...] = ()
    if counted is not None:
        rise = round(counted.rise)
        witnesses = (
            Evidence(name="allocation_rise_count", value=rise, unit="count", n=counted.n, window="same window"),
        )
    return Leak.of(grown, "allocated", witnesses, float(rank.seconds[-1]), "bytes")


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
    grown = growth(rank.seconds, unused, negligible=negligible, steps=rank.steps)
    if grown is None:
        return None
    holes = witness_of("inactive_split_rise_bytes", rank.seconds, rank.column("inactive_split_bytes"), grown)
    retried = retried_steps(rank, grown.since_seconds)
    failed = Evidence(name="alloc_retry_steps_count", value=retried, unit="count", n=grown.n, window="same window")
    witnesses = (*((holes,) if holes else ()), *((failed,) if retried >= RETRIES_APART else ()))
    if not witnesses:
        return None  # the high-water mark of uneven sizes
    return leak_finding(
        tables,
        "gpu-fragmentation",
        Leak.of(grown, "unused", witnesses, float(rank.seconds[-1]), "bytes"),
        summary=(
            f"PyTorch's allocator on GPU {rank.device} (pid {rank.key[1]}) holds ever more that no tensor uses: "
            f"{size(grown.rise)} more, in pieces that do not fit what is asked for."
        ),
        locus=_locus(rank),
        advice=_HOLES_ADVICE,
        key=rank.key,
    )


def retried_steps(rank: Allocator, since_seconds: float) -> int:
    """In how many steps since then an allocation failed and was tried again after the cache was flushed."""
    failed = np.diff(rank.column("alloc_retry_count")) > 0
    return int((failed & (rank.seconds[1:] >= since_seconds)).sum())


def _pinned_cache(tables: RunTables, rank: Allocator) -> Finding | None:
    owned, active = rank.column("pinned_allocated_bytes"), rank.column("pinned_active_bytes")
    grown = growth(rank.seconds, owned - active, negligible=negligible_bytes(owned), steps=rank.steps)
    if grown is None:
        return None
    rows = while_training(tables, sampled(tables, rank.key))
    resident = witness_of("rss_rise_bytes", floats(rows, "time_ns") / SECOND_NS, floats(rows, "rss_bytes"), grown)
    witnesses: tuple[Evidence, ...] = ()
    summary = (
        f"Pinned host memory that nothing uses keeps growing (pid {rank.key[1]}): {size(grown.rise)} more, "
        "cached and never given back."
    )
    if resident is None:
        summary += " The resident memory of the process does not show it."
    else:
        in_use = rise_since(rank.seconds, active, grown)
        witnesses = (
            resident,
            Evidence(
                name="pinned_active_rise_bytes",
                value=round(in_use),
                unit="bytes",
                n=grown.n,
                window="same window",
            ),
        )
    return leak_finding(
        tables,
        "pinned-cache-growth",
        Leak.of(grown, "pinned_cache", witnesses, float(rank.seconds[-1]), "bytes"),
        summary=summary,
        locus=Locus(host=rank.key[0], rank=rank.rank, role="main", pid=rank.key[1]),
        advice=_PINNED_ADVICE,
        key=rank.key,
    )


def _outside(tables: RunTables, locus: Locus, seconds: Floats, own: Floats, whole_device: Floats) -> Finding | None:
    """Growth of what the driver counts above what PyTorch reserves, `own` of the run's processes."""
    steps = step_numbers(tables, str(locus.host), seconds)
    grown = growth(seconds, own, negligible=negligible_bytes(own), steps=steps)
    if grown is None and not np.isfinite(own).any():
        return _not_attributed(tables, locus, seconds, steps, whole_device)
    if grown is None:
        return None
    witness = witness_of("device_outside_pytorch_rise_bytes", seconds, whole_device, grown)
    summary = (
        f"GPU {locus.device}: memory that PyTorch does not hold keeps growing in the run's processes: "
        f"{size(grown.rise)} so far, {size(grown.slope * 60)} per minute."
    )
    if witness is None:
        summary += " The device as a whole does not show it."
    leak = Leak.of(grown, "outside_pytorch", (witness,) if witness else (), float(seconds[-1]), "bytes")
    return leak_finding(
        tables, "gpu-non-pytorch-growth", leak, summary=summary, locus=locus, advice=_OUTSIDE_ADVICE
    )


def _not_attributed(
    tables: RunTables, locus: Locus, seconds: Floats, steps: Floats, whole_device: Floats
) -> Finding | None:
    grown = growth(seconds, whole_device, negligible=negligible_bytes(whole_device), steps=steps)
    if grown is None:
        return None
    return leak_finding(
        tables,
        "gpu-non-pytorch-growth",
        Leak.of(grown, "outside_pytorch", (), float(seconds[-1]), "bytes"),
        summary=(
            f"GPU {locus.device}: {size(grown.rise)} more are in use that PyTorch does not hold, and the "
            "driver does not tell by which processes: the run's libraries or somebody else's job."
        ),
        locus=locus,
        advice=(),
    )


def _locus(rank: Allocator) -> Locus:
    return Locus(host=rank.key[0], rank=rank.rank, device=rank.device, role="main", pid=rank.key[1])
