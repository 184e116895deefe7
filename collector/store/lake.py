"""The lake: DuckLake tables derived from the streams, on a SQLite catalog beside Parquet files.

The catalog is in WAL mode, so commits and readers do not wait for each other: a commit only adds
files, and a reader's snapshot leaves out what came later. Maintenance replaces files, so it needs the
lake for itself, and so does the deletion of journals: readers hold a shared lock, these an exclusive one.
Inlining of small inserts is off: its rows live in the catalog itself, where a flush takes them from
under a reader. `journal_offset` only grows: the row with the greatest `end_bytes` of a path is valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from collector.errors import TidegaugeError
from collector.store import shared, tiles
from collector.store.engine import ERRORS, Ask, Instance, Place, borrowed, one_line, prepare, quoted
from collector.store.runs import Run
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
    **tiles.TABLES,
}

TARGET_BYTES = 16_000_000
#: Files below the target are merged, so each row is rewritten a few times, not at every maintenance.
_OPTIONS = {
    "data_inlining_row_limit": "0",
    "parquet_compression": "zstd",
    "parquet_version": "2",
    "target_file_size": f"{TARGET_BYTES // 10**6}MB",
}


#: How long maintenance waits for readers, each of which looks for a moment.
_PATIENCE_SECONDS = 1.0
#: A file, not a directory: NFS locks only what is open for writing exclusively.
_READERS_LOCK = "readers.lock"
#: Between attempts to open a lake of the shared store that others are making too.
_OPENING_PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class Progress:
    """What the attached lake holds of the journals.

    Attributes:
        offsets: file name -> bytes that are in the lake.
        damaged: event log -> lines that were skipped in it.
        lost: writer -> records that it had lost when it opened its last segment.

    """

    offsets: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def note_loss(self, writer: str, count: int) -> None:
        """Keep the greatest count of a writer: each count is a total so far."""
        self.lost[writer] = max(self.lost.get(writer, 0), count)

    @property
    def lost_count(self) -> int:
        """Records that writers could not write."""
        return sum(self.lost.values())


def place_of(run: Run) -> Place:
    """Where the lake of a run is: in its own directory, or in the shared store.

    Raises:
        TidegaugeError: it is in the shared store, and nothing says where that is.

    """
    if run.is_shared:
        return shared.place(run.run_id)
    return _embedded(run.catalog_path, run)


def exists(run: Run) -> bool:
    """Whether the run has a lake; of one in the shared store only the store knows."""
    return run.is_shared or run.catalog_path.exists()


def title(run: Run) -> str:
    """What to call the run's lake in a message."""
    return "the shared store" if run.is_shared else str(run.catalog_path)


@contextlib.contextmanager
def attached(
    place: Place,
    *,
    read_only: bool,
    threads: int | None = None,
    kept: Hashable = None,
    version: Hashable = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with a lake as `lake`; a transaction that is open at the end is rolled back.

    The data path is the run's own, wherever the run was when the lake was made. To attach it and read its catalog
    takes 50 ms: what is `kept` stays attached, whatever its version, for who names it next. No file is open then.

    Raises:
        duckdb.Error: it cannot be opened.
        TidegaugeError: DuckDB's extensions are missing.

    """
    with borrowed(threads=threads, lake=kept) as instance, instance.cursor() as connection:
        if kept is None or (instance.lake, instance.version) != (kept, version):
            instance.versions_count += 1
        if kept is None or instance.lake != kept:
            _attach(instance, connection, place, read_only=read_only)
        instance.lake, instance.version = kept, version
        try:
            yield connection
        finally:
            with contextlib.suppress(duckdb.Error):  # none is open, or the database has gone away
                connection.rollback()
            if kept is None:
                connection.execute(f"DETACH {LAKE}")


def _attach(instance: Instance, connection: duckdb.DuckDBPyConnection, place: Place, *, read_only: bool) -> None:
    if instance.lake is not None:
        connection.execute(f"DETACH {LAKE}")
    # No file of a lake ever changes, so DuckDB keeps all that it reads of each, also of those that are merged away.
    # What is on this machine the kernel keeps; over a network only a reader wants the same again.
    connection.execute(f"SET GLOBAL enable_external_file_cache = {read_only and '://' in place.data}")
    prepare(connection, place)
    connection.execute(
        f"ATTACH {quoted(f'ducklake:{place.catalog}')} AS {LAKE} (DATA_PATH {quoted(place.data)}, "
        f"OVERRIDE_DATA_PATH true, {place.options}{', READ_ONLY' if read_only else ''})"
    )


@contextlib.contextmanager
def writable(run: Run) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the run's lake as `lake`, to write; the lake is made if there is none.

    Only the holder of the run's lock may use this; in the shared store there is one on each node.

    Raises:
        TidegaugeError: it is damaged or of a newer version, or cannot be reached or written.

    """
    with contextlib.ExitStack() as stack:
        try:
            if not exists(run):
                _create(run)
            connection = stack.enter_context(_open_shared(run) if run.is_shared else _open_embedded(run))
        except (*ERRORS, OSError) as error:
            remedy = f"make room, or move it and {run.data_dir} away and collect again what the journals still hold"
            if "version mismatch" in str(error):
                remedy = "use the Tidegauge that wrote it, or a newer one"
            elif run.is_shared:
                remedy = f"the records wait in {run.journal_dir} until it can"
            raise TidegaugeError(f"{title(run)} cannot be opened ({one_line(error)}): {remedy}") from None
        yield connection


@contextlib.contextmanager
def _open_embedded(run: Run) -> Iterator[duckdb.DuckDBPyConnection]:
    with attached(place_of(run), read_only=False, threads=1) as connection:
        _add_missing(connection)
        yield connection


@contextlib.contextmanager
def _open_shared(run: Run) -> Iterator[duckdb.DuckDBPyConnection]:
    """The same where the collectors of other nodes may be about to make the lake too."""
    with contextlib.ExitStack() as stack:
        for pause in (*_OPENING_PAUSES_SECONDS, None):
            try:
                connection = stack.enter_context(attached(place_of(run), read_only=False, threads=1))
                if not _columns(connection):
                    _set_options(connection)
                connection.begin()
                _add_missing(connection)
                connection.commit()
                break
            except duckdb.Error as error:
                stack.close()
                if pause is None or not _is_race(error):
                    raise
                time.sleep(pause * random.uniform(0.5, 1.5))
        yield connection


def _is_race(error: duckdb.Error) -> bool:
    """Whether somebody else made the same thing at the same time."""
    text = str(error).lower()
    return any(word in text for word in ("already exists", "duplicate key", "conflict", "concurrent"))


@contextlib.contextmanager
def files_locked(run: Run, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock on a run's files: shared to look, exclusive to replace or delete some.

    Who looks goes without where there can be no lock: nobody can take it exclusively there.

    Raises:
        BlockingIOError: readers still look after `_PATIENCE_SECONDS` (exclusive only: looking waits).
        OSError: there can be no lock here (exclusive only).

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
    """What the attached lake holds of the journals, in the current transaction.

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
    """Files made within are this user's alone (0600), directories too (0700)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _create(run: Run) -> None:
    """Make the lake under another name, then rename: nobody ever meets half a catalog."""
    scratch = run.path / "lake.new"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    run.data_dir.mkdir(mode=0o700, exist_ok=True)
    catalog = scratch / run.catalog_path.name
    try:
        with attached(_embedded(catalog, run), read_only=False, threads=1) as connection:
            connection.begin()
            _add_missing(connection)
            connection.commit()
            _set_options(connection)
        os.replace(catalog, run.catalog_path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _embedded(catalog: Path, run: Run) -> Place:
    return Place(
        catalog=f"sqlite:{catalog}",
        data=f"{run.data_dir}/",
        options="META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT 1000",
    )


def _set_options(connection: duckdb.DuckDBPyConnection) -> None:
    for option, value in _OPTIONS.items():
        connection.execute(f"CALL {LAKE}.set_option({quoted(option)}, {quoted(value)})")


def _create_table(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in TABLES[table])
    connection.execute(f"CREATE TABLE {LAKE}.{table} ({columns})")


def _add_missing(connection: duckdb.DuckDBPyConnection) -> None:
    """Bring a lake, of an older Tidegauge say, up to today's tables and columns."""
    have = _columns(connection)
    tables = {table for table, _ in have}
    for table, columns in TABLES.items():
        if table not in tables:
            _create_table(connection, table)
            continue
        for name, kind in columns:
            if (table, name) not in have:
                connection.execute(f'ALTER TABLE {LAKE}.{table} ADD COLUMN "{name}" {kind}')


def _columns(connection: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    return connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = ?", [LAKE]
    ).fetchall()


def _lock_exclusively(descriptor: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PATIENCE_SECONDS / 20)
