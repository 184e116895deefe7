"""Trainings that end in all the ways in which a training can end."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from benchmarks.accuracy.memory_leaks import MIB, block, due, each_step, kind
from training_harness.jobs.faults.job import BATCH_SIZE, Items, Job, sleep


@kind
def die_main(job: Job) -> None:
    """The training process ends itself by the signal `--rate`."""
    each_step(job, lambda: due(job) and os.kill(os.getpid(), job.options.rate))


@kind
def die_worker(job: Job) -> None:
    """Worker 1 is ended by the signal `--rate`."""
    due_item = job.options.onset * job.steps_count * BATCH_SIZE
    job.dataset = Items(partial(end_worker, due_item, job.options.rate))


def end_worker(due_item: float, by: int, index: int) -> None:
    sleep(0.010, index)
    worker = get_worker_info()
    if index >= due_item and worker is not None and worker.id == 1:
        os.kill(os.getpid(), by)


@kind
def die_of_exit(job: Job) -> None:
    """The training ends with the exit status `--rate`, without an exception."""
    each_step(job, lambda: due(job) and sys.exit(job.options.rate))


@kind
def die_of_exception(job: Job) -> None:
    each_step(job, lambda: due(job) and job.model(block(3)))


@kind
def die_of_item(job: Job) -> None:
    """An item can't be decoded: the worker hands its exception over."""
    job.dataset = Items(partial(bad_item, job.options.onset * job.steps_count * BATCH_SIZE))


def bad_item(due_item: float, index: int) -> None:
    sleep(0.010, index)
    if index >= due_item:
        pickle.loads(b"no picture")


@kind
def die_of_address_space(job: Job) -> None:
    """It keeps what it makes, and may have 600 MiB more of address space."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 600 * MIB, resource.RLIM_INFINITY))
    each_step(job, lambda: job.objects.append(block(4 * MIB)))


@kind
def die_of_descriptors(job: Job) -> None:
    """It leaves open what it opens, and may have 200 files open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    each_step(job, lambda: job.objects.append(os.open(os.devnull, os.O_RDONLY)))


@kind
def die_of_null(job: Job) -> None:
    """A native library reads where nothing is."""
    each_step(job, lambda: due(job) and ctypes.string_at(0))


@kind
def die_of_full_shm(job: Job) -> None:
    """Worker 1 writes into /dev/shm until that is full, by a map: the kernel has no error for that but SIGBUS."""
    job.dataset = Items(partial(fill_shm, [], job.options.onset * job.steps_count * BATCH_SIZE))


def fill_shm(maps: list[Any], due_item: float, index: int) -> None:
    sleep(0.020, index)
    worker = get_worker_info()
    if index >= due_item and worker is not None and worker.id == 1:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(MIB)
            maps.append(mmap.mmap(file.fileno(), MIB))
        maps[-1][:] = b"\1" * MIB
