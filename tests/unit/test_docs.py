"""The docs say what the code does: their commands exist, and their lists are those of the code."""

import re
import shlex
from pathlib import Path

import click
import pytest

from app.terms import TERMS
from collector import cli
from collector.commands.programs.mcp import Tools
from collector.findings import Locus
from collector.report import listing, stack_listing
from collector.stacks import Frame, Stack, group
from collector.store.catalogue import list_runs
from tests.conftest import REPOSITORY
from tests.golden import golden_files
from training_harness.jobs.__main__ import JOBS
from training_harness.jobs.faults import FAULTS
from training_harness.layout import create_run

DOCS = REPOSITORY / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
CONTEXT = click.Context(cli.cli)
COMMANDS = {
    name: command
    for name in cli.cli.list_commands(CONTEXT)
    if (command := cli.cli.get_command(CONTEXT, name)) and not command.hidden
}
#: Options that several commands have, described once.
SHARED = {"--home", "--help"}


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page(name), re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no section {title}"
    return found[1]


def first_column(text: str) -> list[str]:
    """Return the words in code that begin the rows of its tables."""
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, | with )?)+) \|", text, re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def command_lines(path: Path) -> list[str]:
    """Return the command lines of a page: in blocks, and in code within a sentence."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans
    found = (re.search(r"(?:^\s*|[\s;&|(])tidegauge (?!-)(.*)", " ".join(line.split())) for line in lines)
    return [match[1] for match in found if match and "tidegauge:" not in match[0]]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_exists_with_its_options(path):
    for line in command_lines(path):
        if not re.match(r"[a-z]+(\s|$)", line):
            continue
        try:
            words = shlex.split(re.split(r"\s--(?:\s|$)|[;&>]|\s#", line.replace("\\|", "|"))[0])
        except ValueError:  # a sentence that ends in the middle of a quotation
            continue
        name, options = words[0], {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        if name == "job":  # a job's own options come after its name
            continue
        assert name in COMMANDS, f"`tidegauge {line}`"
        known = {option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)}
        assert {option.strip("[]…") for option in options} <= known | SHARED, f"`tidegauge {line}`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described_where_its_command_is(name):
    text = page("cli.md")
    row = re.search(rf"^\| `tidegauge {name}\b.*$", text, re.MULTILINE)
    assert row
    places = row[0] + section("cli.md", "Reporting while the run goes on")
    if f"\n## {name}\n" in text:
        places += section("cli.md", name)
    options = [option for each in COMMANDS[name].params if isinstance(each, click.Option) for option in each.opts]
    assert [each for each in options if each.startswith("--") and each not in places and each not in SHARED] == []


def test_no_option_is_described_that_no_command_has():
    known = {option for each in COMMANDS.values() for parameter in each.params for option in parameter.opts}
    known |= {
        option for each in COMMANDS.values() for parameter in each.params for option in parameter.secondary_opts
    }
    described = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", re.sub(r"\]\([^)]*\)", "", page("cli.md"))))
    assert described - known - SHARED == {"--list"}  # of `tidegauge job fault`


def test_every_job_and_fault_is_in_the_table():
    text = page("jobs.md")
    row = re.compile(r"^\| `([\w-]+)`[^|`]*\| `([\w-]+)` \| (.+) \|$", re.MULTILINE)
    assert sorted(row.findall(section("jobs.md", "fault"))) == sorted(
        (kind, fault.finding, fault.meaning) for kind, fault in FAULTS.items()
    )
    assert all(f"\n| `{name}" in text for name in JOBS)


def test_the_comparison_is_documented():
    table = golden_files.read_golden("compare")["table"]
    text = section("cli.md", "compare")
    assert set(first_column(text)) == {*table, "measures", "settings"}
    assert set(re.findall(r"`(\w+)`", text)) >= {*table["runs"][0], *table["runs"][0]["measures"]}
    assert set(re.findall(r"`(\w+)`", text)) >= table["runs"][0]["measures"]["steps"].keys()


def test_the_list_of_runs_is_documented(tmp_path):
    create_run(tmp_path, name="train", argv=["x"])
    (run,) = list_runs(tmp_path)
    fields = listing.as_json(listing.list_entry(run))
    assert sorted(first_column(section("cli.md", "runs").partition("| field |")[2])) == sorted(fields)


def test_the_list_of_stacks_is_documented():
    frames = (Frame("train", "/home/me/train.py", 7),)
    stack = Stack(locus=Locus(pid=1, role="main"), thread="MainThread", frames=frames, waits=None)
    (body,) = stack_listing.as_json(group([stack]))
    text = section("cli.md", "stacks")
    assert sorted(first_column(text)) == sorted(body)
    words = set(re.findall(r"`(\w+)`", text))
    assert words >= {*body["threads"][0], *body["frames"][0]}


def test_every_tool_of_an_assistant_is_documented(tmp_path):
    assert first_column(section("cli.md", "mcp")) == [tool.__name__ for tool in Tools(tmp_path).all()]


def test_the_terms_are_those_of_the_dashboard():
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", section("views.md", "Terms"), re.MULTILINE)
    assert dict(rows[1:]) == TERMS


@pytest.mark.parametrize("name", ["report", "check"])
def test_the_help_names_every_form_of_a_run(name):
    said = " ".join((COMMANDS[name].help or "").split())
    assert "a run id, a unique part of one, the name of a run, the path of a run directory, or `latest`" in said


def test_command_lines_are_found():
    assert sum(len(command_lines(path)) for path in PAGES) > 150
