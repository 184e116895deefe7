"""Uneven shards: some workers of an iterable dataset run out before the others, and the epoch's rest is slow."""

from __future__ import annotations

import numpy as np

from collector.diagnosis.costs import TELL, confidence, costly, lost_ratio, measured
from collector.diagnosis.epochs import RECENT_EPOCHS
from collector.diagnosis.findings import Advice, Finding, Locus
from collector.diagnosis.frames import SECOND_NS, floats, mean, origin_ns, step_at, window_text
from collector.diagnosis.loops import Loop, loader_settings
from collector.diagnosis.tables import RunTables
from collector.quantities import duration, number, percent


def shard_skew(tables: RunTables, loop: Loop) -> list[Finding]:
    """What a loop over an iterable dataset loses when some of its workers have run out.

    An even end of an epoch leaves at most `ramp` batches after a worker's last one.
    """
    setting = loader_settings(tables).get((loop.main, loop.loader), {})
    if loop.num_workers < 2 or not setting.get("iterable"):
        return []
    lost, tail_count, counts, largest = 0.0, 0, [], []
    made = dict(iter(loop.fetches.groupby("epoch")))
    epochs = np.unique(floats(loop.batches, "epoch"))
    recent = loop.batches[loop.batches["epoch"].isin(epochs[-RECENT_EPOCHS:])]
    for epoch, rows in recent.groupby("epoch"):
        if epoch not in made:
            continue
        ends = made[epoch].groupby("worker")["time_ns"].max()
        share = made[epoch].groupby("worker").size()
        from_ns = float(ends.min()) if len(ends) == loop.num_workers else 0.0
        times, waits, index = (floats(rows, name) for name in ("time_ns", "wait_ns", "index"))
        tail = (times > from_ns) & (index >= loop.ramp)
        if tail.sum() <= loop.ramp:
            continue
        usual = mean(waits[~tail & (index >= loop.ramp)])
        lost += float(np.nansum(waits[tail]) - tail.sum() * np.nan_to_num(usual)) / SECOND_NS
        tail_count += int(tail.sum())
        counts.append(float(share.max()) * loop.num_workers / float(share.sum()))
        largest.append(int(share.index[int(np.argmax(share))]))
    lost *= len(epochs) / len(epochs[-RECENT_EPOCHS:])
    ratio = lost_ratio(tables, max(lost, 0.0))
    if not counts or ratio < TELL:
        return []
    worker = max(set(largest), key=largest.count)
    same = largest.count(worker) > len(largest) / 2
    times = floats(loop.batches, "time_ns")
    window = window_text(times[0], times[-1], origin_ns(tables))
    return [
        costly(
            "shard-skew",
            ratio,
            lost,
            n=len(counts),
            window=window,
            certainty=confidence(tail_count, 10 * loop.ramp),
            summary=(
                f"The dataset of loader {loop.loader} is shared out unevenly: "
                + (f"worker {worker} has " if same else "one worker has ")
                + f"{number(mean(np.array(counts)))} times its even share, and works on when others are done. "
                f"That costs {duration(lost)} in {len(counts)} epochs, {percent(ratio)} of the run."
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
                measured("largest_share_ratio", mean(np.array(counts)), "ratio", len(counts), window),
                measured("tail_batches_count", tail_count / len(counts), "count", len(counts), window),
            ),
            advice=(
                Advice(
                    text="Share the samples out evenly over get_worker_info().num_workers: by sample (every "
                    "n-th), or in shards of equal size whose number is a multiple of the workers",
                    expected=f"all workers end together: about {duration(lost / len(counts))} less per epoch",
                ),
            ),
        )
    ]
