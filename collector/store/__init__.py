"""Runs on disk: find them, ingest their journals into the lake, and read both together.

Other packages import from here, from the faces of `queries`, `journals`, `prune` and `cluster`, or from the modules
of this folder. Each name is looked up when it is first used: the collector process, which only ingests, never loads
pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collector.store.allocator_snapshots import newest_allocator_snapshot as newest_allocator_snapshot
    from collector.store.catalogue import LATEST as LATEST, find_run as find_run, list_runs as list_runs
    from collector.store.lake.counters import Counts as Counts, Totals as Totals
    from collector.store.lake.ingest import Ingester as Ingester, IngestResult as IngestResult
    from collector.store.lake.reader import Snapshot as Snapshot, read as read
    from collector.store.runs.run import (
        ProcessKey as ProcessKey,
        Run as Run,
        command_and_collector as command_and_collector,
        living_processes as living_processes,
        of_this_boot as of_this_boot,
    )

_MODULES = {
    "collector.store.allocator_snapshots": ("newest_allocator_snapshot",),
    "collector.store.catalogue": ("LATEST", "find_run", "list_runs"),
    "collector.store.lake.counters": ("Counts", "Totals"),
    "collector.store.lake.ingest": ("Ingester", "IngestResult"),
    "collector.store.lake.reader": ("Snapshot", "read"),
    "collector.store.runs.run": ("ProcessKey", "Run", "command_and_collector", "living_processes", "of_this_boot"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
