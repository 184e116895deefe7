"""Ended runs in a real Chromium: pages in both themes and sizes, links, downloads, and the HTML report."""

import re
from pathlib import Path
from typing import NamedTuple

import make_run
import pytest
import screenshots
from playwright.sync_api import Page, expect

from app.html_report import render
from app.pages import PAGES
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.store.runs.run import Run
from tests.browser.watched_pages import watched_page

ARTIFACTS = Path(__file__).parents[2] / "test-artifacts"


class Dashboard(NamedTuple):
    """A page of a dashboard, its address, the runs by script, and the errors of the page."""

    page: Page
    base: str
    runs: dict
    complaints: list


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    scripts = (make_run.HOSTILE, make_run.HEALTHY, make_run.SLOW_WORKER, make_run.KILLED)
    runs = {script: Run(make_run.make_run(home, script)) for script in scripts}
    ARTIFACTS.mkdir(exist_ok=True)
    with (
        screenshots.dashboard(home, log=ARTIFACTS / "streamlit-ended.log") as base,
        screenshots.chromium() as browser,
    ):
        page, complaints = watched_page(browser, base, viewport={"width": 1280, "height": 1600}, timezone_id="UTC")
        yield Dashboard(page, base, runs, complaints)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ended_runs_are_drawn_in_both_themes_and_sizes(dashboard, theme):
    page, base, runs, complaints = dashboard
    died = runs[make_run.KILLED].run_id
    page.emulate_media(color_scheme=theme)
    others = [runs[script].run_id for script in (make_run.HEALTHY, make_run.SLOW_WORKER)]
    page.goto(screenshots.address(base, "compare", run=died, compare=others))
    page.locator(".legendtext", has_text=others[-1].split("-", 2)[2]).first.wait_for(timeout=30_000)
    sizes = screenshots.SIZES if theme == "light" else screenshots.SIZES[:1]  # a size looks the same in the dark
    _take_screenshots(page, f"ended-three-{theme}", sizes)
    titles = {page_of.path: page_of.title for page_of in PAGES}
    for view in reversed(screenshots.VIEWS):  # ends on the overview
        if f"/{view}?" not in page.url:
            page.get_by_role("link", name=titles[view]).first.click()
        page.wait_for_url(f"**/{view}?*")
        screenshots.await_view(page)
        assert f"run={died}" in page.url
        _take_screenshots(page, f"ended-{view}-{theme}", sizes)
        assert page.evaluate(_CUT_LABELS) == []
        assert page.locator("[data-testid=stException], [data-testid=stAlertContentError]").count() == 0
    page.go_back()
    page.wait_for_url("**/oom-risk?*")
    page.get_by_role("heading", name="How near is each limit").wait_for()
    assert complaints == []


def test_clicks_lead_to_downloads_terms_pages_and_runs(dashboard):
    page, base, runs, complaints = dashboard
    slow, well = runs[make_run.SLOW_WORKER].run_id, runs[make_run.HEALTHY].run_id
    page.goto(screenshots.address(base, "worker-stalls", run=well))
    screenshots.await_view(page)
    memory = page.locator("[data-testid=stMetric]", has_text="Host memory")
    before = memory.inner_text()
    page.get_by_role("slider", name="num_workers").press("End")
    expect(memory).not_to_have_text(before)
    page.goto(screenshots.address(base, "worker-stalls", run=slow))
    screenshots.await_view(page)
    with page.expect_download() as got:
        page.get_by_test_id("stDownloadButton").get_by_role("button").click()
    assert got.value.suggested_filename == f"{slow}-workers.csv"
    page.goto(screenshots.address(base, "overview", run=slow))
    screenshots.await_view(page)
    page.get_by_test_id("stMain").get_by_test_id("stTooltipIcon").last.hover()
    with page.expect_popup() as opened:
        page.get_by_test_id("stTooltipContent").get_by_role("link", name="PSS").click()
    opened.value.get_by_role("heading", name="What do the words mean?").wait_for()
    assert opened.value.url.endswith("/terms#pss")
    opened.value.close()
    assert "/overview?" in page.url  # the first page has an address of its own, besides that of the server
    link = page.get_by_role("link", name="See Workers & stalls")
    alone = page.context.browser.new_page()  # as if the link were opened in a new tab
    alone.goto(f"{base}/{link.get_attribute('href')}")
    alone.get_by_role("button", name="Show all").wait_for()
    assert alone.get_by_role("combobox", name="Run").input_value() == slow
    alone.close()
    link.click()
    page.wait_for_url("**/worker-stalls?*focus=*")
    page.get_by_role("button", name="Show all").wait_for()
    page.wait_for_function("() => (location.search.match(/run=/g) ?? []).length === 1")
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("button", name="Show all").wait_for(state="hidden")
    page.get_by_role("link", name="Show it in the charts").click()
    page.get_by_role("button", name="Show all").wait_for()
    assert page.get_by_role("combobox", name="Run").input_value() == slow
    page.goto(screenshots.address(base, "overview", run=slow))
    screenshots.await_view(page)
    page.locator(".annotation a", has_text=re.compile("slow-worker (after|from)")).last.click()
    page.wait_for_url(f"**/worker-stalls?run={slow}")
    page.get_by_role("heading", name="What does training wait for").wait_for()
    screenshots.await_view(page)
    assert page.locator(".annotation", has_text=re.compile("slow-worker (after|from)")).count() > 0
    choice = page.get_by_role("combobox", name="Run")
    choice.scroll_into_view_if_needed()
    page.wait_for_function(_FRAMES)  # the list closes on scrolling, which it notices a frame later
    choice.click()
    page.get_by_role("option", name=well).click()
    page.wait_for_url(f"**run={well}*")
    page.get_by_text("No stall has been found").wait_for()
    assert complaints == []


def test_a_long_path_in_the_exit_record_does_not_widen_a_narrow_page(dashboard):
    page, base, runs, _ = dashboard
    page.goto(screenshots.address(base, "post-mortem", run=runs[make_run.KILLED].run_id))
    screenshots.await_view(page)
    screenshots.show_whole(page, 390)
    fact = page.get_by_role("row", name="Victim").get_by_role("cell").last
    fact.evaluate("cell => { cell.textContent = '/kubepods/' + 'a'.repeat(100); }")
    assert page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth") <= 390
    page.set_viewport_size(dict(zip(("width", "height"), screenshots.SIZES[0], strict=True)))


@pytest.mark.parametrize("view", ["worker-stalls", "pipeline-stages"])
def test_hostile_names_make_no_links_and_no_requests(dashboard, view):
    page, base, runs, complaints = dashboard
    page.goto(screenshots.address(base, view, run=runs[make_run.HOSTILE].run_id))
    screenshots.await_view(page)
    assert page.get_by_text("e.st").count() > 0
    assert page.locator("a[href*='e.st'], img[src*='e.st']").count() == 0
    assert complaints == []


def test_html_report_opens_without_a_network(dashboard, tmp_path):
    slow = dashboard.runs[make_run.SLOW_WORKER]
    (tmp_path / "report.html").write_text(render(slow, diagnose(load_tables(slow))))
    alone, complaints = watched_page(dashboard.page.context.browser, "file:")
    alone.goto(f"file://{tmp_path}/report.html")
    alone.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 10")
    alone.screenshot(path=ARTIFACTS / "report.png", full_page=True)
    alone.locator("#overview ~ article .annotation text a").first.click()
    assert alone.url.endswith("#worker-stalls")
    assert complaints == []


_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_CUT_LABELS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(chart => {
  const edge = Math.max(chart.getBoundingClientRect().left,
                        chart.querySelector('.ytitle')?.getBoundingClientRect().right ?? 0);
  return [...chart.querySelectorAll('.ytick text')].filter(label => label.getBoundingClientRect().left < edge - 1)
    .map(label => label.textContent);
})"""


def _take_screenshots(page, name, sizes):
    for width, _ in sizes:
        screenshots.show_whole(page, width)
        page.wait_for_timeout(300)  # Plotly draws once more after a resize
        page.screenshot(path=ARTIFACTS / f"{name}-{width}.png")
    page.set_viewport_size(dict(zip(("width", "height"), screenshots.SIZES[0], strict=True)))
