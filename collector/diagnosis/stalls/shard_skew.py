"""Samples shared out unevenly: some workers run out of them before the others, or never have any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.run.columns import SECOND_NS, floats, mean, whole
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.training import step_at
from collector.diagnosis.stalls.case import loop_locus
from collector.diagnosis.stalls.cost import confidence
from collector.diagnosis.stalls.epoch_start import RECENT_EPOCHS
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
