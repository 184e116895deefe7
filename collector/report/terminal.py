"""The terminal and Markdown: both show every text literally, and obey no control characters in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from collector.errors import one_line, printable


class Terminal(Console):
    """A console for foreign texts: names, paths, messages. Square brackets in them are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as a console does, with the texts' control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


#: Characters of a text that Markdown would take as its own.
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|<>*`[]"})


def markdown_text(text: str) -> str:
    """Return a text as Markdown that shows it literally, in one line."""
    return one_line(text).translate(_MARKDOWN)


def markdown_table(table: Table) -> str:
    """Return a table as Markdown, without empty rows."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    heads = [str(column.header) for column in table.columns]
    rows = [row for row in zip(*columns, strict=True) if any(row)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(markdown_text, line))} |\n" for line in lines)
