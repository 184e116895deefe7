"""Every kind of finding and every page is where a reader looks for it."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from app import pages
from app.blocks import evidence_page, name_width
from app.pages import PAGES
from collector.findings import KINDS, Finding, Locus, Rate, measurements
from training_harness.jobs.faults import FAULTS

DOCS = Path(__file__).parents[3] / "docs"


def lines_of(page):
    return (DOCS / page).read_text().splitlines()


def section_of(kind):
    return (DOCS / "findings" / f"{kind}.md").read_text().partition("\n## ")[0]


def has_finding(page, finding):
    return importlib.import_module(f"app.views.{page.module}").VIEW.has_finding(finding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_finding_has_a_page_of_the_docs_and_one_that_shows_it(kind):
    assert section_of(kind).startswith(f"# {kind}\n")
    assert any(
        line.startswith("| ") and f"[{kind}](findings/{kind}.md)" in line for line in lines_of("findings.md")
    )
    evidence = measurements(1, "run", first_count=1, second_count=1)
    finding = Finding(kind=kind, severity="warning", confidence=1.0, summary="", evidence=evidence)
    assert has_finding(evidence_page(finding), finding)
    assert {page.path for page in PAGES} >= set(KINDS[kind].pages)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_the_docs_has_evidence_causes_remedy_and_false_positives(kind):
    section = section_of(kind)
    for part in ("Evidence", "Usual causes", "What to do", "False positives"):
        assert f"- **{part}**" in section, part
    known = sorted(name for name, fault in FAULTS.items() if fault.finding == kind)
    tried = section.partition("- **Try it**: `tidegauge job fault ")[2].partition("\n\n")[0].partition("\n- ")[0]
    assert re.findall(r"[a-z-]+(?=`)", tried) == known


@pytest.mark.parametrize(
    ("locus", "unit", "path"),
    [
        (Locus(role="main"), "bytes/s", "leak-timeline"),
        (Locus(role="worker", loader=0), "bytes/s", "leak-timeline"),
        (Locus(role="main"), "count/s", "oom-risk"),
        (Locus(host="node"), "bytes/s", "oom-risk"),
        (Locus(role="main", device=0), "bytes/s", "gpu-memory"),
    ],
)
def test_growth_that_cannot_be_judged_is_on_the_page_where_it_is_seen(locus, unit, path):
    rate = Rate(value=1.0, low=0.5, high=1.5, unit=unit)
    growth = Finding(kind="cannot-tell", severity="info", confidence=0.7, summary="", locus=locus, rate=rate)
    page = evidence_page(growth)

    assert page.path == path
    assert [one.path for one in PAGES if has_finding(one, growth)].count(path) == 1
    assert not has_finding(pages.AGENT_HEALTH, growth)


def test_a_loader_that_cannot_be_judged_is_on_the_page_of_its_waits():
    unclear = Finding(kind="cannot-tell", severity="info", confidence=1.0, summary="", locus=Locus(loader=0))

    assert evidence_page(unclear).path == "worker-stalls"
    assert has_finding(evidence_page(unclear), unclear)
    assert not has_finding(pages.AGENT_HEALTH, unclear)


@pytest.mark.parametrize(("kind", "path"), [("hang", "worker-stalls"), ("host-oom-kill", "leak-timeline")])
def test_an_end_is_also_on_the_page_that_would_call_its_subject_fine(kind, path):
    evidence = measurements(1, "run", first_count=1, second_count=1)
    end = Finding(kind=kind, severity="critical", confidence=1.0, summary="", evidence=evidence)

    assert evidence_page(end).path == "post-mortem"
    assert [one.path for one in PAGES if has_finding(one, end)].count(path) == 1


def test_leak_timeline_begins_with_the_leak_even_if_the_run_died_of_it():
    evidence = measurements(1, "run", first_count=1, second_count=1)
    end, leak = (
        Finding(kind=kind, severity=severity, confidence=1.0, summary="", evidence=evidence)
        for kind, severity in (("host-oom-kill", "critical"), ("main-heap-leak", "warning"))
    )
    verdict = SimpleNamespace(findings=(end, leak))
    kinds = {
        page: [finding.kind for finding in importlib.import_module(f"app.views.{page}").VIEW.findings_of(verdict)]
        for page in ("overview", "leak_timeline")
    }
    assert kinds["overview"] == ["host-oom-kill", "main-heap-leak"]
    assert kinds["leak_timeline"] == ["main-heap-leak", "host-oom-kill"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_has_a_section_with_its_question(page):
    view = importlib.import_module(f"app.views.{page.module}").VIEW
    lines = lines_of("views.md")
    assert view.name == page.path
    assert f"## {page.title}" in lines
    assert any(line.startswith(f"| [{page.title}](#") and f"| {view.question} |" in line for line in lines)


def test_names_in_a_table_of_many_columns_get_the_room_that_they_need():
    short, long = (pd.DataFrame({"Stage": [name], **dict.fromkeys("abcdef", "1")}) for name in ("read", "x" * 30))
    assert name_width(short)["Stage"] < name_width(long)["Stage"]
    assert name_width(long[["Stage", "a"]]) == {}  # the columns of a small table share its width
