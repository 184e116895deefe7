"""The journal writer: fixed-size records, whole in each `write(2)`, to files that only grow.

A segment is `MAGIC`, the header's length (uint32, little-endian), a JSON header, then records. The
header names the writing process and the layout, so a reader needs nothing else. A segment that ends in
less than a whole record was cut short (full disk, power loss): the rest is ignored and the writer
goes on in the next segment. Written records survive the death of the process, since the page
cache outlives it.

A `write(2)` in the middle of a training step costs 3 to 6 µs, five times as much as in a tight loop, since
the kernel's code and data push the training's out of the caches. So a writer can hold records that follow the
last write closely, and write them together: a kill then loses those of the last few milliseconds.

A writer keeps a lock on its open segment. The kernel drops the lock when the writer goes on to the next segment
or its process dies. So the collector knows which segments are finished, and deletes them once they are in the
lake. Where no collector runs, a writer stops at `SEGMENTS_AT_MOST` and counts the records that it loses.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_harness.records import Stream
from training_harness.redaction import redact_fields

if TYPE_CHECKING:
    from training_harness.events import EventKind

MAGIC = b"TDGJ"
FORMAT_VERSION = 1
SEGMENT_BYTES = 8 * 2**20
#: Segments of one writer that may wait for a collector: 64 MiB are some 600,000 batches.
SEGMENTS_AT_MOST = 8
#: Nanoseconds between a failed write and the next attempt, so that a full disk costs next to nothing.
RETRY_AFTER_NS = 1_000_000_000
#: Reasons of a `records-lost` event.
WRITE_FAILED = "write-failed"
NOT_COLLECTED = "not-collected"
NOT_A_RECORD = "not-a-record"
#: Flags that keep out a FIFO, which would make the training wait for a reader, and a link, which may leave the run.
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a writing process: (host, pid, start_ticks), never the pid alone."""

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
    """Return a process's start time in clock ticks since boot: field 22 of /proc/PID/stat (proc_pid_stat(5)).

    Raises:
        OSError: there is no such process.
    """
    return int(stat_fields(Path(f"/proc/{pid}/stat").read_bytes())[19])


def stat_fields(stat: bytes) -> list[bytes]:
    """Return 20 fields of /proc/PID/stat from the state on, and the rest as one.

    The name before them may hold blanks and brackets.
    """
    return stat.rpartition(b") ")[2].split(None, 20)


class JournalWriter:
    """Writer of the records of one stream for one process.

    Args:
        directory: the run's `journal/` directory.
        stream: the stream; `append` takes its columns in order.
        identity: the writing process.
        events: log for losses: one event when they begin, and one each time that their count has doubled.
        segment_bytes: size at which a segment is closed and the next one opened.
        segments_at_most: number of segments on disk above which the writer opens no other.
        hold_ns: a record whose time is within this span of the last write waits for the next record, `flush`
            or `close`; 0 writes each record at once.
        clock_ns: clock for the pause after a failed write.

    Attributes:
        hold: function that takes a record, as a tuple, for the next `flush` or `append`.
        lost_count: number of records that could not be written.
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
        self._pending: deque[tuple[Any, ...]] = deque()
        self.hold = self._pending.append
        self._written_at_ns: float = -hold_ns
        self._sequence = 0
        self._segments: list[Path] = []
        self._loss_reason = WRITE_FAILED
        self._reported_count = 0
        self._fd = -1
        self._file: tuple[int, int] | None = None
        self._segment_files: set[tuple[int, int]] = set()
        self._room_bytes = 0
        self._retry_at_ns = 0

    def append(self, *record: Any) -> None:
        """Write or hold one record, which begins with its time. A record that can't be written counts as lost."""
        self.hold(record)
        if not 0 <= record[0] - self._written_at_ns < self._hold_ns:
            self.flush()

    def append_all(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Write or hold records that belong together, all in one go."""
        self._pending.extend(records)
        if not 0 <= records[-1][0] - self._written_at_ns < self._hold_ns:
            self.flush()

    def flush(self) -> None:
        """Write the records on hold. Each is written once, also if several threads call this."""
        if not self._pending:
            return
        records = []
        try:
            while self._pending:
                records.append(self._pending.popleft())
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
            if (self._room_bytes > 0 and self._has_segment_open()) or self._open_segment():
                written = os.write(self._fd, records)
        except OSError:
            self._loss_reason = WRITE_FAILED
        if written == len(records):
            self._room_bytes -= written
            return
        self._room_bytes = 0
        if not self._is_pausing():
            self._retry_at_ns = self._clock_ns() + RETRY_AFTER_NS
        self._lose((len(records) - written + self._record_bytes - 1) // self._record_bytes, self._loss_reason)

    def _is_pausing(self) -> bool:
        # A clock that went back ends the pause too: its reading says nothing then.
        return 0 < self._retry_at_ns - self._clock_ns() <= RETRY_AFTER_NS

    def _lose(self, count: int, reason: str) -> None:
        self.lost_count += count
        self._loss_reason = reason
        if self.lost_count >= 2 * self._reported_count:
            self._report_losses()

    def _report_losses(self) -> None:
        self._reported_count = self.lost_count
        if self._events is not None:
            self._events.append(
                "records-lost", stream=self._stream.name, count=self.lost_count, reason=self._loss_reason
            )

    def close(self) -> None:
        """Write the records on hold, end the segment and report losses. The next record opens a new segment."""
        self.flush()
        self._room_bytes = 0
        if self.lost_count:
            self._report_losses()

    def disown(self) -> None:
        """Leave the segment, its lock and the records on hold to the parent; called in a forked child."""
        self._pending.clear()
        self._room_bytes = 0
        if self._has_segment_open():
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._has_segment_open():
            os.close(self._fd)

    def _has_segment_open(self) -> bool:
        return _is_open(self._fd, self._segment_files)

    def _open_segment(self) -> bool:
        if self._is_pausing():
            return False
        self._segments = [path for path in self._segments if path.exists()]
        if len(self._segments) >= self._segments_at_most:
            self._loss_reason = NOT_COLLECTED
            return False
        descriptor, path = self._create()
        header = self._header()
        try:
            whole = os.write(descriptor, header) == len(header)
        except OSError:
            whole = False
        if not whole:
            os.close(descriptor)
            os.unlink(path)
            raise OSError(f"{path} has no room for its header")
        self._switch_to(descriptor)
        self._segments.append(path)
        self._room_bytes = self._segment_bytes
        self._retry_at_ns = 0
        return True

    def _create(self) -> tuple[int, Path]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            # The lake remembers deleted segments by name: no later process with this pid may use a time again.
            self._sequence = max(self._sequence + 1, self._clock_ns())
            name = f"{self._identity.host}.{self._identity.pid}.{self._stream.name}.{self._sequence}.journal"
            path = self._directory / name
            try:
                descriptor = os.open(path, flags, 0o600)
            except FileExistsError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # a file system without locks: nothing is ever deleted there
            return descriptor, path

    def _switch_to(self, descriptor: int) -> None:
        """Point the writer's one descriptor at another segment.

        Its number never changes while the writer lives: a thread that is about to write meets the old segment or
        the new one, never a file of the user's that got the number in between. Both count as the writer's until
        the switch is made.
        """
        old, new = self._file, _file_id(descriptor)
        self._segment_files.add(new)
        if self._has_segment_open():
            os.dup2(descriptor, self._fd, inheritable=False)
            os.close(descriptor)
        else:
            self._fd = descriptor
        self._file = new
        if old is not None:
            self._segment_files.discard(old)

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
    """Log of rare, structured events, one JSON object per line and one `write(2)` each.

    Its file stays open from the first event on: a training that runs out of descriptors can tell of that.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._path = directory / f"{identity.host}.{identity.pid}.jsonl"
        self._writer = {
            "host": identity.host,
            "pid": identity.pid,
            "start_ticks": identity.start_ticks,
            "rank": identity.rank,
        }
        self._fd = -1
        self._file: tuple[int, int] | None = None

    def append(self, kind: EventKind, **fields: object) -> None:
        """Write one event, without secrets in its texts; `fields` must be JSON-able.

        A failure is silent: events must not harm the training.
        """
        event = {"time_ns": time.monotonic_ns(), "kind": kind, **self._writer, **fields}
        try:
            line = json.dumps(redact_fields(event), default=repr).encode() + b"\n"
            if not _is_open(self._fd, (self._file,)):
                self._fd = os.open(self._path, _APPEND, 0o600)
                self._file = _file_id(self._fd)
            os.write(self._fd, line)
        except (OSError, ValueError):
            pass

    def __del__(self) -> None:
        if _is_open(self._fd, (self._file,)):
            os.close(self._fd)


def _file_id(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_open(descriptor: int, files: Collection[tuple[int, int] | None]) -> bool:
    """Return whether a descriptor is still that of one of these files.

    A program that closes all descriptors (a daemon, `os.closerange`) gives its own next files these numbers.
    """
    try:
        return descriptor >= 0 and _file_id(descriptor) in files
    except OSError:
        return False


def _environment_int(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
