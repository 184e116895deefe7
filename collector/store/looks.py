"""The lake of a run as a look finds it: in a transaction, attached anew only where it must be."""

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

from collector.store import lake
from collector.store.engine import Place, rows_of
from collector.store.runs import Run

_COPY_ATTEMPTS = 5
#: Of each lake, its newest snapshot that was looked at, and what was asked of that.
_answers: dict[Hashable, tuple[tuple[Any, ...], dict[str, list[tuple[Any, ...]]]]] = {}
_MOST_LAKES = 8
#: What was made of files of lakes, which do not change, by the SQL that names them; the newest asked for last.
_tables: dict[str, pa.Table] = {}
_MOST_TABLES = 32


class OpenLake:
    """A lake in a transaction; what is asked of it is kept as long as no snapshot follows.

    Args:
        connection: that has it attached.
        kept: stands for it from one look to the next; None where nothing is kept.

    Attributes:
        connection: as above.
        version: the same for two looks at one snapshot; None where nothing is kept.
        progress: what the snapshot holds of the journals.

    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, kept: Hashable) -> None:
        self.connection = connection
        self.version: Hashable = None
        self._kept = kept
        self.begin()

    def begin(self) -> None:
        """Take the newest snapshot."""
        self.connection.begin()
        self._known: dict[str, list[tuple[Any, ...]]] = {}
        if self._kept is not None:
            self._know_again()
        self.progress = lake.read_progress(self.ask)

    def _know_again(self) -> None:
        # A lake that was made anew has the numbers of the one before, at other times.
        [snapshot] = self.connection.execute(
            f"SELECT max(snapshot_id), max(epoch_us(snapshot_time)) FROM ducklake_snapshots('{lake.LAKE}')"
        ).fetchall()
        newest, known = _answers.pop(self._kept, (None, self._known))
        if newest == snapshot:
            self._known = known
        _answers[self._kept] = snapshot, self._known
        self.version = self._kept, snapshot
        for old in list(_answers)[:-_MOST_LAKES]:
            _answers.pop(old, None)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of SQL over the lake alone.

        Raises:
            duckdb.Error: the lake cannot be read.

        """
        if sql not in self._known:
            self._known[sql] = self.connection.execute(sql).fetchall()
        return self._known[sql]

    def whole(self, stream: str) -> str:
        """SQL: all rows of a stream, from their files: it takes a third of the time that DuckLake takes.

        DuckLake in turn leaves out files by what they hold.

        Raises:
            duckdb.Error: the lake cannot be read.

        """
        found = self.ask(f"SELECT data_file, delete_file FROM ducklake_list_files('{lake.LAKE}', '{stream}')")
        are_plain = found and not any(deleted for _, deleted in found)
        return rows_of([file for file, _ in found]) if are_plain else f"FROM {lake.LAKE}.{stream}"

    def table(self, sql: str) -> pa.Table:
        """The rows of SQL over files of the lake alone, which it names.

        Raises:
            duckdb.Error: they cannot be read.

        """
        table = _tables.pop(sql, None)
        if table is None:
            table = self.connection.execute(sql).to_arrow_table()
        _tables[sql] = table
        for old in list(_tables)[:-_MOST_TABLES]:
            _tables.pop(old, None)
        return table


@contextmanager
def opened(run: Run) -> Iterator[OpenLake]:
    """The lake of a run, and with it the journals' offsets.

    Raises:
        duckdb.Error: it cannot be read.
        OSError: as above.
        TidegaugeError: DuckDB's extensions are missing, or nothing says where the shared store is.

    """
    version = _version(run)
    with (
        _readable_place(run) as (place, kept),
        lake.attached(place, read_only=True, kept=kept, version=version) as connection,
    ):
        yield OpenLake(connection, kept)


@contextmanager
def _readable_place(run: Run) -> Iterator[tuple[Place, Hashable]]:
    """Where the lake is, and what stands for it from one look to the next.

    Or a copy of its catalog: SQLite cannot open a WAL database where it can't write.
    """
    place = lake.place_of(run)
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
    """The catalog, and beside it what was written last."""
    return run.catalog_path, run.catalog_path.with_name(f"{run.catalog_path.name}-wal")


def _version(run: Run) -> tuple[tuple[int, int] | None, ...]:
    """Differs from what it was when the catalog has been written."""
    found: list[tuple[int, int] | None] = []
    for path in _files(run):
        try:
            stat = path.stat()
            found.append((stat.st_size, stat.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)
