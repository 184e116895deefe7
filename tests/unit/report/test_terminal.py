"""Tables on a terminal: those written as lines are the ones that Rich draws."""

import io

import pytest
from rich.table import Table

from collector.report.terminal import Terminal


def table(*rows: tuple[str, str, str]) -> Table:
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column("run", no_wrap=True)
    made.add_column("steps", justify="right", no_wrap=True)
    made.add_column("finding", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def printed(rows: list[tuple[str, str, str]], way: str, **options) -> list[str]:
    stream = io.StringIO()
    getattr(Terminal(file=stream, **options), way)(table(*rows))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 34, 20])
@pytest.mark.parametrize(
    "rows",
    [
        [("first", "12", "warning: fd-leak"), ("second-one", "1234", "")],
        [("日本", "1", "wide"), ("brackets", "2", "[bold]no markup[/]")],
        [("a", "1", "two\nlines"), ("b", "2", "one")],
        [],
    ],
)
def test_table_is_as_rich_draws_it(rows, width):
    assert printed(rows, "print_table", width=width) == printed(rows, "print", width=width)


def test_titles_and_styles_are_left_to_rich():
    titled, styled = table(("first", "12", "")), table(("first", "12", ""))
    titled.title = "Runs"
    styled.add_row("second", "3", "", style="red")
    for made, expected in ((titled, "Runs"), (styled, "\x1b[31m")):
        stream = io.StringIO()
        Terminal(file=stream, width=80, force_terminal=True, color_system="standard").print_table(made)
        assert expected in stream.getvalue()


def test_control_characters_are_shown_and_aligned():
    rows = [("esc\x1b[31m", "1", "red"), ("a", "2", "b")]
    assert printed(rows, "print_table", width=80)[1:] == ["esc␛[31m      1  red", "a             2  b"]


def test_header_is_bold_on_a_terminal():
    rows = [("first", "12", "warning: fd-leak")]
    lines = printed(rows, "print_table", width=80, force_terminal=True)
    assert lines[0] == "\x1b[1mrun    steps  finding\x1b[0m"
    assert lines[1] == "first     12  warning: fd-leak"
