"""Readers of /proc, one per file; each takes the root, so a test can lay out its own tree.

A process can end between any two reads and may belong to another user, so "cannot be read" is an
ordinary answer: None, never an exception and never 0. Formats are those of proc(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from training_harness.journal import stat_fields

#: Nanoseconds per unit of the times in /proc/PID/stat.
NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Larger than any file that `_read_once` reads.
_READ_BYTES = 1 << 16
_ENDED_STATES = frozenset(b"ZXx")
#: PF_EXITING (include/linux/sched.h): the process has begun to release its memory and control groups.
_EXITING = 0x4
#: The kernel's own tree. A test's tree is on a file system whose directories have a size in bytes.
PROC = "/proc"
#: Upper bound on the length of a field's number with the blanks around it.
_NUMBER_BYTES = 48
_CORES = re.compile(rb"\nCpus_allowed:\s*([0-9a-f,]+)")
_HANDLED = re.compile(rb"^SigCgt:\t([0-9a-f]+)$", re.MULTILINE)


class LocalProcess(NamedTuple):
    """A process of this host; its pid alone can be used again."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> LocalProcess:
        """Return the process that an event, or an entry of the manifest, names."""
        return cls(fields["pid"], fields["start_ticks"])

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return start_ticks(PROC, self.pid) == self.start_ticks


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are needed.

    Attributes:
        has_ended: whether it is a zombie, or about to become one.
        is_runnable: whether it computes, or waits for a core.
    """

    has_ended: bool
    is_runnable: bool
    parent_pid: int
    cpu_ticks: int
    start_ticks: int


class Status(NamedTuple):
    """The fields of /proc/PID/status that are needed; sizes in bytes."""

    rss_bytes: int | None
    file_bytes: int | None
    shm_bytes: int | None
    swap_bytes: int | None
    data_bytes: int | None
    thread_count: int | None
    allowed_cores_count: int | None


class Resident(NamedTuple):
    """The resident memory of a process, and the part that is neither mapped files nor shared memory, in bytes."""

    rss_bytes: int
    anon_bytes: int


class Rollup(NamedTuple):
    """The fields of /proc/PID/smaps_rollup that are needed, in bytes; `uss` counts clean pages too."""

    pss_bytes: int | None
    private_dirty_bytes: int | None
    uss_bytes: int | None


def read_file(path: str) -> bytes | None:
    """Read a whole file of /proc or of a cgroup; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.readall()
    except OSError:
        return None


def field(text: bytes, name: bytes) -> int | None:
    """Return the number after `name` at the beginning of any line but the first; None if absent."""
    at = text.find(b"\n" + name)
    if at < 0:
        return None
    begin = at + 1 + len(name)
    value = text[begin : begin + _NUMBER_BYTES].split(None, 1)
    return int(value[0]) if value and value[0].isdigit() else None


def kibibytes(text: bytes, name: bytes) -> int | None:
    """Return the size after `name` in bytes; /proc counts in KiB."""
    value = field(text, name)
    return None if value is None else value * 1024


def pids(proc: str) -> set[int]:
    """Return the pids of all visible processes."""
    return {int(name) for name in os.listdir(proc) if name.isdigit()}


def read_command_line(proc: str, pid: int) -> list[str]:
    """Return the words of a process's command line; none if it cannot be read, or has none."""
    text = read_file(f"{proc}/{pid}/cmdline") or b""
    return [os.fsdecode(word) for word in text.rstrip(b"\0").split(b"\0")] if text else []


def start_ticks(proc: str, pid: int) -> int | None:
    """Return the start time of a living process in ticks since boot; None if it has ended."""
    stat = read_stat(proc, pid)
    return None if stat is None or stat.has_ended else stat.start_ticks


def read_stat(proc: str, pid: int) -> Stat | None:
    """Read the state of a process; None if there is none with this pid."""
    text = _read_once(f"{proc}/{pid}/stat")
    if text is None:
        return None
    fields = stat_fields(text)
    if len(fields) < 20:
        return None
    return Stat(
        has_ended=fields[0][0] in _ENDED_STATES or bool(int(fields[6]) & _EXITING),
        is_runnable=fields[0] == b"R",
        parent_pid=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
    )


def read_wait_channel(proc: str, pid: int) -> bytes | None:
    """Return the kernel function in which a process's main thread waits; None if it runs or the kernel hides it."""
    name = _read_once(f"{proc}/{pid}/wchan")
    return None if name in (None, b"0") else name


def read_run_queue_ns(proc: str, pid: int) -> int | None:
    """Return how long a process's main thread was runnable without a core; None if the kernel does not count it."""
    fields = (_read_once(f"{proc}/{pid}/schedstat") or b"").split()
    return int(fields[1]) if len(fields) == 3 else None


def read_status(proc: str, pid: int) -> Status | None:
    """Read resident, shared and swapped memory, and threads; takes microseconds at any size of process."""
    text = _read_once(f"{proc}/{pid}/status")
    if text is None:
        return None
    return Status(
        rss_bytes=kibibytes(text, b"VmRSS:"),
        file_bytes=kibibytes(text, b"RssFile:"),
        shm_bytes=kibibytes(text, b"RssShmem:"),
        swap_bytes=kibibytes(text, b"VmSwap:"),
        data_bytes=kibibytes(text, b"VmData:"),
        thread_count=field(text, b"Threads:"),
        allowed_cores_count=_cores_in(text),
    )


def anon_bytes(proc: str, pid: int) -> int | None:
    """Read the resident anonymous memory of a process; None if it ended."""
    status = read_status(proc, pid)
    if status is None or status.rss_bytes is None:
        return None
    return status.rss_bytes - (status.file_bytes or 0) - (status.shm_bytes or 0)


def namespaces_count(proc: str, pid: int) -> int:
    """Return the number of nested PID namespaces that a process has a pid in (proc(5), NSpid); 1 if not known."""
    status = read_file(f"{proc}/{pid}/status") or b""
    found = re.search(rb"^NSpid:(.*)$", status, re.MULTILINE)
    return max(1, len(found[1].split())) if found else 1


def handles_signal(proc: str, pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal (SigCgt of /proc/PID/status); False if it is gone."""
    mask = _HANDLED.search(_read_once(f"{proc}/{pid}/status") or b"")
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def read_resident(proc: str, pid: int) -> Resident | None:
    """Read resident memory from /proc/PID/statm, in half the time of `read_status`; None if the process ended."""
    fields = (_read_once(f"{proc}/{pid}/statm") or b"").split()
    if len(fields) != 7 or fields[1] == b"0":  # a zombie has no memory
        return None
    resident, shared = int(fields[1]), int(fields[2])
    return Resident(rss_bytes=resident * _PAGE_BYTES, anon_bytes=(resident - shared) * _PAGE_BYTES)


def _cores_in(status: bytes) -> int | None:
    """Count the bits of the affinity mask, comma-separated words of hexadecimal digits."""
    mask = _CORES.search(status)
    return int(mask[1].replace(b",", b""), 16).bit_count() if mask else None


def read_rollup(proc: str, pid: int) -> Rollup | None:
    """Read proportional and private memory; takes milliseconds per GiB, so not at every tick (see `Budget`)."""
    text = _read_once(f"{proc}/{pid}/smaps_rollup")
    if text is None:
        return None
    private = [kibibytes(text, name) for name in (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:")]
    is_complete = private[0] is not None and private[1] is not None
    return Rollup(
        pss_bytes=kibibytes(text, b"Pss:"),
        private_dirty_bytes=private[1],
        uss_bytes=sum(part or 0 for part in private) if is_complete else None,
    )


def count_fds(proc: str, pid: int) -> int | None:
    """Count the open file descriptors; None for a process of another user.

    Since Linux 6.2 the size of the directory is their number; before, it is 0, and they are listed.
    """
    directory = f"{proc}/{pid}/fd"
    try:
        count = os.stat(directory).st_size if proc == PROC else 0
        return count or len(os.listdir(directory))
    except OSError:
        return None


def read_fd_limit(proc: str, pid: int) -> int | None:
    """Read the soft RLIMIT_NOFILE; None without a limit, or for a process of another user."""
    text = _read_once(f"{proc}/{pid}/limits")
    return None if text is None else field(text, b"Max open files ")


def _read_once(path: str) -> bytes | None:
    """Read a file with one read(2), enough for the files of a process, which the kernel renders at once."""
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
