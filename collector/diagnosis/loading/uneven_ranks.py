"""Ranks with different numbers of batches: one that is done leaves the others waiting in a collective."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop, loader_settings, loops, own_pass
from collector.diagnosis.loading.names import loader_name
from collector.diagnosis.run.columns import floats, whole, written
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables, once
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Advice, Evidence, fact
from collector.store import ProcessKey
from collector.units import count, counted

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


def batches_meanwhile(
    tables: RunTables, main: ProcessKey, begins: Floats, ends: Floats, *, with_training: bool = True
) -> list[str]:
    """Return a clause for each loader from which another training process got batches in these stretches (ns).

    `with_training` includes the loaders whose batches it trains on.
    """
    clauses = []
    for key in lifecycle_of(tables).mains:
        batches = written(tables, "batch", key)
        if not with_training:
            batches = _without_training(batches, floats(written(tables, "step", key), "time_ns"))
        batches = records_within(batches, begins, ends)
        for loader, number in Counter(floats(batches, "loader")).items() if key != main else ():
            name = loader_name(loader_settings(tables).get((key, int(loader)), {}))
            named = f"loader {int(loader)} ({name})" if name else f"loader {int(loader)}"
            clauses.append(f"{lifecycle_of(tables).name(key)} got {counted(number, 'batch')} of {named}")
    return clauses


def _without_training(batches: pd.DataFrame, steps_ns: Floats) -> pd.DataFrame:
    """Return the batches of loaders with a pass of several batches, and no step from a pass to the next batch."""
    if batches.empty:
        return batches
    passes = batches.groupby(["loader", "epoch"])["time_ns"].agg(["min", "max"])
    firsts, lasts = floats(passes, "min"), floats(passes, "max")
    times = floats(batches, "time_ns")
    nexts = np.append(times, np.inf)[np.searchsorted(times, lasts, side="right")]
    has_step = np.searchsorted(steps_ns, nexts) > np.searchsorted(steps_ns, firsts)
    loaders = passes.index.get_level_values("loader")
    evaluating = set(loaders[lasts > firsts]) - set(loaders[has_step])
    return batches[batches["loader"].isin(evaluating)]


def records_within(records: pd.DataFrame, begins: Floats, ends: Floats) -> pd.DataFrame:
    """Return the records of these stretches, which begin and end in order (ns)."""
    times = floats(records, "time_ns")
    return records[np.searchsorted(begins, times, side="right") > np.searchsorted(ends, times, side="left")]


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
