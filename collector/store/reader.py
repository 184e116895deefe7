"""Reading a run: one snapshot of the lake, and the journals beyond it.

The stored offsets are read in the lake's transaction, the journals after that. Journals only grow, and none is
deleted while somebody looks, so together they hold every record up to some moment, once: with the collector
alive, dead or never there.
"""

from __future__ import annotations

import functools
import re
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from collector.errors import TidegaugeError
from collector.store import columnar, journals, lake, looks, tiles
from collector.store.engine import ERRORS, connected, one_line, quoted
from collector.store.ingest import damaged_lines
from collector.store.runs import Run, of_this_boot
from collector.store.tiling import SAMPLED
from training_harness.records import STREAMS

#: What follows the name of a stream in that of the view that says how far it reaches.
_REACH = "_reach"
_SUFFIXES = f"({_REACH}|{tiles.ROWS}|{tiles.TILED})$"
#: What a query reads.
_SOURCES = re.compile(r'\b(?:FROM|JOIN) "?(\w+)')
#: Streams of which mostly the whole run is asked for.
_WHOLE = ("event", "host", "device")
#: Of the SQL, of Ctrl-C, of the machine; whatever else a query raises, damaged files make.
_NO_DAMAGE = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ParserException,
    duckdb.ConversionException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
)
#: A busy catalog is waited for in each (`lake.attached`).
_OPEN_ATTEMPTS = 2
#: What a copy may take, however long the run: DuckDB sorts the rest on disk. Each thread holds a row group.
_COPY_MEMORY, _COPY_THREADS = "512MB", 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """What a segment holds beyond the lake, up to its size when the snapshot was taken."""

    path: Path
    header: journals.SegmentHeader
    begin_bytes: int
    end_bytes: int


class Snapshot:
    """A run at one moment. Use it in one thread, inside `with read(run)`."""

    def __init__(
        self,
        run: Run,
        connection: duckdb.DuckDBPyConnection,
        *,
        opened: looks.OpenLake | None,
        problems: Sequence[str],
    ) -> None:
        self._run = run
        self._connection = connection
        self._opened = opened
        self._behind_ns = _clocks_behind_ns(run)
        self._known_problems = problems
        # In the shared store the clocks of the hosts tell no common time up to which all is laid.
        self._trusts_tiles = opened is not None and not run.is_shared
        self._begin()

    def _begin(self) -> None:
        progress = self._opened.progress if self._opened else lake.Progress()
        self._views: set[str] = set()
        self._read: dict[str, pa.Table] = {}
        self._problems = list(self._known_problems)
        self._progress = progress
        self._stored = {journals.table_of(name) for name in progress.offsets}
        self._events = self._read_events(progress)
        self._tails = self._find_tails(progress)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each thing that could not be read."""
        return tuple(self._problems)

    @property
    def version(self) -> Hashable:
        """The same for two looks that see the same records; None if nobody can tell, or not all could be read."""
        if self._problems or (self._opened and self._opened.version is None):
            return None
        of_all = [tail for tails in self._tails.values() for tail in tails]
        beyond = frozenset((tail.path, tail.begin_bytes, tail.end_bytes) for tail in of_all)
        return self._run.path, self._opened and self._opened.version, beyond, self._events.num_rows

    @functools.cached_property
    def now_ns(self) -> int:
        """CLOCK_MONOTONIC now, of the run's host; for a run that is over elsewhere, the time of its last record."""
        if of_this_boot(self._run):
            return time.monotonic_ns()
        if self._run.is_shared and self._run.manifest["end_time_ns"] is None:
            return time.time_ns() - _wall_offset_ns(self._run.anchors[self._run.manifest["host"]])
        sources = " UNION ALL ".join(f"SELECT last_ns FROM {name}{_REACH}" for name in ("event", *STREAMS))
        with self._intact():
            last = self._execute(f"SELECT max(last_ns) FROM ({sources})", None).fetchone()
        return int(last[0]) if last and last[0] is not None else 0

    @functools.cached_property
    def lost_count(self) -> int:
        """Records that writers could not write."""
        with self._intact():
            reported = self._execute("FROM event WHERE kind = 'records-lost'", None).to_arrow_table()
        for writer, count in journals.reported_losses(reported).items():
            self._progress.note_loss(writer, count)
        return self._progress.lost_count

    def query(self, sql: str, params: Mapping[str, object] | Sequence[object] | None = None) -> pd.DataFrame:
        """Run SQL over the views: one per stream of `records.STREAMS`, and `event`.

        And for each of them, as `step_reach`: one row with n (records), first_ns and last_ns, without a scan. And
        for some, as `step_rows`, each row as a tile, and as `step_tiled`, tiles where there are any.

        A column of integers with NULLs comes as float64 with NaN, one without as integers.

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
                if isinstance(error, _NO_DAMAGE) or not self._forgo_tiles():
                    raise
                frame = self._execute(sql, params).df()
        # DuckDB gives some of them as masked integers, whose NA breaks comparisons.
        masked = [
            name
            for name, dtype in frame.dtypes.items()
            if isinstance(dtype, pd.Int64Dtype | pd.Int32Dtype | pd.Int16Dtype | pd.Int8Dtype)
        ]
        return frame.assign(**{str(name): frame[name].to_numpy(np.float64, na_value=np.nan) for name in masked})

    def copy(self, name: str, path: Path, options: str) -> int:
        """Write a view to a file in order of time, with DuckDB's COPY, and return how many rows it has.

        Args:
            name: of the view.
            path: of the file.
            options: of COPY, as `FORMAT csv`.

        Raises:
            TidegaugeError: files of the lake are damaged or gone.
            OSError: the file cannot be written, or there is no room on disk to sort.

        """
        self._connection.execute(f"SET memory_limit = '{_COPY_MEMORY}'; SET threads = {_COPY_THREADS}")
        sql = f'COPY (FROM "{name}" ORDER BY time_ns) TO {quoted(str(path))} ({options})'
        try:
            with self._intact(writing=path):
                rows_count = int(self._execute(sql, None).fetchall()[0][0])
        except duckdb.IOException as error:
            raise OSError(str(error).rpartition(": ")[2]) from None
        except duckdb.OutOfMemoryException:
            raise OSError(f"no room to sort in {tempfile.gettempdir()}; set TMPDIR to a folder with room") from None
        # After an error this instance is not used again (`connected`).
        self._connection.execute("RESET memory_limit; RESET threads")
        return rows_count

    @contextmanager
    def _intact(self, *, writing: Path | None = None) -> Iterator[None]:
        """Say so if files of the lake are damaged or gone; errors of another cause are left as they are."""
        try:
            yield
        except _NO_DAMAGE:
            raise
        except ERRORS as error:
            if writing is not None and str(writing) in str(error):
                raise
            if self._run.is_shared:
                raise TidegaugeError(
                    f"the shared store does not give its files ({one_line(error)}): try again"
                ) from None
            raise TidegaugeError(
                f"{self._run.data_dir} is damaged ({one_line(error)}): move it and {self._run.catalog_path} "
                "away and run `tidegauge collect`, for what the journals still hold"
            ) from None

    def _execute(
        self, sql: str, params: Mapping[str, object] | Sequence[object] | None
    ) -> duckdb.DuckDBPyConnection:
        for name in set(_SOURCES.findall(sql)):
            self._add_view(name)
        return self._connection.execute(sql, params)

    def _add_view(self, name: str) -> None:
        """Make a view when a query first names it: most pages need the journals of two or three streams."""
        stream = re.sub(_SUFFIXES, "", name)
        if name in self._views or stream not in {*STREAMS, *tiles.TILINGS, "event"}:
            return
        if name == stream:
            sql = self._rows(stream)
        elif name.endswith(_REACH):
            sql = self._reached(stream).told
        elif stream in tiles.TILINGS:
            sql = self._tiles(name, stream)
        else:
            return
        self._connection.execute(f'CREATE TEMP VIEW "{name}" AS {sql}')
        self._views.add(name)

    def _rows(self, stream: str) -> str:
        """SQL: a stream, or several that are laid together, of the lake and beyond."""
        if stream in tiles.TILINGS and stream not in STREAMS:
            return tiles.TILINGS[stream].gathered(lambda part: f"({self._rows(part)})")
        columns = ", ".join(f'"{column}"' for column in self._tail(stream).column_names)
        parts = [f"FROM tail_{stream}"]
        if stream in self._stored:  # an empty table of the lake would cost as much as a full one
            assert self._opened is not None
            is_whole = stream in _WHOLE and not self._run.is_shared
            parts.append(self._opened.whole(stream) if is_whole else f"FROM {lake.LAKE}.{stream}")
        source = f"({' UNION ALL BY NAME '.join(parts)})"
        if self._behind_ns:  # what a node wrote whose clock is not known yet is left out
            cases = " ".join(f"WHEN {quoted(host)} THEN {ns}" for host, ns in self._behind_ns.items())
            moved = f"SELECT * REPLACE (time_ns + CASE host {cases} END AS time_ns) FROM {source}"
            source = f"({moved} WHERE host IN ({', '.join(map(quoted, self._behind_ns))}))"
        return f"SELECT {columns} FROM {source}"

    def _reached(self, name: str) -> tiles.Reach:
        """How far rows reach; the catalog knows it of the lake's."""
        streams = tiles.TILINGS[name].parts if name in tiles.TILINGS else (name,)
        if self._behind_ns:
            sources = (tiles.reach(f"({self._rows(stream)})") for stream in streams)
            return tiles.Reach.of(self._connection.execute(sql).fetchall()[0] for sql in sources)
        tails = [self._tail(stream) for stream in streams]
        ends = (pc.min_max(tail["time_ns"]).as_py() for tail in tails)
        found = [(tail.num_rows, end["min"], end["max"]) for tail, end in zip(tails, ends, strict=True)]
        for stream in streams:
            if self._opened and stream in self._stored:
                found += self._opened.ask(tiles.reach(f"{lake.LAKE}.{stream}"))
        return tiles.Reach.of(found)

    def _tiles(self, name: str, stream: str) -> str:
        """SQL: a stream as tiles, those of the lake, if it may, and the rows that they lack."""
        tiling, whole = tiles.TILINGS[stream], self._reached(stream)
        laid = None
        if name.endswith(tiles.TILED) and self._trusts_tiles and whole.rows_count > tiles.TILED_BEYOND:
            laid = self._laid(stream)
        if laid is None:
            self._add_view(stream)
            return tiling.alone(f'"{stream}"', every=tiles.one_in(whole.rows_count))
        assert self._opened is not None
        thinner = max(1, whole.rows_count // tiles.SAMPLED_BEYOND)
        every = thinner * SAMPLED
        older = self._opened.table(tiling.coarser(laid.tiles, laid.until_ns - laid.first_ns, thinner=thinner))
        newer = self._opened.table(tiling.laid(laid.newer, every=every))
        self._connection.register(f"tiles_{stream}", pa.concat_tables([older, newer]))
        # Plus nothing: else DuckDB has Arrow filter by time, which takes more than to scan all of it.
        kept = f"SELECT * REPLACE (time_ns + 0 AS time_ns) FROM tiles_{stream}"
        tail = tiling.gathered(lambda part: f"tail_{part}")  # `_reached` has made them known
        return f"{kept} UNION ALL BY NAME {tiling.alone(tail, every=every)}"

    def _laid(self, stream: str) -> tiles.Laid | None:
        if self._opened is None or self._stored.isdisjoint(tiles.TILINGS[stream].parts):
            return None
        try:
            return tiles.find_laid(self._opened.ask, lake.LAKE, stream)
        except duckdb.CatalogException:  # a lake of an older Tidegauge
            return None

    def _forgo_tiles(self) -> bool:
        """Begin anew without tiles, whose files may be what is damaged; False if there are none to be used."""
        if not self._trusts_tiles:
            return False
        self._trusts_tiles = False
        assert self._opened is not None
        self._connection.rollback()  # and with it go the views
        self._opened.begin()
        self._begin()
        return True

    def _tail(self, stream: str) -> pa.Table:
        """What the journals hold beyond the lake, which is made known as `tail_STREAM`."""
        if stream not in self._read:
            tail = self._events if stream == "event" else self._read_tail(stream)
            self._connection.register(f"tail_{stream}", tail)
            self._read[stream] = tail
        return self._read[stream]

    def _read_tail(self, stream: str) -> pa.Table:
        pieces = []
        for tail in self._tails.get(stream, ()):
            try:
                records = columnar.raw_records(tail.path, tail.header, tail.begin_bytes, tail.end_bytes)
            except journals.JournalError as error:
                self._problems.append(str(error))
            else:
                pieces.append((tail.header, records))
        return columnar.tabulated(stream, pieces)

    def _find_tails(self, progress: lake.Progress) -> dict[str, list[_Tail]]:
        tails: dict[str, list[_Tail]] = {}
        for path in journals.list_segments(self._run):
            begin = progress.offsets.get(path.name, 0)
            try:
                end = journals.size_bytes(path)
                header = journals.read_header(path) if end > begin else None
            except journals.JournalError as error:
                self._problems.append(str(error))
                continue
            if header is not None:
                progress.note_loss(header.writer, header.lost_before_count)
                tails.setdefault(header.stream, []).append(
                    _Tail(path=path, header=header, begin_bytes=begin, end_bytes=end)
                )
        return tails

    def _read_events(self, progress: lake.Progress) -> pa.Table:
        tables = [journals.EVENT_SCHEMA.empty_table()]
        for path in journals.list_event_logs(self._run):
            damaged_count, begin = progress.damaged.get(path.name, 0), progress.offsets.get(path.name, 0)
            try:
                lines = journals.read_events(path, begin) if journals.size_bytes(path) > begin else None
            except journals.JournalError as error:
                self._problems.append(str(error))
                continue
            if lines is not None:
                damaged_count += lines.damaged_count
                tables.append(lines.table)
            if damaged_count:
                self._problems.append(damaged_lines(path, damaged_count))
        return pa.concat_tables(tables)


@contextmanager
def read(run: Run) -> Iterator[Snapshot]:
    """One consistent look at a run.

    Without a lake the journals alone are read: nobody has deleted any of them. With a lake that cannot be
    opened too, but then they are not the whole run, for segments that were in the lake are gone: a problem says so.

    Raises:
        TidegaugeError: the run's directory cannot be read or is gone, or DuckDB's extensions are missing.

    """
    with ExitStack() as stack:
        stack.enter_context(lake.files_locked(run, exclusive=False))
        if not run.path.exists():
            raise TidegaugeError(f"run {run.run_id} is not there any more; `tidegauge runs` lists those that are")
        opened, problems = None, []
        if lake.exists(run):
            for _ in range(_OPEN_ATTEMPTS):
                try:
                    opened = stack.enter_context(looks.opened(run))
                except (*ERRORS, OSError) as error:
                    why = one_line(error)
                    if run.is_shared and "does not exist" in str(error):  # no collector has come to it yet
                        break
                else:
                    break
            else:
                where = "of this machine alone" if run.is_shared else "alone"
                problems.append(
                    f"{lake.title(run)} cannot be opened ({why}): the journals {where} are shown, "
                    "which lack what is in the lake alone"
                )
        connection = opened.connection if opened else stack.enter_context(connected())
        yield Snapshot(run, connection, opened=opened, problems=problems)


def _clocks_behind_ns(run: Run) -> dict[str, int]:
    """Host -> how far its CLOCK_MONOTONIC is behind that of the run's own host, where several nodes take part."""
    if not run.is_shared:
        return {}
    anchors, own = run.anchors, run.manifest["host"]
    offsets_ns = {host: _wall_offset_ns(anchor) for host, anchor in anchors.items()}
    return {host: offset_ns - offsets_ns[own] for host, offset_ns in offsets_ns.items()}


def _wall_offset_ns(anchor: Mapping[str, Any]) -> int:
    return int(anchor["wall_ns"]) - int(anchor["time_ns"])
