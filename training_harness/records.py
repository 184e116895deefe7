"""Every stream that Tidegauge records, declared once.

The journal layout, the Arrow schema, the lake tables and docs/streams.md are all derived from
`STREAMS`. Units are part of the names (`_bytes`, `_ns`, `_count`, `_ratio`). An unknown value is
*missing*, never zero: the smallest value of an integer type, NaN for a float, no bytes for a
name. Readers turn all of them into NULL.

This module is pure declarations and imports the standard library alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: Size of a text column in bytes: UTF-8, cut short or filled with NUL.
NAME_BYTES = 24
NAME = f"{NAME_BYTES}s"

#: struct code -> the value that stands for "missing" in a record.
MISSING: dict[str, Any] = {"q": -(2**63), "i": -(2**31), "h": -(2**15), "b": -(2**7), "d": float("nan"), NAME: b""}
MISSING_INT64 = -(2**63)
MISSING_INT32 = -(2**31)

#: Roles of a process in a run; the `role` column of `process` holds the position in this tuple.
ROLES = ("main", "worker", "other", "collector")
ROLE_MAIN, ROLE_WORKER, ROLE_OTHER, ROLE_COLLECTOR = range(4)

#: Ends of a step; the `unit` column of `step` holds the position in this tuple. A run counts its highest unit.
STEP_UNITS = ("forward pass", "batch", "optimizer step", "step")
UNIT_PASS, UNIT_BATCH, UNIT_OPTIMIZER, UNIT_SCRIPT = range(4)

#: The worker id of a batch that was made in the training process itself (`num_workers=0`).
INLINE_WORKER = -1
#: `device` of host memory, in the stream `optimizer`.
HOST_DEVICE = -1


@dataclass(frozen=True)
class Column:
    """One column: `code` is its struct code (little-endian), `unit` is for people."""

    name: str
    code: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Stream:
    """One kind of record. Every record has the same size; the first column is `time_ns`."""

    name: str
    one_per: str
    columns: tuple[Column, ...]

    @cached_property
    def struct(self) -> struct.Struct:
        """Packer of the columns, in order, little-endian and without padding."""
        return struct.Struct("<" + "".join(column.code for column in self.columns))

    @property
    def layout(self) -> list[list[str]]:
        """Layout in each journal header: `[name, struct code]` per column."""
        return [[column.name, column.code] for column in self.columns]


def _measured(name: str, code: str, meaning: str) -> Column:
    """Return a column whose name ends in its unit."""
    return Column(name, code, name.rpartition("_")[2], meaning)


#: Columns that every record gets from the header of its journal. They name the process that *wrote* the record.
IDENTITY = (
    Column("host", "s", "name", "host name of the writing process"),
    Column("pid", "i", "id", "process id of the writing process"),
    _measured("start_ticks", "q", "start time of that process since boot, /proc/PID/stat field 22"),
    Column("rank", "i", "id", "RANK of the writing process, missing outside a distributed job"),
)

_TIME = _measured("time_ns", "q", "time of the record on CLOCK_MONOTONIC")
_LOADER = Column("loader", "i", "id", "DataLoader, numbered from 0 in the order of first use in its process")
_EPOCH = Column("epoch", "i", "id", "pass over that loader, from 0")
_INDEX = Column("index", "q", "id", "position of the batch in its epoch, from 0")
_WORKER = Column(
    "worker", "i", "id", "id that DataLoader recorded for the worker; -1: made in the training process"
)
_STEP = Column("step", "q", "id", "step of this process, from 0 (docs/steps.md says what ends one)")
_DEVICE = Column("device", "h", "id", "device, numbered as the command of the run sees it")
_SAMPLES = _measured("samples_count", "i", "samples in the batch")


def _stream(name: str, one_per: str, *columns: Column) -> Stream:
    return Stream(name, one_per, columns)


STEP = _stream(
    "step",
    "step and rank",
    _TIME,
    _STEP,
    _measured("duration_ns", "q", "time since the end of the previous step"),
    _measured(
        "data_wait_ns",
        "q",
        "time in the DataLoader's `__iter__` and `__next__`; missing where the training's thread iterates none",
    ),
    _measured("h2d_ns", "q", "host time in host to device copies"),
    _measured(
        "forward_ns",
        "q",
        "host time from a batch's arrival to the backward pass, without copies; where `data_wait_ns` is missing, "
        "in the top-level module's call",
    ),
    _measured("backward_ns", "q", "host time in the backward pass"),
    _measured("optimizer_ns", "q", "host time inside `Optimizer.step`"),
    _measured("other_ns", "q", "the rest of the step"),
    _measured("outside_cpu_ns", "q", "CPU time of the thread in `other_ns`, where `data_wait_ns` is missing"),
    _measured("batches_count", "i", "batches yielded within the step (gradient accumulation)"),
    _measured(
        "passes_count", "i", "calls of the top-level module within the step, where `data_wait_ns` is missing"
    ),
    _SAMPLES,
    Column(
        "unit", "b", "enum", "what ended the step: 0 forward pass, 1 batch, 2 optimizer, 3 the script's own call"
    ),
)

DEVICE_MEMORY = _stream(
    "device_memory",
    "step and device, just before the optimizer runs",
    _TIME,
    _STEP,
    _DEVICE,
    _measured("allocated_bytes", "q", "memory in blocks that tensors use"),
    _measured("requested_bytes", "q", "memory requested by tensors, before rounding"),
    _measured("active_bytes", "q", "allocated, or freed and awaiting another stream"),
    _measured("reserved_bytes", "q", "memory that the caching allocator has from the driver"),
    _measured("inactive_split_bytes", "q", "holes that can't be released (0 with expandable segments)"),
    _measured("allocated_peak_bytes", "q", "highest allocated since the peak was last reset by the user"),
    _measured("reserved_peak_bytes", "q", "highest reserved since the peak was last reset by the user"),
    _measured("allocation_count", "q", "live allocations"),
    _measured("segment_count", "q", "live segments"),
    _measured("alloc_retry_count", "q", "failed device allocations that flushed the cache, so far"),
    _measured("oom_count", "q", "out-of-memory errors thrown, so far"),
    _measured("device_alloc_count", "q", "cudaMalloc and cuMemMap calls, so far"),
    _measured("device_free_count", "q", "cudaFree and cuMemUnmap calls, so far"),
    _measured("private_pool_bytes", "q", "reserved by private pools and CUDA graphs"),
    _measured("pinned_allocated_bytes", "q", "pinned host memory owned by the host allocator"),
    _measured("pinned_active_bytes", "q", "pinned host memory in use"),
)

BATCH = _stream(
    "batch",
    "batch yielded to the training loop",
    _TIME,
    _LOADER,
    _EPOCH,
    _INDEX,
    _WORKER,
    _measured("wait_ns", "q", "time in the DataLoader's `__next__`"),
    _measured("blocked_ns", "q", "part of `wait_ns` spent on the result queue"),
    _measured("outstanding_count", "i", "batches dispatched that have not arrived yet"),
    _measured("parked_count", "i", "batches that arrived out of order and wait for their turn"),
    _measured("ready_count", "i", "batches in the result queue"),
    _measured("payload_bytes", "q", "size of the tensors and arrays in the batch; recorded at most every 5 ms"),
    _SAMPLES,
)

FETCH = _stream(
    "fetch",
    "batch made by a worker, or by the training process when `num_workers=0`",
    _TIME,
    _LOADER,
    _EPOCH,
    _INDEX,
    _WORKER,
    _measured("idle_ns", "q", "time waiting for an index before this batch"),
    _measured("getitem_ns", "q", "time in the dataset; when loading is inline, in collate_fn too"),
    _measured("collate_ns", "q", "time in collate_fn; missing when loading is inline"),
    _measured("cpu_ns", "q", "CPU time of the fetching thread during getitem and collate"),
    _measured("process_cpu_ns", "q", "CPU time of all threads of the process during the fetch"),
    _measured("children_cpu_ns", "q", "CPU time of child processes that were reaped during the fetch"),
    _measured("run_queue_ns", "q", "time runnable and waiting for a core, /proc/self/schedstat"),
    _measured("blocked_ns", "q", "rest of the fetch: waiting for I/O, locks or sleep"),
    _measured("major_fault_count", "i", "page faults that needed I/O"),
    _measured("minor_fault_count", "i", "page faults without I/O; copying a shared page takes one"),
    _measured("read_bytes", "q", "bytes read through read(2) and similar calls, page cache and pipes included"),
    _measured("storage_bytes", "q", "bytes read from storage"),
    _SAMPLES,
)

STAGE = _stream(
    "stage",
    "pipeline stage and batch in which the stage ran",
    _TIME,
    _LOADER,
    _EPOCH,
    _INDEX,
    Column(
        "worker", "i", "id", "worker that made the batch; -1: the training process; missing: called by the loop"
    ),
    Column(
        "stage", NAME, "name", "stage, recognised (read, decode, augment, convert, copy …) or named by the user"
    ),
    _measured("calls_count", "i", "calls while the batch was made or used"),
    _measured("duration_ns", "q", "time in these calls, without the stages that they call"),
    _measured("cpu_ns", "q", "CPU time of the thread in these calls"),
)

DEVICE_TIME = _stream(
    "device_time",
    "step and CUDA device, written when the step's CUDA events have completed",
    _TIME,
    _STEP,
    _DEVICE,
    _measured("duration_ns", "q", "time on the device since the end of the previous step"),
    _measured("forward_ns", "q", "time from the batch's arrival to the backward pass, copies included"),
    _measured("backward_ns", "q", "time in the backward pass"),
    _measured("optimizer_ns", "q", "time inside `Optimizer.step`"),
    _measured("other_ns", "q", "the rest of the step"),
)

HEAP = _stream(
    "heap",
    "reading of the heap of a training process or a worker, at most four per second",
    _TIME,
    _measured("in_use_bytes", "q", "memory that the C library's allocator gave out and that is not freed"),
    _measured("free_bytes", "q", "freed memory that the allocator keeps: holes between used blocks"),
)

OPTIMIZER = _stream(
    "optimizer",
    "device and reading of the optimizers of a training process, at most one per second and at CUDA errors",
    _TIME,
    Column("device", "h", "id", "device, numbered as the command of the run sees it; -1: host memory"),
    _measured(
        "gradients_bytes", "q", "gradients of their parameters, when one of them had stepped, or at the error"
    ),
    _measured("state_bytes", "q", "what they keep for their parameters, such as momenta or a history"),
)

PROCESS = _stream(
    "process",
    "sampled process and tick of the collector",
    _TIME,
    Column("process_pid", "i", "id", "pid of the sampled process"),
    _measured("process_start_ticks", "q", "start time of that process since boot"),
    Column("parent_pid", "i", "id", "pid of its parent"),
    Column("process_rank", "i", "id", "rank of that process"),
    Column("role", "b", "enum", "0 main, 1 worker, 2 other, 3 collector"),
    _LOADER,
    _WORKER,
    _measured("rss_bytes", "q", "resident set; does not show copy-on-read growth"),
    _measured("pss_bytes", "q", "resident memory, with shared pages divided by their users; additive"),
    _measured("private_dirty_bytes", "q", "written pages that only this process has; used for trends"),
    _measured("uss_bytes", "q", "private pages, clean and dirty"),
    _measured("swap_bytes", "q", "swapped-out memory"),
    _measured("file_bytes", "q", "resident pages of mapped files (RssFile)"),
    _measured("shm_bytes", "q", "resident shared memory (RssShmem)"),
    _measured("data_bytes", "q", "private writable address space (VmData), touched or not"),
    _measured("fd_count", "i", "open file descriptors"),
    _measured("fd_limit_count", "q", "soft RLIMIT_NOFILE; read as often as the proportional memory"),
    _measured("thread_count", "i", "threads"),
    _measured("allowed_cores_count", "i", "cores that its affinity allows"),
    Column(
        "wait_channel",
        NAME,
        "name",
        "kernel function in which its main thread waits, /proc/PID/wchan; missing while it runs or is hidden",
    ),
    _measured("cpu_ns", "q", "user and system time since its start"),
    _measured("run_queue_ns", "q", "time its main thread was runnable and waited for a core, since its start"),
    Column("alive", "b", "bool", "0 in the last record of a process that ended"),
    _measured("exit_status", "i", "exit code, or -n for signal n; known only for the command"),
)

EARLY_PROCESS = _stream(
    "early_process",
    "sampled process, between two ticks of the collector in its first two minutes",
    _TIME,
    Column("process_pid", "i", "id", "pid of the sampled process"),
    _measured("process_start_ticks", "q", "start time of that process since boot"),
    _measured("rss_bytes", "q", "resident set"),
    _measured("anon_bytes", "q", "resident pages of neither mapped files nor shared memory"),
    _measured("fd_count", "i", "open file descriptors"),
)

HOST = _stream(
    "host",
    "host and tick of the collector",
    _TIME,
    _measured("memory_total_bytes", "q", "MemTotal"),
    _measured("memory_available_bytes", "q", "MemAvailable"),
    _measured("memory_shmem_bytes", "q", "Shmem: tmpfs and shared memory of the whole host"),
    _measured("cgroup_limit_bytes", "q", "smallest memory limit from the command's cgroup up to the root"),
    _measured("cgroup_usage_bytes", "q", "usage charged at the level of that limit, page cache included"),
    _measured("cgroup_anon_bytes", "q", "anonymous part of `cgroup_usage_bytes`"),
    _measured("cgroup_file_bytes", "q", "page cache part, shared memory included"),
    _measured("cgroup_shmem_bytes", "q", "shared memory and tmpfs part"),
    _measured(
        "cgroup_slab_reclaimable_bytes",
        "q",
        "kernel caches that can be reclaimed; only cgroup version 2 reports them",
    ),
    _measured("cgroup_oom_count", "q", "times that the limit could not be met, so far"),
    _measured("cgroup_oom_kill_count", "q", "processes killed by the kernel in the cgroup, so far"),
    _measured("host_oom_kill_count", "q", "processes killed for memory on the whole host, /proc/vmstat"),
    _measured("shm_used_bytes", "q", "/dev/shm in use"),
    _measured("shm_unwritten_bytes", "q", "pages of the files in /dev/shm that were never written"),
    _measured("shm_total_bytes", "q", "/dev/shm size"),
    _measured("memory_some_avg10_ratio", "d", "PSI memory, some, 10 s"),
    _measured("memory_full_avg10_ratio", "d", "PSI memory, full, 10 s"),
    _measured("cpu_some_avg10_ratio", "d", "PSI cpu, some, 10 s"),
    _measured("io_some_avg10_ratio", "d", "PSI io, some, 10 s"),
    _measured("usable_cores_count", "d", "cores that affinity and CPU quota leave"),
    _measured(
        "busy_cores_count",
        "d",
        "cores of the affinity that were busy since the sample before, with any process or another virtual machine",
    ),
)

DEVICE = _stream(
    "device",
    "GPU (NVML or AMD SMI) and tick of the collector",
    _TIME,
    _DEVICE,
    _measured("used_bytes", "q", "device memory in use, by all processes and the driver"),
    _measured("total_bytes", "q", "device memory"),
    _measured("reserved_bytes", "q", "memory that the driver reserves for itself, where it reports that"),
    _measured("process_used_bytes", "q", "memory of the run's processes, where the driver reports it"),
    _measured(
        "recorded_used_bytes",
        "q",
        "the part of `process_used_bytes` in training processes with `device_memory` records",
    ),
    _measured("other_used_bytes", "q", "memory of other processes, where the driver reports it per process"),
    _measured("utilisation_ratio", "d", "share of time with a kernel running"),
    _measured("temperature_celsius", "d", "GPU temperature"),
    _measured("power_watts", "d", "power draw"),
)

AGENT = _stream(
    "agent",
    "tick of the collector, with its own cost",
    _TIME,
    _measured("cpu_ns", "q", "own CPU time since start, verdicts and ingests included"),
    _measured("smaps_ns", "q", "part of `cpu_ns` spent on smaps_rollup"),
    _measured("rss_bytes", "q", "own resident set"),
    _measured(
        "verdict_anon_bytes",
        "q",
        "anonymous memory of the processes that judge the run and store its records; NULL if there is none",
    ),
    _measured("interval_ns", "q", "achieved sampling interval"),
    _measured("ingest_lag_ns", "q", "age of the oldest record that is not in the lake yet"),
    _measured("records_ingested_count", "q", "records moved into the lake so far"),
    _measured("records_lost_count", "q", "records that writers could not write"),
)

STREAMS: dict[str, Stream] = {
    stream.name: stream
    for stream in (
        STEP,
        DEVICE_TIME,
        DEVICE_MEMORY,
        BATCH,
        FETCH,
        STAGE,
        HEAP,
        OPTIMIZER,
        PROCESS,
        EARLY_PROCESS,
        HOST,
        DEVICE,
        AGENT,
    )
}
