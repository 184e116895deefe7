"""Readers of /proc, one file each; every one takes the root, so a test can lay out its own tree.

A process can end between any two reads and may belong to someone else, so "cannot be read" is an
ordinary answer here: None, never an exception and never 0. Formats are those of proc(5).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

#: Of the times in /proc/PID/stat.
NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
#: Larger than any of the files of one process that are read here.
_READ_BYTES = 1 << 16
_ENDED_STATES = frozenset(b"ZXx")
#: PF_EXITING (include/linux/sched.h): it has begun to give back what it has, its control groups among that.
_EXITING = 0x4
#: A tree that a test laid out is on a file system whose directories have a size in bytes.
_KERNELS_OWN = "/proc"
#: A field's number, with the blanks before it and one after it, is shorter.
_NUMBER_BYTES = 48
_CORES = re.compile(rb"\nCpus_allowed:\s*([0-9a-f,]+)")


class ProcessKey(NamedTuple):
    """A process of this host: a pid alone can be used again."""

    pid: int
    start_ticks: int


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is needed.

    Attributes:
        ended: it is a zombie, or on its way there.
        runs: it computes, or waits for a core.
        parent_pid, cpu_ticks, start_ticks: as the kernel gives them.
    """

    ended: bool
    runs: bool
    parent_pid: int
    cpu_ticks: int
    start_ticks: int


class Status(NamedTuple):
    """The part of /proc/PID/status that is needed; sizes in bytes."""

    rss_bytes: int | None
    file_bytes: int | None
    shm_bytes: int | None
    swap_bytes: int | None
    data_bytes: int | None
    thread_count: int | None
    allowed_cores_count: int | None


class Rollup(NamedTuple):
    """The part of /proc/PID/smaps_rollup that is needed, in bytes; `uss` counts clean pages too."""

    pss_bytes: int | None
    private_dirty_bytes: int | None
    uss_bytes: int | None


def read_file(path: str) -> bytes | None:
    """A file of /proc or of a cgroup, whole; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.readall()
    except OSError:
        return None


def field(text: bytes, name: bytes) -> int | None:
    """The number after `name` at the beginning of a line other than the first; None if absent."""
    at = text.find(b"\n" + name)
    if at < 0:
        return None
    begin = at + 1 + len(name)
    value = text[begin : begin + _NUMBER_BYTES].split(None, 1)
    return int(value[0]) if value and value[0].isdigit() else None


def pids(proc: str) -> set[int]:
    """Every process that can be seen."""
    return {int(name) for name in os.listdir(proc) if name.isdigit()}


def read_stat(proc: str, pid: int) -> Stat | None:
    """What the kernel says of a process; None if there is none with this pid."""
    text = _read_once(f"{proc}/{pid}/stat")
    if text is None:
        return None
    # The name, in brackets, may hold blanks and brackets itself.
    fields = text[text.rfind(b")") + 2 :].split(None, 20)
    if len(fields) < 20:
        return None
    return Stat(
        ended=fields[0][0] in _ENDED_STATES or bool(int(fields[6]) & _EXITING),
        runs=fields[0] == b"R",
        parent_pid=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
    )


def read_wait_channel(proc: str, pid: int) -> bytes | None:
    """Return the kernel function in which a process's main thread waits; None if it runs or the kernel hides it."""
    name = _read_once(f"{proc}/{pid}/wchan")
    return None if name in (None, b"0") else name


def read_run_queue_ns(proc: str, pid: int) -> int | None:
    """How long a process's main thread was runnable and had no core; None where the kernel does not count it."""
    fields = (_read_once(f"{proc}/{pid}/schedstat") or b"").split()
    return int(fields[1]) if len(fields) == 3 else None


def read_status(proc: str, pid: int) -> Status | None:
    """Resident, shared and swapped memory, and threads; microseconds at any size of process."""
    text = _read_once(f"{proc}/{pid}/status")
    if text is None:
        return None
    return Status(
        rss_bytes=_kibibytes(text, b"VmRSS:"),
        file_bytes=_kibibytes(text, b"RssFile:"),
        shm_bytes=_kibibytes(text, b"RssShmem:"),
        swap_bytes=_kibibytes(text, b"VmSwap:"),
        data_bytes=_kibibytes(text, b"VmData:"),
        thread_count=field(text, b"Threads:"),
        allowed_cores_count=_cores_in(text),
    )


def _cores_in(status: bytes) -> int | None:
    """Bits set in the affinity mask, comma-separated words of hexadecimal digits."""
    found = _CORES.search(status)
    return int(found[1].replace(b",", b""), 16).bit_count() if found else None


def read_rollup(proc: str, pid: int) -> Rollup | None:
    """Proportional and private memory; milliseconds per GiB, so not at every tick (see budget)."""
    text = _read_once(f"{proc}/{pid}/smaps_rollup")
    if text is None:
        return None
    private = [_kibibytes(text, name) for name in (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:")]
    known = private[0] is not None and private[1] is not None
    return Rollup(
        pss_bytes=_kibibytes(text, b"Pss:"),
        private_dirty_bytes=private[1],
        uss_bytes=sum(part or 0 for part in private) if known else None,
    )


def count_fds(proc: str, pid: int) -> int | None:
    """Open file descriptors; None for a process of another user.

    Since Linux 6.2 the directory's size is their number; before, it is 0, and they are listed.
    """
    directory = f"{proc}/{pid}/fd"
    try:
        count = os.stat(directory).st_size if proc == _KERNELS_OWN else 0
        return count or len(os.listdir(directory))
    except OSError:
        return None


def read_fd_limit(proc: str, pid: int) -> int | None:
    """The soft RLIMIT_NOFILE; None without a limit, or for a process of another user."""
    text = _read_once(f"{proc}/{pid}/limits")
    return None if text is None else field(text, b"Max open files ")


def _kibibytes(text: bytes, name: bytes) -> int | None:
    value = field(text, name)
    return None if value is None else value * 1024


def _read_once(path: str) -> bytes | None:
    """One read(2): enough for the files of a process, which the kernel renders in one piece."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _READ_BYTES) or None
    except OSError:
        return None
    finally:
        os.close(descriptor)
