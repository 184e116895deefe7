"""The lake: DuckLake tables derived from the streams, with a SQLite catalog and Parquet files.

The catalog is in WAL mode, so commits and readers do not wait for each other: a commit only adds
files, and a reader's snapshot does not see later ones. Maintenance replaces files and ingest deletes
journals. Both need the lake for themselves, so they hold an exclusive lock, and readers a shared one.
Inlining of small inserts is off: its rows live in the catalog itself, and a flush would remove them
during a read session. `journal_offset` only grows: the row with the greatest `end_bytes` of a path is valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import duckdb

from collector.store.duck import ERRORS, Ask, Instance, Place, borrow_instance, prepare, quote, short_error
from collector.store.rollups import tables
from collector.store.runs.run import Run
from training_harness.records import IDENTITY, NAME, STREAMS

#: The name under which a lake is attached.
LAKE = "lake"
_SQL_TYPES = {
    "q": "BIGINT",
    "i": "INTEGER",
    "h": "SMALLINT",
    "b": "TINYINT",
    "d": "DOUBLE",
    "s": "VARCHAR",
    NAME: "VARCHAR",
}

_IDENTITY_COLUMNS = tuple((column.name, _SQL_TYPES[column.code]) for column in IDENTITY)
#: table -> ((column, SQL type), ...).
TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    **{
        name: tuple((column.name, _SQL_TYPES[column.code]) for column in stream.columns) + _IDENTITY_COLUMNS
        for name, stream in STREAMS.items()
    },
    "event": (("time_ns", "BIGINT"), ("kind", "VARCHAR"), *_IDENTITY_COLUMNS, ("body", "VARCHAR")),
    "journal_offset": (
        ("path", "VARCHAR"),
        ("end_bytes", "BIGINT"),
        ("writer", "VARCHAR"),
        ("lost_count", "BIGINT"),
        ("damaged_count", "BIGINT"),
    ),
    **tables.TABLES,
}

TARGET_BYTES = 16_000_000
#: Only files below the target size are merged, so a row is rewritten a few times, not at every maintenance.
_OPTIONS = {
    "data_inlining_row_limit": "0",
    "parquet_compression": "zstd",
    "parquet_version": "2",
    "target_file_size": f"{TARGET_BYTES // 10**6}MB",
}
#: Seconds that maintenance waits for readers, each of which reads for a moment.
_LOCK_TIMEOUT_SECONDS = 1.0
#: A file, not a directory: NFS grants an exclusive lock only on a file that is open for writing.
_READERS_LOCK = "readers.lock"


@dataclass(slots=True)
class Progress:
    """The part of the journals that is in the attached lake.

    Attributes:
        offsets: file name -> bytes that are in the lake.
        damaged: event log -> number of its lines that were skipped.
        lost: writer -> number of records that it had lost when it opened its last segment.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def note_loss(self, writer: str, count: int) -> None:
        """Keep a writer's greatest count: each count is a total so far."""
        self.lost[writer] = max(self.lost.get(writer, 0), count)

    @property
    def lost_count(self) -> int:
        """Number of records that writers could not write."""
        return sum(self.lost.values())


@contextlib.contextmanager
def attach(
    place: Place,
    *,
    read_only: bool,
    threads: int | None = None,
    cache_key: Hashable = None,
    version: Hashable = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection with a lake attached as `lake`; a transaction that is open at the end is rolled back.

    The data path is the run's own, wherever the run was when the lake was created. Attaching a lake and reading its
    catalog takes 50 ms, so a lake with a `cache_key` stays attached, whatever its version, for the next call with
    that key. No file is open meanwhile.

    Raises:
        duckdb.Error: it cannot be opened.
        TidegaugeError: DuckDB's extensions are missing.
    """
    with borrow_instance(threads=threads, lake=cache_key) as instance, instance.cursor() as connection:
        if cache_key is None or (instance.lake, instance.version) != (cache_key, version):
            instance.versions_count += 1
        if cache_key is None or instance.lake != cache_key:
            _attach(instance, connection, place, read_only=read_only)
        instance.lake, instance.version = cache_key, version
        try:
            yield connection
        finally:
            with contextlib.suppress(duckdb.Error):  # none is open, or the database has gone away
                connection.rollback()
            if cache_key is None:
                connection.execute(f"DETACH {LAKE}")


def _attach(instance: Instance, connection: duckdb.DuckDBPyConnection, place: Place, *, read_only: bool) -> None:
    if instance.lake is not None:
        connection.execute(f"DETACH {LAKE}")
    # Files of a lake never change, so DuckDB caches all that it reads, even of files that are merged away later.
    # The kernel caches files of this machine. Over a network, only a reader reads the same file again.
    connection.execute(f"SET GLOBAL enable_external_file_cache = {read_only and '://' in place.data}")
    prepare(connection, place)
    connection.execute(
        f"ATTACH {quote(f'ducklake:{place.catalog}')} AS {LAKE} (DATA_PATH {quote(place.data)}, "
        f"OVERRIDE_DATA_PATH true, {place.options}{', READ_ONLY' if read_only else ''})"
    )


@contextlib.contextmanager
def lock_files(run: Run, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock on a run's files: shared to read, exclusive to replace or delete some.

    Where the file system has no locks, a reader goes on without one: no process can take it exclusively there.

    Raises:
        BlockingIOError: readers still read after `_LOCK_TIMEOUT_SECONDS` (exclusive only; a shared lock waits).
        OSError: the lock cannot be taken here (exclusive only).
    """
    access = os.O_RDWR if exclusive else os.O_RDONLY
    with contextlib.ExitStack() as stack:
        try:
            plain = os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(run.path / _READERS_LOCK, access | plain, 0o600)
            stack.callback(os.close, descriptor)
            if exclusive:
                _lock_exclusively(descriptor)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            if exclusive:
                raise
        yield


def read_progress(ask: Ask) -> Progress:
    """Return the part of the journals that is in the attached lake, in the current transaction.

    Raises:
        duckdb.Error: the lake cannot be read.
    """
    progress = Progress()
    offsets = ask(
        "SELECT path, max(end_bytes), max(writer), max(lost_count), max(damaged_count) "
        f"FROM {LAKE}.journal_offset GROUP BY path"
    )
    for path, end_bytes, writer, lost_count, damaged_count in offsets:
        progress.offsets[path] = end_bytes
        if writer is not None:
            progress.note_loss(writer, lost_count)
        if damaged_count:
            progress.damaged[path] = damaged_count
    return progress


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make new files private to this user (0600), directories too (0700)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def set_options(connection: duckdb.DuckDBPyConnection) -> None:
    """Set the options of a new lake."""
    for option, value in _OPTIONS.items():
        connection.execute(f"CALL {LAKE}.set_option({quote(option)}, {quote(value)})")


def add_missing(connection: duckdb.DuckDBPyConnection) -> None:
    """Add the tables and columns that a new lake, or one of an older Tidegauge, lacks."""
    present = columns(connection)
    present_tables = {table for table, _ in present}
    for table, declared in TABLES.items():
        if table not in present_tables:
            names = ", ".join(f'"{name}" {kind}' for name, kind in declared)
            connection.execute(f"CREATE TABLE {LAKE}.{table} ({names})")
            continue
        for name, kind in declared:
            if (table, name) not in present:
                connection.execute(f'ALTER TABLE {LAKE}.{table} ADD COLUMN "{name}" {kind}')


def columns(connection: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    """Return (table, column) of all tables of the attached lake."""
    return connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = ?", [LAKE]
    ).fetchall()


def file_counts(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Return table -> number of its files in the attached lake; the catalog alone answers it."""
    return dict(connection.execute(f"SELECT table_name, file_count FROM ducklake_table_info('{LAKE}')").fetchall())


def delete_unneeded(
    connection: duckdb.DuckDBPyConnection,
    *,
    snapshots: str = "older_than => TIMESTAMP '9999-01-01'",
    files: str = "cleanup_all => true",
    orphans: str = "cleanup_all => true",
) -> None:
    """Expire snapshots, except the newest one, and delete files that no snapshot needs; by default all of them."""
    call(connection, "ducklake_expire_snapshots", snapshots)
    call(connection, "ducklake_cleanup_old_files", files)
    call(connection, "ducklake_delete_orphaned_files", orphans)


def call(connection: duckdb.DuckDBPyConnection, function: str, *arguments: str) -> None:
    """Call a function of DuckLake on the attached lake."""
    # Counted, not fetched: fetching a TIMESTAMPTZ needs pytz.
    words = ", ".join((f"'{LAKE}'", *arguments))
    connection.execute(f"SELECT count(*) FROM {function}({words})").fetchall()


@contextlib.contextmanager
def collect_problem(problems: list[str], connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[None]:
    """Turn an error of one table into a problem line, so that the others go on; the catalog must still answer."""
    try:
        yield
    except ERRORS as error:
        with contextlib.suppress(duckdb.Error):  # none is open
            connection.rollback()
        call(connection, "ducklake_table_info")
        problems.append(f"the lake's table {table} was not tidied up: {short_error(error)}")


def _lock_exclusively(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_TIMEOUT_SECONDS / 20)
