"""Uneven shards: some workers of an iterable dataset run out of samples before the others."""

from __future__ import annotations

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loader_settings
from collector.diagnosis.run.columns import SECOND_NS, floats, mean, origin_ns, step_at, window_text
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, confidence, lost_ratio, measurement
from collector.diagnosis.stalls.epoch_start import RECENT_EPOCHS
from collector.findings import Advice, Finding, Locus
from collector.units import duration, number, percent


def shard_skew(tables: RunTables, loop: Loop) -> list[Finding]:
    """Find time that a loop over an iterable dataset loses after some of its workers have run out.

    With even shards, at most `ramp` batches come after a worker's last one.
    """
    setting = loader_settings(tables).get((loop.main, loop.loader), {})
    if loop.num_workers < 2 or not setting.get("iterable"):
        return []
    lost, tail_count, largest_shares, largest_workers = 0.0, 0, [], []
    fetches_of = dict(iter(loop.fetches.groupby("epoch")))
    epochs = np.unique(floats(loop.batches, "epoch"))
    recent = loop.batches[loop.batches["epoch"].isin(epochs[-RECENT_EPOCHS:])]
    for epoch, rows in recent.groupby("epoch"):
        if epoch not in fetches_of:
            continue
        ends = fetches_of[epoch].groupby("worker")["time_ns"].max()
        counts = fetches_of[epoch].groupby("worker").size()
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
    lost *= len(epochs) / len(epochs[-RECENT_EPOCHS:])
    ratio = lost_ratio(tables, max(lost, 0.0))
    if not largest_shares or ratio < LEAST_LOST_RATIO:
        return []
    epochs_count, share = len(largest_shares), mean(np.array(largest_shares))
    worker = max(set(largest_workers), key=largest_workers.count)
    same = largest_workers.count(worker) > epochs_count / 2
    times = floats(loop.batches, "time_ns")
    window = window_text(times[0], times[-1], origin_ns(tables))
    loss = Loss(ratio=ratio, seconds=lost, n=epochs_count, window=window)
    return [
        Finding(
            kind="shard-skew",
            severity=loss.severity,
            confidence=confidence(tail_count, 10 * loop.ramp),
            summary=(
                f"The dataset of loader {loop.loader} is shared out unevenly: "
                + (f"worker {worker} has " if same else "one worker has ")
                + f"{number(share)} times its even share, and works on when others are done. "
                f"That costs {duration(lost)} in {epochs_count} epochs, {percent(ratio)} of the run."
            ),
            locus=Locus(
                host=loop.main[0],
                rank=loop.rank,
                role="worker",
                loader=loop.loader,
                worker=worker if same else None,
            ),
            since_step=step_at(tables, loop.main, times[0]),
            evidence=(
                *loss.evidence,
                measurement("largest_share_ratio", share, "ratio", epochs_count, window),
                measurement("tail_batches_count", tail_count / epochs_count, "count", epochs_count, window),
            ),
            advice=(
                Advice(
                    text="Share the samples out evenly over get_worker_info().num_workers: by sample (every "
                    "n-th), or in shards of equal size whose number is a multiple of the workers",
                    expected=f"all workers end together: about {duration(lost / epochs_count)} less per epoch",
                ),
            ),
        )
    ]
