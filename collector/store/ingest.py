"""Moving whole records and event lines from the journals into the lake, exactly once.

Records and the offsets up to which the journals were read are committed in one transaction. So a kill
at any point loses nothing and doubles nothing: what was not committed is read again. Segments of this host are
deleted once all of them is committed and their writer has finished them, so journals do not grow with the run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from collector.errors import TidegaugeError
from collector.store import added, columnar, journals, lake, locks, mirror, upkeep
from collector.store.counts import COLUMNS, Counts
from collector.store.durable import DataFiles
from collector.store.engine import ERRORS, asking, one_line, quoted
from collector.store.growing import GrowingFiles
from collector.store.runs import Run, refuse_links

#: Records per transaction: a bound on memory (about 120 bytes each in Arrow, several copies).
CHUNK_RECORDS = 100_000
_OFFSET_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("end_bytes", pa.int64()),
        ("writer", pa.string()),
        ("lost_count", pa.int64()),
        ("damaged_count", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestResult:
    """What one step did.

    Attributes:
        records_count: records that are in the lake now and were not before.
        lag_ns: age of the oldest record that this step found outside the lake; None if it found none.
        lost_count: records that writers could not write, over the whole run.
        is_whole: the lake took all that was found.
        problems: one line each, for whatever could not be read or committed.

    """

    records_count: int
    lag_ns: int | None
    lost_count: int
    is_whole: bool
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Chunk:
    """What one transaction moves."""

    tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    offsets: dict[str, dict[str, object]] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    read: list[Path] = field(default_factory=list)
    records_count: int = 0

    def add(self, table_name: str, table: pa.Table) -> None:
        if table.num_rows:
            self.tables.setdefault(table_name, []).append(table)

    def lose(self, writer: str, count: int) -> None:
        self.losses[writer] = max(self.losses.get(writer, 0), count)

    @property
    def oldest_ns(self) -> int | None:
        streams = (table for name, tables in self.tables.items() if name != "event" for table in tables)
        times = (pc.min(table["time_ns"]).as_py() for table in streams)
        return min((value for value in times if value is not None), default=None)


class Ingester:
    """The one writer of a run's lake.

    Args:
        run: the run to follow.
        clock_ns: CLOCK_MONOTONIC, for the lag.
        chunk_records: most records in one transaction.
        counts: kept up to date with what is in the lake, if somebody asks for them.

    Raises:
        TidegaugeError: another process follows the run, or its lake cannot be opened.

    """

    def __init__(
        self,
        run: Run,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        chunk_records: int = CHUNK_RECORDS,
        counts: Counts | None = None,
    ) -> None:
        self._run = run
        self._clock_ns = clock_ns
        self._counts = counts
        self._chunk_records = chunk_records
        self._host = socket.gethostname()
        self._data_files = DataFiles(run.data_dir)
        self._headers: dict[Path, journals.SegmentHeader] = {}
        self._segments = GrowingFiles(run.journal_dir, journals.SEGMENT_SUFFIX)
        self._event_logs = GrowingFiles(run.events_dir, journals.EVENT_LOG_SUFFIX)
        self._lake = contextlib.ExitStack()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._progress = lake.Progress()
        self._lock = locks.follow(run)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def step(self) -> IngestResult:
        """Move all that is whole and beyond the stored offsets into the lake; never raises for a file or a disk."""
        problems: list[str] = []
        records_count, oldest_ns, is_whole = 0, None, True
        with lake.private_files():
            try:
                connection = self._open()
                for chunk in self._chunks(problems):
                    if oldest_ns is None:
                        oldest_ns = chunk.oldest_ns
                    if chunk.offsets:
                        self._commit(connection, chunk)
                    self._note_read(chunk.read)
                    records_count += chunk.records_count
                self._delete_ingested(problems)
            except (*ERRORS, TidegaugeError, OSError) as error:
                problems.append(f"the lake did not take the records, which stay in the journals: {one_line(error)}")
                self._release()
                is_whole = False
        lag_ns = None if oldest_ns is None else max(0, self._clock_ns() - oldest_ns)
        return IngestResult(
            records_count=records_count,
            lag_ns=lag_ns,
            lost_count=self._progress.lost_count,
            is_whole=is_whole,
            problems=tuple(problems),
        )

    def maintain(self) -> tuple[str, ...]:
        """Merge small files and delete those that no snapshot needs, unless readers look all the time.

        Returns:
            One line per problem; the lake is right with or without maintenance.

        """
        with lake.private_files():
            try:
                return upkeep.tidy(self._run, self._open(), self._data_files)
            except (*ERRORS, TidegaugeError, OSError) as error:
                self._release()
                return (f"the lake was not tidied up: {one_line(error)}",)

    def close(self) -> tuple[str, ...]:
        """Maintain a last time, close the lake and let the next ingester in; returns the problems."""
        if self._lock < 0:
            return ()
        problems: tuple[str, ...] = ()
        if self._connection is not None:  # else it could not be opened just now
            problems = (*self._tell_the_end(), *self.maintain())
        self._release()
        os.close(self._lock)
        self._lock = -1
        return problems

    def _tell_the_end(self) -> tuple[str, ...]:
        try:
            if self._run.is_shared:
                mirror.take_part(self._run)
        except TidegaugeError as error:
            return (str(error),)
        return ()

    def __enter__(self) -> Ingester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        """The open lake. After a failure it is opened anew, and its own offsets say where to go on."""
        if self._connection is None:
            refuse_links(self._run)
            with lake.private_files(), contextlib.ExitStack() as stack:
                if self._run.is_shared:
                    mirror.take_part(self._run)
                connection = stack.enter_context(lake.writable(self._run))
                # What this lake lacks is in files that another may have held already.
                self._segments.forget()
                self._event_logs.forget()
                try:
                    self._progress = lake.read_progress(asking(connection))
                    reported = connection.execute(f"FROM {lake.LAKE}.event WHERE kind = 'records-lost'")
                    for writer, count in journals.reported_losses(reported.to_arrow_table()).items():
                        self._progress.note_loss(writer, count)
                    if self._counts is not None:
                        self._counts.restart(
                            _counted(connection, self._host if self._run.is_shared else None),
                            self._progress.offsets,
                        )
                except ERRORS as error:
                    raise TidegaugeError(f"{lake.title(self._run)} cannot be read: {one_line(error)}") from None
                self._lake = stack.pop_all()
            self._connection = connection
        return self._connection

    def _release(self) -> None:
        self._connection = None
        with contextlib.suppress(duckdb.Error):
            self._lake.close()

    def _chunks(self, problems: list[str]) -> Iterator[_Chunk]:
        """All that is beyond the offsets, in pieces of a bounded size; offsets move with each commit."""
        chunk = _Chunk()
        for path in sorted(self._event_logs.look()):
            try:
                self._add_events(chunk, path, problems)
            except journals.JournalError as error:
                problems.append(str(error))
            else:
                chunk.read.append(path)
        for path in sorted(self._segments.look(), key=lambda path: journals.segment_order(path.name)):
            try:
                while self._add_records(chunk, path):
                    yield chunk
                    chunk = _Chunk()
            except journals.JournalError as error:
                problems.append(str(error))
            else:
                chunk.read.append(path)
        yield chunk

    def _note_read(self, paths: list[Path]) -> None:
        """What was committed up to here need not be looked at again if its writer is gone."""
        names = [path.name for path in paths]
        self._event_logs.read(names)
        self._segments.read(names)

    def _add_events(self, chunk: _Chunk, path: Path, problems: list[str]) -> None:
        begin = self._progress.offsets.get(path.name, 0)
        if journals.size_bytes(path) <= begin:
            return
        lines = journals.read_events(path, begin)
        if lines.end_bytes == begin:
            return
        damaged_count = self._progress.damaged.get(path.name, 0) + lines.damaged_count
        if lines.damaged_count:
            problems.append(damaged_lines(path, damaged_count))
        chunk.add("event", lines.table)
        for writer, count in journals.reported_losses(lines.table).items():
            chunk.lose(writer, count)
        chunk.offsets[path.name] = {
            "path": path.name,
            "end_bytes": lines.end_bytes,
            "writer": None,
            "lost_count": 0,
            "damaged_count": damaged_count,
        }

    def _add_records(self, chunk: _Chunk, path: Path) -> bool:
        """Fill the chunk from a segment; True if the chunk is full and there may be more."""
        begin, size = self._progress.offsets.get(path.name, 0), journals.size_bytes(path)
        if size <= begin:
            return False
        header = self._header(path)
        if header is None:
            return False
        first = max(begin, header.header_bytes)
        room = self._chunk_records - chunk.records_count
        count = min(room, (size - first) // header.record_bytes)
        end = first + count * header.record_bytes
        if end > begin:
            table = columnar.read_records(path, header, first, end)
            chunk.add(header.stream, table)
            chunk.records_count += table.num_rows
            chunk.lose(header.writer, header.lost_before_count)
            chunk.offsets[path.name] = {
                "path": path.name,
                "end_bytes": end,
                "writer": header.writer,
                "lost_count": header.lost_before_count,
                "damaged_count": 0,
            }
        return count == room

    def _delete_ingested(self, problems: list[str]) -> None:
        """Delete the finished segments that hold nothing but what is in the lake, when no reader looks at them."""
        done = [path for path in journals.list_segments(self._run) if self._is_ingested(path)]
        try:
            if done:
                with lake.files_locked(self._run, exclusive=True):
                    for path in done:
                        path.unlink()
                        self._segments.deleted(path.name)
                        self._headers.pop(path, None)
        except BlockingIOError:
            pass  # the next step finds them again
        except OSError as error:
            problems.append(f"journals that are in the lake were not deleted: {one_line(error)}")

    def _is_ingested(self, path: Path) -> bool:
        end = self._progress.offsets.get(path.name)
        if end is None:
            return False
        try:
            header = self._header(path)
            # A writer's lock may not be seen on another host (NFS with local_lock, Lustre with localflock).
            if header is None or header.host != self._host or not journals.is_finished(path):
                return False
            return journals.size_bytes(path) - end < header.record_bytes
        except journals.JournalError:
            return False

    def _header(self, path: Path) -> journals.SegmentHeader | None:
        header = self._headers.get(path) or journals.read_header(path)
        if header is not None:
            self._headers[path] = header
        return header

    def _commit(self, connection: duckdb.DuckDBPyConnection, chunk: _Chunk) -> None:
        tables = {name: pa.concat_tables(parts) for name, parts in chunk.tables.items()}
        tables["journal_offset"] = pa.Table.from_pylist(list(chunk.offsets.values()), schema=_OFFSET_SCHEMA)
        data = lake.place_of(self._run).data if self._run.is_shared else None
        with self._data_files.transaction(connection):
            for name, table in tables.items():
                connection.register("moving", table)
                if data is None:
                    connection.execute(f"INSERT INTO {lake.LAKE}.{name} BY NAME SELECT * FROM moving")
                else:
                    added.insert(connection, data, name, "moving", table.column_names)
                connection.unregister("moving")
        for name, row in chunk.offsets.items():
            self._progress.offsets[name] = int(str(row["end_bytes"]))
            if row["damaged_count"]:
                self._progress.damaged[name] = int(str(row["damaged_count"]))
        for writer, count in chunk.losses.items():
            self._progress.note_loss(writer, count)
        if self._counts is not None:
            self._counts.add(tables, {name: self._progress.offsets[name] for name in chunk.offsets})


def _counted(connection: duckdb.DuckDBPyConnection, host: str | None) -> Iterator[tuple[str, pa.Table]]:
    """What the lake holds of the streams that count, of one node or all, in pieces of a bounded size."""
    where = "" if host is None else f" WHERE host = {quoted(host)}"
    for name, columns in COLUMNS.items():
        found = connection.execute(f'SELECT {", ".join(columns)} FROM {lake.LAKE}."{name}"{where}')
        for batch in found.to_arrow_reader(CHUNK_RECORDS):
            yield name, pa.Table.from_batches([batch])


def damaged_lines(path: Path, count: int) -> str:
    """The problem line about an event log with damaged lines."""
    return f"{path}: {count} damaged {'line is' if count == 1 else 'lines are'} skipped; the others are kept"
