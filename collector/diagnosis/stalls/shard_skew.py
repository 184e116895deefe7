"""Uneven shards: some workers of an iterable dataset run out of samples before the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.run.columns import SECOND_NS, floats, mean
from collector.diagnosis.stalls.epoch_start import RECENT_EPOCHS


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


def shard_skew(loop: Loop) -> ShardSkew | None:
    """Measure what a loop over an iterable dataset loses after some of its workers have run out.

    With even shards, at most `ramp` batches come after a worker's last one.
    """
    lost, tail_count, largest_shares, largest_workers = 0.0, 0, [], []
    fetches_of = dict(iter(loop.fetches.groupby("epoch")))
    epochs = np.unique(floats(loop.batches, "epoch"))
    recent = loop.batches[loop.batches["epoch"].isin(epochs[-RECENT_EPOCHS:])]
    for epoch, rows in recent.groupby("epoch"):
        if epoch not in fetches_of:
            continue
        workers = fetches_of[epoch].groupby("worker")
        ends, counts = workers["time_ns"].max(), workers.size()
        from_ns = float(ends.min()) if len(ends) == loop.num_workers else 0.0
        times, waits, index = (floats(rows, name) for name in ("time_ns", "wait_ns", "index"))
        tail = (times > from_ns) & (index >= loop.ramp)
        if tail.sum() <= loop.ramp:
            continue
        usual = mean(waits[~tail & (index >= loop.ramp)])
        lost += float(np.nansum(waits[tail]) - tail.sum() * np.nan_to_num(usual)) / SECOND_NS
        tail_count += int(tail.sum())
        largest_shares.append(float(counts.max()) * loop.num_workers / float(counts.sum()))
        largest_workers.append(int(counts.index[int(np.argmax(counts))]))
    if not largest_shares:
        return None
    worker = max(set(largest_workers), key=largest_workers.count)
    return ShardSkew(
        seconds=lost * len(epochs) / len(epochs[-RECENT_EPOCHS:]),
        epochs=len(largest_shares),
        tail_batches=tail_count,
        share=mean(np.array(largest_shares)),
        worker=worker if largest_workers.count(worker) > len(largest_workers) / 2 else None,
    )
