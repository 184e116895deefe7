"""DuckDB instances with the extensions that lakes need, and what SQL and its errors look like in text."""

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
#: What a damaged lake raises: also DuckDB's message may hold bytes of it that are no UTF-8.
ERRORS = (duckdb.Error, UnicodeDecodeError)
#: Gives the rows of an SQL query.
Ask = Callable[[str], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a lake is, as DuckLake's ATTACH wants it.

    Attributes:
        catalog: kind and address of the database that holds the catalog.
        data: the folder of the Parquet files, with a slash at its end.
        options: of ATTACH, in SQL.
        extensions: that it needs besides DuckLake and SQLite.
        prepare: SQL to run before, such as that which makes credentials known.

    """

    catalog: str
    data: str
    options: str
    extensions: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Instance:
    """A DuckDB instance that nobody else uses meanwhile.

    Attributes:
        connection: to it.
        lake: which one stays attached to it, if one does.
        version: of the lake, when it was last read.
        versions_count: how many were read.

    """

    connection: duckdb.DuckDBPyConnection
    lake: Hashable = None
    version: Hashable = None
    versions_count: int = 0

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of its own to the instance."""
        with self.connection.cursor() as connection:
            connection.execute("SET enable_progress_bar = false")  # it would be drawn into what a command prints
            yield connection


#: (pid, threads) -> DuckDB instances that nobody uses now. Loading the extensions takes 0.2 s, so
#: instances are kept; none is shared, since DuckLake loses catalogs when threads attach at once. The
#: pid is in the key because the threads of an instance do not survive a fork.
_idle: defaultdict[tuple[int, int | None], list[Instance]] = defaultdict(list)
_idle_lock = threading.Lock()
#: An instance reads so many: it keeps 0.2 MB of each, what DuckLake knows of all columns. A new one costs 0.3 s.
_MOST_VERSIONS = 10


@contextlib.contextmanager
def connected(*, threads: int | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to a DuckDB instance in memory, with the extensions that a lake needs.

    Raises:
        TidegaugeError: an extension cannot be loaded.

    """
    with borrowed(threads=threads) as instance, instance.cursor() as connection:
        yield connection


@contextlib.contextmanager
def borrowed(*, threads: int | None = None, lake: Hashable = None) -> Iterator[Instance]:
    """A DuckDB instance, that with this lake if there is one.

    Raises:
        TidegaugeError: an extension cannot be loaded.

    """
    idle = _idle[os.getpid(), threads]
    with _idle_lock:
        instance = next((each for each in idle if each.lake == lake), idle[-1] if idle else None)
        if instance is not None:
            idle.remove(instance)
    instance = instance or Instance(_new_instance(threads))
    yield instance
    if instance.versions_count < _MOST_VERSIONS:
        with _idle_lock:
            idle.append(instance)  # not after an error: then the next user gets a fresh one


def asking(connection: duckdb.DuckDBPyConnection) -> Ask:
    """Each time over the connection."""
    return lambda sql: connection.execute(sql).fetchall()


def one_line(error: BaseException) -> str:
    """The first line of an error, short enough for a message; of a database that is away, what it says itself."""
    if "Secret Validation Failure" in str(error):
        return "no credentials of the S3 service were found where the AWS tools look for them"
    text = re.sub(r'^.*Unable to connect to Postgres at ".*": ', "", str(error), flags=re.DOTALL)
    return text.splitlines()[0][:300] if text else type(error).__name__


def quoted(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def rows_of(files: Sequence[str]) -> str:
    """SQL: the rows of Parquet files, of which some may lack columns."""
    return f"FROM read_parquet([{', '.join(map(quoted, files))}], union_by_name = true)"


def _new_instance(threads: int | None) -> duckdb.DuckDBPyConnection:
    config: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": os.path.join(tempfile.gettempdir(), f"tidegauge-{os.getpid()}"),
        "autoinstall_known_extensions": False,
    }
    if threads is not None:
        config["threads"] = threads
    instance = duckdb.connect(":memory:", config=config)
    instance.execute("SET enable_progress_bar = false")  # loading may take long enough for one
    for name in _EXTENSIONS:
        load_extension(instance, name)
    return instance


def prepare(connection: duckdb.DuckDBPyConnection, place: Place) -> None:
    """Load the extensions that a place needs, and run what makes its credentials known.

    Raises:
        duckdb.Error: a statement fails.
        TidegaugeError: an extension cannot be had.

    """
    for name in place.extensions:
        load_extension(connection, name)
    for statement in place.prepare:
        connection.execute(statement)


def load_extension(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Load an extension from the pip package of the same version, else from DuckDB's own places.

    Raises:
        TidegaugeError: it cannot be had.

    """
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
