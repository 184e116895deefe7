"""The journal reader: headers of segments, and the lines of event logs from any byte on.

The collector reads with it while a run goes on, so it needs the standard library alone; `arrow` makes tables.

A segment's header holds its layout, so an older file is read with the columns that it has. A header, record
or line that is not yet whole is left for a later read. Damage raises a `JournalError`, which callers collect
as a problem while they go on with the other files.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from collector.errors import TidegaugeError
from collector.store.runs.run import Run
from training_harness.journal import FORMAT_VERSION, MAGIC, SEGMENT_BYTES
from training_harness.records import MISSING, STREAMS

SEGMENT_SUFFIX = ".journal"
EVENT_LOG_SUFFIX = ".jsonl"
_PREFIX_BYTES = len(MAGIC) + 4
#: A real header has about 1 kB; a length beyond this is damage, not a header still being written.
_HEADER_LIMIT_BYTES = 2**20
#: A writer ends a segment at `SEGMENT_BYTES`, after the records of one write.
_SEGMENT_LIMIT_BYTES = 16 * SEGMENT_BYTES
#: Bytes of an event log that are read at once; the longest lines hold a traceback.
_EVENTS_AT_ONCE_BYTES = 2**26
#: Characters of the longest host name of gethostname(2); it is repeated in every record.
_HOST_LIMIT = 255
_REASON_LIMIT = 200
#: Columns of an event besides its body and its rank: the bound of an integer; None for a text.
_EVENT_COLUMNS = {"time_ns": 2**63, "kind": None, "host": None, "pid": 2**31, "start_ticks": 2**63}
_RANK_BOUND = 2**31
#: Flags to open a file without waiting for the other end of a FIFO and without following a link.
_OPEN_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class JournalError(TidegaugeError):
    """A journal cannot be read; the others can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The writer and the layout of a segment.

    Attributes:
        layout: (column, struct code) in the order of the record.
        header_bytes: offset of the first record.
        lost_before_count: number of records that this writer had lost when it opened the segment.
    """

    stream: str
    layout: tuple[tuple[str, str], ...]
    record_bytes: int
    header_bytes: int
    host: str
    pid: int
    start_ticks: int
    rank: int | None
    lost_before_count: int

    @property
    def writer(self) -> str:
        """Name of the writer, the same in all its segments."""
        return writer_name(self.host, self.pid, self.start_ticks, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLines:
    """Whole lines of an event log from some byte on.

    Attributes:
        rows: one per event, with the columns of an event's table; `body` holds the fields that have no column.
        end_bytes: offset at which the next read begins.
        damaged_count: number of lines that were skipped because they are no event.
    """

    rows: list[dict[str, Any]]
    end_bytes: int
    damaged_count: int


def writer_name(host: str, pid: int, start_ticks: int, stream: str) -> str:
    """Return the name of the writer of one stream in one process."""
    return f"{host}.{pid}.{start_ticks}.{stream}"


def list_segments(run: Run) -> list[Path]:
    """Return all segments of a run; those of one writer in the order in which they were written."""
    names = list_names(run.journal_dir, SEGMENT_SUFFIX)
    return [run.journal_dir / name for name in sorted(names, key=segment_order)]


def list_event_logs(run: Run) -> list[Path]:
    """Return all event logs of a run."""
    return [run.events_dir / name for name in sorted(list_names(run.events_dir, EVENT_LOG_SUFFIX))]


def list_names(directory: Path, suffix: str) -> list[str]:
    """Return the names in a directory with this suffix, in no order; none if the directory does not exist.

    Raises:
        TidegaugeError: it cannot be listed.
    """
    try:
        return [name for name in os.listdir(directory) if name.endswith(suffix)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TidegaugeError(f"cannot list {directory}: {error.strerror}; make it readable") from None


def table_of(name: str) -> str:
    """Return the table for the records of a journal or event log, by its name."""
    return "event" if name.endswith(EVENT_LOG_SUFFIX) else "".join(name.split(".")[-3:-2])


def segment_order(name: str) -> tuple[str, int]:
    """Return a sort key for names of segments: those of one writer in the order in which they were written."""
    writer, _, sequence = name.removesuffix(SEGMENT_SUFFIX).rpartition(".")
    return writer, int(sequence) if sequence.isdecimal() else 0


def size_bytes(path: Path) -> int:
    """Return the current size of a journal or event log.

    Raises:
        JournalError: the file cannot be reached, or a writer cannot have made it.
    """
    try:
        return _check_size_bytes(path, path.lstat())
    except OSError as error:
        raise read_error(path, error) from None


def is_finished(path: Path) -> bool:
    """Return True if a segment will not grow any more: its writer has released its lock (flock(2)).

    Return False where locks cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | _OPEN_FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_header(path: Path) -> SegmentHeader | None:
    """Return the header of a segment; None while it is not yet whole.

    Raises:
        JournalError: it is no journal, damaged, or of a newer Tidegauge.
    """
    try:
        with _open(path) as file:
            prefix = file.read(_PREFIX_BYTES)
            if not prefix.startswith(MAGIC[: len(prefix)]):
                raise JournalError(f"{path} is skipped: it begins with {prefix[:4]!r}, not {MAGIC!r}; remove it")
            length = int.from_bytes(prefix[len(MAGIC) :], "little")
            text = file.read(min(length, _HEADER_LIMIT_BYTES))
    except OSError as error:
        raise read_error(path, error) from None
    if length > _HEADER_LIMIT_BYTES:
        raise _damaged(path, f"it claims {length} bytes, the bound is {_HEADER_LIMIT_BYTES}")
    if len(prefix) < _PREFIX_BYTES or len(text) < length:
        return None
    try:
        return _parse_header(path, json.loads(text), _PREFIX_BYTES + length)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def read_events(path: Path, offset_bytes: int) -> EventLines:
    """Return the whole lines of an event log from a byte on; skip and count damaged lines.

    One call reads at most `_EVENTS_AT_ONCE_BYTES`: the caller goes on at `end_bytes`.

    Raises:
        JournalError: the file cannot be read.
    """
    text = _read(path, offset_bytes, _EVENTS_AT_ONCE_BYTES)
    whole = text[: text.rfind(b"\n") + 1]
    if not whole and len(text) == _EVENTS_AT_ONCE_BYTES:
        raise JournalError(f"{path} is skipped: a line of it has more than {len(text)} bytes; remove the file")
    lines = [line for line in whole.split(b"\n") if line]
    rows = [row for line in lines if (row := _event_row(line)) is not None]
    return EventLines(
        rows=rows,
        end_bytes=offset_bytes + len(whole),
        damaged_count=len(lines) - len(rows),
    )


def reported_losses(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return writer -> number of lost records, from the `records-lost` events among these."""
    losses: dict[str, int] = {}
    for row in rows:
        if row["kind"] != "records-lost":
            continue
        body = json.loads(row["body"])
        writer = writer_name(row["host"], row["pid"], row["start_ticks"], str(body.get("stream")))
        if isinstance(body.get("count"), int) and body["count"] < 2**63:
            losses[writer] = max(losses.get(writer, 0), body["count"])
    return losses


def read_error(path: Path, error: OSError) -> JournalError:
    """Return the error for a file that cannot be read."""
    return JournalError(f"{path} is skipped: {error.strerror}; make it readable")


def read_bytes(path: Path, offset_bytes: int, count: int) -> bytes:
    """Return these bytes of a segment.

    Raises:
        JournalError: the file cannot be read, or is shorter now.
    """
    data = _read(path, offset_bytes, count)
    if len(data) < count:
        raise JournalError(f"{path} is skipped: it was cut while it was read; remove it")
    return data


def _read(path: Path, offset_bytes: int, count: int) -> bytes:
    try:
        with _open(path) as file:
            file.seek(offset_bytes)
            return file.read(count)
    except OSError as error:
        raise read_error(path, error) from None


def _open(path: Path) -> BinaryIO:
    file = open(os.open(path, os.O_RDONLY | _OPEN_FLAGS), "rb")  # noqa: SIM115 - the caller closes it
    try:
        _check_size_bytes(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _check_size_bytes(path: Path, status: os.stat_result) -> int:
    """Return the size of a file; raise a JournalError if a writer cannot have made it."""
    if not stat.S_ISREG(status.st_mode):
        raise JournalError(
            f"{path} is skipped: it is no plain file but a directory, a link, a pipe or a device; remove it"
        )
    if path.name.endswith(SEGMENT_SUFFIX) and status.st_size > _SEGMENT_LIMIT_BYTES:
        raise JournalError(
            f"{path} is skipped: it has {status.st_size} bytes, the bound is {_SEGMENT_LIMIT_BYTES}; remove it"
        )
    if not path.name.isprintable():  # a surrogate stands for a byte that is no UTF-8; tables cannot hold it
        raise JournalError(f"{str(path)!r} is skipped: its name is no text; remove the file")
    return status.st_size


def _damaged(path: Path, what: str) -> JournalError:
    what = what if len(what) <= _REASON_LIMIT else f"{what[:_REASON_LIMIT]}…"
    return JournalError(f"{path} is skipped: its header is damaged ({what}); remove the file")


def _parse_header(path: Path, body: dict[str, Any], header_bytes: int) -> SegmentHeader:
    if body["version"] > FORMAT_VERSION or body["stream"] not in STREAMS:
        raise JournalError(
            f"{path} is skipped: journal version {body['version']!r:.20}, stream {body['stream']!r:.40}; "
            f"this Tidegauge reads up to version {FORMAT_VERSION} and the streams {', '.join(STREAMS)}: "
            "upgrade Tidegauge"
        )
    if body["stream"] != table_of(path.name) or len(str(body["host"])) > _HOST_LIMIT:
        raise _damaged(path, f"stream {body['stream']!r} of host {str(body['host'])!r:.80} does not fit the name")
    header = SegmentHeader(
        stream=body["stream"],
        layout=tuple((str(name), str(code)) for name, code in body["layout"]),
        record_bytes=int(body["record_bytes"]),
        header_bytes=header_bytes,
        host=str(body["host"]),
        pid=int(body["pid"]),
        start_ticks=int(body["start_ticks"]),
        rank=None if body["rank"] is None else int(body["rank"]),
        lost_before_count=int(body["lost_before_count"]),
    )
    for name, code in (("pid", "i"), ("start_ticks", "q"), ("rank", "i"), ("lost_before_count", "q")):
        value = getattr(header, name)
        struct.pack(code, 0 if value is None else value)
    header.host.encode()
    codes = {column.name: column.code for column in STREAMS[header.stream].columns}
    for name, code in header.layout:
        if code not in MISSING or codes.get(name, code) != code:
            raise JournalError(
                f"{path} is skipped: column {name!r:.40} has code {code!r:.40}, this Tidegauge knows "
                f"{codes.get(name) or ', '.join(MISSING)}: read it with the Tidegauge that wrote it"
            )
    size = struct.calcsize("<" + "".join(code for _, code in header.layout))
    if size != header.record_bytes or len(dict(header.layout)) != len(header.layout) or not size:
        raise _damaged(path, f"a record of {header.record_bytes} bytes, the layout makes {size}")
    return header


def _event_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of one line; None if it is no event."""
    try:
        body = json.loads(line)
        row = {name: _checked(body.pop(name), bound) for name, bound in _EVENT_COLUMNS.items()}
        rank = body.pop("rank")
        row["rank"] = rank if rank is None else _checked(rank, _RANK_BOUND)
        # Half of a surrogate pair is no text: terminals and browsers refuse it.
        row["body"] = json.dumps(body, ensure_ascii=False).encode(errors="replace").decode()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return row


def _checked(value: Any, bound: int | None) -> Any:
    """Return an integer within its bound or, without a bound, a text; raise a ValueError for anything else."""
    if bound is None and isinstance(value, str):
        value.encode()
    elif bound is None or type(value) is not int or not -bound <= value < bound:
        raise ValueError("it is no event")
    return value


def damaged_lines(path: Path, count: int) -> str:
    """Return the problem line about an event log with damaged lines."""
    return f"{path}: {count} damaged {'line is' if count == 1 else 'lines are'} skipped; the others are kept"
