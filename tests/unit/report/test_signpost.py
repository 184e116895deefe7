"""The page of the dashboard to open first."""

import pytest

from app.blocks import evidence_page
from collector.findings import KINDS, Finding, measurements
from collector.report.signpost import page_of


@pytest.mark.parametrize("kind", KINDS)
def test_page_of_a_kind_is_the_one_that_the_dashboard_links(kind):
    evidence = measurements(1, "run", first_count=1, second_count=1)
    finding = Finding(kind=kind, severity="warning", confidence=1.0, summary="", evidence=evidence)
    assert page_of(kind)[0] == evidence_page(finding).path
