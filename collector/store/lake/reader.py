"""Read a run: one snapshot of the lake, and the journals beyond it.

The stored offsets are read in the lake's transaction, the journals after that. Journals only grow, and none is
deleted during a read session. So lake and journals together hold every record up to some moment exactly once,
whether the collector is alive, dead or was never there.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from collector.errors import TidegaugeError
from collector.store.duck import ERRORS, open_connection, quote
from collector.store.journals import arrow, segments
from collector.store.journals.segments import damaged_lines
from collector.store.lake import lake
from collector.store.lake.read_session import ReadSession
from collector.store.lake.store import Store, store_of
from collector.store.rollups import tables
from collector.store.rollups.facts import SAMPLE_EVERY
from collector.store.runs.run import Run
from training_harness.records import STREAMS

#: Suffix of the view with the number of a stream's rows, and their first and last time.
_REACH_VIEW = "_reach"
#: View -> the stream or rollup that it shows, and the suffix that says how.
_VIEWS = {
    **{f"{name}{end}": (name, end) for name in (*STREAMS, *tables.ROLLUPS, "event") for end in ("", _REACH_VIEW)},
    **{f"{name}{end}": (name, end) for name in tables.ROLLUPS for end in (tables.ROW_VIEW, tables.ROLLUP_VIEW)},
}
#: Names that a query reads from. DuckDB itself tells them only of SQL without parameters.
_SOURCES = re.compile(r'\b(?:FROM|JOIN) "?(\w+)')
#: Streams that are mostly queried over the whole run.
_WHOLE_RUN_STREAMS = ("event", "host", "device")
#: Errors that do not mean a damaged file: of the SQL, of Ctrl-C, of the machine's memory.
_NO_DAMAGE = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ParserException,
    duckdb.ConversionException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
)
#: Rows that are read and written at a time.
_ROWS_PER_BATCH = 2**17
#: Attempts to open the lake; each waits for a busy catalog (`lake.attach`).
_OPEN_ATTEMPTS = 2
#: Memory and threads of an export, however long the run: DuckDB sorts the rest on disk. Each thread holds a row
#: group.
_COPY_MEMORY, _COPY_THREADS = "512MB", 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """The part of a segment beyond the lake, up to its size when the snapshot was taken."""

    path: Path
    header: segments.SegmentHeader
    begin_bytes: int
    end_bytes: int


class Snapshot:
    """A run at one moment. Use it in one thread, inside `with read(run)`."""

    def __init__(
        self,
        store: Store,
        connection: duckdb.DuckDBPyConnection,
        *,
        session: ReadSession | None,
        problems: Sequence[str],
    ) -> None:
        self._run = store.run
        self._store = store
        self._connection = connection
        self._session = session
        self._behind_ns = store.clocks_behind_ns()
        self._open_problems = problems
        self._uses_rollups = session is not None and store.has_one_clock
        self._begin()

    def _begin(self) -> None:
        progress = self._session.progress if self._session else lake.Progress()
        self._views: set[str] = set()
        self._tail_tables: dict[str, pa.Table] = {}
        self._problems = list(self._open_problems)
        self._progress = progress
        self._stored = {segments.table_of(name) for name in progress.offsets}
        self._events = self._read_events(progress)
        self._tails = self._find_tails(progress)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each thing that could not be read."""
        return tuple(self._problems)

    @property
    def version(self) -> Hashable:
        """A value that is equal for two snapshots of the same records; None if unknown, or after a problem."""
        if self._problems or (self._session and self._session.version is None):
            return None
        all_tails = [tail for tails in self._tails.values() for tail in tails]
        beyond_lake = frozenset((tail.path, tail.begin_bytes, tail.end_bytes) for tail in all_tails)
        return self._run.path, self._session and self._session.version, beyond_lake, self._events.num_rows

    @functools.cached_property
    def now_ns(self) -> int:
        """CLOCK_MONOTONIC now on the run's host; for a run that ended elsewhere, the time of its last record."""
        if (now_ns := self._store.now_ns()) is not None:
            return now_ns
        sources = " UNION ALL ".join(f"SELECT last_ns FROM {name}{_REACH_VIEW}" for name in ("event", *STREAMS))
        with self._intact():
            last = self._execute(f"SELECT max(last_ns) FROM ({sources})", None).fetchone()
        return int(last[0]) if last and last[0] is not None else 0

    @functools.cached_property
    def lost_count(self) -> int:
        """Number of records that writers could not write."""
        with self._intact():
            reported = self._execute("FROM event WHERE kind = 'records-lost'", None).to_arrow_table()
        for writer, count in segments.reported_losses(reported.to_pylist()).items():
            self._progress.note_loss(writer, count)
        return self._progress.lost_count

    def query(self, sql: str, params: Mapping[str, object] | Sequence[object] | None = None) -> pd.DataFrame:
        """Run SQL over the views: one per stream of `records.STREAMS`, and `event`.

        Each of them also has a view like `step_reach`: one row of n (records), first_ns and last_ns, without a
        scan. Streams with rollups have `step_tiled`, which reads rollups where there are any, and `step_rows`,
        which has each row as a rollup.

        A column of integers with NULLs is returned as float64 with NaN, one without NULLs as integers.

        Args:
            sql: DuckDB SQL. `"fetch"` is a reserved word there and must be quoted.
            params: values for `$name` or `?`.

        Raises:
            TidegaugeError: files of the lake are damaged or gone.
        """
        with self._intact():
            try:
                frame = self._execute(sql, params).df()
            except ERRORS as error:
                if isinstance(error, _NO_DAMAGE) or not self._disable_rollups():
                    raise
                frame = self._execute(sql, params).df()
        # DuckDB returns some columns as masked integers, whose NA breaks comparisons.
        masked = [
            name
            for name, dtype in frame.dtypes.items()
            if isinstance(dtype, pd.Int64Dtype | pd.Int32Dtype | pd.Int16Dtype | pd.Int8Dtype)
        ]
        return frame.assign(**{str(name): frame[name].to_numpy(np.float64, na_value=np.nan) for name in masked})

    def write_arrow(
        self, sql: str, params: Mapping[str, object] | Sequence[object] | None, stream: BinaryIO
    ) -> None:
        """Run a user's SQL over the views, and write its rows in Arrow's stream format as they come.

        Raises:
            TidegaugeError: the SQL is wrong, or files of the lake are damaged or gone.
        """
        try:
            for name in set(re.findall(r"\w+", sql)):  # a user names views in any way that SQL has
                self._add_view(name)
            answer = self._execute(sql, params)
            if answer is None:  # spaces or a comment alone
                raise TidegaugeError("the query is empty; give a SELECT")
            rows = answer.to_arrow_reader(_ROWS_PER_BATCH)
            with pa.ipc.new_stream(stream, rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
        except ERRORS as error:
            if self._store.data in str(error):  # else it is about the SQL, or files that it names
                raise self._store.damaged(error) from None
            raise TidegaugeError(f"the query failed: {error}") from None

    def copy(
        self, name: str, path: Path, options: str, *, texts: Mapping[str, Callable[[str], str]] | None = None
    ) -> int:
        """Write a view to a file in order of time, with DuckDB's COPY, and return its number of rows.

        Args:
            name: name of the view.
            path: path of the file.
            options: options of COPY, such as `FORMAT csv`.
            texts: column of text -> what its values are replaced by.

        Raises:
            TidegaugeError: files of the lake are damaged or gone.
            OSError: the file cannot be written, or there is no room on disk to sort.
        """
        self._connection.execute(f"SET memory_limit = '{_COPY_MEMORY}'; SET threads = {_COPY_THREADS}")
        replaced = ", ".join(f'replace_{column}("{column}") AS "{column}"' for column in texts or ())
        columns = f"* REPLACE ({replaced})" if replaced else "*"
        sql = f'COPY (SELECT {columns} FROM "{name}" ORDER BY time_ns) TO {quote(str(path))} ({options})'
        try:
            with self._intact(writing=path), self._functions(texts or {}):
                rows_count = int(self._execute(sql, None).fetchall()[0][0])
        except duckdb.IOException as error:
            raise OSError(str(error).rpartition(": ")[2]) from None
        except duckdb.OutOfMemoryException:
            raise OSError(f"no room to sort in {tempfile.gettempdir()}; set TMPDIR to a folder with room") from None
        # After an error this instance is not reused (`duck.borrow_instance`).
        self._connection.execute("RESET memory_limit; RESET threads")
        return rows_count

    @contextmanager
    def _functions(self, texts: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
        """Give the connection a function `replace_COLUMN` for each column."""
        for column, function in texts.items():
            self._connection.create_function(f"replace_{column}", function, ["VARCHAR"], "VARCHAR")
        try:
            yield
        finally:
            for column in texts:
                self._connection.remove_function(f"replace_{column}")

    @contextmanager
    def _intact(self, *, writing: Path | None = None) -> Iterator[None]:
        """Report damaged or missing files of the lake as a TidegaugeError; other errors pass."""
        try:
            yield
        except _NO_DAMAGE:
            raise
        except ERRORS as error:
            if writing is not None and str(writing) in str(error):
                raise
            raise self._store.damaged(error) from None

    def _execute(
        self, sql: str, params: Mapping[str, object] | Sequence[object] | None
    ) -> duckdb.DuckDBPyConnection:
        for name in set(_SOURCES.findall(sql)):
            self._add_view(name)
        return self._connection.execute(sql, params)

    def _add_view(self, name: str) -> None:
        """Create a view when a query first names it: most pages need the journals of two or three streams."""
        if name in self._views or name not in _VIEWS:
            return
        stream, suffix = _VIEWS[name]
        if suffix == "":
            sql = self._rows(stream)
        elif suffix == _REACH_VIEW:
            sql = self._reach(stream).sql
        else:
            sql = self._rollups(stream, may_be_stored=suffix == tables.ROLLUP_VIEW)
        self._connection.execute(f'CREATE TEMP VIEW "{name}" AS {sql}')
        self._views.add(name)

    def _rows(self, stream: str) -> str:
        """Return SQL for a stream, or the several of a rollup, from the lake and the journals beyond it."""
        if stream in tables.ROLLUPS and stream not in STREAMS:
            return tables.ROLLUPS[stream].union_sql(lambda part: f"({self._rows(part)})")
        columns = ", ".join(f'"{column}"' for column in self._tail(stream).column_names)
        parts = [f"FROM tail_{stream}"]
        if stream in self._stored:  # an empty table of the lake would cost as much as a full one
            assert self._session is not None
            is_whole = stream in _WHOLE_RUN_STREAMS and self._store.has_one_clock
            parts.append(self._session.whole_stream(stream) if is_whole else f"FROM {lake.LAKE}.{stream}")
        source = f"({' UNION ALL BY NAME '.join(parts)})"
        if self._behind_ns:  # records of a node whose clock is not known yet are left out
            cases = " ".join(f"WHEN {quote(host)} THEN {ns}" for host, ns in self._behind_ns.items())
            on_own_clock = f"SELECT * REPLACE (time_ns + CASE host {cases} END AS time_ns) FROM {source}"
            source = f"({on_own_clock} WHERE host IN ({', '.join(map(quote, self._behind_ns))}))"
        return f"SELECT {columns} FROM {source}"

    def _reach(self, name: str) -> tables.Reach:
        """Return the reach of a stream or rollup; the lake's part comes from its catalog."""
        streams = tables.ROLLUPS[name].stream_columns if name in tables.ROLLUPS else (name,)
        if self._behind_ns:
            queries = (tables.reach_sql(f"({self._rows(stream)})") for stream in streams)
            return tables.Reach.merge(self._connection.execute(sql).fetchall()[0] for sql in queries)
        tails = [self._tail(stream) for stream in streams]
        ends = (pc.min_max(tail["time_ns"]).as_py() for tail in tails)
        reaches = [(tail.num_rows, end["min"], end["max"]) for tail, end in zip(tails, ends, strict=True)]
        for stream in streams:
            if self._session and stream in self._stored:
                reaches += self._session.ask(tables.reach_sql(f"{lake.LAKE}.{stream}"))
        return tables.Reach.merge(reaches)

    def _rollups(self, name: str, *, may_be_stored: bool) -> str:
        """Return SQL for a rollup: stored rollups if they may serve, and every other row as a rollup of itself."""
        rollup, whole = tables.ROLLUPS[name], self._reach(name)
        if may_be_stored and self._uses_rollups and whole.rows_count > tables.ROWS_WITHOUT_ROLLUPS:
            # A lake of an older Tidegauge may lack the table, or a column of it.
            with suppress(duckdb.CatalogException, duckdb.BinderException):
                if stored := self._stored_rollups(name, whole):
                    return stored
        self._add_view(name)
        return rollup.row_sql(f'"{name}"', sample_every=tables.sample_every(whole.rows_count))

    def _stored_rollups(self, name: str, whole: tables.Reach) -> str:
        """Return SQL for the stored rollups and the rows that they lack; empty if there are none."""
        rollup = tables.ROLLUPS[name]
        if self._session is None or self._stored.isdisjoint(rollup.stream_columns):
            return ""
        stored = tables.find_rollups(self._session.ask, lake.LAKE, name)
        if stored is None:
            return ""
        thin_by = max(1, whole.rows_count // tables.EXACT_QUANTILE_ROWS)
        sample_every = thin_by * SAMPLE_EVERY
        older_sql = rollup.merge_sql(stored.rollups, stored.until_ns - stored.first_ns, thin_by=thin_by)
        older = self._session.table(older_sql)
        newer = self._session.table(rollup.rollup_sql(stored.newer_rows, sample_every=sample_every))
        self._connection.register(f"rollups_{name}", pa.concat_tables([older, newer]))
        # Adding 0 keeps DuckDB from letting Arrow filter by time, which takes longer than scanning all of it.
        rollups = f"SELECT * REPLACE (time_ns + 0 AS time_ns) FROM rollups_{name}"
        tail = rollup.union_sql(lambda stream: f"tail_{stream}")  # `_reach` has registered them
        return f"{rollups} UNION ALL BY NAME {rollup.row_sql(tail, sample_every=sample_every)}"

    def _disable_rollups(self) -> bool:
        """Begin again without rollups, since their files may be the damaged ones; False if none were in use."""
        if not self._uses_rollups:
            return False
        self._uses_rollups = False
        assert self._session is not None
        self._connection.rollback()  # it drops the views too
        self._session.begin()
        self._begin()
        return True

    def _tail(self, stream: str) -> pa.Table:
        """Return the records of the journals beyond the lake, and register them as `tail_STREAM`."""
        if stream not in self._tail_tables:
            tail = self._events if stream == "event" else self._read_tail(stream)
            self._connection.register(f"tail_{stream}", tail)
            self._tail_tables[stream] = tail
        return self._tail_tables[stream]

    def _read_tail(self, stream: str) -> pa.Table:
        parts = []
        for tail in self._tails.get(stream, ()):
            try:
                records = arrow.raw_records(tail.path, tail.header, tail.begin_bytes, tail.end_bytes)
            except segments.JournalError as error:
                self._problems.append(str(error))
            else:
                parts.append((tail.header, records))
        return arrow.tabulate(stream, parts)

    def _find_tails(self, progress: lake.Progress) -> dict[str, list[_Tail]]:
        tails: dict[str, list[_Tail]] = {}
        for path in segments.list_segments(self._run):
            begin = progress.offsets.get(path.name, 0)
            try:
                end = segments.size_bytes(path)
                header = segments.read_header(path) if end > begin else None
            except segments.JournalError as error:
                self._problems.append(str(error))
                continue
            if header is not None:
                progress.note_loss(header.writer, header.lost_before_count)
                tails.setdefault(header.stream, []).append(
                    _Tail(path=path, header=header, begin_bytes=begin, end_bytes=end)
                )
        return tails

    def _read_events(self, progress: lake.Progress) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for path in segments.list_event_logs(self._run):
            damaged_count, begin = progress.damaged.get(path.name, 0), progress.offsets.get(path.name, 0)
            try:
                lines = segments.read_events(path, begin) if segments.size_bytes(path) > begin else None
            except segments.JournalError as error:
                self._problems.append(str(error))
                continue
            if lines is not None:
                damaged_count += lines.damaged_count
                rows += lines.rows
            if damaged_count:
                self._problems.append(damaged_lines(path, damaged_count))
        return arrow.tabulate_events(rows)


@contextmanager
def read(run: Run) -> Iterator[Snapshot]:
    """Open one consistent snapshot of a run.

    Without a lake, the journals hold the whole run. With a lake that cannot be opened, the journals are read alone.
    Then they lack the segments that were deleted once in the lake, and a problem says so.

    Raises:
        TidegaugeError: the run's directory cannot be read or is gone, or DuckDB's extensions are missing.
    """
    with ExitStack() as stack:
        stack.enter_context(lake.lock_files(run, exclusive=False))
        if not run.path.exists():
            raise TidegaugeError(f"run {run.run_id} no longer exists; `tidegauge runs` lists the runs that do")
        store, session, problem = store_of(run), None, None
        for _ in range(_OPEN_ATTEMPTS if store.exists else 0):
            try:
                session, problem = ReadSession(*stack.enter_context(store.open_readable())), None
                break
            except (*ERRORS, OSError) as error:
                problem = store.unreadable(error)
                if problem is None:
                    break
        connection = session.connection if session else stack.enter_context(open_connection())
        yield Snapshot(store, connection, session=session, problems=[problem] if problem else [])
