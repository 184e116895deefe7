"""Runs on disk: find them, ingest their journals into the lake, and read both together.

Other packages import from here, and from the faces `queries` and `prune`. Each name is looked up when it is first
used: the collector process, which only ingests, never loads pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collector.store.allocator_snapshots import (
        ProcessGrowth,
        SiteGrowth,
        newest_allocator_snapshot,
        read_growth,
        read_growths,
    )
    from collector.store.catalogue import LATEST, find_run, is_trial, list_runs, own_first, started_wall_ns
    from collector.store.cluster.postgres import check_shared_store, store_address
    from collector.store.documents import annotate, change_document
    from collector.store.duck import open_connection
    from collector.store.export import ExportedFile, export_run
    from collector.store.journals.growing_files import GrowingFiles
    from collector.store.journals.segments import EVENT_LOG_SUFFIX, JournalError, read_events, size_bytes
    from collector.store.lake.counters import Counts, Totals
    from collector.store.lake.ingest import Ingester
    from collector.store.lake.ingest_result import IngestResult
    from collector.store.lake.reader import Snapshot, read
    from collector.store.runs.annotations import Edit
    from collector.store.runs.documents import (
        ANNOTATION,
        KNOWN_FINDINGS,
        RESULT,
        SHARED_KNOWN_FINDINGS,
        document_path,
        read_document,
    )
    from collector.store.runs.locks import follow_run
    from collector.store.runs.run import (
        ProcessKey,
        Run,
        command_and_collector,
        living_processes,
        of_this_boot,
        tags_of,
    )

_NAMES = {
    "allocator_snapshots": "ProcessGrowth SiteGrowth newest_allocator_snapshot read_growth read_growths",
    "catalogue": "LATEST find_run is_trial list_runs own_first started_wall_ns",
    "cluster.postgres": "check_shared_store store_address",
    "documents": "annotate change_document",
    "duck": "open_connection",
    "export": "ExportedFile export_run",
    "journals.growing_files": "GrowingFiles",
    "journals.segments": "EVENT_LOG_SUFFIX JournalError read_events size_bytes",
    "lake.counters": "Counts Totals",
    "lake.ingest": "Ingester",
    "lake.ingest_result": "IngestResult",
    "lake.reader": "Snapshot read",
    "runs.annotations": "Edit",
    "runs.documents": "ANNOTATION KNOWN_FINDINGS RESULT SHARED_KNOWN_FINDINGS document_path read_document",
    "runs.locks": "follow_run",
    "runs.run": "ProcessKey Run command_and_collector living_processes of_this_boot tags_of",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _NAMES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
