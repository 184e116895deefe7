"""`streamlit run app`, as a user starts it, in a real Chromium: during a real job, and with runs that ended."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import make_run
import pytest
import screenshots
from playwright.sync_api import expect

from app.html_report import render
from app.pages import COMPARE, GPU_MEMORY, PAGES, POST_MORTEM
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.store.catalogue import list_runs
from collector.store.lake.reader import read
from collector.store.queries import spans
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "test-artifacts"
START_SECONDS = 60
#: At some time, the newest point of a page that follows its run is younger than this. `benchmarks.pages` measures
#: how long a refresh takes.
FRESH_SECONDS = 8.0
#: Views without charts for a job that has no GPU, has not died, and is compared with no other.
WITHOUT_CHARTS = (GPU_MEMORY, POST_MORTEM, COMPARE)
WINDOW = "last 5 min"
LIVE = "browser"
#: Runs that have ended, the killed one last, so that it is the newest.
ENDED = (make_run.HOSTILE, make_run.HEALTHY, make_run.SLOW_WORKER, make_run.KILLED)
#: Paths that Streamlit requests below the page before it requests them at the root.
PROBES = ("/_stcore/health", "/_stcore/host-config")

#: Other tests on the same cores would delay pages beyond their time to be fresh.
pytestmark = pytest.mark.alone


@contextmanager
def training(home):
    """A real job under `tidegauge run`; gives its run once it has made steps."""
    tidegauge = Path(sys.executable).with_name("tidegauge")
    script = [sys.executable, "examples/plain_train.py", "--steps", "1000000"]
    job = subprocess.Popen(
        [tidegauge, "run", "--name", LIVE, "--", *script],
        cwd=ROOT,
        env={**os.environ, "TIDEGAUGE_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield _await_steps(home, job)
    finally:
        job.terminate()
        job.wait(30)


def _await_steps(home, job):
    def with_steps():
        assert job.poll() is None, f"no steps, exit status {job.poll()}"
        for run in (run for run in list_runs(home) if run.manifest["name"] == LIVE):
            with read(run) as snapshot:
                reach = spans.extent(snapshot)
                steps = int(snapshot.query("SELECT count(*) AS n FROM step")["n"].iloc[0]) if reach else 0
            if steps > 20:
                return run
        return None

    return wait_for(with_steps, "the steps of the job", START_SECONDS)


def newest_seconds(page):
    """The age of the newest point on the screen now, in seconds, by the words of the status line."""
    words = page.get_by_text("data as of").inner_text()
    as_of, age = re.search(r"data as of (\d\d:\d\d:\d\d) .* newest record ([\d.]+) s old", words).groups()
    now = datetime.now(UTC)
    read_at = now.replace(hour=int(as_of[:2]), minute=int(as_of[3:5]), second=int(as_of[6:]), microsecond=999_999)
    if read_at - now > timedelta(hours=12):
        read_at -= timedelta(days=1)
    return max(0.0, (now - read_at).total_seconds()) + float(age)


def await_fresh(page):
    """Wait until the newest point on the screen is fresh: other work on the machine may hold up a refresh."""
    deadline = time.monotonic() + 30
    ages = []
    while time.monotonic() < deadline:
        ages.append(newest_seconds(page))
        if ages[-1] <= FRESH_SECONDS:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"the newest point was never less than {FRESH_SECONDS} s old: {ages}")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A page of a dashboard with a live job and ended runs, the run of the job, and the errors of the page."""
    home = tmp_path_factory.mktemp("home")
    for script in ENDED:
        make_run.make_run(home, script)
    ARTIFACTS.mkdir(exist_ok=True)
    with (
        training(home) as run,
        screenshots.dashboard(home, log=ARTIFACTS / "streamlit.log") as base,
        screenshots.chromium() as browser,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, timezone_id="UTC")
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", lambda answer: _note_failure(answer, complaints))
        page.on("console", lambda message: _note_console(message, complaints))
        page.on("request", lambda request: _note_foreign_request(request.url, base, complaints))
        page.goto(screenshots.address(base, "overview", run=run.run_id, window=WINDOW))
        screenshots.await_view(page)
        yield page, run, complaints


@pytest.mark.parametrize("view", PAGES, ids=lambda view: view.path)
def test_view_is_live_and_without_errors_while_a_job_runs(live, view):
    page, run, complaints = live
    try:
        _check_view(page, view)
    finally:  # the picture is most useful when the test fails
        page.screenshot(path=ARTIFACTS / f"{view.path}.png", full_page=True)
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.locator("[data-testid=stAlertContentError]").all_inner_texts() == []
    assert complaints == []
    # the selection travels in the address
    assert f"run={run.run_id}" in page.url
    assert "window=last+5+min" in page.url


def _check_view(page, view):
    page.get_by_role("link", name=view.title).first.click()
    page.wait_for_url(f"**/{view.path}?*")
    screenshots.await_view(page)
    page.locator(".stMarkdownBadge", has_text="live").first.wait_for(timeout=15_000)
    page.wait_for_function(
        f"seen => {_RECORDS} > seen", arg=_records_count(page), timeout=15_000
    )  # it moves by itself
    # a chart is replaced when its data change: wait for the moment in which all stand
    if view not in WITHOUT_CHARTS:
        page.wait_for_function(
            "() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 2", timeout=15_000
        )
    await_fresh(page)


def test_dragging_in_a_chart_pauses_the_page_and_keeps_the_zoom(live):
    page, _, complaints = live
    page.get_by_role("link", name="Overview").first.click()
    page.locator(".stMarkdownBadge", has_text=re.compile("live|stale")).first.wait_for(timeout=15_000)
    screenshots.await_view(page)
    area = page.locator(".js-plotly-plot .nsewdrag").first
    area.hover(position={"x": 60, "y": 60})
    page.mouse.down()
    try:
        box = area.bounding_box()
        page.mouse.move(box["x"] + 160, box["y"] + 70, steps=10)
        page.locator(".stMarkdownBadge", has_text="paused").first.wait_for(timeout=15_000)
    finally:
        page.mouse.up()
    zoomed = page.evaluate(_RANGE)
    page.wait_for_url("**live=false*")
    seen = _records_count(page)
    with page.expect_download() as got:
        page.locator(".js-plotly-plot").first.hover()
        page.locator(".modebar-btn[data-title^=Download]").first.click()
    assert got.value.suggested_filename == "tidegauge.png"
    assert page.evaluate(_RANGE) == zoomed
    assert _records_count(page) == seen
    page.locator(".st-key-live label").first.click()
    page.wait_for_function(f"seen => {_RECORDS} > seen", arg=seen, timeout=15_000)
    assert complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ended_runs_are_drawn_in_both_themes_and_sizes(live, theme):
    page, run, complaints = live
    base = _base(page)
    ended = [other.run_id for other in list_runs(run.path.parents[1]) if other.path != run.path]
    died = next(run_id for run_id in ended if "-killed-" in run_id)
    page.emulate_media(color_scheme=theme)
    others = [run_id for run_id in ended if run_id != died and "-hostile-" not in run_id]
    page.goto(screenshots.address(base, "compare", run=died, compare=others))
    page.locator(".legendtext", has_text=others[-1]).first.wait_for(timeout=30_000)
    _take_screenshots(page, f"ended-three-{theme}")
    titles = {page_of.path: page_of.title for page_of in PAGES}
    for view in reversed(screenshots.VIEWS):  # ends on the overview
        if f"/{view}?" not in page.url:
            page.get_by_role("link", name=titles[view]).first.click()
        page.wait_for_url(f"**/{view}?*")
        screenshots.await_view(page)
        assert f"run={died}" in page.url
        _take_screenshots(page, f"ended-{view}-{theme}")
        assert page.evaluate(_CUT_LABELS) == []
        assert page.locator("[data-testid=stException], [data-testid=stAlertContentError]").count() == 0
    page.go_back()
    page.wait_for_url("**/oom-risk?*")
    page.get_by_role("heading", name="How near is each limit").wait_for()
    assert complaints == []


def test_clicks_lead_to_downloads_terms_pages_and_runs(live):
    page, run, complaints = live
    base = _base(page)
    slow, well = (_ended_run(run, script).run_id for script in (make_run.SLOW_WORKER, make_run.HEALTHY))
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
    runs = page.get_by_role("combobox", name="Run")
    runs.scroll_into_view_if_needed()
    page.wait_for_function(_FRAMES)  # the list closes on scrolling, which it notices a frame later
    runs.click()
    page.get_by_role("option", name=well).click()
    page.wait_for_url(f"**run={well}*")
    page.get_by_text("No stall has been found").wait_for()
    assert complaints == []


@pytest.mark.parametrize("view", ["worker-stalls", "pipeline-stages"])
def test_hostile_names_make_no_links_and_no_requests(live, view):
    page, run, complaints = live
    hostile = _ended_run(run, make_run.HOSTILE).run_id
    page.goto(screenshots.address(_base(page), view, run=hostile))
    screenshots.await_view(page)
    assert page.get_by_text("e.st").count() > 0
    assert page.locator("a[href*='e.st'], img[src*='e.st']").count() == 0
    assert complaints == []


def test_keyboard_focus_on_a_chart_pauses_the_page(live):
    page, run, complaints = live
    page.goto(screenshots.address(_base(page), "overview", run=run.run_id))
    screenshots.await_view(page)
    page.locator(".stMarkdownBadge", has_text=re.compile("live|stale")).first.wait_for(timeout=15_000)
    page.get_by_text("Which processes hold the host memory?").click()  # from here on
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.url.find("live=false") >= 0:
            break
    page.locator(".stMarkdownBadge", has_text="paused").first.wait_for(timeout=15_000)
    assert page.evaluate("() => document.activeElement.closest('.js-plotly-plot') !== null")
    assert complaints == []


def test_html_report_opens_without_a_network(live, tmp_path):
    page, run, _ = live
    slow = _ended_run(run, make_run.SLOW_WORKER)
    (tmp_path / "report.html").write_text(render(slow, diagnose(load_tables(slow))))
    alone = page.context.browser.new_page()
    complaints = []
    alone.on("pageerror", lambda error: complaints.append(str(error)))
    alone.on("console", lambda message: _note_console(message, complaints))
    alone.on("request", lambda request: _note_foreign_request(request.url, "file:", complaints))
    alone.goto(f"file://{tmp_path}/report.html")
    alone.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 10")
    alone.screenshot(path=ARTIFACTS / "report.png", full_page=True)
    alone.locator("#overview ~ article .annotation text a").first.click()
    assert alone.url.endswith("#worker-stalls")
    assert complaints == []


def _base(page):
    return "/".join(page.url.split("/")[:3])


def _ended_run(run, script):
    """Return the run of a script of `ENDED`."""
    return next(other for other in list_runs(run.path.parents[1]) if f"-{script.name}-" in other.run_id)


_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_CUT_LABELS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(chart => {
  const edge = Math.max(chart.getBoundingClientRect().left,
                        chart.querySelector('.ytitle')?.getBoundingClientRect().right ?? 0);
  return [...chart.querySelectorAll('.ytick text')].filter(label => label.getBoundingClientRect().left < edge - 1)
    .map(label => label.textContent);
})"""
_RANGE = "() => document.querySelector('.js-plotly-plot').layout.xaxis.range"
_RECORDS = (
    "parseInt([...document.querySelectorAll('p')].map(p => p.innerText.match(/([\\d,]+) records ·/))"
    ".filter(Boolean)[0][1].replaceAll(',', ''))"
)


def _take_screenshots(page, name):
    for width, _ in screenshots.SIZES:
        screenshots.show_whole(page, width)
        page.wait_for_timeout(300)  # Plotly draws once more after a resize
        page.screenshot(path=ARTIFACTS / f"{name}-{width}.png")
    page.set_viewport_size(dict(zip(("width", "height"), screenshots.SIZES[0], strict=True)))


def _records_count(page):
    return page.evaluate(f"() => {_RECORDS}")


def _note_failure(answer, complaints):
    if answer.status >= 400 and not answer.url.endswith(PROBES):
        complaints.append(f"{answer.status} {answer.url}")


def _note_console(message, complaints):
    probe = message.location.get("url", "").endswith(PROBES)
    if message.type == "error" and not probe:
        complaints.append(message.text)


def _note_foreign_request(url, base, complaints):
    if not url.startswith((base, base.replace("http", "ws"), "data:", "blob:")):
        complaints.append(f"asked {url}")
