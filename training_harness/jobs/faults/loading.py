"""Faults of data loading and of the training loop, and faults that end the training."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info

from training_harness.jobs.faults.job import BATCH_SIZE, Batch, Item, Items, Job, fault, sleep
from training_harness.jobs.faults.memory import fill_batches

_MIB = 1 << 20
_CHUNK_BYTES = 64 * 1024


def sleep_unevenly(batch_seconds: float, slow_seconds: float, period: int, index: int) -> None:
    """Take longer in worker 1; with a period above 0, take longer at its multiples instead, in any worker."""
    worker = get_worker_info()
    slow = index % period == 0 if period else worker is not None and worker.id == 1
    sleep(slow_seconds if slow else batch_seconds, index)


def compute(batch_seconds: float, _index: int) -> None:
    """Keep a core busy for an item's share of a batch's time."""
    end = time.thread_time() + batch_seconds / BATCH_SIZE
    while time.thread_time() < end:
        sum(range(200))


@fault("slow-worker", num_workers=4)
def slow_worker(job: Job) -> None:
    """Worker 1 of 4 takes 120 ms a batch, the others 20 ms."""
    job.dataset = Items(partial(sleep_unevenly, 0.020, 0.120 if job.faulty else 0.020, 0))


@fault("workers-too-slow", num_workers=4)
def workers_too_slow(job: Job) -> None:
    """Each of 4 workers takes 120 ms a batch, a step takes 10 ms."""
    job.dataset = Items(partial(sleep, 0.120 if job.faulty else 0.020))


@fault("straggler-samples", num_workers=4)
def straggler_samples(job: Job) -> None:
    """Every 37th batch has a sample that takes 400 ms, where a batch takes 20 ms."""
    slow_seconds = 0.400 * BATCH_SIZE if job.faulty else 0.020
    job.dataset = Items(partial(sleep_unevenly, 0.020, slow_seconds, 37 * BATCH_SIZE))


@fault("cpu-bound", "workers-too-slow", num_workers=1)
def cpu_bound(job: Job) -> None:
    """One worker computes 25 ms for a batch, a step takes 10 ms."""
    job.dataset = Items(partial(compute, 0.025 if job.faulty else 0.005))


@fault("oversubscribed", "workers-too-slow")
def oversubscribed(job: Job) -> None:
    """Three workers for each usable core compute more than the cores can."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    job.num_workers = 6 * half if job.faulty else half
    job.dataset = Items(partial(compute, (0.036 if job.faulty else 0.006) * half))


@fault("io-bound", "workers-too-slow", num_workers=4)
def io_bound(job: Job) -> None:
    """Four workers read through one pipe that gives 25 MiB/s: a batch of 512 KiB each 20 ms."""
    folder = job.closing.enter_context(tempfile.TemporaryDirectory(prefix="tidegauge-"))
    os.mkfifo(path := Path(folder) / "pipe")
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # both ends, so it never waits for a reader
    job.closing.callback(os.close, pipe)
    ended, pause_seconds = threading.Event(), (0.020 if job.faulty else 0.006) / BATCH_SIZE
    feeder = threading.Thread(target=feed, args=(pipe, pause_seconds, ended), daemon=True)
    job.closing.callback(feeder.join)
    job.closing.callback(ended.set)
    feeder.start()
    job.dataset = Items(partial(read_chunk, path))


def feed(pipe: int, pause_seconds: float, ended: threading.Event) -> None:
    """Write chunks into a pipe at a steady pace; skip one when the pipe is full."""
    due = time.monotonic()
    while not ended.wait(max(0.0, due - time.monotonic())):
        due += pause_seconds
        with contextlib.suppress(BlockingIOError):
            os.write(pipe, bytes(_CHUNK_BYTES))


def read_chunk(path: Path, _index: int) -> None:
    """Read a chunk from a pipe that the other workers read too."""
    with path.open("rb", buffering=0) as pipe:
        left = _CHUNK_BYTES
        while left > 0 and (data := pipe.read(left)):
            left -= len(data)


def do_slowly(pause_seconds: float, then: Callable[[Any], Any], argument: Any) -> Any:
    """Pause, then call `then`."""
    time.sleep(pause_seconds)
    return then(argument)


@fault("collate-bound")
def collate_bound(job: Job) -> None:
    """The collate function pads for 60 ms, reading takes 4 ms."""
    job.dataset = Items(partial(sleep, 0.004))
    job.settings = {"collate_fn": partial(do_slowly, 0.060 if job.faulty else 0.004, default_collate)}


@fault("copy-bound", steps_count=300)
def copy_bound(job: Job) -> None:
    """Batches of 32 MiB are collated outside shared memory, so that each is copied once more."""
    fill_batches(job, 32 * _MIB if job.faulty else _MIB)
    job.settings = {"collate_fn": collate_privately}


def collate_privately(items: list[Item]) -> Batch:
    """Collate into this process's own memory, so that the queue has to copy the batch into shared memory."""
    return torch.stack([features for features, _ in items]), torch.tensor([label for _, label in items])


class SlowSampler(Sampler[int]):
    """Indices in order, each of which takes a while to choose."""

    def __init__(self, batch_seconds: float) -> None:
        self.batch_seconds = batch_seconds

    def __iter__(self) -> Iterator[int]:
        for index in range(100_000):
            sleep(self.batch_seconds, index)
            yield index


@fault("sampler-bound")
def sampler_bound(job: Job) -> None:
    """The sampler takes 24 ms to choose the indices of a batch, in the training process."""
    job.settings = {"sampler": SlowSampler(0.024 if job.faulty else 0.0)}


@fault("worker-startup")
def worker_startup(job: Job) -> None:
    """Workers that take 1 s to start are started again for each epoch of 50 batches."""
    job.dataset = Items(partial(sleep, 0.010), count=50 * BATCH_SIZE)
    job.settings = {"worker_init_fn": partial(do_slowly, 1.0, id), "persistent_workers": not job.faulty}


@fault("fresh-iterator", "worker-startup", steps_count=200)
def fresh_iterator(job: Job) -> None:
    """next(iter(loader)) in each step starts the workers for one batch."""
    loader = job.loader()
    job.batches = (lambda: iter(lambda: next(iter(loader)), None)) if job.faulty else job.endless


@fault("epoch-refill", num_workers=4, step_seconds=0.020)
def epoch_refill(job: Job) -> None:
    """Epochs of 8 batches: the workers stay, but each epoch begins with empty queues."""
    job.dataset = Items(partial(sleep, 0.060), count=(8 if job.faulty else 8000) * BATCH_SIZE)
    job.settings = {"persistent_workers": True}


@fault("inline-loading")
def inline_loading(job: Job) -> None:
    """With num_workers=0 the training process takes 20 ms for each batch, and trains no step meanwhile."""
    job.num_workers = 0 if job.faulty else 4
    job.dataset = Items(partial(sleep, 0.020))


class Shards(IterableDataset[Item]):
    """Dataset of 250 batches an epoch: worker 0 has `share` of them, the others the rest."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __iter__(self) -> Iterator[Item]:
        worker, items = get_worker_info(), Items(partial(sleep, 0.016))
        others = max(1, worker.num_workers - 1) if worker else 1
        share = self.share if worker is None or worker.id == 0 else (1 - self.share) / others
        yield from (items[index] for index in range(round(250 * BATCH_SIZE * share)))


@fault("shard-skew")
def shard_skew(job: Job) -> None:
    """Worker 0 has 90 % of an iterable dataset: when the other is done, it works alone."""
    job.dataset = Shards(0.9 if job.faulty else 0.5)


@fault("main-thread-pause")
def main_thread_pause(job: Job) -> None:
    """Every 50 steps the garbage collector walks 300,000 objects in the training thread."""
    job.objects = [[number] for number in range(300_000)]

    def collect(_loss: torch.Tensor, _batch: Batch) -> None:
        if job.step == 1 and not job.faulty:
            gc.freeze()  # the collector skips all objects that exist once everything is loaded
            job.closing.callback(gc.unfreeze)
        if job.step % 50 == 0:
            gc.collect()

    job.after_step = collect


@fault("rank-straggler", ranks_count=2)
def rank_straggler(job: Job) -> None:
    """Rank 1 of 2 takes 30 ms longer for its forward pass, and the other waits for its gradients."""
    torch.distributed.init_process_group("gloo")
    job.closing.callback(torch.distributed.destroy_process_group)
    if job.faulty and torch.distributed.get_rank() == 1:
        job.model.register_forward_pre_hook(lambda _model, _inputs: time.sleep(0.030))
    job.model = DistributedDataParallel(job.model)


def die(last: int, by: signal.Signals, index: int) -> None:
    """End a worker at item `last`: by a signal from outside, or by SIGBUS as when /dev/shm is full."""
    sleep(0.010, index)
    if index != last or get_worker_info() is None:
        return
    if by != signal.SIGBUS:
        os.kill(os.getpid(), by)
    with tempfile.TemporaryFile(dir="/dev/shm") as segment:
        segment.truncate(mmap.PAGESIZE)
        shared = mmap.mmap(segment.fileno(), mmap.PAGESIZE)
        segment.truncate(0)
        shared[0] = 1  # no page is behind it


@fault("worker-killed", dies=True)
def worker_killed(job: Job) -> None:
    """A worker is killed by signal 9, as the kernel does it when memory runs out."""
    job.dataset = Items(partial(die, job.options.at_batch * BATCH_SIZE if job.faulty else -1, signal.SIGKILL))


@fault("shm-bus-error", dies=True)
def shm_bus_error(job: Job) -> None:
    """A worker writes to shared memory that could not be had, and dies of SIGBUS."""
    job.dataset = Items(partial(die, job.options.at_batch * BATCH_SIZE if job.faulty else -1, signal.SIGBUS))


def at_batch(job: Job, fall: Callable[[torch.Tensor], object]) -> None:
    """Call `fall` after the step of `--at-batch`, if the fault is on."""
    due = job.options.at_batch if job.faulty else -1
    job.after_step = lambda _loss, batch: fall(batch[0]) if job.step == due else None


@fault("crash", "crashed", dies=True)
def crash(job: Job) -> None:
    """The training fails with an exception."""
    at_batch(job, lambda features: job.model(features[:, :-1]))


@fault("killed", dies=True)
def killed(job: Job) -> None:
    """The training process itself is killed by signal 9."""
    at_batch(job, lambda _features: os.kill(os.getpid(), signal.SIGKILL))
