"""What a lake's catalog names is on the disk before the catalog is: a power cut finds no name without its file.

SQLite syncs the catalog at each commit. DuckDB leaves the Parquet files to the page cache, which outlives a
process, but not the machine. Journals are deleted after the commit of what they hold, so it outlives them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import duckdb


class DataFiles:
    """The data files of one lake, and which of them are on the disk for sure."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._synced: set[str] = set()

    @contextlib.contextmanager
    def transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Commit what is done within, once its files are on the disk; after an error the transaction stays open.

        Raises:
            duckdb.Error: it cannot be committed.
            OSError: the disk does not take the files.

        """
        connection.begin()
        yield
        self._sync()
        connection.commit()

    def _sync(self) -> None:
        """Bring the new files to the disk, and the directories that name them, up to the one of all runs."""
        found = {os.path.join(folder, name) for folder, _, names in os.walk(self._data_dir) for name in names}
        runs_dir = self._data_dir.parent.parent
        new = [Path(path).relative_to(runs_dir) for path in found - self._synced]
        folders = {folder for path in new for folder in path.parents}
        for each in (*new, *folders):
            try:
                descriptor = os.open(runs_dir / each, os.O_RDONLY | os.O_CLOEXEC)
            except PermissionError:  # a folder that may be passed, not read
                if each in new:
                    raise
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._synced = found
