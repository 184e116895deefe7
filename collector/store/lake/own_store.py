"""The run's own lake: a SQLite catalog and Parquet files in the run's directory, with one writer.

Parquet files are synced to the disk before the catalog names them, so that a power cut leaves no name without a
file. SQLite syncs the catalog at each commit. DuckDB leaves the Parquet files to the page cache, which survives the
death of a process, but not a power cut. Journals are deleted after their records are committed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from collector.errors import TidegaugeError
from collector.store.duck import Place, ask_over, short_error
from collector.store.lake import lake
from collector.store.lake.store import Store
from collector.store.rollups import tables as rollups
from collector.store.runs.run import Run

#: Age at which rows are rolled up; no row arrives later than this.
_SETTLED_NS = 60 * 10**9
#: New rollups are written when at least one part in 100 of the run lacks them: each time, they are merged with the
#: older ones.
_LACKING_PART = 100
#: Rows rolled up in one statement, about: a bound on memory.
_ROWS_AT_ONCE = 250_000
_COPY_ATTEMPTS = 5


class OwnStore(Store):
    """The lake in the run's directory."""

    has_one_clock = True
    counted_rows = "TRUE"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.title = str(run.catalog_path)
        self._remedy = (
            f"make room, or move it and {run.data_dir} away and collect again what the journals still hold"
        )
        self._synced: set[str] = set()

    @property
    def exists(self) -> bool:
        """True once a collector has opened the run."""
        return self.run.catalog_path.exists()

    @property
    def data(self) -> str:
        """Path of the folder with the lake's files."""
        return f"{self.run.data_dir}/"

    @contextmanager
    def _open(self) -> Iterator[duckdb.DuckDBPyConnection]:
        if is_new := not self.exists:
            self._create()
        with lake.attach(self._place(self.run.catalog_path), read_only=False, threads=1) as connection:
            if not is_new:
                lake.add_missing(connection)
            yield connection

    def _create(self) -> None:
        """Create the lake under another name, then rename it: no process ever sees half a catalog."""
        scratch = self.run.path / "lake.new"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        self.run.data_dir.mkdir(mode=0o700, exist_ok=True)
        catalog = scratch / self.run.catalog_path.name
        try:
            with lake.attach(self._place(catalog), read_only=False, threads=1) as connection:
                connection.begin()
                lake.add_missing(connection)
                connection.commit()
                lake.set_options(connection)
            os.replace(catalog, self.run.catalog_path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _place(self, catalog: Path) -> Place:
        return Place(
            catalog=f"sqlite:{catalog}",
            data=self.data,
            options="META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT 1000",
        )

    @contextmanager
    def open_readable(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, Hashable]]:
        """Open the lake; where its directory cannot be written, a copy: SQLite cannot open a WAL database there."""
        catalog, version = self.run.catalog_path, self._version()
        if os.access(self.run.path, os.W_OK):
            file = catalog.stat()
            key = (catalog, file.st_dev, file.st_ino)
            with lake.attach(self._place(catalog), read_only=True, cache_key=key, version=version) as connection:
                yield connection, key
            return
        with tempfile.TemporaryDirectory(prefix="tidegauge-") as scratch:
            copy = Path(scratch) / catalog.name
            for _ in range(_COPY_ATTEMPTS):
                before = self._version()
                for source in self._files():
                    if source.exists():
                        shutil.copyfile(source, copy.with_name(source.name))
                if self._version() == before:
                    break
            with lake.attach(self._place(copy), read_only=True) as connection:
                yield connection, None

    def _files(self) -> tuple[Path, Path]:
        """Return the catalog file, and its write-ahead log with the newest commits."""
        return self.run.catalog_path, self.run.catalog_path.with_name(f"{self.run.catalog_path.name}-wal")

    def _version(self) -> Hashable:
        """Return a value that changes when the catalog is written."""
        version: list[tuple[int, int] | None] = []
        for path in self._files():
            try:
                stat = path.stat()
                version.append((stat.st_size, stat.st_mtime_ns))
            except FileNotFoundError:
                version.append(None)
        return tuple(version)

    def commit(self, connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> None:
        """Insert rows into the tables of the lake."""
        with self._transaction(connection):
            for name, table in tables.items():
                connection.register("moving", table)
                connection.execute(f"INSERT INTO {lake.LAKE}.{name} BY NAME SELECT * FROM moving")
                connection.unregister("moving")

    @contextmanager
    def _transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Run a transaction whose files are synced before its commit; after an error it stays open."""
        connection.begin()
        yield
        self._sync()
        connection.commit()

    def _sync(self) -> None:
        """Sync the new files and the directories that name them, up to the directory of all runs."""
        files = {os.path.join(folder, name) for folder, _, names in os.walk(self.run.data_dir) for name in names}
        runs_dir = self.run.path.parent
        new = [Path(path).relative_to(runs_dir) for path in files - self._synced]
        folders = {folder for path in new for folder in path.parents}
        for path in (*new, *folders):
            try:
                descriptor = os.open(runs_dir / path, os.O_RDONLY | os.O_CLOEXEC)
            except PermissionError:  # a folder with permission to pass, not to read
                if path in new:
                    raise
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._synced = files

    def maintain(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
        """Write rollups, merge small files, and delete old ones, unless readers hold the lock."""
        problems: list[str] = []
        files = lake.file_counts(connection)
        try:
            for name, rollup in rollups.ROLLUPS.items():
                with lake.collect_problem(problems, connection, f"{name}{rollups.TABLE_SUFFIX}"):
                    if any(files[stream] for stream in rollup.stream_columns):
                        self._write_rollups(connection, name)
            files = lake.file_counts(connection)
            # Readers wait for the lock, so it is released after each table.
            for table in (table for table in lake.TABLES if files[table] > 1):
                collect = lake.collect_problem(problems, connection, table)
                with lake.lock_files(self.run, exclusive=True), collect, self._transaction(connection):
                    connection.execute(f"CALL ducklake_merge_adjacent_files('{lake.LAKE}', '{table}')").fetchall()
            with lake.lock_files(self.run, exclusive=True):
                lake.delete_unneeded(connection)
        except BlockingIOError:
            pass  # the next time finds the same files
        return tuple(problems)

    def _write_rollups(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Write the missing rollups; write all of them again if rows arrived later than their rollup."""
        rollup, ask = rollups.ROLLUPS[name], ask_over(connection)
        table = f"{lake.LAKE}.{name}{rollups.TABLE_SUFFIX}"
        whole = rollups.Reach.of_lake(ask, lake.LAKE, rollup.stream_columns)
        if whole.rows_count <= rollups.ROWS_WITHOUT_ROLLUPS or whole.first_ns is None or whole.last_ns is None:
            return
        stored = rollups.find_rollups(ask, lake.LAKE, name)
        begin_ns = stored.until_ns if stored else whole.first_ns
        end_ns = (whole.last_ns - _SETTLED_NS) // rollup.width_ns * rollup.width_ns
        if end_ns - begin_ns < max(_SETTLED_NS, (whole.last_ns - whole.first_ns) // _LACKING_PART):
            return
        with self._transaction(connection):
            if stored is None:
                connection.execute(f"DELETE FROM {table}")
            rows = rollup.union_sql(lambda stream: f"{lake.LAKE}.{stream}")
            for from_ns, to_ns in _intervals(connection, rows, begin_ns, end_ns, rollup.width_ns):
                interval = f"(FROM {rows} WHERE time_ns >= {from_ns} AND time_ns < {to_ns})"
                connection.execute(f"INSERT INTO {table} BY NAME {rollup.rollup_sql(interval)}")

    def unreadable(self, error: BaseException) -> str:
        """Return the problem line for a lake that cannot be read."""
        return (
            f"{self.title} cannot be opened ({short_error(error)}): only the journals are shown, "
            "without the records that are in the lake alone"
        )

    def damaged(self, error: BaseException) -> TidegaugeError:
        """Return the error for files of the lake that cannot be read."""
        return TidegaugeError(
            f"{self.run.data_dir} is damaged ({short_error(error)}): move it and {self.title} away and run "
            "`tidegauge collect`, for what the journals still hold"
        )


def _intervals(
    connection: duckdb.DuckDBPyConnection, rows: str, begin_ns: int, end_ns: int, width_ns: int
) -> list[tuple[int, int]]:
    """Return intervals of whole rollups, each with at most `_ROWS_AT_ONCE` rows or of a single rollup."""
    counts = connection.execute(
        f"SELECT time_ns // {width_ns} * {width_ns} AS bucket_ns, count(*) FROM {rows} "
        f"WHERE time_ns >= {begin_ns} AND time_ns < {end_ns} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    cuts, rows_count = [], _ROWS_AT_ONCE
    for bucket_ns, count in counts:
        if rows_count + count > _ROWS_AT_ONCE:
            cuts.append(bucket_ns)
            rows_count = 0
        rows_count += count
    return list(itertools.pairwise([*cuts, end_ns]))
