"""The upkeep of a lake: small files are merged, and those that no snapshot needs are deleted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import duckdb

from collector.store import added, lake, mirror, shared, tiles
from collector.store.durable import DataFiles
from collector.store.engine import ERRORS, asking, one_line
from collector.store.runs import Run

#: A reader of another node holds no lock that we could see: what it may still look at stays this long.
_READERS_AT_MOST = "INTERVAL 30 MINUTES"
#: A file of a commit under way belongs to no snapshot yet.
_COMMITS_AT_MOST = "INTERVAL 1 DAY"
#: Tiles are laid of what is so old: nothing comes so late.
_SETTLED_NS = 60 * 10**9
#: And whenever they lack this part of the run, no more often: each time they are merged with those before.
_LACKING = 100  # one in so many
#: About so many rows at once: a bound on memory.
_TILED_AT_ONCE = 250_000


def tidy(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> tuple[str, ...]:
    """Merge and delete files of an attached lake; without a word if readers look all the time.

    In the shared store the first of the nodes whose part goes on does it, for all nodes.

    Returns:
        One line for each table that stays as it is, since a file of it is damaged, say.

    Raises:
        duckdb.Error: the lake cannot be read or written; it is as right as before.
        OSError: there can be no lock on the run's files.
        TidegaugeError: the shared store cannot be reached.

    """
    if not run.is_shared:
        return _tidy_embedded(run, connection, files)
    return _tidy_shared(run, connection) if mirror.is_first(run) else ()


def _tidy_embedded(run: Run, connection: duckdb.DuckDBPyConnection, files: DataFiles) -> tuple[str, ...]:
    problems: list[str] = []
    try:
        for name in tiles.TILINGS:
            with _told(problems, connection, f"{name}{tiles.TILE}"):
                _lay_tiles(connection, files, name)
        # Readers wait meanwhile, so they are let in after each table.
        for table in lake.TABLES:
            locked, told = lake.files_locked(run, exclusive=True), _told(problems, connection, table)
            with locked, told, files.transaction(connection):
                _merge(connection, table)
        with lake.files_locked(run, exclusive=True):
            # The last snapshot always stays.
            _call(connection, "ducklake_expire_snapshots", "older_than => TIMESTAMP '9999-01-01'")
            _call(connection, "ducklake_cleanup_old_files", "cleanup_all => true")
            _call(connection, "ducklake_delete_orphaned_files", "cleanup_all => true")
    except BlockingIOError:
        pass  # the next time finds the same files
    return tuple(problems)


def _tidy_shared(run: Run, connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    data = lake.place_of(run).data
    problems: list[str] = []
    for table in lake.TABLES:
        if problems:
            shared.look_at_data()  # without its files, each table would be waited for in vain
        with _told(problems, connection, table):
            added.merge(connection, data, table)
    _call(connection, "ducklake_expire_snapshots", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_cleanup_old_files", f"older_than => now() - {_READERS_AT_MOST}")
    _call(connection, "ducklake_delete_orphaned_files", f"older_than => now() - {_COMMITS_AT_MOST}")
    return tuple(problems)


@contextlib.contextmanager
def _told(problems: list[str], connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[None]:
    """Let what ails one table be a problem of that table alone, as long as the catalog answers."""
    try:
        yield
    except ERRORS as error:
        with contextlib.suppress(duckdb.Error):  # none is open
            connection.rollback()
        _call(connection, "ducklake_table_info")
        problems.append(f"the lake's table {table} was not tidied up: {one_line(error)}")


def _lay_tiles(connection: duckdb.DuckDBPyConnection, files: DataFiles, name: str) -> None:
    """Lay the tiles that are missing; anew if rows have come that are older than what was laid."""
    tiling, table, ask = tiles.TILINGS[name], f"{lake.LAKE}.{name}{tiles.TILE}", asking(connection)
    whole = tiles.Reach.of(ask(tiles.reach(f"{lake.LAKE}.{stream}"))[0] for stream in tiling.parts)
    if whole.rows_count <= tiles.TILED_BEYOND or whole.first_ns is None or whole.last_ns is None:
        return
    laid = tiles.find_laid(ask, lake.LAKE, name)
    begin_ns = laid.until_ns if laid else whole.first_ns
    end_ns = (whole.last_ns - _SETTLED_NS) // tiling.width_ns * tiling.width_ns
    if end_ns - begin_ns < max(_SETTLED_NS, (whole.last_ns - whole.first_ns) // _LACKING):
        return
    with files.transaction(connection):
        if laid is None:
            connection.execute(f"DELETE FROM {table}")
        rows = tiling.gathered(lambda stream: f"{lake.LAKE}.{stream}")
        for from_ns, to_ns in _pieces(connection, rows, begin_ns, end_ns, tiling.width_ns):
            piece = f"(FROM {rows} WHERE time_ns >= {from_ns} AND time_ns < {to_ns})"
            connection.execute(f"INSERT INTO {table} BY NAME {tiling.laid(piece)}")


def _pieces(
    connection: duckdb.DuckDBPyConnection, rows: str, begin_ns: int, end_ns: int, width_ns: int
) -> list[tuple[int, int]]:
    """Stretches of whole tiles that have so many rows as can be laid at once, or are one tile."""
    counted = connection.execute(
        f"SELECT time_ns // {width_ns} * {width_ns} AS tile_ns, count(*) FROM {rows} "
        f"WHERE time_ns >= {begin_ns} AND time_ns < {end_ns} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    cuts, held = [], _TILED_AT_ONCE
    for tile_ns, count in counted:
        if held + count > _TILED_AT_ONCE:
            cuts.append(tile_ns)
            held = 0
        held += count
    return list(itertools.pairwise([*cuts, end_ns]))


def _merge(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    connection.execute(f"CALL ducklake_merge_adjacent_files('{lake.LAKE}', '{table}')").fetchall()


def _call(connection: duckdb.DuckDBPyConnection, function: str, *arguments: str) -> None:
    # Counted, not fetched: fetching a TIMESTAMPTZ needs pytz.
    words = ", ".join((f"'{lake.LAKE}'", *arguments))
    connection.execute(f"SELECT count(*) FROM {function}({words})").fetchall()
