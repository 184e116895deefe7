"""The store of a run: where its lake is, and all that depends on that.

A run has a lake of its own, in its directory, or one in the shared store, which the collectors of all its nodes
write. Ingest, reader and maintenance ask the `Store`, and do not ask which of the two it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import duckdb
import pyarrow as pa

from collector.errors import TidegaugeError
from collector.store.duck import ERRORS, short_error
from collector.store.runs.run import Run, of_this_boot


class Store(ABC):
    """The store of one run.

    Attributes:
        title: name of the lake in messages.
        has_one_clock: True if all records are of one host. Then rollups can say up to which time they are complete.
        counted_rows: SQL condition for the rows in this node's totals.
    """

    title: str
    has_one_clock: bool
    counted_rows: str
    #: Remedy where the lake cannot be opened for writing.
    _remedy: str

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    @abstractmethod
    def exists(self) -> bool:
        """False if there is no lake; True if there is one, or if only opening it can show that."""

    @property
    @abstractmethod
    def data(self) -> str:
        """Path or address of the folder with the lake's files."""

    def take_part(self) -> None:  # noqa: B027 - a lake of the run's own has no other nodes
        """Register this node's part in the run, at its begin and at its end; raise a TidegaugeError if refused."""

    @contextmanager
    def open_writable(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a connection for writing, with the run's lake as `lake`; create the lake if there is none.

        Only the holder of the run's lock may use this; in the shared store each node has one holder.

        Raises:
            TidegaugeError: it is damaged or of a newer version, or cannot be reached or written.
        """
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(self._open())
            except (*ERRORS, OSError) as error:
                is_newer = "version mismatch" in str(error)
                remedy = "use the Tidegauge that wrote it, or a newer one" if is_newer else self._remedy
                raise TidegaugeError(f"{self.title} cannot be opened ({short_error(error)}): {remedy}") from None
            yield connection

    @abstractmethod
    def _open(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]: ...

    @abstractmethod
    def open_readable(self) -> AbstractContextManager[tuple[duckdb.DuckDBPyConnection, Hashable]]:
        """Open a connection for reading, with the lake as `lake`, or raise an error of DuckDB or the system.

        The second value stands for the lake in later sessions; None means that no answer can be kept.
        """

    @abstractmethod
    def commit(self, connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> None:
        """Add rows to tables in one transaction; after an error of DuckDB or the disk it may stay open."""

    @abstractmethod
    def maintain(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
        """Write rollups, merge small files, and delete those that no snapshot needs; readers go first.

        Return one line for each table that stays as it is, for example because of a damaged file. Whatever error
        this raises, the lake is as correct as before.
        """

    @abstractmethod
    def unreadable(self, error: BaseException) -> str | None:
        """Return the problem line for a lake that cannot be read; None if the error says that there is no lake."""

    @abstractmethod
    def damaged(self, error: BaseException) -> TidegaugeError:
        """Return the error for files of the lake that cannot be read."""

    def clocks_behind_ns(self) -> dict[str, int]:
        """Return host -> ns that its CLOCK_MONOTONIC is behind the run's own host; empty for a single host."""
        return {}

    def now_ns(self) -> int | None:
        """Return CLOCK_MONOTONIC on the run's host now; None if it cannot be known here."""
        return time.monotonic_ns() if of_this_boot(self.run) else None


def store_of(run: Run) -> Store:
    """Return the store of a run.

    Raises:
        TidegaugeError: it is the shared store, and what that needs is not installed.
    """
    # Each is imported where it is used: the shared store needs the packages of the `cluster` extra.
    if run.is_shared:
        from collector.store.lake.shared_store import SharedStore

        return SharedStore(run)
    from collector.store.lake.own_store import OwnStore

    return OwnStore(run)
