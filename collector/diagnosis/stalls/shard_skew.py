"""Samples shared out unevenly: some workers run out of them before the others, or never have any."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.run.columns import SECOND_NS, floats, whole
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.training import step_at
from collector.diagnosis.stalls.case import loop_locus
from collector.diagnosis.stalls.cost import confidence
from collector.findings import Advice, Finding, measurements
from collector.units import listed

#: Whole epochs of a map-style dataset that show that workers stay without a batch.
_MIN_EPOCHS = 2
#: Most workers that a sentence lists.
_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSkew:
    """Epochs of a loop in which some workers ran out of samples before the others.

    Attributes:
        seconds: time that the loop waited longer than usual after a worker had run out.
        epochs: number of such epochs.
        tail_batches: number of batches after a worker had run out, in all of them.
        share: samples of the worker with most, over an even share; mean.
        worker: the worker that mostly has most; None if that changes.
    """

    seconds: float
    epochs: int
    tail_batches: int
    share: float
    worker: int | None


def while_shared(loop: Loop) -> Loop | None:
    """Return a loop over an iterable dataset without the batches of an epoch after a worker has run out of samples.

    Their fetches are left out too. None if no epoch has such. At most `ramp` batches come after a worker's last
    one where all end together, and a worker with no more batches than its share ends last only since it is slow.
    """
    of_worker = loop.fetches.groupby(["epoch", "worker"])["time_ns"].agg(["max", "size"]).groupby("epoch")
    ends, counts = of_worker["max"].min(), of_worker["size"]
    is_uneven = (counts.size() == loop.num_workers) & (counts.max() > counts.mean() + 1)
    epochs, index = loop.batches["epoch"], floats(loop.batches, "index")
    is_late = floats(loop.batches, "time_ns") > epochs.map(ends.where(is_uneven)).to_numpy(dtype=float)
    is_tail = is_late & (index >= loop.ramp)
    is_tail &= pd.Series(is_tail).groupby(epochs.to_numpy()).transform("sum").to_numpy() > loop.ramp
    if not is_tail.any():
        return None
    made, tail = (
        pd.MultiIndex.from_frame(rows[["epoch", "index"]]) for rows in (loop.fetches, loop.batches[is_tail])
    )
    return dataclasses.replace(loop, batches=loop.batches[~is_tail], fetches=loop.fetches[~made.isin(tail)])


def shard_skew(loop: Loop, even: Loop, slow: Collection[int]) -> ShardSkew:
    """Measure what a loop over an iterable dataset loses after some of its workers have run out.

    `even` is the loop `while_shared`. Its waits for `slow` workers have a cause of their own.
    """
    usual_rows = even.batches[floats(even.batches, "index") >= loop.ramp]
    own_waits = usual_rows["wait_ns"].where(~usual_rows["worker"].isin(slow), 0.0)
    usual = own_waits.groupby(usual_rows["epoch"]).mean()
    places, shared = (pd.MultiIndex.from_frame(part.batches[["epoch", "index"]]) for part in (loop, even))
    tail = loop.batches[~places.isin(shared)]
    lost = float((tail["wait_ns"] - tail["epoch"].map(usual).fillna(0.0)).sum()) / SECOND_NS
    counts = loop.fetches[loop.fetches["epoch"].isin(tail["epoch"])].groupby(["epoch", "worker"]).size().unstack()
    largest, epochs = counts.idxmax(axis=1).mode(), len(counts)
    is_mostly = (counts.idxmax(axis=1) == largest[0]).mean() > 0.5
    return ShardSkew(
        seconds=lost,
        epochs=epochs,
        tail_batches=len(tail),
        share=float((counts.max(axis=1) / counts.mean(axis=1)).mean()),
        worker=int(largest[0]) if is_mostly else None,
    )


def idle_workers(loop: Loop) -> list[int]:
    """Return the workers that made no batch in any whole epoch, since the dataset has fewer shards or batches.

    The last epoch is whole once the run has ended, or the loop has begun another one.
    """
    passes = [rows for _, rows in loop.batches.groupby("epoch") if rows["index"].min() == 0]
    if passes and lifecycle_of(loop.tables).status() == "running":
        passes.pop()
    setting, is_iterable = loop.setting, bool(loop.setting.get("iterable"))
    if loop.num_workers < 2 or len(passes) < (1 if is_iterable else _MIN_EPOCHS):
        return []
    # A worker of an iterable dataset that had its turn and made nothing has no samples.
    samples, size = whole(setting.get("dataset_length")), whole(setting.get("batch_size"))
    if is_iterable:
        is_decided = min(len(rows) for rows in passes) >= loop.num_workers
    else:  # A loop that is left early has fewer batches too.
        is_decided = bool(samples and size and math.ceil(samples / size) < loop.num_workers)
    at_work = {whole(worker) for rows in passes for worker in rows["worker"].unique()}
    if not is_decided or None in at_work:
        return []
    return sorted(set(range(loop.num_workers)) - at_work)


def more_shards(loop: Loop) -> Advice | None:
    """Return the advice that gives each worker samples; None if the dataset does not share them out itself."""
    if not loop.setting.get("iterable"):
        return None
    return Advice(
        text=f"Split the data into at least {loop.num_workers} shards, or give each worker every n-th sample "
        "(get_worker_info())",
        expected=f"all {loop.num_workers} workers make batches",
        effect="changes results",
    )


def idle_workers_finding(loop: Loop, idle: list[int], split: Advice | None, *, others_too_slow: bool) -> Finding:
    """Return a finding for workers that made no batch in any whole epoch.

    Fewer workers are no advice if those at work are too slow, unless there are no more batches to make.
    """
    at_work, epochs = loop.num_workers - len(idle), loop.batches["epoch"].nunique()
    reason = f"an epoch has at most {at_work} batches" if split is None else "the dataset gives them no samples"
    names = listed(idle if len(idle) <= _NAMES else [*idle[:_NAMES], "more"])
    fewer = Advice(
        text=f"Set num_workers={at_work}",
        expected=f"the same batches, with {len(idle)} processes and their memory fewer",
    )
    return Finding(
        kind="idle-workers",
        severity="info",
        confidence=confidence(epochs, 1),
        summary=f"{len(idle)} of {loop.num_workers} workers of loader {loop.loader} never made a batch "
        f"({'worker' if len(idle) == 1 else 'workers'} {names}): {reason}.",
        locus=loop_locus(loop, "worker"),
        since_step=step_at(loop.tables, loop.main, floats(loop.batches, "time_ns")[0]),
        evidence=measurements(
            epochs, "whole epochs", idle_workers=len(idle), batches_per_epoch=len(loop.batches) / epochs
        ),
        advice=(fewer,) if split is None else (split,) if others_too_slow else (fewer, split),
    )
