"""Read sessions: the lake of a run in one transaction, with results cached from one session to the next."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from collector.store.duck import Place, parquet_rows
from collector.store.lake import lake
from collector.store.runs.run import Run

_COPY_ATTEMPTS = 5
#: Cache key of a lake -> its newest snapshot that was read, and the results of queries on that snapshot by SQL.
_results: dict[Hashable, tuple[tuple[Any, ...], dict[str, list[tuple[Any, ...]]]]] = {}
_MOST_LAKES = 8
#: SQL over named files of lakes, which never change -> its rows; the last one used is at the end.
_tables: dict[str, pa.Table] = {}
_MOST_TABLES = 32


class ReadSession:
    """A lake in a transaction; query results are cached until the lake has a new snapshot.

    Args:
        connection: a connection with the lake attached.
        cache_key: stands for the lake in later sessions; None caches nothing.

    Attributes:
        connection: as above.
        version: equal for two sessions on one snapshot; None if nothing is cached.
        progress: the part of the journals that is in the snapshot.

    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, cache_key: Hashable) -> None:
        self.connection = connection
        self.version: Hashable = None
        self._cache_key = cache_key
        self.begin()

    def begin(self) -> None:
        """Begin a transaction on the newest snapshot."""
        self.connection.begin()
        self._results: dict[str, list[tuple[Any, ...]]] = {}
        if self._cache_key is not None:
            self._restore_results()
        self.progress = lake.read_progress(self.ask)

    def _restore_results(self) -> None:
        # A lake that was created again repeats the snapshot ids of the one before, at other times.
        [snapshot] = self.connection.execute(
            f"SELECT max(snapshot_id), max(epoch_us(snapshot_time)) FROM ducklake_snapshots('{lake.LAKE}')"
        ).fetchall()
        cached_snapshot, cached_results = _results.pop(self._cache_key, (None, self._results))
        if cached_snapshot == snapshot:
            self._results = cached_results
        _results[self._cache_key] = snapshot, self._results
        self.version = self._cache_key, snapshot
        for oldest in list(_results)[:-_MOST_LAKES]:
            _results.pop(oldest, None)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of SQL over the lake alone.

        Raises:
            duckdb.Error: the lake cannot be read.

        """
        if sql not in self._results:
            self._results[sql] = self.connection.execute(sql).fetchall()
        return self._results[sql]

    def whole_stream(self, stream: str) -> str:
        """Return SQL for all rows of a stream, read from its files in a third of DuckLake's time.

        DuckLake, in turn, skips files whose contents a condition excludes.

        Raises:
            duckdb.Error: the lake cannot be read.

        """
        files = self.ask(f"SELECT data_file, delete_file FROM ducklake_list_files('{lake.LAKE}', '{stream}')")
        are_whole = files and not any(delete_file for _, delete_file in files)
        return parquet_rows([file for file, _ in files]) if are_whole else f"FROM {lake.LAKE}.{stream}"

    def table(self, sql: str) -> pa.Table:
        """Return the rows of SQL that reads nothing but files of the lake, by name.

        Raises:
            duckdb.Error: the files cannot be read.

        """
        table = _tables.pop(sql, None)
        if table is None:
            table = self.connection.execute(sql).to_arrow_table()
        _tables[sql] = table
        for oldest in list(_tables)[:-_MOST_TABLES]:
            _tables.pop(oldest, None)
        return table


@contextmanager
def open_session(run: Run) -> Iterator[ReadSession]:
    """Open a read session on the lake of a run; it has the journals' offsets.

    Raises:
        duckdb.Error: it cannot be read.
        OSError: as above.
        TidegaugeError: DuckDB's extensions are missing, or the environment does not say where the shared store is.

    """
    version = _version(run)
    with (
        _readable_place(run) as (place, cache_key),
        lake.attach(place, read_only=True, cache_key=cache_key, version=version) as connection,
    ):
        yield ReadSession(connection, cache_key)


@contextmanager
def _readable_place(run: Run) -> Iterator[tuple[Place, Hashable]]:
    """Yield the place of the lake, and its cache key.

    In a directory that cannot be written, it is the place of a copy of the catalog: SQLite opens a WAL database
    only where it can write.
    """
    place = lake.lake_place(run)
    if run.is_shared:
        yield place, None
        return
    if os.access(run.path, os.W_OK):
        file = run.catalog_path.stat()
        yield place, (place, file.st_dev, file.st_ino)
        return
    with tempfile.TemporaryDirectory(prefix="tidegauge-") as scratch:
        copy = Path(scratch) / run.catalog_path.name
        for _ in range(_COPY_ATTEMPTS):
            before = _version(run)
            for source in _files(run):
                if source.exists():
                    shutil.copyfile(source, copy.with_name(source.name))
            if _version(run) == before:
                break
        yield replace(place, catalog=f"sqlite:{copy}"), None


def _files(run: Run) -> tuple[Path, Path]:
    """Return the catalog file, and its write-ahead log with the newest commits."""
    return run.catalog_path, run.catalog_path.with_name(f"{run.catalog_path.name}-wal")


def _version(run: Run) -> tuple[tuple[int, int] | None, ...]:
    """Return a value that changes when the catalog is written."""
    version: list[tuple[int, int] | None] = []
    for path in _files(run):
        try:
            stat = path.stat()
            version.append((stat.st_size, stat.st_mtime_ns))
        except FileNotFoundError:
            version.append(None)
    return tuple(version)
