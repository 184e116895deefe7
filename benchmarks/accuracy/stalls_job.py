"""The trainings that verdicts on stalls are judged by: real loaders with a known fault and random parameters.

    python -m benchmarks.accuracy.stalls_job CASE SEED SECONDS TRUTH_FILE [--fixed]

Each case is drawn again for each seed. With `--fixed` it is the same training without the fault. Waiting is
sleeping unless computing is the subject, so that a case is the same on any machine. The truth about it goes into
TRUTH_FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate, get_worker_info

from training_harness.jobs.common import expect_many_workers
from training_harness.jobs.faults.job import BATCH_SIZE, Items
from training_harness.jobs.faults.loading import (
    Shards,
    SlowSampler,
    collate_privately,
    compute,
    do_slowly,
    feed,
    read_chunk,
)

HEALTHY = "healthy"
BATCHES = 200  # at least


@dataclass(frozen=True, kw_only=True)
class Work:
    """Time that the items of a batch take, in seconds a batch: asleep and computing, with a lognormal spread.

    A batch's factor follows from its number and from these times, which differ between repeats: repeats of a case
    draw other factors, and two runs of one repeat draw the same.
    """

    asleep: float = 0.0
    computing: float = 0.0
    spread: float = 0.15
    slow_worker: int = -1
    slow_batches: frozenset[int] = frozenset()
    slow: float = 0.0  # asleep, in the slow worker and at the slow batches

    def __call__(self, index: int) -> None:
        batch, worker = index // BATCH_SIZE, get_worker_info()
        is_slow = batch in self.slow_batches or (worker is not None and worker.id == self.slow_worker)
        drawn_from = random.Random(f"{batch} {self.asleep} {self.computing}")
        factor = drawn_from.lognormvariate(-(self.spread**2) / 2, self.spread)
        time.sleep((self.slow if is_slow else self.asleep) * factor / BATCH_SIZE)
        if self.computing:
            compute(self.computing * factor, index)


@dataclass(kw_only=True)
class Training:
    """One training, and what is true of it."""

    kind: str
    step: float  # seconds, asleep
    workers: int
    work: Work = field(default_factory=Work)
    limited_by: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    dataset: Dataset[Any] | None = None
    epoch: int = 12_500  # batches
    first_batch: int = 0
    after_step: Callable[[int], object] = lambda _step: None
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def loader(self) -> DataLoader[Any]:
        end = self.first_batch + self.epoch
        dataset = self.dataset or Items(self.work, count=end * BATCH_SIZE)
        if self.first_batch and not isinstance(dataset, IterableDataset):
            dataset = Subset(dataset, range(self.first_batch * BATCH_SIZE, end * BATCH_SIZE))
        return DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=self.workers, **self.settings)


Case = Callable[[random.Random, bool], Training]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", "-")] = function
    return function


def fair(draw: random.Random) -> tuple[int, float, float]:
    """Workers, a step, and what they may take for a batch at most."""
    workers, step = draw.randint(2, 6), draw.uniform(0.006, 0.016)
    return workers, step, workers * step


@case
def healthy(draw: random.Random, _faulty: bool) -> Training:
    workers, step, most = fair(draw)
    return Training(kind=HEALTHY, step=step, workers=workers, work=Work(asleep=most * draw.uniform(0.2, 0.7)))


@case
def too_slow(draw: random.Random, faulty: bool) -> Training:
    workers, step, most = fair(draw)
    asleep = most * (draw.uniform(1.5, 3.0) if faulty else draw.uniform(0.3, 0.7))
    return Training(
        kind="workers-too-slow" if faulty else HEALTHY, step=step, workers=workers, work=Work(asleep=asleep)
    )


@case
def slow_worker(draw: random.Random, faulty: bool) -> Training:
    workers, step = draw.randint(3, 6), draw.uniform(0.006, 0.016)
    most = workers * step
    slow, usual, worker = most * draw.uniform(1.5, 3.0), most * draw.uniform(0.2, 0.6), draw.randrange(workers)
    work = Work(asleep=usual, slow=slow, slow_worker=worker if faulty else -1)
    return Training(kind="slow-worker" if faulty else HEALTHY, step=step, workers=workers, work=work)


@case
def overtaken(draw: random.Random, _faulty: bool) -> Training:
    """A slow worker that the others overtake: healthy."""
    training = slow_worker(draw, True)
    training.settings, training.kind = {"in_order": False}, HEALTHY
    return training


@case
def stragglers(draw: random.Random, faulty: bool) -> Training:
    """One batch in 25 to 50, at random or each 40th, takes longer than what is prefetched can hide."""
    workers, step, most = fair(draw)
    every, lost = draw.randint(25, 50), draw.uniform(0.25, 0.8)
    batches = (
        range(draw.randrange(40), 5000, 40)
        if draw.random() < 0.3
        else [batch for batch in range(5000) if draw.random() < 1 / every]
    )
    slow = 2 * most + lost * every * step
    work = Work(asleep=most * draw.uniform(0.2, 0.5), slow=slow, slow_batches=frozenset(batches if faulty else ()))
    return Training(kind="straggler-samples" if faulty else HEALTHY, step=step, workers=workers, work=work)


@case
def hidden_stragglers(draw: random.Random, _faulty: bool) -> Training:
    """Stragglers that fit into what is prefetched: healthy."""
    training = stragglers(draw, True)
    training.settings, training.kind = {"prefetch_factor": 4}, HEALTHY
    training.work = dataclasses.replace(training.work, slow=2.5 * training.workers * training.step)
    return training


@case
def cpu(draw: random.Random, faulty: bool) -> Training:
    step = draw.uniform(0.008, 0.016)
    work = Work(computing=step * (draw.uniform(1.5, 3.0) if faulty else draw.uniform(0.2, 0.6)))
    return Training(
        kind="workers-too-slow" if faulty else HEALTHY, limited_by="cpu", step=step, workers=1, work=work
    )


@case
def oversubscribed(draw: random.Random, faulty: bool) -> Training:
    cores, step = len(os.sched_getaffinity(0)), draw.uniform(0.008, 0.016)
    workers = cores * draw.randint(3, 4) if faulty else max(1, cores // 2)
    work = Work(computing=step * (draw.uniform(1.5, 2.5) * cores if faulty else 0.4 * workers))
    kind = "workers-too-slow" if faulty else HEALTHY
    return Training(kind=kind, limited_by="oversubscribed", step=step, workers=workers, work=work)


@case
def io(draw: random.Random, faulty: bool) -> Training:
    """Workers read through one pipe of a steady rate."""
    workers, step, _ = fair(draw)
    training = Training(kind="workers-too-slow" if faulty else HEALTHY, limited_by="io", step=step, workers=workers)
    pause = step * (draw.uniform(1.5, 3.0) if faulty else 0.4) / BATCH_SIZE
    folder = training.closing.enter_context(tempfile.TemporaryDirectory(prefix="tidegauge-"))
    os.mkfifo(path := Path(folder) / "pipe")
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    training.closing.callback(os.close, pipe)
    ended = threading.Event()
    feeder = threading.Thread(target=feed, args=(pipe, pause, ended), daemon=True)
    training.closing.callback(feeder.join)
    training.closing.callback(ended.set)
    feeder.start()
    training.dataset = Items(partial(read_chunk, path))
    return training


@case
def copies(draw: random.Random, faulty: bool) -> Training:
    size_bytes = draw.randint(24, 48) << 20 if faulty else draw.randint(256, 1024) << 10
    dataset = Items(Work(asleep=0.004), count=100_000, size=size_bytes // BATCH_SIZE // 4)
    settings = {"collate_fn": collate_privately}
    kind = "copy-bound" if faulty else HEALTHY
    return Training(kind=kind, step=draw.uniform(0.006, 0.012), workers=2, dataset=dataset, settings=settings)


@case
def collating(draw: random.Random, faulty: bool) -> Training:
    workers, step, most = fair(draw)
    pads = most * (draw.uniform(1.5, 3.0) if faulty else 0.2)
    settings = {"collate_fn": partial(do_slowly, pads, default_collate)}
    work = Work(asleep=most * draw.uniform(0.1, 0.4))
    kind = "collate-bound" if faulty else HEALTHY
    return Training(kind=kind, step=step, workers=workers, work=work, settings=settings)


@case
def sampling(draw: random.Random, faulty: bool) -> Training:
    workers, step, most = fair(draw)
    settings = {"sampler": SlowSampler(step * draw.uniform(1.3, 3.0) if faulty else 0.0)}
    work = Work(asleep=most * draw.uniform(0.2, 0.6))
    kind = "sampler-bound" if faulty else HEALTHY
    return Training(kind=kind, step=step, workers=workers, work=work, settings=settings)


@case
def startup(draw: random.Random, faulty: bool) -> Training:
    step, epoch = draw.uniform(0.006, 0.012), draw.randint(30, 60)
    settings = {
        "worker_init_fn": partial(do_slowly, draw.uniform(0.3, 0.8), id),
        "persistent_workers": not faulty,
    }
    return Training(
        kind="worker-startup" if faulty else HEALTHY,
        step=step,
        workers=2,
        work=Work(asleep=step),
        settings=settings,
        epoch=epoch,
    )


@case
def spawned(draw: random.Random, _faulty: bool) -> Training:
    """A slow start that comes once: healthy."""
    training = healthy(draw, False)
    training.settings = {"multiprocessing_context": "spawn", "persistent_workers": True}
    training.workers = 2
    training.work = Work(asleep=training.step)
    return training


@case
def refill(draw: random.Random, faulty: bool) -> Training:
    workers, step = draw.randint(3, 5), draw.uniform(0.012, 0.024)
    return Training(
        kind="epoch-refill" if faulty else HEALTHY,
        step=step,
        workers=workers,
        work=Work(asleep=workers * step * draw.uniform(0.65, 0.8)),
        settings={"persistent_workers": True},
        epoch=draw.randint(7, 10) if faulty else 12_500,
    )


@case
def inline(draw: random.Random, faulty: bool) -> Training:
    step = draw.uniform(0.008, 0.016)
    work = Work(asleep=step * draw.uniform(0.5, 2.0))
    return Training(kind="inline-loading" if faulty else HEALTHY, step=step, workers=0 if faulty else 4, work=work)


@case
def skew(draw: random.Random, faulty: bool) -> Training:
    share = draw.uniform(0.85, 0.95) if faulty else 0.5
    kind = "shard-skew" if faulty else HEALTHY
    return Training(kind=kind, step=draw.uniform(0.009, 0.012), workers=2, dataset=Shards(share))


@case
def pauses(draw: random.Random, faulty: bool) -> Training:
    """The garbage collector walks many objects at a fixed interval of steps."""
    training = healthy(draw, False)
    training.kind = "main-thread-pause" if faulty else HEALTHY
    kept = [[number] for number in range(draw.randint(300_000, 500_000))]
    began = time.monotonic()
    gc.collect()
    every = max(6, round((time.monotonic() - began) / training.step / draw.uniform(0.2, 0.5)))

    def collect(step: int) -> None:
        if step == 1 and not faulty:
            gc.freeze()
        if step % every == 0 and kept:
            gc.collect()

    training.after_step = collect
    return training


def train(training: Training, *, seconds: float = 0.0, batches: int) -> None:
    """Train for `batches` batches, and for `seconds` after the first one."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = float("inf")
    for step, (features, labels) in enumerate(endless(training.loader()), 1):
        end = min(end, time.monotonic() + seconds)
        loss = torch.nn.functional.cross_entropy(model(features[:, :4].clone()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(training.step)
        training.after_step(step)
        if step >= batches and time.monotonic() >= end:
            break


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--fixed", action="store_true")
    options = parser.parse_args()
    expect_many_workers()
    torch.set_num_threads(1)
    training = CASES[options.case](random.Random(f"{options.case} {options.seed}"), not options.fixed)
    limited_by = None if training.kind == HEALTHY else training.limited_by
    truth = {
        "kind": training.kind,
        "limited_by": limited_by,
        "worker": training.work.slow_worker,
        "slow_batches": sorted(training.work.slow_batches),
    }
    options.truth.write_text(json.dumps(truth))
    with training.closing:
        train(training, seconds=options.seconds, batches=BATCHES)


if __name__ == "__main__":
    main()
