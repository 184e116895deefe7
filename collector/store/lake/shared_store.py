"""A run's lake in the shared store: a schema of PostgreSQL and a folder of files, written by many nodes at a time.

Here the collector writes the Parquet files itself and adds them to the lake. DuckLake deletes the files that it
wrote when a commit fails. Over a network a commit can succeed in the database and seem to fail here, if the answer
is lost: then the catalog names files that are gone, and the lake is ruined for all nodes. DuckLake does not delete
files that were added to it. Files of commits that did fail are orphans, which are deleted after a day.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from collector.errors import TidegaugeError
from collector.store.cluster import mirror, postgres
from collector.store.duck import quote, short_error
from collector.store.lake import lake
from collector.store.lake.store import Store
from collector.store.runs.run import Run

#: Seconds between attempts to open a lake that other nodes are creating too.
_OPENING_PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
#: Files stay this long for readers of other nodes, whose locks are not visible here.
_READERS_AT_MOST = "older_than => now() - INTERVAL 30 MINUTES"
#: Files without a snapshot stay this long: they may belong to a commit under way.
_COMMITS_AT_MOST = "older_than => now() - INTERVAL 1 DAY"


class SharedStore(Store):
    """The lake of a run of many nodes."""

    title = "the shared store"
    has_one_clock = False
    exists = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.counted_rows = f"host = {quote(socket.gethostname())}"
        self._remedy = f"the records wait in {run.journal_dir} until it can"

    @property
    def data(self) -> str:
        """Path or address of the run's folder in the store."""
        return postgres.place(self.run.run_id).data

    def take_part(self) -> None:
        """Register this node's manifest of the run."""
        mirror.take_part(self.run)

    @contextmanager
    def _open(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open the lake, which collectors of other nodes may be creating too."""
        with ExitStack() as stack:
            for pause in (*_OPENING_PAUSES_SECONDS, None):
                try:
                    place = postgres.place(self.run.run_id)
                    connection = stack.enter_context(lake.attach(place, read_only=False, threads=1))
                    if not lake.columns(connection):
                        lake.set_options(connection)
                    connection.begin()
                    lake.add_missing(connection)
                    connection.commit()
                    break
                except duckdb.Error as error:
                    stack.close()
                    if pause is None or not _is_race(error):
                        raise
                    time.sleep(pause * random.uniform(0.5, 1.5))
            yield connection

    @contextmanager
    def open_readable(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, Hashable]]:
        """Open the lake; other nodes commit to it at any time, so no answer is kept."""
        with lake.attach(postgres.place(self.run.run_id), read_only=True) as connection:
            yield connection, None

    def commit(self, connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> None:
        """Add a file of rows to each table of the lake."""
        connection.begin()
        for name, table in tables.items():
            connection.register("moving", table)
            self._insert(connection, name, "moving", table.column_names)
            connection.unregister("moving")
        connection.commit()

    def _insert(
        self, connection: duckdb.DuckDBPyConnection, table: str, source: str, present: Sequence[str]
    ) -> None:
        """Add the rows of `source` to a table; columns that are not `present` become NULL."""
        columns = ", ".join(
            (f'"{name}"' if name in present else "NULL") + f'::{kind} AS "{name}"'
            for name, kind in lake.TABLES[table]
        )
        folder = f"{self.data}main/{table}/"
        if folder.startswith("/"):
            os.makedirs(folder, exist_ok=True)
        path = quote(f"{folder}{uuid.uuid4()}.parquet")
        form = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2"
        connection.execute(f"COPY (SELECT {columns} FROM {source}) TO {path} ({form})")
        connection.execute(f"CALL ducklake_add_data_files('{lake.LAKE}', '{table}', {path})")

    def maintain(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
        """Merge small files and delete old ones: the first of the nodes still in the run does it for all."""
        if not mirror.is_first(self.run):
            return ()
        problems: list[str] = []
        for table in lake.TABLES:
            if problems:
                postgres.check_data()  # without the files, every table would wait in vain
            with lake.collect_problem(problems, connection, table):
                self._merge(connection, table)
        lake.delete_unneeded(
            connection, snapshots=_READERS_AT_MOST, files=_READERS_AT_MOST, orphans=_COMMITS_AT_MOST
        )
        return tuple(problems)

    def _merge(self, connection: duckdb.DuckDBPyConnection, table: str) -> None:
        """Merge the small files of a table, in a transaction; after an error it stays open."""
        files = connection.execute(
            f"SELECT data_file, data_file_size_bytes FROM ducklake_list_files('{lake.LAKE}', '{table}') ORDER BY 2"
        ).fetchall()
        small, total_bytes = [], 0
        for path, size_bytes in files:
            if total_bytes + size_bytes > lake.TARGET_BYTES:
                break
            small.append(path)
            total_bytes += size_bytes
        if len(small) < 2:
            return
        is_small = f"filename IN [{', '.join(map(quote, small))}]"
        columns = [name for name, _ in lake.TABLES[table]]
        connection.begin()
        self._insert(connection, table, f"(FROM {lake.LAKE}.{table} WHERE {is_small})", columns)
        connection.execute(f"DELETE FROM {lake.LAKE}.{table} WHERE {is_small}")
        connection.commit()

    def unreadable(self, error: BaseException) -> str | None:
        """Return the problem line for a lake that cannot be read; None if no collector has opened it yet."""
        if "does not exist" in str(error):
            return None
        return (
            f"{self.title} cannot be opened ({short_error(error)}): only the journals of this machine are shown, "
            "without the records that are in the lake alone"
        )

    def damaged(self, error: BaseException) -> TidegaugeError:
        """Return the error for files of the lake that cannot be read."""
        return TidegaugeError(f"the shared store cannot read its files ({short_error(error)}): try again")

    def clocks_behind_ns(self) -> dict[str, int]:
        """Return host -> ns that its CLOCK_MONOTONIC is behind the run's own host."""
        offsets_ns = {host: _wall_offset_ns(anchor) for host, anchor in self.run.anchors.items()}
        own_offset_ns = offsets_ns[self.run.manifest["host"]]
        return {host: offset_ns - own_offset_ns for host, offset_ns in offsets_ns.items()}

    def now_ns(self) -> int | None:
        """Return CLOCK_MONOTONIC on the run's host now; while the run goes on elsewhere, by the wall clock."""
        manifest, now_ns = self.run.manifest, super().now_ns()
        if now_ns is None and manifest["end_time_ns"] is None:
            return time.time_ns() - _wall_offset_ns(self.run.anchors[manifest["host"]])
        return now_ns


def _is_race(error: duckdb.Error) -> bool:
    """Return True if another node created the same thing at the same time."""
    text = str(error).lower()
    return any(word in text for word in ("already exists", "duplicate key", "conflict", "concurrent"))


def _wall_offset_ns(anchor: Mapping[str, Any]) -> int:
    return int(anchor["wall_ns"]) - int(anchor["time_ns"])
