"""Will a device run out of memory, and when.

What is asked of it is what the driver counts, less the allocator's cache as far as it can give it back: not the
holes between live blocks. At the place in
the step where the records are made the activations are gone already; so the limit is met by as much earlier.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from collector.diagnosis.device_growth import RETRIES_APART, retried_steps
from collector.diagnosis.device_rows import Allocator, devices
from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus
from collector.diagnosis.forecast import Course, exhaustion
from collector.diagnosis.frames import SECOND_NS, floats, last, peak, step_numbers
from collector.diagnosis.risk import FULL_RATIO
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import growth, warm_up_end
from collector.diagnosis.witnesses import negligible_bytes, witness_of
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


def find_device_risk(tables: RunTables) -> list[Finding]:
    """`gpu-oom-risk`, one finding at most per device."""
    found = [_judge(tables, host, device, rows, ranks) for host, device, rows, ranks in devices(tables)]
    return [finding for finding in found if finding is not None]


def _judge(
    tables: RunTables, host: str, device: int, samples: pd.DataFrame, ranks: list[Allocator]
) -> Finding | None:
    seconds, used = floats(samples, "time_ns") / SECOND_NS, floats(samples, "used_bytes")
    total = last(floats(samples, "total_bytes")) - float(np.nan_to_num(last(floats(samples, "reserved_bytes"))))
    locus, limit = Locus(host=host, device=device), Limit(name=f"GPU {device}", value=total, unit="bytes")
    reserved, allocated, holes = (
        np.sum([rank.at(seconds, name) for rank in ranks], axis=0)
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    demand = used - reserved + allocated + np.nan_to_num(holes)
    if not total > 0 or not np.isfinite(demand).any():
        return _by_retries(ranks, locus, limit, math.nan)
    steps = step_numbers(tables, host, seconds)
    grown = growth(seconds, demand, negligible=negligible_bytes(demand), steps=steps)
    if grown is not None:
        above = sum(_activations(rank) for rank in ranks)
        course = Course(
            what=f"The memory of GPU {device}",
            grown=grown,
            times=seconds,
            values=demand + above,
            limit=limit,
        )
        series = (
            ("allocated_rise_bytes", allocated),
            ("inactive_split_rise_bytes", holes),
            ("device_used_rise_bytes", used),
        )
        witnesses = tuple(w for name, values in series if (w := witness_of(name, seconds, values, grown)))
        if witnesses and course.is_relevant:
            return exhaustion(tables, "gpu-oom-risk", course, locus=locus, witnesses=witnesses, advice=_ADVICE)
    return _by_retries(ranks, locus, limit, peak(used))


def _activations(rank: Allocator) -> float:
    """How far the newest peak lies above what is held after a backward pass and its holes, 0 if not known."""
    held = rank.column("allocated_bytes") + np.nan_to_num(rank.column("inactive_split_bytes"))
    above = last(rank.column("allocated_peak_bytes")) - last(held)
    return max(0.0, above) if math.isfinite(above) else 0.0


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
