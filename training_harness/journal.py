"""The journal writer: fixed-size records, whole in each `write(2)`, to files that only grow.

A segment is `MAGIC`, the header's length (uint32, little-endian), a JSON header, then records. The
header says who writes and in which layout, so a reader needs nothing else. A segment that ends in
less than a whole record was cut short (full disk, power loss): the rest is ignored and the writer
goes on in the next segment. What was written survives the death of the process, since the page
cache outlives it.

A `write(2)` in the middle of a training step costs 3 to 6 µs, five times what it costs in a tight loop, since
the kernel's code and data push the training's out of the caches. So a writer may be told to hold records that
follow the last write closely, and to write them together: a kill then costs those of the last few milliseconds.

A writer keeps a lock on the segment that is open, which the kernel drops when the writer goes on to the next one
or its process dies: so the collector knows which segments are finished, and deletes them once they are in the
lake. Where nobody does, a writer stops at `SEGMENTS_AT_MOST` and counts what it loses.

The writer never raises and never blocks on anything but the file system.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_harness.records import Stream

MAGIC = b"TDGJ"
FORMAT_VERSION = 1
SEGMENT_BYTES = 8 * 2**20
#: Segments of one writer that may wait for a collector: 64 MiB are some 600,000 batches.
SEGMENTS_AT_MOST = 8
#: After a failed write the next attempt waits this long, so that a full disk costs next to nothing.
RETRY_AFTER_NS = 1_000_000_000
#: Why records were lost, in the `records-lost` event.
WRITE_FAILED = "write-failed"
NOT_COLLECTED = "not-collected"
NOT_A_RECORD = "not-a-record"
#: A FIFO would make the training wait for a reader, and a link lead out of the run.
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes: a process is known by (host, pid, start_ticks), never by its pid alone."""

    host: str
    pid: int
    start_ticks: int
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None

    @classmethod
    def of_this_process(cls) -> Identity:
        """Read this process's identity from /proc and the variables that launchers set."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=start_ticks("self"),
            rank=_environment_int("RANK"),
            local_rank=_environment_int("LOCAL_RANK"),
            world_size=_environment_int("WORLD_SIZE"),
            attempt=_environment_int("TORCHELASTIC_RESTART_COUNT"),
        )


def start_ticks(pid: int | str) -> int:
    """Start time in clock ticks since boot: field 22 of /proc/PID/stat (proc_pid_stat(5)).

    Raises:
        OSError: there is no such process.

    """
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class JournalWriter:
    """Appends the records of one stream for one process.

    Args:
        directory: the run's `journal/` directory.
        stream: what is written; `append` takes its columns in order.
        identity: who writes.
        events: told of losses, when they begin and each time that their count has doubled.
        segment_bytes: a segment that has reached this size is closed and the next one opened.
        segments_at_most: with so many of its segments on disk, it opens no other.
        hold_ns: a record whose time is within this span of the last write waits for the next record, `flush`
            or `close`; 0 writes each record at once.
        clock_ns: for the pause after a failed write.

    Attributes:
        hold: takes a record, as a tuple, for the next `flush` or `append`.
        lost_count: records that could not be written.

    """

    def __init__(
        self,
        directory: Path,
        stream: Stream,
        identity: Identity,
        *,
        events: EventLog | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        segments_at_most: int = SEGMENTS_AT_MOST,
        hold_ns: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.lost_count = 0
        self._directory = directory
        self._stream = stream
        self._identity = identity
        self._events = events
        self._segment_bytes = segment_bytes
        self._segments_at_most = segments_at_most
        self._hold_ns = hold_ns
        self._clock_ns = clock_ns
        self._record_bytes = stream.struct.size
        self._held: deque[tuple[Any, ...]] = deque()
        self.hold = self._held.append
        self._written_at_ns: float = -hold_ns
        self._sequence = 0
        self._on_disk: list[Path] = []
        self._loss_reason = WRITE_FAILED
        self._told_count = 0
        self._fd = -1
        self._file: tuple[int, int] | None = None
        self._own_files: set[tuple[int, int]] = set()
        self._room_bytes = 0
        self._retry_at_ns = 0

    def append(self, *record: Any) -> None:
        """Write one record, which begins with its time, or hold it; one that can't be written counts as lost."""
        self.hold(record)
        if not 0 <= record[0] - self._written_at_ns < self._hold_ns:
            self.flush()

    def append_all(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Write records that belong together in one go, or hold them all."""
        self._held.extend(records)
        if not 0 <= records[-1][0] - self._written_at_ns < self._hold_ns:
            self.flush()

    def flush(self) -> None:
        """Write the records that are held. Each is taken once, whichever thread comes first."""
        if not self._held:
            return
        records = []
        try:
            while self._held:
                records.append(self._held.popleft())
        except IndexError:  # another thread was faster
            pass
        if not records:
            return
        self._written_at_ns = records[-1][0]
        try:
            packed = b"".join(itertools.starmap(self._stream.struct.pack, records))
        except struct.error:
            self._lose(len(records), NOT_A_RECORD)
            return
        self._write(packed)

    def _write(self, records: bytes) -> None:
        written = 0
        try:
            if (self._room_bytes > 0 and self._owns_descriptor()) or self._open_segment():
                written = os.write(self._fd, records)
        except OSError:
            self._loss_reason = WRITE_FAILED
        if written == len(records):
            self._room_bytes -= written
            return
        self._room_bytes = 0
        if not self._waits():
            self._retry_at_ns = self._clock_ns() + RETRY_AFTER_NS
        self._lose((len(records) - written + self._record_bytes - 1) // self._record_bytes, self._loss_reason)

    def _waits(self) -> bool:
        # A clock that went back ends the wait too: then it says nothing.
        return 0 < self._retry_at_ns - self._clock_ns() <= RETRY_AFTER_NS

    def _lose(self, count: int, reason: str) -> None:
        self.lost_count += count
        self._loss_reason = reason
        if self.lost_count >= 2 * self._told_count:
            self._tell_losses()

    def _tell_losses(self) -> None:
        self._told_count = self.lost_count
        if self._events is not None:
            self._events.append(
                "records-lost", stream=self._stream.name, count=self.lost_count, reason=self._loss_reason
            )

    def close(self) -> None:
        """Write what is held, end the segment and tell of losses; if used again, the writer opens a new segment."""
        self.flush()
        self._room_bytes = 0
        if self.lost_count:
            self._tell_losses()

    def disown(self) -> None:
        """In a forked child: leave the segment, its lock and what is held to the parent."""
        self._held.clear()
        self._room_bytes = 0
        if self._owns_descriptor():
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._owns_descriptor():
            os.close(self._fd)

    def _owns_descriptor(self) -> bool:
        """Return whether the descriptor is still that of the segment.

        A program that closes all descriptors (a daemon, `os.closerange`) gives its own next files these numbers.
        """
        try:
            return self._fd >= 0 and _file_of(self._fd) in self._own_files
        except OSError:
            return False

    def _open_segment(self) -> bool:
        if self._waits():
            return False
        self._on_disk = [path for path in self._on_disk if path.exists()]
        if len(self._on_disk) >= self._segments_at_most:
            self._loss_reason = NOT_COLLECTED
            return False
        fresh, path = self._create()
        header = self._header()
        try:
            whole = os.write(fresh, header) == len(header)
        except OSError:
            whole = False
        if not whole:
            os.close(fresh)
            os.unlink(path)
            raise OSError(f"{path} has no room for its header")
        self._switch_to(fresh)
        self._on_disk.append(path)
        self._room_bytes = self._segment_bytes
        self._retry_at_ns = 0
        return True

    def _create(self) -> tuple[int, Path]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            # The lake remembers deleted segments by name: a time is not used again, whoever gets this pid.
            self._sequence = max(self._sequence + 1, self._clock_ns())
            name = f"{self._identity.host}.{self._identity.pid}.{self._stream.name}.{self._sequence}.journal"
            path = self._directory / name
            try:
                fresh = os.open(path, flags, 0o600)
            except FileExistsError:
                continue
            try:
                fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # a file system without locks: nothing is ever deleted there
            return fresh, path

    def _switch_to(self, fresh: int) -> None:
        """Let the writer's one descriptor stand for another segment.

        Its number never changes while the writer lives: a thread that is about to write meets the old segment or
        the new one, never a file of the user's that got the number in between. Both are its own until the switch
        is made.
        """
        old, new = self._file, _file_of(fresh)
        self._own_files.add(new)
        if self._owns_descriptor():
            os.dup2(fresh, self._fd, inheritable=False)
            os.close(fresh)
        else:
            self._fd = fresh
        self._file = new
        if old is not None:
            self._own_files.discard(old)

    def _header(self) -> bytes:
        body: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "stream": self._stream.name,
            "layout": self._stream.layout,
            "record_bytes": self._record_bytes,
            "host": self._identity.host,
            "pid": self._identity.pid,
            "start_ticks": self._identity.start_ticks,
            "rank": self._identity.rank,
            "lost_before_count": self.lost_count,
        }
        text = json.dumps(body).encode()
        return MAGIC + len(text).to_bytes(4, "little") + text


class EventLog:
    """Appends rare, structured events, one JSON object per line and one `write(2)` each."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._path = directory / f"{identity.host}.{identity.pid}.jsonl"
        self._who = {
            "host": identity.host,
            "pid": identity.pid,
            "start_ticks": identity.start_ticks,
            "rank": identity.rank,
        }

    def append(self, kind: str, **fields: object) -> None:
        """Write one event; `fields` must be JSON-able. A failure is silent: events never harm."""
        event = {"time_ns": time.monotonic_ns(), "kind": kind, **self._who, **fields}
        try:
            line = json.dumps(event, default=repr).encode() + b"\n"
            descriptor = os.open(self._path, _APPEND, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            pass


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _environment_int(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
