"""Writes docs/streams.md from the declarations in training_harness/records.py.

python scripts/streams_page.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from training_harness.records import IDENTITY, STREAMS, Column

PAGE = Path(__file__).resolve().parent.parent / "docs" / "streams.md"
HEAD = """# Streams

Generated from `training_harness/records.py`. Each stream is a table of the lake and a view of
`collector.store.reader.Snapshot`. A value that is not known is NULL, never 0.
"""


def rows(columns: tuple[Column, ...]) -> str:
    """The columns as a Markdown table."""
    lines = ["| column | unit | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{each.name}` | {each.unit} | {each.meaning} |" for each in columns])


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Identity\n\nOf the process that wrote the record; in every table.\n\n" + rows(IDENTITY)]
    parts += [
        f"\n## {each.name}\n\nOne record per {each.one_per}.\n\n{rows(each.columns)}" for each in STREAMS.values()
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is not what records.py declares: run python scripts/streams_page.py")
