"""DuckDB instances with the extensions that lakes need, and the text of SQL literals and errors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from collector.errors import TidegaugeError

_EXTENSIONS = ("ducklake", "sqlite_scanner")
#: Errors of a damaged lake: DuckDB's message, too, may hold bytes of it that are no UTF-8.
ERRORS = (duckdb.Error, UnicodeDecodeError)
#: Function that returns the rows of an SQL query.
Ask = Callable[[str], list[tuple[Any, ...]]]
#: pid -> DuckDB instances that are not in use. A new instance takes some 20 ms, so instances are reused. None is
#: shared: DuckLake loses catalogs when threads attach at once. The pid is the key because the threads of an
#: instance do not survive a fork.
_idle: defaultdict[int, list[Instance]] = defaultdict(list)
_idle_lock = threading.Lock()
#: Number of lake versions that an instance reads before it is replaced. It holds 0.2 MB for each (DuckLake's data
#: about all columns).
_MOST_VERSIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address of a lake, for DuckLake's ATTACH.

    Attributes:
        catalog: kind and address of the database that holds the catalog.
        data: folder of the Parquet files, with a slash at its end.
        options: options of ATTACH, in SQL.
        extensions: needed extensions besides DuckLake and SQLite.
        prepare: SQL statements to run first, such as those that register credentials.
    """

    catalog: str
    data: str
    options: str
    extensions: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Instance:
    """A DuckDB instance with one user at a time.

    Attributes:
        lake: key of the lake that stays attached to it, if one does.
        version: version of that lake when it was last read.
        versions_count: number of versions read.
    """

    connection: duckdb.DuckDBPyConnection
    lake: Hashable = None
    version: Hashable = None
    versions_count: int = 0

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open another connection to the instance."""
        with self.connection.cursor() as connection:
            connection.execute("SET enable_progress_bar = false")  # it would be drawn into what a command prints
            yield connection


@contextlib.contextmanager
def open_connection(*, threads: int | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection to a DuckDB instance in memory, with the extensions that a lake needs.

    Raises:
        TidegaugeError: an extension cannot be loaded.
    """
    with borrow_instance(threads=threads) as instance, instance.cursor() as connection:
        yield connection


@contextlib.contextmanager
def borrow_instance(*, threads: int | None = None, lake: Hashable = None) -> Iterator[Instance]:
    """Take a DuckDB instance that is not in use, if possible one with this lake attached.

    An instance is not reused after an error.

    Raises:
        TidegaugeError: an extension cannot be loaded.
    """
    idle = _idle[os.getpid()]
    with _idle_lock:
        instance = next((candidate for candidate in idle if candidate.lake == lake), idle[-1] if idle else None)
        if instance is not None:
            idle.remove(instance)
    if instance is None:
        instance = Instance(_new_instance(threads))
    else:
        instance.connection.execute("RESET threads" if threads is None else f"SET threads = {threads}")
    yield instance
    if instance.versions_count < _MOST_VERSIONS:
        with _idle_lock:
            idle.append(instance)


def ask_over(connection: duckdb.DuckDBPyConnection) -> Ask:
    """Return a function that runs SQL over the connection each time."""
    return lambda sql: connection.execute(sql).fetchall()


def short_error(error: BaseException) -> str:
    """Return an error's first line, short enough for a message; for a database that is away, its own words."""
    if "Secret Validation Failure" in str(error):
        return "no credentials of the S3 service were found where the AWS tools look for them"
    text = re.sub(r'^.*Unable to connect to Postgres at ".*": ', "", str(error), flags=re.DOTALL)
    return text.splitlines()[0][:300] if text else type(error).__name__


def quote(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def parquet_rows(files: Sequence[str]) -> str:
    """Return SQL for the rows of Parquet files; some files may lack columns."""
    return f"FROM read_parquet([{', '.join(map(quote, files))}], union_by_name = true)"


def _new_instance(threads: int | None) -> duckdb.DuckDBPyConnection:
    config: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": os.path.join(tempfile.gettempdir(), f"tidegauge-{os.getpid()}"),
        "autoinstall_known_extensions": False,
        # Packages installed by pip are trusted like DuckDB itself. To check two signatures takes 0.4 s of CPU.
        "allow_unsigned_extensions": all(_packaged(name) for name in _EXTENSIONS),
    }
    if threads is not None:
        config["threads"] = threads
    instance = duckdb.connect(":memory:", config=config)
    instance.execute("SET enable_progress_bar = false")  # loading may take long enough for one
    for name in _EXTENSIONS:
        load_extension(instance, name)
    instance.execute("SET allow_unsigned_extensions = false")
    return instance


def prepare(connection: duckdb.DuckDBPyConnection, place: Place) -> None:
    """Load the extensions that a place needs, and run the statements that register its credentials.

    Raises:
        duckdb.Error: a statement fails.
        TidegaugeError: an extension cannot be loaded.
    """
    for name in place.extensions:
        load_extension(connection, name)
    for statement in place.prepare:
        connection.execute(statement)


def load_extension(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Load an extension from the pip package of the same version, else from DuckDB's own places.

    Raises:
        TidegaugeError: it cannot be loaded.
    """
    path = _packaged(name)
    try:
        if path is None:
            connection.execute(f"INSTALL {name}")
        connection.execute(f"LOAD {quote(str(path) if path else name)}")
    except duckdb.Error as error:
        raise TidegaugeError(
            f"DuckDB {duckdb.__version__} cannot load its extension {name} ({short_error(error)}): "
            f"pip install duckdb-extension-{name.replace('_', '-')}=={duckdb.__version__}"
        ) from None


def _packaged(name: str) -> Path | None:
    """Return the file of an extension in its pip package; None without a package of DuckDB's version."""
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension" for folder in folders]
    return next((file for file in files if file.exists()), None)
