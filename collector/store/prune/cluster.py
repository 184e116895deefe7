"""Delete old runs of the shared store: the records of all nodes, for everyone.

A run is first renamed in the table of nodes to a name that no run has, in one statement, and only if the parts of
all its nodes have ended. Then its files are deleted, its schema, and last its rows. After a kill, the next prune
deletes the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from collector.errors import TidegaugeError
from collector.store.catalogue import list_runs
from collector.store.cluster import postgres
from collector.store.duck import short_error
from collector.store.lake import lake
from collector.store.prune.home import StoredRun
from collector.store.runs.run import PRUNED_PREFIX, Run
from training_harness.layout import RUN_ID


def stored_runs(home: Path) -> list[StoredRun]:
    """Return all runs of the shared store that this home has a directory for, the oldest first.

    Raises:
        TidegaugeError: the store cannot be reached, or the home cannot be read.
    """
    runs, parts, sizes_bytes = list_runs(home), postgres.nodes(), postgres.sizes_bytes()
    return [
        StoredRun(
            run=run, size_bytes=sizes_bytes.get(run.run_id, 0), keep_reason=_keep_reason(run, parts[run.run_id])
        )
        for run in reversed(runs)
        if run.is_shared and run.run_id in parts  # a local run may have the same id
    ]


def delete(home: Path, runs: Iterable[Run]) -> dict[Run, str]:
    """Delete runs from the shared store, and the rest of killed deletions; return why some stay after all.

    Raises:
        TidegaugeError: the store cannot be reached, or something cannot be deleted.
    """
    _sweep(home)
    staying = {}
    for run in runs:
        postgres.retire(run.run_id, f"{PRUNED_PREFIX}{run.run_id}")
        if parts := postgres.nodes(run.run_id).get(run.run_id):
            staying[run] = _keep_reason(run, parts) or "it has just begun again"
        elif run.is_mirror:
            shutil.rmtree(run.path)
    _sweep(home)
    return staying


def leftovers(_home: Path) -> list[str]:
    """Return names in the store of runs whose deletion was killed."""
    names = (name for name in postgres.nodes() if name.startswith(PRUNED_PREFIX))
    return sorted(name for name in names if RUN_ID.fullmatch(name.removeprefix(PRUNED_PREFIX)))


def _keep_reason(run: Run, parts: Sequence[Mapping[str, Any]]) -> str | None:
    if run.annotation.is_pinned:
        return "it is pinned"
    hosts = sorted(str(part["host"]) for part in parts if part["end_time_ns"] is None)
    return f"its part on {', '.join(hosts)} has not ended" if hosts else None


def _sweep(home: Path) -> None:
    for name in leftovers(home):
        run_id = name.removeprefix(PRUNED_PREFIX)
        try:
            _empty(run_id)
        except (duckdb.Error, OSError) as error:
            raise TidegaugeError(
                f"run {run_id} of the shared store cannot be deleted ({short_error(error)}): prune again"
            ) from None
        postgres.forget(run_id, name)


def _empty(run_id: str) -> None:
    """Delete the files of a run. If its lake is gone already, this creates an empty one."""
    place = postgres.place(run_id)
    with lake.attach(place, read_only=False, threads=1) as connection:
        for table in {table for table, _ in lake.columns(connection)}:
            connection.execute(f"DROP TABLE {lake.LAKE}.{table}")
        lake.delete_unneeded(connection)
    if place.data.startswith("/"):  # and the folders
        shutil.rmtree(place.data, ignore_errors=True)
