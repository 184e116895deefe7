"""Tables on a terminal: those written as lines are the ones that Rich draws."""

import io

import pytest
from rich.table import Table

from collector.report import comparison
from collector.report.listing import ListEntry, run_table
from collector.report.results import Result, ResultFinding
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


def narrow(shown: Table, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Terminal(file=stream, width=width).print_table(shown)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_four_runs_compare_within_80_columns_without_a_wrapped_figure():
    units = {
        "Samples per second": ("samples/second", 548.0),
        "Step p95": ("ms", 22.8),
        "Data wait": ("ratio", 0.19),
        "Peak host memory": ("bytes", 3.45 * 2**30),
    }
    runs = [
        {
            label: comparison.Measure(label=label, value=value * factor, unit=unit, n=12_500)
            for label, (unit, value) in units.items()
        }
        for factor in (1.0, 3.45, 1.02, 0.0875)
    ]
    ids = [f"20261125-15083{place}-{name}" for place, name in enumerate(("train-85e9", "wide-318d", "a-b9d1"))]
    names = comparison.headings([*ids, "20261126-090000-resnet50-from-scratch-0b1c"], short=True)
    lines = narrow(comparison.wrap_headings(comparison.table(runs, names)))
    assert [line.split("  ")[0] for line in lines[-4:]] == list(units)
    assert lines[-3].split()[2:] == [
        "22.8",
        "ms",
        "78.7",
        "ms",
        "+245%",
        "23.3",
        "ms",
        "+2.0%",
        "1.99",
        "ms",
        "-91%",
    ]
    assert "66% +47 points" in lines[-2]
    words = " ".join(lines[:-4]).split()
    assert words[-4:] == ["(baseline)", "wide-318d", "a-b9d1", "scratch-0b1c"]
    assert max(map(len, lines)) <= 80


def test_settings_of_compared_runs_name_each_setting_once():
    lines = narrow(comparison.settings_table(["a", "b"], {"tag lr": ["0.1", "0.2"]}))
    assert [line.split() for line in lines[1:]] == [["tag", "lr", "a", "0.1"], ["b", "0.2"]]


def test_runs_whose_short_names_are_the_same_keep_their_ids():
    ids = ["20261125-150831-train-85e9", "20261126-150831-train-85e9"]
    assert comparison.headings(ids, short=True) == ids
    assert comparison.headings(ids[:1], short=True) == ["train-85e9"]


def test_a_run_has_one_line_of_80_columns_in_the_list():
    leak = ResultFinding(kind="copy-on-read-growth", place="loader 0", severity="warning")
    results = [
        Result(status="finished", steps=1600, duration_seconds=71.0, findings=findings)
        for findings in ((leak,), ())
    ]
    ids = ("20261125-151018-copy-on-read-6138", "20261125-150831-healthy-85e9")
    entries = [ListEntry(run_id=ids[i], status="finished", result=result) for i, result in enumerate(results)]
    _, leaking, healthy = narrow(run_table(entries))
    assert leaking.split(maxsplit=3)[3].endswith("▲ copy-on-read-growth")
    _, first, *_ = narrow(run_table(entries), width=60)
    assert first.startswith(f"{ids[0]} finished 1,600 71 s ▲")  # the finding is cut, the rest is whole
    assert healthy.endswith("nothing needs attention")


@pytest.mark.parametrize(
    ("status", "kinds", "words"),
    [
        ("failed", (), "ended, cause not known"),
        ("killed", ("killed",), "nothing needs attention"),  # by Ctrl-C
    ],
)
def test_a_run_that_failed_without_a_cause_is_not_called_fine_in_the_list(status, kinds, words):
    findings = tuple(ResultFinding(kind=kind, place="", severity="info") for kind in kinds)
    entry = ListEntry(
        run_id="20261125-151018-a-6138", status=status, result=Result(status=status, findings=findings)
    )
    assert narrow(run_table([entry]))[1].endswith(words)


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
