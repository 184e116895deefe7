"""Will a device run out of memory, and when.

Demand is what the driver counts, less the allocator's cache as far as it can give it back: not the holes between
live blocks. Where in the step the records are made, the activations are gone already: the peaks come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.device_growth import RETRIES_APART, retried_steps
from collector.diagnosis.device_rows import Allocator, capacity_of, devices
from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus
from collector.diagnosis.forecast import Course, exhaustion
from collector.diagnosis.frames import SECOND_NS, floats, last, peak, step_numbers
from collector.diagnosis.risk import FULL_RATIO
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats, Growth, growth, warm_up_end
from collector.diagnosis.witnesses import CONFIRMED, negligible_bytes, share_of, witness_of
from collector.quantities import size

_ADVICE = (
    Advice(
        text="Fix what grows: see the gpu findings; checkpoint before the time named",
        expected="demand stays where it is",
    ),
    Advice(
        text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` "
        "finds the largest that fits), activation checkpointing, bfloat16",
        expected="activations shrink in proportion to the batch",
    ),
)
_OTHERS_ADVICE = (
    Advice(
        text="End what grows on this GPU, or run this training on another one (`nvidia-smi` names the processes)",
        expected="the memory of the GPU is the run's own",
    ),
)
_NO_RECORDS_ADVICE = (
    Advice(
        text="Start the training with `tidegauge run`, which reads PyTorch's allocator too",
        expected="the report says whether tensors, the cache or a library grow",
    ),
)


def find_device_risk(tables: RunTables) -> list[Finding]:
    """`gpu-oom-risk`, one finding at most per device, and per process that may use a share of it only."""
    found: list[Finding | None] = []
    for host, device, samples, ranks in devices(tables):
        capacities = [capacity_of(tables, rank) for rank in ranks]
        total = max([last(floats(samples, "total_bytes")), *(total for total, _ in capacities)], key=np.nan_to_num)
        shares = [(rank, share) for rank, (_, share) in zip(ranks, capacities, strict=True) if share < total]
        of_shares = [_judge(tables, _of_share(tables, rank, share), [rank]) for rank, share in shares]
        found += of_shares
        if not any(of_shares):  # a share is used up before the device is
            found.append(_judge(tables, _of_device(tables, host, device, samples, ranks, total), ranks))
    return [finding for finding in found if finding is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Use of one limit of device memory over time.

    Attributes:
        what: its name, at the beginning of a sentence.
        seconds: of the samples.
        steps: that the training was in then.
        demand: bytes that can't be given back, between two steps.
        witnesses: other series of bytes that would grow with it.
        peak_bytes: the most that was used, NaN if not known.
        used, library, others: bytes that the driver counts: all, those of the run's processes without PyTorch, and
            those of other processes; NaN where it does not tell.

    """

    what: str
    locus: Locus
    limit: Limit
    seconds: Floats
    steps: Floats
    demand: Floats
    witnesses: Mapping[str, Floats]
    peak_bytes: float
    used: Floats
    library: Floats
    others: Floats


def _of_device(
    tables: RunTables, host: str, device: int, samples: pd.DataFrame, ranks: list[Allocator], total: float
) -> _Use:
    """Return what the driver counts; without it what PyTorch has, which is less."""
    used, own = floats(samples, "used_bytes"), floats(samples, "process_used_bytes")
    is_told = bool(np.isfinite(used).any())
    what = f"The memory of GPU {device}" + ("" if is_told else ", counting PyTorch alone since NVML tells nothing,")
    seconds = floats(samples, "time_ns") / SECOND_NS if is_told else ranks[0].seconds
    reserved, allocated, holes = (
        np.sum([np.zeros(len(seconds)), *(rank.at(seconds, name) for rank in ranks)], axis=0)
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    held = allocated + np.nan_to_num(holes)
    unknown = np.full(len(seconds), np.nan)
    return _Use(
        what=what,
        locus=Locus(host=host, device=device),
        limit=Limit(name=f"GPU {device}", value=total, unit="bytes"),
        seconds=seconds,
        steps=step_numbers(tables, host, seconds),
        demand=used - reserved + held if is_told else held,
        witnesses={
            **({"allocated_rise_bytes": allocated, "inactive_split_rise_bytes": holes} if ranks else {}),
            **({"device_used_rise_bytes": used} if is_told and ranks else {}),
            **({"process_used_rise_bytes": own} if is_told else {"reserved_rise_bytes": reserved}),
        },
        peak_bytes=peak(used) if is_told else math.nan,
        used=used if is_told else unknown,
        library=own - reserved if is_told and ranks else unknown,
        others=floats(samples, "other_used_bytes") if is_told else unknown,
    )


def _of_share(tables: RunTables, rank: Allocator, share: float) -> _Use:
    """Return what a process has of the share that it may use (`set_per_process_memory_fraction`)."""
    return _Use(
        what=f"The share of GPU {rank.device} that pid {rank.key[1]} may use",
        locus=Locus(host=rank.key[0], rank=rank.rank, device=rank.device, role="main", pid=rank.key[1]),
        limit=Limit(name=f"its share of GPU {rank.device}", value=share, unit="bytes"),
        seconds=rank.seconds,
        steps=rank.steps,
        demand=rank.held_bytes,
        witnesses={
            "allocated_rise_bytes": rank.column("allocated_bytes"),
            "inactive_split_rise_bytes": rank.column("inactive_split_bytes"),
            "reserved_rise_bytes": rank.column("reserved_bytes"),
        },
        peak_bytes=peak(rank.column("reserved_peak_bytes")),
        used=(unknown := np.full(len(rank.rows), np.nan)),
        library=unknown,
        others=unknown,
    )


def _judge(tables: RunTables, use: _Use, ranks: list[Allocator]) -> Finding | None:
    if not use.limit.value > 0 or not np.isfinite(use.demand).any():
        return _by_retries(ranks, use.locus, use.limit, math.nan)
    grown = growth(use.seconds, use.demand, negligible=negligible_bytes(use.demand), steps=use.steps)
    if grown is not None:
        values = _met_by(use, grown, ranks)
        course = Course(what=use.what, grown=grown, times=use.seconds, values=values, limit=use.limit)
        others = witness_of("other_processes_rise_bytes", use.seconds, use.others, grown)
        named = use.witnesses.items()
        witnesses = [w for name, series in named if (w := witness_of(name, use.seconds, series, grown))]
        if (others or witnesses) and course.is_relevant:
            advice = _OTHERS_ADVICE if others else _ADVICE if ranks else _NO_RECORDS_ADVICE
            witnesses = [others] if others else witnesses
            risk = exhaustion(
                tables, "gpu-oom-risk", course, locus=use.locus, witnesses=tuple(witnesses), advice=advice
            )
            return (
                replace(risk, summary=f"{risk.summary} Other processes grow there, not this run.")
                if others
                else risk
            )
    return _by_retries(ranks, use.locus, use.limit, use.peak_bytes)


def _met_by(use: _Use, grown: Growth, ranks: list[Allocator]) -> Floats:
    """Return what meets the limit: demand at the peaks of the steps, or what the driver counts if a library grows.

    The driver refuses a library while PyTorch could still give back its cache.
    """
    if share_of(use.seconds, use.library, grown) >= CONFIRMED:
        return use.used
    return np.sum([use.demand, *(rank.peaks_above(use.seconds) for rank in ranks)], axis=0)  # type: ignore[no-any-return]


def _by_retries(ranks: list[Allocator], locus: Locus, limit: Limit, used: float) -> Finding | None:
    """Allocations failed after the warm-up, and went on only since the cache could be given back."""
    retried = sum(
        retried_steps(rank, float(rank.seconds[warm_up_end(rank.column("allocated_bytes"))]))
        for rank in ranks
        if len(rank.rows) > 1
    )
    full = used >= FULL_RATIO * limit.value
    if retried < RETRIES_APART or (math.isfinite(used) and not full):
        return None
    n = sum(len(rank.rows) for rank in ranks)
    retries = Evidence(name="alloc_retry_steps_count", value=retried, unit="count", n=n, window="after the warm-up")
    told = f"In {retried} steps GPU {locus.device} had no memory left until PyTorch had given back its cache"
    if not full:
        return Finding(
            kind="cannot-tell",
            severity="info",
            confidence=0.9,
            summary=f"{told}; how full the device is is not known, so whether memory runs out cannot be told.",
            locus=locus,
            evidence=(retries,),
        )
    return Finding(
        kind="gpu-oom-risk",
        severity="warning",
        confidence=0.9,
        summary=f"{told}: {size(used)} of {size(limit.value)} were in use at the peak.",
        locus=locus,
        evidence=(
            retries,
            Evidence(name="device_used_peak_bytes", value=used, unit="bytes", n=n, window="run"),
        ),
        limit=limit,
        advice=_ADVICE,
    )
