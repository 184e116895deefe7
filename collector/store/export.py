"""Export a run: one file per stream, in order of time, for other programs to read.

All files come from one snapshot of the reader, so a run that goes on can be exported. They are written to
a scratch folder within the target and moved once all are whole: the export is complete, or there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store.lake.reader import Snapshot, read
from collector.store.redaction import Redactor
from collector.store.runs.run import Run
from training_harness.layout import MANIFEST
from training_harness.records import IDENTITY, NAME, STREAMS, Column, Stream

SCHEMA_FILE = "schema.json"
SCHEMA_VERSION = 1
#: format -> options of DuckDB's COPY.
FORMATS = {"parquet": "FORMAT parquet, COMPRESSION zstd", "csv": "FORMAT csv, HEADER true"}

_EVENTS = Stream(
    "event",
    "rare fact: docs/events.md lists the kinds",
    (
        Column("time_ns", "q", "ns", "CLOCK_MONOTONIC when it was written"),
        Column("kind", "s", "name", "what happened"),
        Column("body", "s", "JSON", "what else is known, by kind"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One file of an export; `rows_count` is None for a file without rows."""

    name: str
    rows_count: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The files of an export, and one line for each part of the run that could not be read."""

    files: tuple[ExportedFile, ...]
    problems: tuple[str, ...]


def export_run(
    run: Run,
    directory: Path,
    form: str,
    *,
    is_redacted: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Export:
    """Write all records and events of a run to a new or empty directory.

    Args:
        run: the run, ended or not.
        directory: the target; created if it is missing.
        form: one of `FORMATS`.
        is_redacted: replace the user's texts by pseudonyms (`store.redaction`).
        say: called with the name of each file before it is written.

    Returns:
        The files: one for each stream with rows, the events, the schema of the columns, and the manifest.

    Raises:
        TidegaugeError: there is no such format, the run cannot be read, or the directory cannot be written or is
            not empty. Then no file is left in it.
    """
    if form not in FORMATS:
        raise TidegaugeError(f"no format {form!r}; this version writes {' and '.join(FORMATS)}")
    manifest = run.manifest
    redactor = Redactor((manifest["host"], *manifest["anchors"])) if is_redacted else None
    if redactor:
        manifest = redactor.manifest(manifest)
    with _all_or_nothing(directory) as scratch:
        with read(run) as snapshot:
            rows = dict(_copy_tables(snapshot, scratch, form, redactor, say))
            problems = snapshot.problems
        schema = {"schema": SCHEMA_VERSION, "run_id": manifest["run_id"], "tables": {n: _describe(n) for n in rows}}
        for name, body in ((SCHEMA_FILE, schema), (MANIFEST, manifest)):
            (scratch / name).write_text(json.dumps(body, indent=1) + "\n")
        names = {**{f"{table}.{form}": count for table, count in rows.items()}, SCHEMA_FILE: None, MANIFEST: None}
        files = tuple(
            ExportedFile(name=name, rows_count=count, size_bytes=(scratch / name).stat().st_size)
            for name, count in names.items()
        )
    return Export(files=files, problems=problems)


def _copy_tables(
    snapshot: Snapshot, directory: Path, form: str, redactor: Redactor | None, say: Callable[[str], None]
) -> Iterator[tuple[str, int]]:
    for table in (*STREAMS, _EVENTS.name):
        name = f"{table}.{form}"
        if not snapshot.query(f'SELECT 1 FROM "{table}" LIMIT 1').empty:
            say(name)
            texts = _replacements(table, redactor) if redactor else None
            yield table, snapshot.copy(table, directory / name, FORMATS[form], texts=texts)


def _replacements(table: str, redactor: Redactor) -> dict[str, Callable[[str], str]]:
    """Return what replaces the values of each column of text of a table."""
    if table == _EVENTS.name:
        return {"host": redactor.host, "body": redactor.event}
    stages = {column.name: redactor.stage for column in STREAMS[table].columns if column.code == NAME}
    return {"host": redactor.host, **stages}


def _describe(table: str) -> dict[str, Any]:
    stream = STREAMS.get(table, _EVENTS)
    columns = (*stream.columns, *IDENTITY)
    return {
        "one_per": stream.one_per,
        "columns": {column.name: {"unit": column.unit, "meaning": column.meaning} for column in columns},
    }


@contextmanager
def _all_or_nothing(directory: Path) -> Iterator[Path]:
    """Yield a folder inside `directory`; its files move there at the end, unless something fails."""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if found := next(directory.iterdir(), None):
            raise TidegaugeError(f"{directory} is not empty, it holds {found.name}: name a new or an empty folder")
        scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
        try:
            yield scratch
            for path in sorted(scratch.iterdir()):
                os.rename(path, directory / path.name)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    directory.rmdir()
            raise
        scratch.rmdir()
    except OSError as error:
        why = error.strerror or str(error)
        raise TidegaugeError(f"cannot export to {directory} ({why}): name a folder that has room") from None
