"""Trainings that leak at a given rate, and the parts that all faulty trainings share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from training_harness.jobs.faults.job import BATCH_SIZE, Items, Job, sleep

MIB = 1 << 20
#: kind -> puts it into a job.
KINDS: dict[str, Callable[[Job], None]] = {}


def kind(spoil: Callable[[Job], None]) -> Callable[[Job], None]:
    """Declare a kind, called as the function with hyphens."""
    KINDS[spoil.__name__.replace("_", "-")] = spoil
    return spoil


def block(size_bytes: float) -> torch.Tensor:
    """Memory that is written."""
    return torch.ones(max(1, int(size_bytes)), dtype=torch.uint8)


def each_step(job: Job, do: Callable[[], object]) -> None:
    """Do it after each step, next to what is done already."""
    before = job.after_step
    job.after_step = lambda loss, batch: (before(loss, batch), do())


def part(job: Job) -> float:
    """Return the share of the training that is over, 0 to 1."""
    return job.step / job.steps_count


def due(job: Job) -> bool:
    return job.faulty and part(job) >= job.options.onset


@kind
def main_heap(job: Job) -> None:
    each_step(job, lambda: job.objects.append(block(job.options.rate)) if due(job) else block(job.options.rate))


@kind
def worker_heap(job: Job) -> None:
    job.settings = {"persistent_workers": True}
    due_item = job.options.onset * job.steps_count * BATCH_SIZE if job.faulty else math.inf
    pause = job.step_seconds * 0.8
    job.dataset = Items(partial(keep_item, [], job.options.rate / BATCH_SIZE, due_item, pause))


def keep_item(kept: list[Any], size_bytes: float, due_item: float, batch_seconds: float, index: int) -> None:
    sleep(batch_seconds, index)
    picture = block(size_bytes)
    if index >= due_item:
        kept.append(picture)


@kind
def descriptors(job: Job) -> None:
    count = max(1, job.options.rate // 1024)  # a descriptor for each KiB of the rate, every tenth step

    def read() -> None:
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count if job.step % 10 == 0 else 0)]
        for descriptor in opened:
            job.closing.callback(os.close, descriptor) if due(job) else os.close(descriptor)

    each_step(job, read)


@kind
def shared(job: Job) -> None:
    def share() -> None:
        segment = SharedMemory(create=True, size=job.options.rate)
        memoryview(segment.buf or b"")[:] = bytes(job.options.rate)
        segment.close()
        job.closing.callback(segment.unlink) if due(job) else segment.unlink()

    each_step(job, share)
