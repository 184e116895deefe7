"""Lists for the terminal: of runs, from manifests and saved reports, and of an export's files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from collector.errors import TidegaugeError
from collector.store import Run, command_and_collector, living_processes
from collector.units import MISSING, duration, is_known, number, size
from training_harness.layout import read_plain

if TYPE_CHECKING:
    from collector.store import ExportedFile
    from collector.store.prune.home import StoredRun

#: File of the last report on an ended run, so that a list of runs need not diagnose them all again.
REPORT_NAME = "report.json"
_REPORT_LIMIT_BYTES = 2**25


def save_report(run: Run, report: Mapping[str, Any]) -> None:
    """Save the report in the run directory; do nothing if that cannot be written."""
    path = run.path / REPORT_NAME
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(report, stream, allow_nan=False)
        os.replace(scratch, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """A run in a list; a field that only a saved report has is None without one."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    steps: float | None = None
    duration_seconds: float | None = None
    gravest: str | None = None


def list_entry(run: Run) -> ListEntry:
    """Return the entry of a run in a list, from its manifest and its saved report."""
    tags = _tags(run)
    with suppress(LookupError, TypeError, OverflowError):  # Without a valid report the manifest is enough.
        report = _saved_report(run) or {}
        facts, findings = report["run"], report["findings"]
        return ListEntry(
            run_id=run.run_id,
            status=str(facts["status"]),
            tags=tags,
            steps=_figure(facts["steps"]),
            duration_seconds=_figure(facts["duration_seconds"]),
            gravest=f"{findings[0]['severity']}: {findings[0]['kind']}" if findings else "nothing needs attention",
        )
    return ListEntry(run_id=run.run_id, status=_status_without_report(run), tags=tags)


def run_table(runs: Iterable[ListEntry]) -> Table:
    """Draw id, status, steps, duration and the gravest finding of each run, in the given order."""
    table = _plain_table()
    table.add_column("run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("duration", justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for run in runs:
        length = duration(run.duration_seconds)
        table.add_row(run.run_id, run.status, number(run.steps), length, run.gravest or MISSING)
    return table


def export_table(files: Iterable[ExportedFile]) -> Table:
    """Draw name, rows and size of each file."""
    table = _plain_table()
    table.add_column("file", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for file in files:
        table.add_row(file.name, number(file.rows_count), size(file.size_bytes))
    return table


def prune_table(candidates: Iterable[StoredRun]) -> Table:
    """Draw id, status and size of the runs to delete, and why some stay."""
    table = _plain_table()
    table.add_column("run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for stored in candidates:
        fate = f"stays: {stored.keep_reason}" if stored.keep_reason else "goes"
        table.add_row(stored.run.run_id, list_entry(stored.run).status, size(stored.size_bytes), fate)
    return table


def _plain_table() -> Table:
    return Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)


def _figure(value: Any) -> float | None:
    """Return a figure of a report, which any program may have written; None if it is no number."""
    return value if is_known(value) else None


def _tags(run: Run) -> Mapping[str, str]:
    try:
        tags = run.manifest.get("tags")
    except TidegaugeError:
        return {}
    return tags if isinstance(tags, dict) else {}


def _saved_report(run: Run) -> dict[str, Any] | None:
    try:
        report = json.loads(read_plain(run.path / REPORT_NAME, _REPORT_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and report.get("schema") == 1 else None


def _status_without_report(run: Run) -> str:
    """Return the status by the manifest alone: `running`, `ended`, or `abandoned` (no collector, see `collect`)."""
    try:
        manifest = run.manifest
    except TidegaugeError:
        return "damaged"
    if manifest["end_time_ns"] is not None:
        return "ended"
    living = living_processes(run, command_and_collector(manifest))
    if living is None:
        return "unknown"
    return "running" if living else "abandoned"
