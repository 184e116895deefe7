"""Lists for the terminal: of runs, from manifests and the reports that were kept, and of an export's files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from collector.errors import TidegaugeError
from collector.quantities import MISSING, duration, known, number, size
from collector.store.runs import Run, command_and_collector, living_processes
from training_harness.layout import read_plain

if TYPE_CHECKING:
    from collector.store.export import ExportedFile
    from collector.store.prune import StoredRun

#: The last report on an ended run, so that a list of runs need not judge them all again.
KEPT_REPORT = "report.json"
_REPORT_LIMIT_BYTES = 2**25


def keep_report(run: Run, report: Mapping[str, Any]) -> None:
    """Keep the report in the run directory; a directory that can't be written goes without."""
    path = run.path / KEPT_REPORT
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(report, stream, allow_nan=False)
        os.replace(scratch, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A run in a list; None is what no kept report tells."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    steps: float | None = None
    duration_seconds: float | None = None
    gravest: str | None = None


def listed(run: Run) -> Listed:
    """What the manifest and the kept report tell of a run."""
    tags = _tags(run)
    with suppress(LookupError, TypeError, OverflowError):  # a report that is none: the manifest tells
        kept = _kept_report(run) or {}
        facts, findings = kept["run"], kept["findings"]
        return Listed(
            run_id=run.run_id,
            status=str(facts["status"]),
            tags=tags,
            steps=_figure(facts["steps"]),
            duration_seconds=_figure(facts["duration_seconds"]),
            gravest=f"{findings[0]['severity']}: {findings[0]['kind']}" if findings else "nothing needs attention",
        )
    return Listed(run_id=run.run_id, status=_status_without_report(run), tags=tags)


def run_table(runs: Iterable[Listed]) -> Table:
    """Id, status, steps, duration and the gravest finding of each run, in the given order."""
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
    """Name, rows and size of each file."""
    table = _plain_table()
    table.add_column("file", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for file in files:
        table.add_row(file.name, number(file.rows_count), size(file.size_bytes))
    return table


def prune_table(beyond: Iterable[StoredRun]) -> Table:
    """Id, status and size of the runs that are to go, and why some stay."""
    table = _plain_table()
    table.add_column("run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for stored in beyond:
        fate = f"stays: {stored.needed}" if stored.needed else "goes"
        table.add_row(stored.run.run_id, listed(stored.run).status, size(stored.size_bytes), fate)
    return table


def _plain_table() -> Table:
    return Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)


def _figure(value: Any) -> float | None:
    """A figure of a report that anybody may have written; None if it is none."""
    return value if known(value) else None


def _tags(run: Run) -> Mapping[str, str]:
    try:
        tags = run.manifest.get("tags")
    except TidegaugeError:
        return {}
    return tags if isinstance(tags, dict) else {}


def _kept_report(run: Run) -> dict[str, Any] | None:
    try:
        kept = json.loads(read_plain(run.path / KEPT_REPORT, _REPORT_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return kept if isinstance(kept, dict) and kept.get("schema") == 1 else None


def _status_without_report(run: Run) -> str:
    """From the manifest alone: `running`, `ended`, or `abandoned` (its collector is gone, see `collect`)."""
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
