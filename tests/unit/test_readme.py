"""The README: its commands exist, its links lead to files and headings, and its figures are those of the docs."""

import re

import click

from collector import cli
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([\w./-]+)(?:#([\w-]+))?\)")
#: "84 of 85", "17.8 µs", "0.993": figures that a benchmark measured.
FIGURE = re.compile(r"\d+ of \d+|\d+\.\d+(?: µs)?")


def headings(page):
    """Return the anchors of a page, as GitHub makes them."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("# ").lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


def test_it_fits_on_one_screen_and_names_the_commands_that_everybody_needs():
    assert len(README.splitlines()) <= 70
    assert all(f"\ntidegauge {command}" in README for command in ("run", "report", "dashboard"))
    assert "\nmake test " in README


def test_its_commands_and_make_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"\btidegauge (\w+)", README)) <= set(cli.cli.list_commands(click.Context(cli.cli)))
    assert all(f"\n{target}:" in makefile for target in re.findall(r"^make (\w+)", README, re.MULTILINE))


def test_its_links_lead_to_files_and_headings():
    links = LINK.findall(README)
    assert len(links) > 10
    assert [path for path, _ in links if not (REPOSITORY / path).is_file()] == []
    assert [(path, anchor) for path, anchor in links if anchor and anchor not in headings(path)] == []


def test_its_figures_are_those_of_the_pages_that_it_links():
    """A figure is on the first page that follows it in its paragraph."""
    checked = 0
    for paragraph in re.split(r"\n\n|\n- ", README.partition("## What it promises")[2].partition("\n## ")[0]):
        pages = [(link.start(), link[1]) for link in LINK.finditer(paragraph) if link[1].startswith("docs/")]
        for figure in FIGURE.finditer(LINK.sub(lambda link: " " * len(link[0]), paragraph)):
            page = next(path for start, path in pages if start > figure.start())
            text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
            assert figure[0] in text, f"{figure[0]} is not in {page}"
            checked += 1
    assert checked >= 7
