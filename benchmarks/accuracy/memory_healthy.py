"""Trainings whose memory looks as if it leaked, and does not."""

from __future__ import annotations

import gc
import itertools
import math
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.memory_leaks import MIB, block, each_step, kind, part
from training_harness.jobs.faults.job import BATCH_SIZE, FEATURES_COUNT, Items, Job, sleep


@kind
def warm_up(job: Job) -> None:
    """Caches that fill ever more slowly."""

    def fill() -> None:
        while len(job.objects) < 200 * (1 - math.exp(-8 * part(job))):
            job.objects.append(block(MIB))

    each_step(job, fill)


@kind
def gc_sawtooth(job: Job) -> None:
    """Cycles, which the collector of garbage takes at times."""
    gc.disable()

    def make() -> None:
        cycle = [block(MIB // 2)]
        cycle.append(cycle)  # type: ignore[arg-type]
        if job.step % 110 == 0:
            gc.collect()

    each_step(job, make)


@kind
def epoch_outputs(job: Job) -> None:
    """The outputs of an epoch are kept until its end; a small summary of each stays."""

    def keep() -> None:
        job.objects.append(block(MIB // 2))
        if job.step % 90 == 0:
            job.objects[:] = [each for each in job.objects if len(each) <= 4096] + [block(4096)]

    each_step(job, keep)


@kind
def one_step_up(job: Job) -> None:
    """A copy of the weights from the middle on."""
    each_step(job, lambda: job.objects or (part(job) > 0.45 and job.objects.append(block(150 * MIB))))


@kind
def two_steps_up(job: Job) -> None:
    """First the evaluation, then the checkpoint leaves its buffers."""
    dues = [0.25, 0.6]
    each_step(job, lambda: dues and part(job) > dues[0] and (dues.pop(0), job.objects.append(block(90 * MIB))))


@kind
def high_water(job: Job) -> None:
    """A buffer that is as large as the longest sequence so far."""
    lengths = random.Random(job.options.seed)

    def see() -> None:
        length = int(4 * MIB * lengths.lognormvariate(0, 0.8))
        if not job.objects or len(job.objects[0]) < length:
            job.objects[:] = [block(length)]

    each_step(job, see)


@kind
def slow_lengths(job: Job) -> None:
    """Lengths that wander, as those of sorted or streamed text do."""
    wander, state = random.Random(job.options.seed), [0.0]

    def hold() -> None:
        state[0] = 0.985 * state[0] + wander.gauss(0, 0.17)
        job.objects[:] = [block(100 * MIB * math.exp(0.35 * state[0]))]

    each_step(job, hold)


def mapped_file(job: Job, size_bytes: int) -> Path:
    folder = job.closing.enter_context(tempfile.TemporaryDirectory(prefix="tidegauge-", dir="/var/tmp"))
    path = Path(folder) / "data"
    with path.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(bytes(MIB))
    return path


@kind
def mapped_in_main(job: Job) -> None:
    """A memory-mapped file is read from its beginning to its end."""
    data = np.memmap(mapped_file(job, 300 * MIB), mode="r")
    size = len(data) // job.steps_count
    each_step(job, lambda: data[job.step * size : (job.step + 1) * size].sum())


@kind
def mapped_in_workers(job: Job) -> None:
    """The dataset is a memory-mapped file."""
    data = np.memmap(mapped_file(job, 300 * MIB), mode="r")
    job.dataset = Items(partial(read_piece, data, len(data) // (job.steps_count * BATCH_SIZE), job.step_seconds))


def read_piece(data: Any, size: int, batch_seconds: float, index: int) -> None:
    sleep(batch_seconds, index)
    data[index * size : (index + 1) * size].sum()


@kind
def collecting_workers(job: Job) -> None:
    """Each worker collects its garbage once: that touches, and so copies, every object that it inherited."""
    job.settings = {"persistent_workers": True}
    own = max(1, job.steps_count * BATCH_SIZE // (2 * job.num_workers))
    job.dataset = Items(partial(collect_once, itertools.count(-own), job.step_seconds * 0.8))


def collect_once(count: Iterator[int], batch_seconds: float, index: int) -> None:
    sleep(batch_seconds, index)
    if next(count) == 0:
        gc.collect()


@kind
def checkpoints_on_disk(job: Job) -> None:
    """A checkpoint of 100 MiB each 5 s: page cache, and nothing of the process's own."""
    path, every = mapped_file(job, MIB), max(1, round(5 / job.step_seconds))
    state = block(100 * MIB)
    each_step(job, lambda: job.step % every == 0 and torch.save(state, path))


@kind
def arena_retention(job: Job) -> None:
    """Many small objects come and go; some stay, and so does the heap around them."""
    every = max(1, round(4 / job.step_seconds))

    def churn() -> None:
        if job.step % every == 0:
            crowd = [bytes(700) for _ in range(90_000)]
            job.objects[:] = crowd[::500]

    each_step(job, churn)


@kind
def iterator_per_step(job: Job) -> None:
    """next(iter(loader)) in each step, which costs time and keeps nothing."""
    job.num_workers, job.dataset = 0, Items(partial(sleep, 0.0))
    loader = job.loader()
    job.batches = lambda: iter(lambda: next(iter(loader)), None)


@kind
def cycle_plateau(job: Job) -> None:
    """itertools.cycle(loader) over a small dataset: it has all its batches after an epoch."""
    job.num_workers = 0
    batches_count = int(0.3 * job.steps_count)
    size = 160 * MIB // batches_count // BATCH_SIZE // 4
    job.dataset = Items(partial(sleep, 0.0), count=batches_count * BATCH_SIZE, size=max(size, FEATURES_COUNT))
    job.batches = lambda: itertools.cycle(job.loader())


@kind
def replay_buffer(job: Job) -> None:
    """A buffer of bounded size, full after a third."""
    buffer: deque[Any] = deque(maxlen=max(1, job.steps_count // 3))
    each_step(job, lambda: buffer.append(block(200 * MIB / (job.steps_count // 3))))


@kind
def bounded_cache(job: Job) -> None:
    """A cache in each worker that is full after a third."""
    job.settings = {"persistent_workers": True}
    buffer: deque[Any] = deque(maxlen=max(1, job.steps_count * BATCH_SIZE // 6))
    size = 100 * MIB / (job.steps_count * BATCH_SIZE // 6)
    job.dataset = Items(partial(cache_item, buffer, size, job.step_seconds * 0.8))


def cache_item(buffer: deque[Any], size_bytes: float, batch_seconds: float, index: int) -> None:
    sleep(batch_seconds, index)
    buffer.append(block(size_bytes))


@kind
def epoch_caches(job: Job) -> None:
    """Each epoch's workers have a cache, which ends with them."""
    job.dataset = Items(
        partial(cache_item, deque(), MIB // 4 // BATCH_SIZE, job.step_seconds * 0.8),
        count=max(1, job.steps_count // 6) * BATCH_SIZE,
    )


@kind
def evaluations(job: Job) -> None:
    """Evaluations hold 200 MiB, longer each time."""

    def evaluate() -> None:
        inside = part(job) % 0.25 > 0.22 - 0.05 * part(job)
        if inside and not job.objects:
            job.objects.append(block(200 * MIB))
        elif not inside:
            job.objects.clear()

    each_step(job, evaluate)


@kind
def scalar_history(job: Job) -> None:
    """The losses as numbers: some 100 bytes a step."""
    each_step(job, lambda: job.objects.append({"step": job.step, "loss": random.random()}))


@kind
def late_optimizer(job: Job) -> None:
    """Layers that are thawed one after another get their state."""
    layers = [torch.nn.Linear(1024, 2048) for _ in range(8)]
    dues = [0.1, 0.2, 0.3, 0.4]

    def thaw() -> None:
        if dues and part(job) > dues[0]:
            dues.pop(0)
            layer = layers.pop()
            optimizer = torch.optim.Adam(layer.parameters())
            layer(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            job.objects.append(optimizer)

    each_step(job, thaw)
