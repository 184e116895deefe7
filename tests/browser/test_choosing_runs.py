"""The page Runs in a real Chromium: choosing rows of its table, and the links and the form that follow."""

import re

import make_run
import pytest
import screenshots
from playwright.sync_api import expect

from collector.store.catalogue import list_runs

#: Pixels: height of a row of the table, and the middle of its check box.
ROW, BOX = 35, 14


@pytest.fixture
def page(tmp_path):
    for script in (make_run.HEALTHY, make_run.SLOW_WORKER):
        make_run.make_run(tmp_path, script)
    with screenshots.dashboard(tmp_path) as base, screenshots.chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(screenshots.address(base, "runs"))
        page.locator("[data-testid=stDataFrame] canvas").first.wait_for()
        yield page


def choose(page, row):
    page.locator("[data-testid=stDataFrame]").first.click(position={"x": BOX, "y": ROW * (row + 1.5)})


def test_chosen_runs_are_edited_opened_and_compared(page, tmp_path):
    newest, older = list_runs(tmp_path)
    choose(page, 0)
    page.get_by_label("Name").fill("baseline")
    page.get_by_label("Note").fill("before the change")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="Open baseline")).to_be_visible()
    assert (newest.name, newest.annotation.note) == ("baseline", "before the change")
    choose(page, 1)
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_url(re.compile(rf"/compare\?run={newest.run_id}"))
    screenshots.await_view(page)
    assert older.run_id in page.locator("[data-testid=stMultiSelect]").inner_text()
    page.get_by_role("link", name="Runs").first.click()
    page.get_by_role("heading", name="What changed from run to run?").wait_for()
    page.locator("[data-testid=stDataFrame] canvas").first.wait_for()
    choose(page, 1)
    page.get_by_role("link", name=re.compile("^.*Open ")).click()
    page.wait_for_url(re.compile(rf"/overview\?run={older.run_id}"))


def test_a_phone_shows_the_table_within_its_width(page):
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.get_by_role("heading", name="What changed from run to run?")).to_be_visible()
    page.wait_for_function("() => document.querySelector('[data-testid=stMain]').scrollWidth <= 390")
