"""Delete runs: old ones of a home or of the shared store (`tidegauge prune`), and chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collector.store.runs.run import Run


def delete_runs(home: Path, runs: Sequence[Run]) -> dict[Run, str]:
    """Delete chosen runs, those of the shared store for all nodes; return why some stay: pinned, or in use.

    Raises:
        TidegaugeError: something cannot be deleted.
    """
    from collector.store.prune import cluster, home as home_prune

    shared = [run for run in runs if run.is_shared]
    staying = cluster.delete(home, shared) if shared else {}
    local = [run for run in runs if run not in staying and run.path.exists()]
    return staying | home_prune.delete(home, local)
