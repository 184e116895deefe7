"""Lists: of runs, from their manifests, annotations and results; of an export's files."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from collector.errors import TidegaugeError
from collector.findings import KINDS
from collector.report.known import Command, Known, command_of, known_files, known_findings
from collector.report.results import RESULT_FIGURES, Result, result_from
from collector.report.terminal import plain_table
from collector.store import (
    ANNOTATION,
    RESULT,
    Run,
    command_and_collector,
    document_path,
    is_trial,
    living_processes,
    read_document,
    started_wall_ns,
    tags_of,
)
from collector.units import MISSING, duration, number, size
from training_harness import layout
from training_harness.layout import slug

if TYPE_CHECKING:
    from collector.store import ExportedFile
    from collector.store.prune.home import StoredRun


_name = functools.partial(Column, no_wrap=True)
_number = functools.partial(Column, justify="right", no_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """A run in a list: its manifest, what people noted on it, and its result; None without a verdict.

    Attributes:
        started_seconds: wall clock (Unix time); 0 if it is not known.
        commit: git commit of the folder that the command ran in; None if it was in no repository.
        is_dirty: True if files differed from that commit; None if that is not known.
        is_trial: True for a trial of `tidegauge tune`.
    """

    run_id: str
    status: str
    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    is_pinned: bool = False
    started_seconds: float = 0.0
    command: Command = field(default_factory=Command)
    commit: str | None = None
    is_dirty: bool | None = None
    is_trial: bool = False
    result: Result | None = None

    @property
    def gravest(self) -> str | None:
        """The gravest finding that needs attention, in words; None without a verdict."""
        if self.result is None:
            return None
        urgent = next((finding for finding in self.result.findings if finding.is_urgent), None)
        if urgent is not None:
            return f"{urgent.severity}: {urgent.kind}"
        known = next((finding for finding in self.result.findings if finding.known), None)
        if known is not None:
            return f"known: {known.kind}"
        is_explained = any(KINDS[finding.kind].group == "death" for finding in self.result.findings)
        has_died = self.status in ("failed", "killed") and not is_explained
        return "ended, cause not known" if has_died else "nothing needs attention"


def list_entry(run: Run) -> ListEntry:
    """Return the entry of a run in a list; its files are read again only if they have changed."""
    files = [run.path / layout.MANIFEST, *(document_path(run.path, name) for name in (ANNOTATION, RESULT))]
    known_versions = tuple(map(_version, known_files(run.home)))
    entry, has_ended = _read_entry(run, tuple(map(_version, files)), known_versions)
    return entry if has_ended else replace(entry, status=_status_without_result(run))


def as_json(entry: ListEntry) -> dict[str, Any]:
    """Return the public JSON form of an entry (docs/cli.md)."""
    result = entry.result
    figures = {name: getattr(result, name) if result else None for name in RESULT_FIGURES}
    return {
        "run_id": entry.run_id,
        "name": entry.name,
        "status": entry.status,
        "tags": dict(entry.tags),
        "note": entry.note,
        "pinned": entry.is_pinned,
        "trial": entry.is_trial,
        "started_seconds": entry.started_seconds or None,
        "command": entry.command.text,
        "folder": entry.command.folder,
        "git_commit": entry.commit,
        "git_dirty": entry.is_dirty,
        "gravest": entry.gravest,
        **figures,
        "throughput_unit": result.throughput_unit if result else None,
        "machine": result.machine if result else None,
        "findings": [asdict(finding) for finding in result.findings] if result else None,
    }


@functools.lru_cache(maxsize=16)
def _read_known(home: Path, _versions: tuple[tuple[int, int], ...]) -> Known:
    return known_findings(home)


def _version(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


@functools.lru_cache(maxsize=4096)
def _read_entry(
    run: Run, _versions: tuple[tuple[int, int], ...], known_versions: tuple[tuple[int, int], ...]
) -> tuple[ListEntry, bool]:
    """Return the entry of a run, and True if its status cannot change any more."""
    result = result_from(read_document(run.path, RESULT))
    try:
        manifest = run.manifest
    except TidegaugeError:
        return ListEntry(run_id=run.run_id, status=result.status if result else "damaged", result=result), True
    annotation, command = run.annotation, command_of(manifest)
    if result is not None:
        known = _read_known(run.home, known_versions)
        reasons = [known.get((command, finding.identity)) for finding in result.findings]
        marked = [replace(each, known=reason) for each, reason in zip(result.findings, reasons, strict=True)]
        result = replace(result, findings=tuple(marked))
    entry = ListEntry(
        run_id=run.run_id,
        # A run has ended although its process outlived the watch or the command.
        status=result.status if result and result.status != "running" else "ended",
        name=annotation.name or manifest["name"],
        tags=tags_of(manifest) if annotation.tags is None else annotation.tags,
        note=annotation.note,
        is_pinned=annotation.is_pinned,
        started_seconds=started_wall_ns(run.path) / 1e9,
        command=command,
        commit=_text(manifest.get("git_commit")),
        is_dirty=manifest.get("git_dirty") if isinstance(manifest.get("git_dirty"), bool) else None,
        is_trial=is_trial(run),
        result=result,
    )
    return entry, result is not None or manifest["end_time_ns"] is not None


def run_table(runs: Iterable[ListEntry]) -> Table:
    """Draw id, name and tags, status, steps, duration and the gravest finding of each run, in the given order."""
    runs = list(runs)
    has_labels = any(map(_label, runs))
    labels = [Column("name, tags", overflow="fold")] if has_labels else []
    counts = (_number("steps"), _number("took"))
    gravest = Column("finding", no_wrap=True, overflow="ellipsis")
    table = plain_table(_name("run"), *labels, _name("status"), *counts, gravest, gap=1)
    for run in runs:
        result = run.result
        steps, length = (number(result.steps), duration(result.duration_seconds)) if result else (MISSING, MISSING)
        label = [_label(run)] if has_labels else []
        finding = (run.gravest or MISSING).replace("critical:", "✖").replace("warning:", "▲")  # as on the card
        table.add_row(run.run_id, *label, run.status, steps, length, finding)
    return table


def _label(entry: ListEntry) -> str:
    """Return a name that the id does not show, the tags, and the pin."""
    name = entry.name if entry.name and f"-{slug(entry.name)}-" not in f"-{entry.run_id}-" else ""
    tags = [f"{key}={value}" for key, value in entry.tags.items()]
    return ", ".join(filter(None, [name, *tags, "pinned" if entry.is_pinned else ""]))


def export_table(files: Iterable[ExportedFile]) -> Table:
    """Draw name, rows and size of each file."""
    table = plain_table(_name("file"), _number("rows"), _number("size"))
    for file in files:
        table.add_row(file.name, number(file.rows_count), size(file.size_bytes))
    return table


def prune_table(candidates: Iterable[StoredRun]) -> Table:
    """Draw id, status and size of the runs to delete, and why some stay."""
    table = plain_table(_name("run"), _name("status"), _number("size"), Column("", overflow="fold"))
    for stored in candidates:
        fate = f"stays: {stored.keep_reason}" if stored.keep_reason else "goes"
        table.add_row(stored.run.run_id, list_entry(stored.run).status, size(stored.size_bytes), fate)
    return table


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _status_without_result(run: Run) -> str:
    """Return the status of a run without an end: running, abandoned (see `tidegauge collect`), or unknown."""
    try:
        living = living_processes(run, command_and_collector(run.manifest))
    except TidegaugeError:
        return "damaged"
    if living is None:
        return "unknown"
    return "running" if living else "abandoned"
