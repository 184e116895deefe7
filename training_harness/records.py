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


#: Columns that every record gets from the header of its journal. They name the process that *wrote* the record.
IDENTITY = (
    Column("host", "s", "name", "host name of the writing process"),
    Column("pid", "i", "id", "process id of the writing process"),
    Column("start_ticks", "q", "ticks", "start time of that process since boot, /proc/PID/stat field 22"),
    Column("rank", "i", "id", "RANK of the writing process, missing outside a distributed job"),
)

_TIME = Column("time_ns", "q", "ns", "time of the record on CLOCK_MONOTONIC")
_LOADER = Column("loader", "i", "id", "DataLoader, numbered from 0 in the order of first use in its process")
_EPOCH = Column("epoch", "i", "id", "pass over that loader, from 0")
_INDEX = Column("index", "q", "id", "position of the batch in its epoch, from 0")
_WORKER = Column(
    "worker", "i", "id", "id that DataLoader recorded for the worker; -1: made in the training process"
)
_DEVICE = Column("device", "h", "id", "device, numbered as the command of the run sees it")
_SAMPLES = Column("samples_count", "i", "count", "samples in the batch")


def _stream(name: str, one_per: str, *columns: Column) -> Stream:
    return Stream(name, one_per, columns)


STEP = _stream(
    "step",
    "step and rank",
    _TIME,
    Column("step", "q", "id", "step of this process, from 0 (docs/steps.md says what ends one)"),
    Column("duration_ns", "q", "ns", "time since the end of the previous step"),
    Column(
        "data_wait_ns",
        "q",
        "ns",
        "time in the DataLoader's `__iter__` and `__next__`; missing where the training's thread iterates none",
    ),
    Column("h2d_ns", "q", "ns", "host time in host to device copies"),
    Column(
        "forward_ns",
        "q",
        "ns",
        "host time from a batch's arrival to the backward pass, without copies; where `data_wait_ns` is missing, "
        "in the top-level module's call",
    ),
    Column("backward_ns", "q", "ns", "host time in the backward pass"),
    Column("optimizer_ns", "q", "ns", "host time inside `Optimizer.step`"),
    Column("other_ns", "q", "ns", "the rest of the step"),
    Column("outside_cpu_ns", "q", "ns", "CPU time of the thread in `other_ns`, where `data_wait_ns` is missing"),
    Column("batches_count", "i", "count", "batches yielded within the step (gradient accumulation)"),
    Column(
        "passes_count",
        "i",
        "count",
        "calls of the top-level module within the step, where `data_wait_ns` is missing",
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
    Column("step", "q", "id", "step of this process, from 0 (docs/steps.md says what ends one)"),
    _DEVICE,
    Column("allocated_bytes", "q", "bytes", "memory in blocks that tensors use"),
    Column("requested_bytes", "q", "bytes", "memory requested by tensors, before rounding"),
    Column("active_bytes", "q", "bytes", "allocated, or freed and awaiting another stream"),
    Column("reserved_bytes", "q", "bytes", "memory that the caching allocator has from the driver"),
    Column("inactive_split_bytes", "q", "bytes", "holes that can't be released (0 with expandable segments)"),
    Column("allocated_peak_bytes", "q", "bytes", "highest allocated since the peak was last reset by the user"),
    Column("reserved_peak_bytes", "q", "bytes", "highest reserved since the peak was last reset by the user"),
    Column("allocation_count", "q", "count", "live allocations"),
    Column("segment_count", "q", "count", "live segments"),
    Column("alloc_retry_count", "q", "count", "failed device allocations that flushed the cache, so far"),
    Column("oom_count", "q", "count", "out-of-memory errors thrown, so far"),
    Column("device_alloc_count", "q", "count", "cudaMalloc and cuMemMap calls, so far"),
    Column("device_free_count", "q", "count", "cudaFree and cuMemUnmap calls, so far"),
    Column("private_pool_bytes", "q", "bytes", "reserved by private pools and CUDA graphs"),
    Column("pinned_allocated_bytes", "q", "bytes", "pinned host memory owned by the host allocator"),
    Column("pinned_active_bytes", "q", "bytes", "pinned host memory in use"),
)

BATCH = _stream(
    "batch",
    "batch yielded to the training loop",
    _TIME,
    _LOADER,
    _EPOCH,
    _INDEX,
    _WORKER,
    Column("wait_ns", "q", "ns", "time in the DataLoader's `__next__`"),
    Column("blocked_ns", "q", "ns", "part of `wait_ns` spent on the result queue"),
    Column("outstanding_count", "i", "count", "batches dispatched that have not arrived yet"),
    Column("parked_count", "i", "count", "batches that arrived out of order and wait for their turn"),
    Column("ready_count", "i", "count", "batches in the result queue"),
    Column(
        "payload_bytes", "q", "bytes", "size of the tensors and arrays in the batch; recorded at most every 5 ms"
    ),
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
    Column("idle_ns", "q", "ns", "time waiting for an index before this batch"),
    Column("getitem_ns", "q", "ns", "time in the dataset; when loading is inline, in collate_fn too"),
    Column("collate_ns", "q", "ns", "time in collate_fn; missing when loading is inline"),
    Column("cpu_ns", "q", "ns", "CPU time of the fetching thread during getitem and collate"),
    Column("process_cpu_ns", "q", "ns", "CPU time of all threads of the process during the fetch"),
    Column("children_cpu_ns", "q", "ns", "CPU time of child processes that were reaped during the fetch"),
    Column("run_queue_ns", "q", "ns", "time runnable and waiting for a core, /proc/self/schedstat"),
    Column("blocked_ns", "q", "ns", "rest of the fetch: waiting for I/O, locks or sleep"),
    Column("major_fault_count", "i", "count", "page faults that needed I/O"),
    Column("minor_fault_count", "i", "count", "page faults without I/O; copying a shared page takes one"),
    Column(
        "read_bytes", "q", "bytes", "bytes read through read(2) and similar calls, page cache and pipes included"
    ),
    Column("storage_bytes", "q", "bytes", "bytes read from storage"),
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
    Column("calls_count", "i", "count", "calls while the batch was made or used"),
    Column("duration_ns", "q", "ns", "time in these calls, without the stages that they call"),
    Column("cpu_ns", "q", "ns", "CPU time of the thread in these calls"),
)

DEVICE_TIME = _stream(
    "device_time",
    "step and CUDA device, written when the step's CUDA events have completed",
    _TIME,
    Column("step", "q", "id", "step of this process, from 0 (docs/steps.md says what ends one)"),
    _DEVICE,
    Column("duration_ns", "q", "ns", "time on the device since the end of the previous step"),
    Column("forward_ns", "q", "ns", "time from the batch's arrival to the backward pass, copies included"),
    Column("backward_ns", "q", "ns", "time in the backward pass"),
    Column("optimizer_ns", "q", "ns", "time inside `Optimizer.step`"),
    Column("other_ns", "q", "ns", "the rest of the step"),
)

HEAP = _stream(
    "heap",
    "reading of the heap of a training process or a worker, at most four per second",
    _TIME,
    Column("in_use_bytes", "q", "bytes", "memory that the C library's allocator gave out and that is not freed"),
    Column("free_bytes", "q", "bytes", "freed memory that the allocator keeps: holes between used blocks"),
)

OPTIMIZER = _stream(
    "optimizer",
    "device and reading of the optimizers of a training process, at most one per second",
    _TIME,
    Column("device", "h", "id", "device, numbered as the command of the run sees it; -1: host memory"),
    Column("gradients_bytes", "q", "bytes", "gradients of their parameters, when one of them had stepped"),
    Column("state_bytes", "q", "bytes", "what they keep for their parameters, such as momenta or a history"),
)

PROCESS = _stream(
    "process",
    "sampled process and tick of the collector",
    _TIME,
    Column("process_pid", "i", "id", "pid of the sampled process"),
    Column("process_start_ticks", "q", "ticks", "start time of that process since boot"),
    Column("parent_pid", "i", "id", "pid of its parent"),
    Column("process_rank", "i", "id", "rank of that process"),
    Column("role", "b", "enum", "0 main, 1 worker, 2 other, 3 collector"),
    _LOADER,
    _WORKER,
    Column("rss_bytes", "q", "bytes", "resident set; does not show copy-on-read growth"),
    Column("pss_bytes", "q", "bytes", "resident memory, with shared pages divided by their users; additive"),
    Column("private_dirty_bytes", "q", "bytes", "written pages that only this process has; used for trends"),
    Column("uss_bytes", "q", "bytes", "private pages, clean and dirty"),
    Column("swap_bytes", "q", "bytes", "swapped-out memory"),
    Column("file_bytes", "q", "bytes", "resident pages of mapped files (RssFile)"),
    Column("shm_bytes", "q", "bytes", "resident shared memory (RssShmem)"),
    Column("data_bytes", "q", "bytes", "private writable address space (VmData), touched or not"),
    Column("fd_count", "i", "count", "open file descriptors"),
    Column("fd_limit_count", "q", "count", "soft RLIMIT_NOFILE; read as often as the proportional memory"),
    Column("thread_count", "i", "count", "threads"),
    Column("allowed_cores_count", "i", "count", "cores that its affinity allows"),
    Column(
        "wait_channel",
        NAME,
        "name",
        "kernel function in which its main thread waits, /proc/PID/wchan; missing while it runs or is hidden",
    ),
    Column("cpu_ns", "q", "ns", "user and system time since its start"),
    Column("run_queue_ns", "q", "ns", "time its main thread was runnable and waited for a core, since its start"),
    Column("alive", "b", "bool", "0 in the last record of a process that ended"),
    Column("exit_status", "i", "status", "exit code, or -n for signal n; known only for the command"),
)

EARLY_PROCESS = _stream(
    "early_process",
    "sampled process, between two ticks of the collector in its first two minutes",
    _TIME,
    Column("process_pid", "i", "id", "pid of the sampled process"),
    Column("process_start_ticks", "q", "ticks", "start time of that process since boot"),
    Column("rss_bytes", "q", "bytes", "resident set"),
    Column("anon_bytes", "q", "bytes", "resident pages of neither mapped files nor shared memory"),
    Column("fd_count", "i", "count", "open file descriptors"),
)

HOST = _stream(
    "host",
    "host and tick of the collector",
    _TIME,
    Column("memory_total_bytes", "q", "bytes", "MemTotal"),
    Column("memory_available_bytes", "q", "bytes", "MemAvailable"),
    Column("memory_shmem_bytes", "q", "bytes", "Shmem: tmpfs and shared memory of the whole host"),
    Column("cgroup_limit_bytes", "q", "bytes", "smallest memory limit from the command's cgroup up to the root"),
    Column("cgroup_usage_bytes", "q", "bytes", "usage charged at the level of that limit, page cache included"),
    Column("cgroup_anon_bytes", "q", "bytes", "anonymous part of `cgroup_usage_bytes`"),
    Column("cgroup_file_bytes", "q", "bytes", "page cache part, shared memory included"),
    Column("cgroup_shmem_bytes", "q", "bytes", "shared memory and tmpfs part"),
    Column(
        "cgroup_slab_reclaimable_bytes",
        "q",
        "bytes",
        "kernel caches that can be reclaimed; only cgroup version 2 reports them",
    ),
    Column("cgroup_oom_count", "q", "count", "times that the limit could not be met, so far"),
    Column("cgroup_oom_kill_count", "q", "count", "processes killed by the kernel in the cgroup, so far"),
    Column("host_oom_kill_count", "q", "count", "processes killed for memory on the whole host, /proc/vmstat"),
    Column("shm_used_bytes", "q", "bytes", "/dev/shm in use"),
    Column("shm_unwritten_bytes", "q", "bytes", "pages of the files in /dev/shm that were never written"),
    Column("shm_total_bytes", "q", "bytes", "/dev/shm size"),
    Column("memory_some_avg10_ratio", "d", "ratio", "PSI memory, some, 10 s"),
    Column("memory_full_avg10_ratio", "d", "ratio", "PSI memory, full, 10 s"),
    Column("cpu_some_avg10_ratio", "d", "ratio", "PSI cpu, some, 10 s"),
    Column("io_some_avg10_ratio", "d", "ratio", "PSI io, some, 10 s"),
    Column("usable_cores_count", "d", "count", "cores that affinity and CPU quota leave"),
    Column(
        "busy_cores_count",
        "d",
        "count",
        "cores of the affinity that were busy since the sample before, with any process or another virtual machine",
    ),
)

DEVICE = _stream(
    "device",
    "GPU (NVML or AMD SMI) and tick of the collector",
    _TIME,
    _DEVICE,
    Column("used_bytes", "q", "bytes", "device memory in use, by all processes and the driver"),
    Column("total_bytes", "q", "bytes", "device memory"),
    Column("reserved_bytes", "q", "bytes", "memory that the driver reserves for itself, where it reports that"),
    Column("process_used_bytes", "q", "bytes", "memory of the run's processes, where the driver reports it"),
    Column(
        "recorded_used_bytes",
        "q",
        "bytes",
        "the part of `process_used_bytes` in processes with `device_memory` records",
    ),
    Column("other_used_bytes", "q", "bytes", "memory of other processes, where the driver reports it per process"),
    Column("utilisation_ratio", "d", "ratio", "share of time with a kernel running"),
    Column("temperature_celsius", "d", "celsius", "GPU temperature"),
    Column("power_watts", "d", "watts", "power draw"),
)

AGENT = _stream(
    "agent",
    "tick of the collector, with its own cost",
    _TIME,
    Column("cpu_ns", "q", "ns", "own CPU time since start, verdicts and ingests included"),
    Column("smaps_ns", "q", "ns", "part of `cpu_ns` spent on smaps_rollup"),
    Column("rss_bytes", "q", "bytes", "own resident set"),
    Column(
        "verdict_anon_bytes",
        "q",
        "bytes",
        "anonymous memory of the processes that judge the run and store its records; NULL if there is none",
    ),
    Column("interval_ns", "q", "ns", "achieved sampling interval"),
    Column("ingest_lag_ns", "q", "ns", "age of the oldest record that is not in the lake yet"),
    Column("records_ingested_count", "q", "count", "records moved into the lake so far"),
    Column("records_lost_count", "q", "count", "records that writers could not write"),
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
