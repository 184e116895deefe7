"""Write docs/streams.md, docs/events.md and docs/measurements.md from the declarations in the code.

python scripts/declared_pages.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from collector.report.labels import LABELS
from training_harness import events, records

DOCS = Path(__file__).resolve().parent.parent / "docs"
STREAMS_HEAD = """# Streams

Generated from `training_harness/records.py`. Each stream is a table of the lake and a view of
`collector.store.Snapshot`. A value that is not known is NULL, never 0.

## Identity

Every table has these columns. They name the process that wrote the record.
"""
EVENTS_HEAD = """# Events

Generated from `training_harness/events.py`. Events are rare, structured facts: one JSON object per line in
`events/<host>.<pid>.jsonl`, and the table `event` of the lake. A field that is not known is null.

## Identity

Every event has these fields. They name the process that wrote the event.
"""
MEASUREMENTS_HEAD = """# Measurements

Generated from `collector/report/labels.py`. The evidence of a finding has names; cards and pages show these words.
[Findings](findings.md) says which kinds have which. A name ends in its unit; a name that is not here reads as its
words: `last_rss_bytes` is the last RSS.

| measurement | meaning |
|---|---|
"""


def table(heads: tuple[str, str, str], rows: Iterable[tuple[str, str, str]]) -> str:
    """Return a Markdown table, with the names of its first column as code."""
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {kind} | {text} |" for name, kind, text in rows]) + "\n"


def columns(declared: tuple[records.Column, ...]) -> str:
    """Return the table of a stream's columns."""
    return table(("column", "unit", "meaning"), ((each.name, each.unit, each.meaning) for each in declared))


def fields(declared: tuple[events.Field, ...]) -> str:
    """Return the table of an event's fields."""
    if not declared:
        return "No further fields.\n"
    return table(("field", "type", "meaning"), ((each.name, each.kind, each.meaning) for each in declared))


def pages() -> dict[str, str]:
    """Return file name -> the whole page."""
    streams = [STREAMS_HEAD, columns(records.IDENTITY)]
    for stream in records.STREAMS.values():
        streams += [f"## {stream.name}\n\nOne record per {stream.one_per}.\n", columns(stream.columns)]
    kinds = [EVENTS_HEAD, fields(events.IDENTITY)]
    for kind, event in events.EVENTS.items():
        kinds += [f"## {kind}\n\nWritten by: {event.written_by}. When: {event.occasion}.\n", fields(event.fields)]
    measurements = MEASUREMENTS_HEAD + "".join(
        f"| `{name}` | {words} |\n" for name, words in sorted(LABELS.items())
    )
    return {"streams.md": "\n".join(streams), "events.md": "\n".join(kinds), "measurements.md": measurements}


if __name__ == "__main__":
    for name, page in pages().items():
        if "--check" not in sys.argv:
            (DOCS / name).write_text(page)
        elif (DOCS / name).read_text() != page:
            sys.exit(f"docs/{name} is not what the code declares: run python scripts/declared_pages.py")
