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

from collector.diagnosis.memory.exhaustion import Course, exhaustion_finding
from collector.diagnosis.memory.gpu_growth import MIN_RETRY_STEPS, retry_steps
from collector.diagnosis.memory.host_oom_risk import FULL_RATIO
from collector.diagnosis.memory.leak import CONFIRMED, negligible_bytes, share_of, witness_of
from collector.diagnosis.run.allocators import Allocator, capacity_of, devices
from collector.diagnosis.run.columns import SECOND_NS, floats, last, peak, step_numbers
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth, growth, warm_up_end
from collector.findings import Advice, Evidence, Finding, Limit, Locus
from collector.units import size

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
    """Find `gpu-oom-risk`, at most once per device, and per process that may use only a share of it."""
    findings: list[Finding | None] = []
    for host, device, samples, ranks in devices(tables):
        capacities = [capacity_of(tables, rank) for rank in ranks]
        total = max([last(floats(samples, "total_bytes")), *(total for total, _ in capacities)], key=np.nan_to_num)
        shares = [(rank, share) for rank, (_, share) in zip(ranks, capacities, strict=True) if share < total]
        on_shares = [_judge(tables, _use_of_share(rank, share), [rank]) for rank, share in shares]
        findings += on_shares
        if not any(on_shares):  # a share is used up before the device is
            findings.append(_judge(tables, _use_of_device(tables, host, device, samples, ranks, total), ranks))
    return [finding for finding in findings if finding is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Use of one limit of device memory over time.

    Attributes:
        what: its name, at the beginning of a sentence.
        seconds: times of the samples.
        steps: the step that the training was in at these times.
        demand: bytes that can't be given back, between two steps.
        witnesses: other series of bytes that would grow with it.
        peak_bytes: the highest use, NaN if not known.
        used, library, others: bytes that the driver counts: all, those of the run's processes outside PyTorch, and
            those of other processes; NaN where it does not report them.

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


def _use_of_device(
    tables: RunTables, host: str, device: int, samples: pd.DataFrame, ranks: list[Allocator], total: float
) -> _Use:
    """Return the use that the driver counts, or without it that of PyTorch, which is less."""
    used, run = floats(samples, "used_bytes"), floats(samples, "process_used_bytes")
    has_driver = bool(np.isfinite(used).any())
    what = f"The memory of GPU {device}"
    what += "" if has_driver else ", counting PyTorch alone since NVML tells nothing,"
    seconds = floats(samples, "time_ns") / SECOND_NS if has_driver else ranks[0].seconds
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
        demand=used - reserved + held if has_driver else held,
        witnesses={
            **({"allocated_rise_bytes": allocated, "inactive_split_rise_bytes": holes} if ranks else {}),
            **({"device_used_rise_bytes": used} if has_driver and ranks else {}),
            **({"process_used_rise_bytes": run} if has_driver else {"reserved_rise_bytes": reserved}),
        },
        peak_bytes=peak(used) if has_driver else math.nan,
        used=used if has_driver else unknown,
        library=run - reserved if has_driver and ranks else unknown,
        others=floats(samples, "other_used_bytes") if has_driver else unknown,
    )


def _use_of_share(rank: Allocator, share: float) -> _Use:
    """Return a process's use of the share of the device that it may use (`set_per_process_memory_fraction`)."""
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
    trend = growth(use.seconds, use.demand, negligible=negligible_bytes(use.demand), steps=use.steps)
    if trend is not None:
        values = _use_at_limit(use, trend, ranks)
        course = Course(what=use.what, growth=trend, times=use.seconds, values=values, limit=use.limit)
        others = witness_of("other_processes_rise_bytes", use.seconds, use.others, trend)
        series = use.witnesses.items()
        witnesses = [w for name, values in series if (w := witness_of(name, use.seconds, values, trend))]
        if (others or witnesses) and course.is_relevant:
            advice = _OTHERS_ADVICE if others else _ADVICE if ranks else _NO_RECORDS_ADVICE
            witnesses = [others] if others else witnesses
            risk = exhaustion_finding(
                tables, "gpu-oom-risk", course, locus=use.locus, witnesses=tuple(witnesses), advice=advice
            )
            return (
                replace(risk, summary=f"{risk.summary} Other processes grow there, not this run.")
                if others
                else risk
            )
    return _by_retries(ranks, use.locus, use.limit, use.peak_bytes)


def _use_at_limit(use: _Use, trend: Growth, ranks: list[Allocator]) -> Floats:
    """Return the use that meets the limit: demand at the peaks of the steps, or all used bytes if a library grows.

    The driver refuses a library memory even while PyTorch could still give back its cache.
    """
    if share_of(use.seconds, use.library, trend) >= CONFIRMED:
        return use.used
    return np.sum([use.demand, *(rank.peaks_above(use.seconds) for rank in ranks)], axis=0)  # type: ignore[no-any-return]


def _by_retries(ranks: list[Allocator], locus: Locus, limit: Limit, used: float) -> Finding | None:
    """Return the finding that allocations failed after the warm-up until the cache was given back."""
    count = sum(
        retry_steps(rank, float(rank.seconds[warm_up_end(rank.column("allocated_bytes"))]))
        for rank in ranks
        if len(rank.rows) > 1
    )
    is_full = used >= FULL_RATIO * limit.value
    if count < MIN_RETRY_STEPS or (math.isfinite(used) and not is_full):
        return None
    n = sum(len(rank.rows) for rank in ranks)
    retries = Evidence(name="alloc_retry_steps_count", value=count, unit="count", n=n, window="after the warm-up")
    text = f"In {count} steps GPU {locus.device} had no memory left until PyTorch had given back its cache"
    if not is_full:
        return Finding(
            kind="cannot-tell",
            severity="info",
            confidence=0.9,
            summary=f"{text}; how full the device is is not known, so whether memory runs out cannot be told.",
            locus=locus,
            evidence=(retries,),
        )
    return Finding(
        kind="gpu-oom-risk",
        severity="warning",
        confidence=0.9,
        summary=f"{text}: {size(used)} of {size(limit.value)} were in use at the peak.",
        locus=locus,
        evidence=(
            retries,
            Evidence(name="device_used_peak_bytes", value=used, unit="bytes", n=n, window="run"),
        ),
        limit=limit,
        advice=_ADVICE,
    )
