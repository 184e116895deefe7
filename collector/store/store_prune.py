"""Deleting old runs of the shared store: the records of all nodes, for everyone.

A run is first renamed in the table of nodes, in one statement and only if all its parts are over, to what is no
run's name. Then its files go, its schema, and last its rows: what a kill leaves is deleted by the next prune.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from collector.errors import TidegaugeError
from collector.store import lake, shared
from collector.store.engine import one_line
from collector.store.prune import StoredRun
from collector.store.runs import PRUNED_PREFIX, Run, list_runs
from training_harness.layout import RUN_ID


def stored_runs(home: Path) -> list[StoredRun]:
    """All runs of the shared store that this home knows, the oldest first.

    Raises:
        TidegaugeError: the store cannot be reached, or the home not be read.

    """
    runs, parts, sizes_bytes = list_runs(home), shared.nodes(), shared.sizes_bytes()
    return [
        StoredRun(run=run, size_bytes=sizes_bytes.get(run.run_id, 0), needed=_needed(parts[run.run_id]))
        for run in reversed(runs)
        if run.is_shared and run.run_id in parts
    ]


def delete(home: Path, runs: Iterable[Run]) -> dict[Run, str]:
    """Delete runs from the shared store, and what a killed deletion has left there.

    Returns:
        The runs that stay after all, and why.

    Raises:
        TidegaugeError: the store cannot be reached, or something cannot be deleted.

    """
    _sweep(home)
    staying = {}
    for run in runs:
        shared.retire(run.run_id, f"{PRUNED_PREFIX}{run.run_id}")
        if left := shared.nodes(run.run_id).get(run.run_id):
            staying[run] = _needed(left) or "it has just begun again"
        elif run.is_mirror:
            shutil.rmtree(run.path)
    _sweep(home)
    return staying


def leftovers(_home: Path) -> list[str]:
    """Names in the store that were runs until a prune that was killed began to delete them."""
    names = (name for name in shared.nodes() if name.startswith(PRUNED_PREFIX))
    return sorted(name for name in names if RUN_ID.fullmatch(name.removeprefix(PRUNED_PREFIX)))


def _needed(parts: Sequence[Mapping[str, Any]]) -> str | None:
    hosts = sorted(str(part["host"]) for part in parts if part["end_time_ns"] is None)
    return f"its part on {', '.join(hosts)} has not ended" if hosts else None


def _sweep(home: Path) -> None:
    for name in leftovers(home):
        run_id = name.removeprefix(PRUNED_PREFIX)
        try:
            _empty(run_id)
        except (duckdb.Error, OSError) as error:
            raise TidegaugeError(
                f"run {run_id} of the shared store cannot be deleted ({one_line(error)}): prune again"
            ) from None
        shared.forget(run_id, name)


def _empty(run_id: str) -> None:
    """Delete the files of a run. A lake that is gone already is made anew, empty."""
    place = shared.place(run_id)
    with lake.attached(place, read_only=False, threads=1) as connection:
        tables = "SELECT table_name FROM duckdb_tables() WHERE database_name = ?"
        for (table,) in connection.execute(tables, [lake.LAKE]).fetchall():
            connection.execute(f"DROP TABLE {lake.LAKE}.{table}")
        for function, what in (
            ("ducklake_expire_snapshots", "older_than => TIMESTAMP '9999-01-01'"),
            ("ducklake_cleanup_old_files", "cleanup_all => true"),
            ("ducklake_delete_orphaned_files", "cleanup_all => true"),
        ):
            connection.execute(f"SELECT count(*) FROM {function}('{lake.LAKE}', {what})").fetchall()
    if place.data.startswith("/"):  # and what is left of its folders
        shutil.rmtree(place.data, ignore_errors=True)
