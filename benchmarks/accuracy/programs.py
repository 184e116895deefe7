"""Programs that predictions are judged on, besides the loaders of `stalls_settings`.

Times are seconds per batch of `BATCH_SIZE` items, drawn again for each seed.
"""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.accuracy.stalls_job import BATCH_SIZE, Training, Work
from training_harness.jobs.faults.job import Item, Items
from training_harness.jobs.faults.loading import compute

Pair = tuple[int, int]  # num_workers, prefetch_factor
_LOOP = "i=0; while [ $i -lt {} ]; do i=$((i+1)); done"


@dataclass(frozen=True)
class Program:
    """Function that draws a training, the setting it runs in, and those that are predicted and then measured."""

    draw: Callable[[random.Random], Training]
    source: Pair
    others: tuple[Pair, ...]


def computing(draw: random.Random) -> Training:
    work = Work(computing=draw.uniform(0.014, 0.022), spread=0.3)
    return Training(kind="", step=draw.uniform(0.003, 0.008), workers=2, work=work)


def computing_loop(draw: random.Random) -> Training:
    """A loop that computes half as long as a worker does for a batch, and hardly sleeps."""
    training = computing(draw)
    seconds = draw.uniform(0.006, 0.010)
    training.step, training.after_step = 0.0005, lambda _step: compute(seconds * BATCH_SIZE, 0)
    return training


def sorting(draw: random.Random) -> Training:
    """Items that numpy sorts while the GIL is free."""
    dataset = Items(partial(sort, draw.randint(120_000, 200_000)))
    return Training(kind="", step=draw.uniform(0.003, 0.006), workers=1, dataset=dataset)


def sort(size: int, index: int) -> None:
    np.sort(np.random.default_rng(index).random(size))


def tails(draw: random.Random) -> Training:
    """Reads of which a few take ten times as long as most."""
    work = Work(asleep=draw.uniform(0.020, 0.030), spread=1.0)
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=3, work=work)


def short_epochs(draw: random.Random) -> Training:
    """Epochs of 30 batches whose workers start again in each."""
    work = Work(asleep=draw.uniform(0.015, 0.025), spread=0.3)
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=2, work=work, epoch=30)


def persistent(draw: random.Random) -> Training:
    """Epochs of 40 batches of workers that stay, and compute a part of the time."""
    work = Work(asleep=draw.uniform(0.010, 0.020), computing=draw.uniform(0.004, 0.008), spread=0.3)
    settings = {"persistent_workers": True}
    return Training(kind="", step=draw.uniform(0.005, 0.008), workers=2, work=work, epoch=40, settings=settings)


class Stream(IterableDataset[Item]):
    """Items without end; of n workers, each yields every n-th batch."""

    def __init__(self, work: Callable[[int], object]) -> None:
        self.work = work

    def __iter__(self) -> Iterator[Item]:
        worker, items = get_worker_info(), Items(self.work)
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for batch in range(first, 100_000, workers):
            for place in range(BATCH_SIZE):
                yield items[batch * BATCH_SIZE + place]


def iterable(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.015, 0.025), computing=draw.uniform(0.003, 0.006), spread=0.3)
    return Training(kind="", step=draw.uniform(0.005, 0.008), workers=2, dataset=Stream(work))


def one_lock(draw: random.Random) -> Training:
    """Workers that hold one lock for a half of each batch."""
    work = Locked(asleep=draw.uniform(0.010, 0.014), held=draw.uniform(0.010, 0.014))
    return Training(kind="", step=draw.uniform(0.003, 0.006), workers=2, dataset=Items(work))


class Locked:
    """Wait by oneself for an item, and at the end of a batch hold the lock that all workers share."""

    def __init__(self, *, asleep: float, held: float) -> None:
        self.asleep, self.held = Work(asleep=asleep, spread=0.3), held
        self.lock = multiprocessing.Lock()

    def __call__(self, index: int) -> None:
        self.asleep(index)
        if index % BATCH_SIZE == BATCH_SIZE - 1:
            with self.lock:
                time.sleep(self.held * random.Random(index).uniform(0.7, 1.3))


class Limited:
    """A service that answers a fixed number of items per second, for all workers together, each after a while."""

    def __init__(self, *, per_batch: float, answer: float) -> None:
        self.per_item, self.answer = per_batch / BATCH_SIZE, Work(asleep=answer, spread=0.3)
        self.due = multiprocessing.Value("d", 0.0)

    def __call__(self, index: int) -> None:
        with self.due.get_lock():
            self.due.value = max(self.due.value, time.monotonic()) + self.per_item
            due = self.due.value
        time.sleep(max(0.0, due - time.monotonic()))
        self.answer(index)


def limited(draw: random.Random) -> Training:
    dataset = Items(Limited(per_batch=draw.uniform(0.012, 0.018), answer=draw.uniform(0.010, 0.020)))
    return Training(kind="", step=draw.uniform(0.004, 0.006), workers=2, dataset=dataset)


def children(draw: random.Random) -> Training:
    """A program for each item that computes in a process of its own."""
    dataset = Items(partial(run_child, draw.randint(1500, 3000)))
    return Training(kind="", step=draw.uniform(0.003, 0.006), workers=2, dataset=dataset)


def run_child(rounds: int, _index: int) -> None:
    subprocess.run(["/bin/sh", "-c", _LOOP.format(rounds)], check=True)


def large(draw: random.Random) -> Training:
    """Batches of 8 to 16 MiB that are computed."""
    size = draw.randint(8, 16) * (1 << 20) // BATCH_SIZE // 4
    dataset = Items(Work(computing=draw.uniform(0.006, 0.010)), size=size)
    return Training(kind="", step=draw.uniform(0.008, 0.012), workers=1, dataset=dataset)


def varying(draw: random.Random) -> Training:
    """Long and short items by turns: 50 batches are cheap, the next 50 take three times as long."""
    long = draw.uniform(0.024, 0.036)
    work = partial(alternate, Work(asleep=0.7 * long, computing=0.3 * long), Work(asleep=0.3 * long))
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=2, dataset=Items(work))


def alternate(long: Work, short: Work, index: int) -> None:
    (long if index // BATCH_SIZE // 50 % 2 else short)(index)


def unordered(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.006, 0.010), computing=draw.uniform(0.010, 0.014), spread=0.6)
    settings = {"in_order": False}
    return Training(kind="", step=draw.uniform(0.004, 0.006), workers=3, work=work, settings=settings)


def inline(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.008, 0.012), computing=draw.uniform(0.008, 0.012), spread=0.3)
    return Training(kind="", step=draw.uniform(0.005, 0.008), workers=0, work=work)


def mostly_asleep(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.030, 0.045), computing=draw.uniform(0.001, 0.003), spread=0.4)
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=4, work=work)


PROGRAMS = {
    "computing, from 2 x 1": Program(computing, (2, 1), ((1, 1), (2, 2), (2, 4), (3, 1), (4, 2))),
    "computing, to 2 x 1": Program(computing, (4, 2), ((1, 2), (2, 1), (2, 2), (3, 1), (4, 1))),
    "loop computes": Program(computing_loop, (2, 1), ((1, 1), (1, 2), (2, 2), (3, 1), (4, 2))),
    "sorting, GIL released": Program(sorting, (1, 4), ((1, 1), (2, 1), (2, 2), (3, 2))),
    "heavy tails": Program(tails, (3, 2), ((1, 2), (2, 1), (3, 1), (4, 4), (5, 2))),
    "short epochs": Program(short_epochs, (2, 2), ((1, 2), (2, 1), (3, 2), (4, 2))),
    "persistent, short epochs": Program(persistent, (2, 1), ((1, 2), (2, 4), (3, 1), (4, 2))),
    "iterable": Program(iterable, (2, 4), ((1, 1), (2, 1), (3, 2), (4, 1))),
    "one lock": Program(one_lock, (2, 2), ((1, 2), (2, 1), (3, 2), (4, 2))),
    "rate-limited service": Program(limited, (2, 2), ((1, 2), (2, 1), (3, 2), (4, 4))),
    "subprocess per item": Program(children, (2, 2), ((1, 2), (2, 1), (3, 1), (4, 2))),
    "large batches": Program(large, (1, 2), ((1, 1), (2, 1), (2, 2), (3, 2))),
    "varying costs": Program(varying, (2, 2), ((1, 2), (2, 1), (3, 2), (4, 4))),
    "unordered": Program(unordered, (3, 1), ((1, 2), (2, 1), (3, 2), (4, 2))),
    "inline": Program(inline, (0, 2), ((1, 1), (2, 1), (2, 2), (4, 2))),
    "sleeping, from 4 x 1": Program(mostly_asleep, (4, 1), ((1, 2), (2, 2), (3, 4), (6, 2))),
}
