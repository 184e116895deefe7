"""Every kind of finding and every page is where a reader looks for it."""

import importlib
from pathlib import Path

import pytest

from app.blocks import evidence_page
from app.pages import PAGES
from collector.findings import KINDS, Finding, measurements

DOCS = Path(__file__).parents[3] / "docs"


def lines_of(page):
    return (DOCS / page).read_text().splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_finding_has_a_section_and_a_page_that_shows_it(kind):
    lines = lines_of("findings.md")
    assert f"## {kind}" in lines
    assert any(line.startswith("| ") and f"[{kind}](#{kind})" in line for line in lines)
    evidence = measurements(1, "run", first_count=1, second_count=1)
    finding = Finding(kind=kind, severity="warning", confidence=1.0, summary="", evidence=evidence)
    view = importlib.import_module(f"app.views.{evidence_page(kind).module}").VIEW
    assert view.has_finding(finding)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_has_a_section_with_its_question(page):
    view = importlib.import_module(f"app.views.{page.module}").VIEW
    lines = lines_of("views.md")
    assert view.name == page.path
    assert f"## {page.title}" in lines
    assert any(line.startswith(f"| [{page.title}](#") and f"| {view.question} |" in line for line in lines)
