"""Sync Parquet files to the disk before the catalog names them, so that a power cut leaves no name without a file.

SQLite syncs the catalog at each commit. DuckDB leaves the Parquet files to the page cache, which survives the
death of a process, but not a power cut. Journals are deleted after their records are committed, so no record is
lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import duckdb


class DataFiles:
    """The data files of one lake, with those that are synced to the disk."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._synced: set[str] = set()

    @contextlib.contextmanager
    def transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Run a transaction whose files are synced before its commit; after an error it stays open.

        Raises:
            duckdb.Error: it cannot be committed.
            OSError: the disk does not take the files.

        """
        connection.begin()
        yield
        self._sync()
        connection.commit()

    def _sync(self) -> None:
        """Sync the new files and the directories that name them, up to the directory of all runs."""
        files = {os.path.join(folder, name) for folder, _, names in os.walk(self._data_dir) for name in names}
        runs_dir = self._data_dir.parent.parent
        new = [Path(path).relative_to(runs_dir) for path in files - self._synced]
        folders = {folder for path in new for folder in path.parents}
        for path in (*new, *folders):
            try:
                descriptor = os.open(runs_dir / path, os.O_RDONLY | os.O_CLOEXEC)
            except PermissionError:  # a folder with permission to pass, not to read
                if path in new:
                    raise
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._synced = files
