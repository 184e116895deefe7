"""The terminal and Markdown: both show every text literally, and obey no control characters in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from collector.errors import one_line, printable

#: Characters that are left of a column that is cut.
_LEAST_CELL = 4


class Terminal(Console):
    """A console for foreign texts: names, paths, messages. Square brackets in them are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as a console does, with the texts' control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print_table(self, table: Table) -> None:
        """Print a table; one that needs no wrapping is written as lines, much faster than Rich does.

        Where a last column that may be cut is all that is too wide, it is cut, and the others stay whole.
        """
        lines = _aligned_lines(table)
        excess = 0 if lines is None else max(map(cell_len, lines)) - self.width
        if lines is None or excess > _room_to_cut(table):
            self.print(table)
            return
        self.print(Text(lines[0], style=table.header_style), no_wrap=True, overflow="ellipsis")
        if excess > 0:
            for line in lines[1:]:
                self.print(Text(line), no_wrap=True, overflow="ellipsis")
            return
        self.file.write("".join(f"{line}\n" for line in lines[1:]))


def plain_table(*columns: str | Column, gap: int = 2) -> Table:
    """Return a table without lines, with blanks between its columns, that `Terminal.print_table` can print."""
    return Table(*columns, box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)


def grid(*columns: Column, gap: int = 2, rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """Return a table without lines and headings, with blanks between its columns."""
    table = Table.grid(*columns, padding=(0, gap, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _room_to_cut(table: Table) -> int:
    """Return by how many characters the last column may be cut."""
    last = table.columns[-1]
    if not (last.no_wrap and last.overflow == "ellipsis"):
        return 0
    return max((cell_len(str(cell)) for cell in last.cells), default=0) - _LEAST_CELL


def _aligned_lines(table: Table) -> list[str] | None:
    """Return the header and the rows of a table; None if it has more, or a cell that is no plain line."""
    _, right, _, _ = table.padding
    styles = (*(column.style for column in table.columns), *(row.style for row in table.rows))
    if any((table.box, table.title, table.caption, table.show_footer, table.expand, *styles)):
        return None
    columns = []
    for column in table.columns:
        cells = [column.header, *column.cells]
        texts = [printable(cell) for cell in cells if isinstance(cell, str) and "\n" not in cell]
        if len(texts) < len(cells):
            return None
        widths = [cell_len(text) for text in texts]
        width, is_right = max(widths), column.justify == "right"
        blanks = [" " * (width - each) for each in widths]
        pairs = zip(blanks, texts, strict=True)
        columns.append([blank + text if is_right else text + blank for blank, text in pairs])
    return [(" " * right).join(line).rstrip() for line in zip(*columns, strict=True)]


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
