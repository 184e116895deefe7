"""Move whole records and event lines from the journals into the lake, exactly once.

Records and the offsets up to which the journals were read are committed in one transaction. So a kill
at any point loses nothing and doubles nothing: uncommitted records are read again. A segment of this host is
deleted once it is committed whole and its writer has finished it, so journals do not grow with the run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from collector.errors import TidegaugeError
from collector.store.duck import ERRORS, Ask, ask_over, short_error
from collector.store.journals import arrow, segments
from collector.store.journals.growing_files import GrowingFiles
from collector.store.journals.segments import damaged_lines
from collector.store.lake import lake
from collector.store.lake.counters import ALLOCATOR, SUMS, Totals
from collector.store.lake.ingest_result import IngestResult
from collector.store.lake.store import store_of
from collector.store.runs import locks
from collector.store.runs.run import Run, refuse_links

#: Records per transaction: a bound on memory (about 120 bytes each in Arrow, several copies).
CHUNK_RECORDS = 100_000
_OFFSET_TYPES = {"VARCHAR": pa.string(), "BIGINT": pa.int64()}
_OFFSET_SCHEMA = pa.schema([(name, _OFFSET_TYPES[kind]) for name, kind in lake.TABLES["journal_offset"]])


class CatchesUp(Protocol):
    """The totals of a run, in this process or in another (`counters.Counts`)."""

    @property
    def has_begun(self) -> bool:
        """True once the totals of a lake are known."""

    def begin(self, totals: Totals, offsets: Mapping[str, int]) -> None:
        """Begin with the totals of the lake, which has each journal up to an offset."""

    def catch_up(self) -> None:
        """Count what the journals have now."""


@dataclass(slots=True)
class _Chunk:
    """The records, events and offsets of one transaction."""

    tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    offsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    read_paths: list[Path] = field(default_factory=list)
    records_count: int = 0

    def add(self, table_name: str, table: pa.Table) -> None:
        if table.num_rows:
            self.tables.setdefault(table_name, []).append(table)

    def lose(self, writer: str, count: int) -> None:
        self.losses[writer] = max(self.losses.get(writer, 0), count)

    def move(self, path: Path, end_bytes: int, writer: str | None, lost_count: int, damaged_count: int) -> None:
        row = (path.name, end_bytes, writer, lost_count, damaged_count)
        self.offsets[path.name] = dict(zip(_OFFSET_SCHEMA.names, row, strict=True))

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
        counts: totals to begin with those of the lake, and to bring up to date before journals are deleted, if any.
        lock: the run's lock, where a parent process holds it; by default it is taken here.

    Raises:
        TidegaugeError: another process follows the run, or its lake cannot be opened.
    """

    def __init__(
        self,
        run: Run,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        chunk_records: int = CHUNK_RECORDS,
        counts: CatchesUp | None = None,
        lock: int | None = None,
    ) -> None:
        self._run = run
        self._clock_ns = clock_ns
        self._counts = counts
        self._chunk_records = chunk_records
        self._host = socket.gethostname()
        self._store = store_of(run)
        self._headers: dict[Path, segments.SegmentHeader] = {}
        self._segments = GrowingFiles(run.journal_dir, segments.SEGMENT_SUFFIX)
        self._event_logs = GrowingFiles(run.events_dir, segments.EVENT_LOG_SUFFIX)
        self._lake = contextlib.ExitStack()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._progress = lake.Progress()
        self._lock = locks.follow_run(run) if lock is None else lock
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def step(self) -> IngestResult:
        """Move all whole records beyond the stored offsets into the lake; never raise for a file or a disk."""
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
                    for files in (self._event_logs, self._segments):
                        files.mark_read(path.name for path in chunk.read_paths)
                    records_count += chunk.records_count
                if self._counts is not None:
                    self._counts.catch_up()
                self._delete_ingested(problems)
            except (*ERRORS, TidegaugeError, OSError) as error:
                problems.append(
                    f"the lake did not take the records, which stay in the journals: {short_error(error)}"
                )
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
        """Merge small files and delete those that no snapshot needs, unless readers hold the lock.

        Return one line per problem; the lake is correct with or without maintenance.
        """
        with lake.private_files():
            try:
                return self._store.maintain(self._open())
            except (*ERRORS, TidegaugeError, OSError) as error:
                self._release()
                return (f"the lake was not tidied up: {short_error(error)}",)

    def close(self) -> tuple[str, ...]:
        """Maintain a last time, close the lake and release the lock; return the problems."""
        if self._lock < 0:
            return ()
        problems: list[str] = []
        if self._connection is not None:  # else it could not be opened just now
            try:
                self._store.take_part()
            except TidegaugeError as error:
                problems.append(str(error))
            problems += self.maintain()
        self._release()
        os.close(self._lock)
        self._lock = -1
        return tuple(problems)

    def __enter__(self) -> Ingester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        """Return the open lake; after a failure, open it again and go on from its own offsets."""
        if self._connection is None:
            refuse_links(self._run)
            with lake.private_files(), contextlib.ExitStack() as stack:
                self._store.take_part()
                connection = stack.enter_context(self._store.open_writable())
                # This lake may lack records of files that were read to their end for the one before.
                self._segments.recheck_all()
                self._event_logs.recheck_all()
                try:
                    self._progress = lake.read_progress(ask_over(connection))
                    reported = connection.execute(f"FROM {lake.LAKE}.event WHERE kind = 'records-lost'")
                    for writer, count in segments.reported_losses(reported.to_arrow_table().to_pylist()).items():
                        self._progress.note_loss(writer, count)
                    if self._counts is not None and not self._counts.has_begun:
                        totals = _totals(ask_over(connection), self._store.counted_rows)
                        self._counts.begin(totals, self._progress.offsets)
                except ERRORS as error:
                    raise TidegaugeError(f"{self._store.title} cannot be read: {short_error(error)}") from None
                self._lake = stack.pop_all()
            self._connection = connection
        return self._connection

    def _release(self) -> None:
        self._connection = None
        with contextlib.suppress(duckdb.Error):
            self._lake.close()

    def _chunks(self, problems: list[str]) -> Iterator[_Chunk]:
        """Yield everything beyond the offsets, in chunks of a bounded size; offsets move with each commit."""
        chunk = _Chunk()
        for path in sorted(self._event_logs.list_growing()):
            try:
                self._add_events(chunk, path, problems)
            except segments.JournalError as error:
                problems.append(str(error))
            else:
                chunk.read_paths.append(path)
        for path in sorted(self._segments.list_growing(), key=lambda path: segments.segment_order(path.name)):
            try:
                while self._add_records(chunk, path):
                    yield chunk
                    chunk = _Chunk()
            except segments.JournalError as error:
                problems.append(str(error))
            else:
                chunk.read_paths.append(path)
        yield chunk

    def _add_events(self, chunk: _Chunk, path: Path, problems: list[str]) -> None:
        begin = self._progress.offsets.get(path.name, 0)
        if segments.size_bytes(path) <= begin:
            return
        lines = segments.read_events(path, begin)
        if lines.end_bytes == begin:
            return
        damaged_count = self._progress.damaged.get(path.name, 0) + lines.damaged_count
        if lines.damaged_count:
            problems.append(damaged_lines(path, damaged_count))
        chunk.add("event", arrow.tabulate_events(lines.rows))
        for writer, count in segments.reported_losses(lines.rows).items():
            chunk.lose(writer, count)
        chunk.move(path, lines.end_bytes, None, 0, damaged_count)

    def _add_records(self, chunk: _Chunk, path: Path) -> bool:
        """Fill the chunk from a segment; return True if the chunk is full and there may be more."""
        begin, size = self._progress.offsets.get(path.name, 0), segments.size_bytes(path)
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
            table = arrow.read_records(path, header, first, end)
            chunk.add(header.stream, table)
            chunk.records_count += table.num_rows
            chunk.lose(header.writer, header.lost_before_count)
            chunk.move(path, end, header.writer, header.lost_before_count, 0)
        return count == room

    def _delete_ingested(self, problems: list[str]) -> None:
        """Delete the finished segments that are in the lake whole, unless readers hold the lock."""
        ingested = [path for path in segments.list_segments(self._run) if self._is_ingested(path)]
        try:
            if ingested:
                with lake.lock_files(self._run, exclusive=True):
                    for path in ingested:
                        path.unlink()
                        self._segments.mark_deleted(path.name)
                        self._headers.pop(path, None)
        except BlockingIOError:
            pass  # the next step finds them again
        except OSError as error:
            problems.append(f"journals that are in the lake were not deleted: {short_error(error)}")

    def _is_ingested(self, path: Path) -> bool:
        end = self._progress.offsets.get(path.name)
        if end is None:
            return False
        try:
            header = self._header(path)
            # A writer's lock may be invisible on another host (NFS with local_lock, Lustre with localflock).
            if header is None or header.host != self._host or not segments.is_finished(path):
                return False
            return segments.size_bytes(path) - end < header.record_bytes
        except segments.JournalError:
            return False

    def _header(self, path: Path) -> segments.SegmentHeader | None:
        header = self._headers.get(path) or segments.read_header(path)
        if header is not None:
            self._headers[path] = header
        return header

    def _commit(self, connection: duckdb.DuckDBPyConnection, chunk: _Chunk) -> None:
        tables = {name: pa.concat_tables(parts) for name, parts in chunk.tables.items()}
        tables["journal_offset"] = pa.Table.from_pylist(list(chunk.offsets.values()), schema=_OFFSET_SCHEMA)
        self._store.commit(connection, tables)
        for name, row in chunk.offsets.items():
            self._progress.offsets[name] = row["end_bytes"]
            if row["damaged_count"]:
                self._progress.damaged[name] = row["damaged_count"]
        for writer, count in chunk.losses.items():
            self._progress.note_loss(writer, count)


def _totals(ask: Ask, where: str) -> Totals:
    """Return the totals of the lake's rows."""
    totals = Totals()
    for stream, sums in SUMS.items():
        columns = ", ".join("count(*)" if name is None else f"sum({name})::BIGINT" for name in sums.values())
        query = f"SELECT host, rank, {columns} FROM {lake.LAKE}.{stream} WHERE {where} GROUP BY ALL"
        for host, rank, *values in ask(query):
            rank_sums = totals.sums.setdefault((host, rank), {})
            rank_sums.update({name: value for name, value in zip(sums, values, strict=True) if value is not None})
    columns = ", ".join(f"arg_max(struct_pack(v := {name}), time_ns).v" for name in ALLOCATOR)
    newest = f"FROM {lake.LAKE}.device_memory WHERE {where} GROUP BY ALL"
    for host, rank, device, *values in ask(f"SELECT host, rank, device, max(time_ns), {columns} {newest}"):
        totals.keep_last((host, rank, device), dict(zip(("time_ns", *ALLOCATOR), values, strict=True)))
    return totals
