"""The upkeep of a lake: small files are merged, and those that no snapshot needs are deleted."""

from __future__ import annotations

import duckdb

from collector.store import added, lake, mirror
from collector.store.durable import DataFiles
from collector.store.runs import Run

#: A reader of another node holds no lock that we could see: what it may still look at stays this long.
_READERS_AT_MOST = "INTERVAL 30 MINUTES"
#: A file of a commit under way belongs to no snapshot yet.
_COMMITS_AT_MOST = "INTERVAL 1 DAY"


def tidy(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> None:
    """Merge and delete files of an attached lake; without a word if readers look all the time.

    In the shared store the first of the nodes whose part goes on does it, for all nodes.

    Raises:
        duckdb.Error: the lake cannot be read or written; it is as right as before.
        OSError: there can be no lock on the run's files.
        TidegaugeError: the shared store cannot be reached.

    """
    if not run.is_shared:
        _tidy_embedded(run, connection, files)
    elif mirror.is_first(run):
        _tidy_shared(run, connection)


def _tidy_embedded(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> None:
    try:
        # Readers wait meanwhile, so they are let in after each table.
        for table in lake.TABLES:
            with lake.files_locked(run, exclusive=True), files.transaction(connection):
                _merge(connection, table)
        with lake.files_locked(run, exclusive=True):
            # The last snapshot always stays.
            _call(connection, "ducklake_expire_snapshots", "older_than => TIMESTAMP '9999-01-01'")
            _call(connection, "ducklake_cleanup_old_files", "cleanup_all => true")
            _call(connection, "ducklake_delete_orphaned_files", "cleanup_all => true")
    except BlockingIOError:
        pass  # the next time finds the same files


def _tidy_shared(run: Run, connection: duckdb.DuckDBPyConnection) -> None:
    data = lake.place_of(run).data
    for table in lake.TABLES:
        added.merge(connection, data, table)
    _call(connection, "ducklake_expire_snapshots", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_cleanup_old_files", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_delete_orphaned_files", f"older_than => now() - {_COMMITS_AT_MOST}")


def _merge(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    connection.execute(f"CALL ducklake_merge_adjacent_files('{lake.LAKE}', '{table}')").fetchall()


def _call(connection: duckdb.DuckDBPyConnection, function: str, argument: str) -> None:
    # Counted, not fetched: fetching a TIMESTAMPTZ needs pytz.
    connection.execute(f"SELECT count(*) FROM {function}('{lake.LAKE}', {argument})").fetchall()
