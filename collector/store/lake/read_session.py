"""Read sessions: the lake of a run in one transaction, with answers kept from one session to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from collector.store.duck import parquet_rows
from collector.store.lake import lake

#: (snapshot of a lake, SQL) -> its answer; the last one used is at the end. Files of a lake never change, so SQL
#: that names them has one answer in all snapshots: its key has None for the snapshot.
_answers: dict[tuple[Hashable, str], Any] = {}
_MOST_ANSWERS = 256
T = TypeVar("T")


class ReadSession:
    """A lake in a transaction; answers to queries are kept until the lake has a new snapshot.

    Args:
        connection: a connection with the lake attached.
        cache_key: stands for the lake in later sessions; None keeps no answer.

    Attributes:
        connection: as above.
        version: equal for two sessions on one snapshot; None if no answer is kept.
        progress: the part of the journals that is in the snapshot.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, cache_key: Hashable) -> None:
        self.connection = connection
        self.version: Hashable = None
        self._cache_key = cache_key
        self._answers = {} if cache_key is None else _answers
        self.begin()

    def begin(self) -> None:
        """Begin a transaction on the newest snapshot."""
        self.connection.begin()
        if self._cache_key is not None:
            # A lake that was created again repeats the snapshot ids of the one before, at other times.
            snapshot = self.connection.execute(
                f"SELECT max(snapshot_id), max(epoch_us(snapshot_time)) FROM ducklake_snapshots('{lake.LAKE}')"
            ).fetchone()
            self.version = self._cache_key, snapshot
        self.progress = lake.read_progress(self.ask)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of SQL over the lake alone; raise duckdb.Error if it cannot be read."""
        return self._answer((self.version, sql), lambda: self.connection.execute(sql).fetchall())

    def table(self, sql: str) -> pa.Table:
        """Return the rows of SQL that reads nothing but files of the lake, by name."""
        return self._answer((None, sql), lambda: self.connection.execute(sql).to_arrow_table())

    def _answer(self, key: tuple[Hashable, str], find: Callable[[], T]) -> T:
        answer: T | None = self._answers.pop(key, None)  # sessions of other threads share the answers
        self._answers[key] = answer = find() if answer is None else answer
        for oldest in list(self._answers)[:-_MOST_ANSWERS]:
            self._answers.pop(oldest, None)
        return answer

    def whole_stream(self, stream: str) -> str:
        """Return SQL for all rows of a stream, read from its files in a third of DuckLake's time.

        DuckLake, in turn, skips files whose contents a condition excludes.
        """
        files = self.ask(f"SELECT data_file, delete_file FROM ducklake_list_files('{lake.LAKE}', '{stream}')")
        are_whole = files and not any(delete_file for _, delete_file in files)
        return parquet_rows([file for file, _ in files]) if are_whole else f"FROM {lake.LAKE}.{stream}"
