"""Maintain a lake: write rollups, merge small files, and delete files that no snapshot needs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import duckdb

from collector.store.cluster import mirror, postgres
from collector.store.duck import ERRORS, ask_over, short_error
from collector.store.lake import lake, parquet_files
from collector.store.lake.fsync import DataFiles
from collector.store.rollups import tables
from collector.store.runs.run import Run

#: Files stay this long for readers of other nodes, whose locks are not visible here.
_READERS_AT_MOST = "INTERVAL 30 MINUTES"
#: Files without a snapshot stay this long: they may belong to a commit under way.
_COMMITS_AT_MOST = "INTERVAL 1 DAY"
#: Age at which rows are rolled up; no row arrives later than this.
_SETTLED_NS = 60 * 10**9
#: New rollups are written when at least one part in 100 of the run lacks them: each time, they are merged with the
#: older ones.
_LACKING_PART = 100
#: Rows rolled up in one statement, about: a bound on memory.
_ROWS_AT_ONCE = 250_000


def tidy(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> tuple[str, ...]:
    """Write rollups, and merge and delete files of an attached lake; skip it silently while readers hold the lock.

    In the shared store, the first of the nodes that still take part in the run does it for all nodes.

    Returns:
        One line for each table that stays as it is, for example because of a damaged file.

    Raises:
        duckdb.Error: the lake cannot be read or written; it is as correct as before.
        OSError: the run's files cannot be locked.
        TidegaugeError: the shared store cannot be reached.

    """
    if not run.is_shared:
        return _tidy_embedded(run, connection, files)
    return _tidy_shared(run, connection) if mirror.is_first(run) else ()


def _tidy_embedded(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> tuple[str, ...]:
    problems: list[str] = []
    try:
        for name in tables.ROLLUPS:
            with _collect_problem(problems, connection, f"{name}{tables.TABLE_SUFFIX}"):
                _write_rollups(connection, files, name)
        # Readers wait for the lock, so it is released after each table.
        for table in lake.TABLES:
            lock, collect = lake.lock_files(run, exclusive=True), _collect_problem(problems, connection, table)
            with lock, collect, files.transaction(connection):
                _merge(connection, table)
        with lake.lock_files(run, exclusive=True):
            # The last snapshot always stays.
            _call(connection, "ducklake_expire_snapshots", "older_than => TIMESTAMP '9999-01-01'")
            _call(connection, "ducklake_cleanup_old_files", "cleanup_all => true")
            _call(connection, "ducklake_delete_orphaned_files", "cleanup_all => true")
    except BlockingIOError:
        pass  # the next time finds the same files
    return tuple(problems)


def _tidy_shared(run: Run, connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    data = lake.lake_place(run).data
    problems: list[str] = []
    for table in lake.TABLES:
        if problems:
            postgres.check_data()  # without the files, every table would wait in vain
        with _collect_problem(problems, connection, table):
            parquet_files.merge(connection, data, table)
    _call(connection, "ducklake_expire_snapshots", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_cleanup_old_files", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_delete_orphaned_files", f"older_than => now() - {_COMMITS_AT_MOST}")
    return tuple(problems)


@contextlib.contextmanager
def _collect_problem(problems: list[str], connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[None]:
    """Turn an error of one table into a problem line, so that the others go on; the catalog must still answer."""
    try:
        yield
    except ERRORS as error:
        with contextlib.suppress(duckdb.Error):  # none is open
            connection.rollback()
        _call(connection, "ducklake_table_info")
        problems.append(f"the lake's table {table} was not tidied up: {short_error(error)}")


def _write_rollups(connection: duckdb.DuckDBPyConnection, files: DataFiles, name: str) -> None:
    """Write the missing rollups; write all of them again if rows arrived later than their rollup."""
    rollup, table, ask = tables.ROLLUPS[name], f"{lake.LAKE}.{name}{tables.TABLE_SUFFIX}", ask_over(connection)
    whole = tables.Reach.merge(
        ask(tables.reach_sql(f"{lake.LAKE}.{stream}"))[0] for stream in rollup.stream_columns
    )
    if whole.rows_count <= tables.ROWS_WITHOUT_ROLLUPS or whole.first_ns is None or whole.last_ns is None:
        return
    stored = tables.find_rollups(ask, lake.LAKE, name)
    begin_ns = stored.until_ns if stored else whole.first_ns
    end_ns = (whole.last_ns - _SETTLED_NS) // rollup.width_ns * rollup.width_ns
    if end_ns - begin_ns < max(_SETTLED_NS, (whole.last_ns - whole.first_ns) // _LACKING_PART):
        return
    with files.transaction(connection):
        if stored is None:
            connection.execute(f"DELETE FROM {table}")
        rows = rollup.union_sql(lambda stream: f"{lake.LAKE}.{stream}")
        for from_ns, to_ns in _intervals(connection, rows, begin_ns, end_ns, rollup.width_ns):
            interval = f"(FROM {rows} WHERE time_ns >= {from_ns} AND time_ns < {to_ns})"
            connection.execute(f"INSERT INTO {table} BY NAME {rollup.rollup_sql(interval)}")


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


def _merge(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    connection.execute(f"CALL ducklake_merge_adjacent_files('{lake.LAKE}', '{table}')").fetchall()


def _call(connection: duckdb.DuckDBPyConnection, function: str, *arguments: str) -> None:
    # Counted, not fetched: fetching a TIMESTAMPTZ needs pytz.
    words = ", ".join((f"'{lake.LAKE}'", *arguments))
    connection.execute(f"SELECT count(*) FROM {function}({words})").fetchall()
