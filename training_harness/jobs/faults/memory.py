"""Faults of memory, of file descriptors and of shared memory."""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
import resource
import warnings
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from training_harness.jobs.common import JobError
from training_harness.jobs.faults.job import BATCH_SIZE, FEATURES_COUNT, Batch, Items, Job, fault, sleep

_MIB = 1 << 20
_PIECE_BYTES = _MIB // 4
_PICTURE_BYTES = _MIB // 16
_FLOAT_BYTES = 4
_ROWS_COUNT = 300_000
#: Bytes that the allocator may reserve in the fault `cuda-oom`.
_FRACTION_BYTES = 96 * _MIB


@fault("copy-on-read", "copy-on-read-growth", step_seconds=0.025)
def copy_on_read(job: Job) -> None:
    """A list of Python objects is copied page by page into each forked worker."""
    rows: Any = torch.arange(_ROWS_COUNT)[:, None] + torch.arange(9)
    if job.faulty:
        rows = [{"path": f"photographs/{i:09d}.jpg", "box": list(range(i, i + 9))} for i in range(_ROWS_COUNT)]
    job.dataset = Items(partial(read_rows, rows), count=_ROWS_COUNT // 4)
    job.settings = {"shuffle": True}


def read_rows(rows: Any, index: int) -> None:
    """Read the four annotations of a mosaic. This writes reference counts of objects, and so copies pages."""
    for row in rows[index :: _ROWS_COUNT // 4]:
        sum(row["box"] if isinstance(row, dict) else row)


@fault("worker-cache", "worker-heap-leak")
def worker_cache(job: Job) -> None:
    """The dataset keeps the decoded picture of every item, in each worker for itself."""
    job.settings = {"persistent_workers": True}
    job.dataset = Items(partial(decode, {}, job.options.limit_mb << 20 if job.faulty else 0))


def decode(cache: dict[int, bytearray], limit_bytes: int, index: int) -> None:
    """Make a picture of 64 KiB in 1 ms, and keep it up to the worker's share of the limit."""
    sleep(0.008, index)
    picture, worker = bytearray(b"\1" * _PICTURE_BYTES), get_worker_info()
    if len(cache) * _PICTURE_BYTES < limit_bytes // (worker.num_workers if worker else 1):
        cache[index] = picture


@fault("main-leak", "main-heap-leak", step_seconds=0.020)
def main_leak(job: Job) -> None:
    """The training process keeps 256 KiB of each step for ever."""
    job.after_step = lambda _loss, _batch: job.keep(_PIECE_BYTES, torch.ones(_PIECE_BYTES, dtype=torch.uint8))


@fault("loss-list", "main-heap-leak", step_seconds=0.020)
def loss_list(job: Job) -> None:
    """A list keeps each validation loss with its graph, and so with the activations, 256 KiB."""
    job.model = job.make_model(hidden_count := 4096)

    def validate(_loss: torch.Tensor, batch: Batch) -> None:
        loss = job.loss(*batch)  # without torch.no_grad()
        job.keep(2 * BATCH_SIZE * hidden_count * _FLOAT_BYTES, loss, loss.item())

    job.after_step = validate


@fault("loss-sum", "main-heap-leak", steps_count=4000, step_seconds=0.003)
def loss_sum(job: Job) -> None:
    """The running sum of the losses is a tensor: the nodes of every step's graph stay, some 10 KiB."""
    job.dataset = Items(partial(sleep, 0.004))
    job.model = nn.Sequential(*(nn.Linear(FEATURES_COUNT, FEATURES_COUNT) for _ in range(24)))
    job.objects = [torch.zeros(())]

    def add(loss: torch.Tensor, _batch: Batch) -> None:
        job.objects[0] = job.objects[0] + (loss if job.may_take(10 * 1024) else loss.detach())

    job.after_step = add


@fault("create-graph", "main-heap-leak", step_seconds=0.020)
def create_graph(job: Job) -> None:
    """A copy of the model gets gradients with create_graph=True: it and they hold each other."""
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph")
    job.model = job.make_model(1024)

    def look_ahead(_loss: torch.Tensor, batch: Batch) -> None:
        trial = copy.deepcopy(job.model)
        nn.functional.cross_entropy(trial(batch[0].clone()), batch[1].clone()).backward(create_graph=True)  # type: ignore[no-untyped-call]
        if not job.may_take(_PIECE_BYTES):
            trial.zero_grad(set_to_none=True)

    job.after_step = look_ahead


@fault("activation-hook", "main-heap-leak", step_seconds=0.020)
def activation_hook(job: Job) -> None:
    """A forward hook keeps the activations of every step, 512 KiB."""
    job.model = job.make_model(8192)

    def watch(_model: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        job.keep(2 * output.numel() * _FLOAT_BYTES, output, output.mean().item())

    next(job.model.children()).register_forward_hook(watch)


@fault("cycled-loader", "main-heap-leak", num_workers=0, step_seconds=0.020)
def cycled_loader(job: Job) -> None:
    """itertools.cycle(loader) keeps every batch of the first epoch, to hand it out again."""
    batches_count = max(1, (job.options.limit_mb << 20) // _PIECE_BYTES)
    size = _PIECE_BYTES // BATCH_SIZE // _FLOAT_BYTES
    job.dataset = Items(partial(sleep, 0.0), count=batches_count * BATCH_SIZE, size=size)
    job.batches = (lambda: itertools.cycle(job.loader())) if job.faulty else job.endless


@fault("fd-leak", step_seconds=0.020)
def fd_leak(job: Job) -> None:
    """A file is opened in each step and not closed, until half of the allowed number are open."""

    def read(_loss: torch.Tensor, _batch: Batch) -> None:
        descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
        if job.faulty and descriptor < half_of_the_descriptors():
            job.closing.callback(os.close, descriptor)
        else:
            os.close(descriptor)

    job.after_step = read


@fault("kept-batches", "fd-leak", step_seconds=0.020)
def kept_batches(job: Job) -> None:
    """Batches from workers are kept: each tensor holds a descriptor, up to half of the allowed number."""
    limit = half_of_the_descriptors() // 2
    job.after_step = lambda _loss, batch: job.objects.append(batch if job.faulty and job.step < limit else None)


def half_of_the_descriptors() -> int:
    """Return half of the number of files that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


@fault("shm-leak", step_seconds=0.020)
def shm_leak(job: Job) -> None:
    """A shared memory segment of 256 KiB is made in each step and not unlinked."""

    def share(_loss: torch.Tensor, _batch: Batch) -> None:
        segment = SharedMemory(create=True, size=_PIECE_BYTES)
        memoryview(segment.buf or b"")[:] = bytes(_PIECE_BYTES)
        segment.close()
        if shared_memory_free_bytes() > job.taken_bytes and job.may_take(_PIECE_BYTES):
            job.closing.callback(segment.unlink)  # after a kill, multiprocessing's resource tracker does it
        else:
            segment.unlink()

    job.after_step = share


def shared_memory_free_bytes() -> int:
    """Return the free bytes of /dev/shm."""
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def fill_batches(job: Job, batch_bytes: int) -> None:
    """Set the size of a job's batches, if all batches in flight fit into /dev/shm."""
    needed, free = (2 * job.num_workers + 2) * batch_bytes // _MIB, shared_memory_free_bytes() // _MIB
    if free < needed:
        raise JobError(
            f"{free} MiB are free in /dev/shm and {needed} are needed; give it more (docker: --shm-size)"
        )
    job.dataset = Items(partial(sleep, 0.0), size=batch_bytes // BATCH_SIZE // _FLOAT_BYTES)


@fault("gpu-loss-list", "gpu-tensor-leak", needs_gpu=True, step_seconds=0.020)
def gpu_loss_list(job: Job) -> None:
    """A list keeps each validation loss on the GPU with its graph, and so with the activations, 256 KiB."""
    loss_list(job)


@fault("cuda-oom", needs_gpu=True, dies=True, step_seconds=0.020)
def cuda_oom(job: Job) -> None:
    """The activations that a list keeps fill the 96 MiB of the GPU that the process may use."""
    loss_list(job)
    share = _FRACTION_BYTES / torch.cuda.get_device_properties(job.device).total_memory
    torch.cuda.set_per_process_memory_fraction(share)


@fault("gpu-driver-leak", "gpu-non-pytorch-growth", needs_gpu=True, step_seconds=0.020)
def gpu_driver_leak(job: Job) -> None:
    """A library takes 2 MiB every fourth step from the CUDA driver itself, unseen by PyTorch's allocator."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call_library(_loss: torch.Tensor, _batch: Batch) -> None:
        if job.step % 4:
            return
        address = ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(2 * _MIB)):
            raise JobError("the CUDA driver has no memory left; free some on the GPU")
        if not job.may_take(2 * _MIB):
            driver.cuMemFree_v2(address)

    job.after_step = call_library


@fault("gpu-fragmentation", needs_gpu=True, steps_count=600, step_seconds=0.020)
def gpu_fragmentation(job: Job) -> None:
    """Every 50 steps one needs 4 MiB more than ever, and a small tensor stays in the segment that it leaves."""
    empty = partial(torch.empty, dtype=torch.uint8, device=job.device)
    wanted_bytes = 12 * _MIB

    def work(_loss: torch.Tensor, _batch: Batch) -> None:
        nonlocal wanted_bytes
        if job.step % 50 or not job.may_take(wanted_bytes + 6 * _MIB):
            empty(wanted_bytes)
            return
        wanted_bytes += 4 * _MIB
        empty(wanted_bytes + 2 * _MIB)  # a segment of its own, since none is large enough; free again at once
        most = empty(wanted_bytes)  # in that segment: every other is too small
        job.objects.append(empty(2 * _MIB))  # the best fit is what `most` left there
        del most

    job.after_step = work


@fault("pinned-cache", "pinned-cache-growth", needs_gpu=True, step_seconds=0.020)
def pinned_cache(job: Job) -> None:
    """Each step has one more pinned buffer of 256 KiB in flight than the last; their cache gives none back."""

    def stage(_loss: torch.Tensor, _batch: Batch) -> None:
        job.may_take(_PIECE_BYTES)
        for _ in range(1 + job.taken_bytes // _PIECE_BYTES):
            job.objects.append(torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True))
        job.objects.clear()

    job.after_step = stage


@fault("pin-bound", needs_gpu=True, num_workers=4, step_seconds=0.001)
def pin_bound(job: Job) -> None:
    """The one thread that pins batches of 32 MiB takes longer than a step, and than the four workers."""
    fill_batches(job, 32 * _MIB)
    job.settings = {"pin_memory": job.faulty}
