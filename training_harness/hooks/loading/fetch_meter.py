"""Meter of one fetch: time on CPU, in the run queue and blocked, without privileges.

Wall = CPU + run queue + blocked. CPU is the thread's own clock, the run queue wait is the second field of
/proc/thread-self/schedstat (Linux, Documentation/scheduler/sched-stats.rst), the rest is blocked. They are not
read at one instant: on a crowded host the thread may lose its core between two readings, and for longer than the
fetch took. So the wait for a core counts only up to the time in which the thread did not compute.

A fetch that waits for a child process (ffmpeg, say) is blocked, and yet a core computes: the CPU time of children
that it waited for is counted too. Children also add the bytes that they read to their parent's counters, so only
bytes that the thread itself read are counted.

Reading the CPU clocks and /proc costs about 10 µs a fetch. Fetches that begin within `FULL_EVERY_NS` of the last
full reading skip it, and leave those columns missing: the cost stays below 1 % of the time spent.
"""

from __future__ import annotations

import os
import resource
import time
from typing import NamedTuple

from training_harness.records import MISSING_INT32, MISSING_INT64

FULL_EVERY_NS = 2_000_000
_NO_FILE = -1
#: Bytes that the meter's own readings add to `rchar` at most in one fetch: two lines of schedstat and a file of io.
_METER_READS_BYTES = 256
_IO_BYTES = 192


class FetchCosts(NamedTuple):
    """Costs of one fetch, in ns and counts; faults and bytes are since the last full reading."""

    wall_ns: int
    cpu_ns: int = MISSING_INT64
    process_cpu_ns: int = MISSING_INT64
    children_cpu_ns: int = MISSING_INT64
    run_queue_ns: int = MISSING_INT64
    blocked_ns: int = MISSING_INT64
    major_faults: int = MISSING_INT32
    minor_faults: int = MISSING_INT32
    read_bytes: int = MISSING_INT64
    storage_bytes: int = MISSING_INT64


class _Counts(NamedTuple):
    """Counters that only rise: faults of the process (getrusage(2)), bytes of the thread (proc_pid_io(5))."""

    major_faults: int
    minor_faults: int
    read_bytes: int
    storage_bytes: int


class FetchMeter:
    """Reader of the counters of one thread of this process; made in that thread."""

    _schedstat = _io = _NO_FILE

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._schedstat = _open("/proc/thread-self/schedstat")
        self._io = _open("/proc/thread-self/io")
        self._full = False
        self._full_at_ns = 0
        self._counts_before = self._counts()

    def __del__(self) -> None:
        for descriptor in (self._schedstat, self._io):
            if descriptor != _NO_FILE:
                os.close(descriptor)

    def begin(self) -> None:
        """Mark the start of a fetch."""
        now_ns = time.monotonic_ns()
        self._full = self._schedstat != _NO_FILE and now_ns - self._full_at_ns >= FULL_EVERY_NS
        if self._full:
            self._full_at_ns = now_ns
            self._run_queue_ns = self._run_queue()
            self._children_cpu_ns = _children_cpu_ns()
            self._process_cpu_ns = time.process_time_ns()
            self._cpu_ns = time.thread_time_ns()
            now_ns = time.monotonic_ns()
        self.begun_ns = now_ns

    def end(self) -> FetchCosts:
        """Return the costs since `begin`."""
        now_ns = time.monotonic_ns()
        wall_ns = now_ns - self.begun_ns
        if not self._full:
            return FetchCosts(wall_ns)
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        process_cpu_ns = time.process_time_ns() - self._process_cpu_ns
        waited_ns = max(0, wall_ns - cpu_ns)
        run_queue_ns = min(waited_ns, self._run_queue() - self._run_queue_ns)
        blocked_ns = waited_ns - run_queue_ns
        children_cpu_ns = _children_cpu_ns() - self._children_cpu_ns
        before, self._counts_before = self._counts_before, self._counts()
        major, minor, read_bytes, storage_bytes = (
            now - then for now, then in zip(self._counts_before, before, strict=True)
        )
        if self._io == _NO_FILE:
            read_bytes = storage_bytes = MISSING_INT64
        else:
            read_bytes = max(0, read_bytes - _METER_READS_BYTES)
        spent_ns = cpu_ns, process_cpu_ns, children_cpu_ns, run_queue_ns, blocked_ns
        return FetchCosts(wall_ns, *spent_ns, major, minor, read_bytes, storage_bytes)

    def _run_queue(self) -> int:
        return int(os.pread(self._schedstat, 64, 0).split()[1])

    def _counts(self) -> _Counts:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if self._io == _NO_FILE:
            return _Counts(usage.ru_majflt, usage.ru_minflt, 0, 0)
        lines = os.pread(self._io, _IO_BYTES, 0).split(b"\n", 5)
        return _Counts(usage.ru_majflt, usage.ru_minflt, int(lines[0][7:]), int(lines[4][12:]))  # rchar, read_bytes


def _children_cpu_ns() -> int:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.pread(descriptor, 64, 0)
    except OSError:
        return _NO_FILE
    return descriptor


def samples_in(batch_of_samples: object) -> int:
    """Return the number of samples that collate_fn gets; missing when they have no length."""
    return len(batch_of_samples) if isinstance(batch_of_samples, (list, tuple)) else MISSING_INT32
