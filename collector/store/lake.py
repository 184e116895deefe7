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
import importlib.util
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from collector.errors import TidegaugeError
from collector.store.runs import Run
from training_harness.records import IDENTITY, NAME, STREAMS

#: The name under which a lake is attached.
LAKE = "lake"
_EXTENSIONS = ("ducklake", "sqlite_scanner")
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
}

#: Files below the target are merged, so each row is rewritten a few times, not at every maintenance.
_OPTIONS = {
    "data_inlining_row_limit": "0",
    "parquet_compression": "zstd",
    "parquet_version": "2",
    "target_file_size": "16MB",
}


#: How long maintenance waits for readers, each of which looks for a moment.
_PATIENCE_SECONDS = 1.0
#: A file, not a directory: NFS locks only what is open for writing exclusively.
_READERS_LOCK = "readers.lock"

#: (pid, threads) -> DuckDB instances that nobody uses now. Loading the extensions takes 0.2 s, so
#: instances are kept; none is shared, since DuckLake loses catalogs when threads attach at once. The
#: pid is in the key because the threads of an instance do not survive a fork.
_idle: defaultdict[tuple[int, int | None], list[duckdb.DuckDBPyConnection]] = defaultdict(list)
_idle_lock = threading.Lock()


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


@contextlib.contextmanager
def connected(*, threads: int | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to a DuckDB instance in memory, with the extensions that a lake needs.

    Raises:
        TidegaugeError: an extension cannot be loaded.

    """
    idle = _idle[os.getpid(), threads]
    with _idle_lock:
        instance = idle.pop() if idle else None
    instance = instance or _new_instance(threads)
    with instance.cursor() as connection:
        yield connection
    with _idle_lock:
        idle.append(instance)  # not after an error: then the next user gets a fresh one


@contextlib.contextmanager
def attached(
    catalog: Path, data: Path, *, read_only: bool, threads: int | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with a lake as `lake`; a transaction that is open at the end is rolled back.

    The data path is the run's own, wherever the run was when the lake was made.

    Raises:
        duckdb.Error: it cannot be opened.
        TidegaugeError: DuckDB's extensions are missing.

    """
    with connected(threads=threads) as connection:
        connection.execute(
            f"ATTACH {quoted(f'ducklake:sqlite:{catalog}')} AS {LAKE} (DATA_PATH {quoted(f'{data}/')}, "
            "OVERRIDE_DATA_PATH true, META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT 1000"
            f"{', READ_ONLY' if read_only else ''})"
        )
        try:
            yield connection
        finally:
            with contextlib.suppress(duckdb.TransactionException):
                connection.rollback()
            connection.execute(f"DETACH {LAKE}")


@contextlib.contextmanager
def writable(run: Run) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the run's lake as `lake`, to write; the lake is made if there is none.

    Only the holder of the run's lock may use this.

    Raises:
        TidegaugeError: it is damaged or of a newer version, or the directory cannot be written.

    """
    with contextlib.ExitStack() as stack:
        try:
            if not run.catalog_path.exists():
                _create(run)
            lake = attached(run.catalog_path, run.data_dir, read_only=False, threads=1)
            connection = stack.enter_context(lake)
            _add_missing(connection)
        except (duckdb.Error, OSError) as error:
            raise TidegaugeError(
                f"{run.catalog_path} cannot be opened ({one_line(error)}): make room, or move it and "
                f"{run.data_dir} away and collect again what the journals still hold"
            ) from None
        yield connection


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
            descriptor = os.open(run.path / _READERS_LOCK, access | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            if exclusive:
                _lock_exclusively(descriptor)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            if exclusive:
                raise
        yield


def read_progress(connection: duckdb.DuckDBPyConnection) -> Progress:
    """What the attached lake holds of the journals, in the current transaction.

    Raises:
        duckdb.Error: the lake cannot be read.

    """
    progress = Progress()
    offsets = connection.execute(
        "SELECT path, max(end_bytes), max(writer), max(lost_count), max(damaged_count) "
        f"FROM {LAKE}.journal_offset GROUP BY path"
    )
    for path, end_bytes, writer, lost_count, damaged_count in offsets.fetchall():
        progress.offsets[path] = end_bytes
        if writer is not None:
            progress.note_loss(writer, lost_count)
        if damaged_count:
            progress.damaged[path] = damaged_count
    return progress


def one_line(error: BaseException) -> str:
    """The first line of an error, short enough for a message."""
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def quoted(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


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
        with attached(catalog, run.data_dir, read_only=False, threads=1) as connection:
            connection.begin()
            for table in TABLES:
                _create_table(connection, table)
            connection.commit()
            for option, value in _OPTIONS.items():
                connection.execute(f"CALL {LAKE}.set_option({quoted(option)}, {quoted(value)})")
        os.replace(catalog, run.catalog_path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _create_table(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in TABLES[table])
    connection.execute(f"CREATE TABLE {LAKE}.{table} ({columns})")


def _add_missing(connection: duckdb.DuckDBPyConnection) -> None:
    """Bring a lake that an older Tidegauge made up to today's tables and columns."""
    have = connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = ?", [LAKE]
    ).fetchall()
    tables = {table for table, _ in have}
    for table, columns in TABLES.items():
        if table not in tables:
            _create_table(connection, table)
            continue
        for name, kind in columns:
            if (table, name) not in have:
                connection.execute(f'ALTER TABLE {LAKE}.{table} ADD COLUMN "{name}" {kind}')


def _lock_exclusively(descriptor: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PATIENCE_SECONDS / 20)


def _new_instance(threads: int | None) -> duckdb.DuckDBPyConnection:
    config: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": os.path.join(tempfile.gettempdir(), f"tidegauge-{os.getpid()}"),
        "autoinstall_known_extensions": False,
    }
    if threads is not None:
        config["threads"] = threads
    instance = duckdb.connect(":memory:", config=config)
    for name in _EXTENSIONS:
        _load_extension(instance, name)
    return instance


def _load_extension(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """From the pip package of the same version, else from DuckDB's own places."""
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension" for folder in folders]
    found = next((file for file in files if file.exists()), None)
    try:
        if found is None:
            connection.execute(f"INSTALL {name}")
        connection.execute(f"LOAD {quoted(str(found) if found else name)}")
    except duckdb.Error as error:
        raise TidegaugeError(
            f"DuckDB {duckdb.__version__} cannot load its extension {name} ({one_line(error)}): "
            f"pip install duckdb-extension-{name.replace('_', '-')}=={duckdb.__version__}"
        ) from None
