"""The page of the dashboard to open first."""

import pytest

from app.blocks import evidence_page
from app.pages import OVERVIEW
from collector.findings import KINDS
from collector.report.signpost import page_of


@pytest.mark.parametrize("kind", KINDS)
def test_page_of_a_kind_is_the_one_that_the_dashboard_links(kind):
    page = evidence_page(kind)
    assert page_of(kind)[0] == ("" if page is OVERVIEW else page.path)
