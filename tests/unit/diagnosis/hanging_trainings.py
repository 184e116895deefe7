"""Trainings that stand still, for the tests of hangs."""

from __future__ import annotations

from simulated_runs import MAIN, START_SECONDS, ns, start_training
from stack_events import (
    WORKERS,
    add_stacks,
)

from collector.diagnosis.hangs.hang import find_hangs

OTHER_RANK = ("node", 200, 5100)


def training(*, batches=10, dataset_length=400, script=None, key=MAIN, rank=None, timeout_seconds=None):
    """Return a training with two workers that has had some `batches` of 8 samples."""
    script = start_training(script, key=key, rank=rank)
    begin = START_SECONDS + 1
    loader = {
        "dataset_length": dataset_length,
        "batch_size": 8,
        "num_workers": 2,
        "timeout_seconds": timeout_seconds,
    }
    script.event(begin, "loader", key, rank, loader=0, **loader)
    pids = [worker[1] + key[1] - MAIN[1] for worker in WORKERS]
    script.event(begin, "epoch-start", key, rank, loader=0, epoch=0, worker_pids=pids, begun_ns=ns(begin))
    times = [begin + 0.5 * index for index in range(batches)]
    script.add(
        "batch",
        [{"time_ns": ns(time), "loader": 0, "epoch": 0, "index": index} for index, time in enumerate(times)],
        key,
        rank,
    )
    return script.add("step", [{"time_ns": ns(time), "step": i} for i, time in enumerate(times)], key, rank)


def two_ranks():
    """Return a training of two ranks with two workers each."""
    return training(script=training(rank=0), key=OTHER_RANK, rank=1)


def stacks(script, *processes, silent=(MAIN,), **options):
    """Add a series of dumps of a silent training."""
    return add_stacks(script, *processes, silent=silent, **options)


def only(script):
    (finding,) = find_hangs(script.tables())
    return finding
