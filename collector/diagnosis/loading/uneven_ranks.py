"""Ranks with different numbers of batches: one that is done leaves the others waiting in a collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from collector.diagnosis.loading.loaders import Loop, loops, own_pass
from collector.diagnosis.run.columns import whole
from collector.diagnosis.run.tables import RunTables, once
from collector.findings import Advice, Evidence, fact
from collector.units import count

#: Longest time from the end of a pass that an exception leaves to the record of that exception.
_UNWINDING_NS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenRanks:
    """Words on ranks with different numbers of batches. `sentence` has a blank before it."""

    sentence: str
    evidence: tuple[Evidence, ...]
    advice: Advice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Batches of a rank in the longest of its passes that are over, NaN if none is; and in its longest pass."""

    rank: int
    ended: float
    longest: float


@once
def uneven_ranks(tables: RunTables) -> UnevenRanks | None:
    """Return the rank that was done with the fewest batches, and the one with the most; None if they have as many.

    Loaders of the ranks belong together if one line made them.
    """
    by_line: dict[object, list[_Passes]] = {}
    for loop in loops(tables):
        if loop.rank is not None:
            by_line.setdefault(loop.setting.get("line") or loop.loader, []).append(_passes(loop, loop.rank))
    for ranks in by_line.values():
        ended = [one for one in ranks if math.isfinite(one.ended)]
        least, most = min(ended, key=lambda one: one.ended, default=None), max(ranks, key=lambda one: one.longest)
        if least is not None and least.ended < most.longest:
            return _words(least, most)
    return None


def _passes(loop: Loop, rank: int) -> _Passes:
    numbers = loop.batches.groupby("epoch")["index"].max() + 1.0
    # An exception on its way out ends the pass that it leaves.
    raised = [event["time_ns"] for event in loop.tables.events_of("exception", by=loop.main)]
    over = {
        (event["loader"], event["epoch"])
        for event in loop.tables.events_of("workers-ended", by=loop.main)
        if not any(0 <= time_ns - event["time_ns"] < _UNWINDING_NS for time_ns in raised)
    }
    length, size = (whole(loop.setting.get(name)) for name in ("dataset_length", "batch_size"))
    planned = length // size if length and size else math.inf
    ended = [
        number
        for place, (epoch, number) in enumerate(zip(numbers.index, numbers, strict=True), 1)
        if place < len(numbers) or own_pass(loop.loader, epoch) in over or number >= planned
    ]
    # The rest of a first pass is planned.
    longest = max(numbers.max(), planned) if not ended and math.isfinite(planned) else numbers.max()
    return _Passes(rank=rank, ended=max(ended, default=math.nan), longest=float(longest))


def _words(least: _Passes, most: _Passes) -> UnevenRanks:
    return UnevenRanks(
        sentence=f" Rank {least.rank} has {count(least.ended)} batches in an epoch, rank {most.rank} has "
        f"{count(most.longest)}: a rank that is done leaves the others waiting in a collective.",
        evidence=(
            fact("fewest_batches_count", round(least.ended), f"epoch of rank {least.rank}"),
            fact("most_batches_count", round(most.longest), f"epoch of rank {most.rank}"),
        ),
        advice=Advice(
            text="Give each rank as many batches: use DistributedSampler, or shards of one length and "
            "drop_last=True; or train each epoch in `with model.join():` (DistributedDataParallel)",
            expected="all ranks enter each collective",
        ),
    )
