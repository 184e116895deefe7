"""Trainings with caches that fill, and growth that decelerates without an end.

`--fill` is the length of the training in time constants of its cache: at 1, a share of 63 % is full at its end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.accuracy.memory_leaks import MIB, block, each_step, kind
from training_harness.jobs.faults.job import BATCH_SIZE, Items, Job, sleep

#: Entries of the cache: enough to be smooth, few enough to be visited.
ENTRIES_COUNT = 800


def visits(job: Job) -> int:
    """Return how many entries a step visits, on average, times 1000."""
    return round(1000 * job.options.fill * ENTRIES_COUNT / job.steps_count)


def random_keys(job: Job) -> Iterator[list[int]]:
    """Yield the entries that each step visits."""
    draw, due = random.Random(job.options.seed), 0
    while True:
        due += visits(job)
        count, due = divmod(due, 1000)
        yield [draw.randrange(ENTRIES_COUNT) for _ in range(count)]


def filling(job: Job) -> None:
    cache: dict[int, torch.Tensor] = {}
    keys = random_keys(job)

    def visit() -> None:
        for key in next(keys):
            if key not in cache:
                cache[key] = block(job.options.rate)

    each_step(job, visit)


@kind
def random_cache(job: Job) -> None:
    """A cache of decoded samples, visited at random."""
    filling(job)


@kind
def cache_and_leak(job: Job) -> None:
    """The same cache, and a leak that takes as much in the whole training."""
    filling(job)
    size = job.options.rate * ENTRIES_COUNT / job.steps_count
    each_step(job, lambda: job.objects.append(block(size)))


@kind
def worker_random_cache(job: Job) -> None:
    """A cache in each of the workers, which stay."""
    job.settings = {"persistent_workers": True}
    steps = job.steps_count * BATCH_SIZE / job.num_workers
    cached = CachedItems(steps / job.options.fill, job.options.rate, job.step_seconds * 0.8)
    job.dataset = Items(cached)


class CachedItems:
    """A cache with one time constant of `scale` visits, each entry of `size_bytes`."""

    def __init__(self, scale: float, size_bytes: float, batch_seconds: float) -> None:
        self.scale, self.size_bytes, self.batch_seconds = scale, size_bytes, batch_seconds
        self.cache: dict[int, torch.Tensor] = {}

    def __call__(self, index: int) -> None:
        sleep(self.batch_seconds, index)
        key = random.Random(index).randrange(max(1, round(self.scale)))
        if key < ENTRIES_COUNT and key not in self.cache:
            self.cache[key] = block(self.size_bytes)


@kind
def slowing_leak(job: Job) -> None:
    """A leak per step, with steps that take longer and longer."""
    first = job.step_seconds

    def keep() -> None:
        job.objects.append(block(job.options.rate))
        job.step_seconds = first * (1 + 4 * job.step / job.steps_count)

    each_step(job, keep)


@kind
def root_growth(job: Job) -> None:
    """Growth as the square root of the step, as of a vocabulary: it has no end."""

    def keep() -> None:
        while len(job.objects) < 40 * math.sqrt(job.step / job.steps_count) * job.options.rate / MIB:
            job.objects.append(block(MIB))

    each_step(job, keep)


@kind
def first_step_state(job: Job) -> None:
    """Batch normalisation, and an optimizer whose state is made in the first step."""
    job.model = torch.nn.Sequential(job.model, torch.nn.Linear(2, 1024), torch.nn.BatchNorm1d(1024))
    large = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(large.parameters())

    def step() -> None:
        if job.step % 10 == 1:
            optimizer.zero_grad()
            large(torch.ones(4, 2048)).sum().backward()
            optimizer.step()

    each_step(job, step)


@kind
def prefetching(job: Job) -> None:
    """Workers that fetch ahead many large batches."""
    job.settings = {"prefetch_factor": 16}
    job.dataset = Items(partial(sleep, job.step_seconds / 2), count=1_000_000, size=40_000)


@kind
def varying_arrays(job: Job) -> None:
    """Arrays of numpy whose size varies from step to step."""
    lengths = random.Random(job.options.seed)
    held: list[torch.Tensor] = []

    def make() -> None:
        held[:] = [block(MIB * lengths.uniform(0.1, 3)) for _ in range(8)]

    each_step(job, make)
