"""`streamlit run app`, as a user starts it, in a real Chromium during a real job."""

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

from app.pages import COMPARE, GPU_MEMORY, PAGES, POST_MORTEM
from collector.store.catalogue import list_runs
from collector.store.lake.reader import read
from collector.store.queries import spans
from tests.browser.watched_pages import watched_page
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


@contextmanager
def training(home):
    """A real job under `tidegauge run`, which mostly sleeps; gives its run once it has made steps."""
    tidegauge = Path(sys.executable).with_name("tidegauge")
    command = [sys.executable, "-P", "-m", "training_harness.jobs", "fault", "slow-worker", "--fixed"]
    job = subprocess.Popen(
        [tidegauge, "run", "--name", LIVE, "--", *command, "--steps", "1000000"],
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
    """A page of a dashboard with a live job and an ended run, the run of the job, and the errors of the page."""
    home = tmp_path_factory.mktemp("home")
    make_run.make_run(home, make_run.KILLED)
    ARTIFACTS.mkdir(exist_ok=True)
    with (
        training(home) as run,
        screenshots.dashboard(home, log=ARTIFACTS / "streamlit.log") as base,
        screenshots.chromium() as browser,
    ):
        page, complaints = watched_page(browser, base, viewport={"width": 1280, "height": 1600}, timezone_id="UTC")
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


def test_keyboard_focus_on_a_chart_pauses_the_page(live):
    page, run, complaints = live
    page.goto(screenshots.address(_base(page), "overview", run=run.run_id))
    screenshots.await_view(page)
    page.locator(".stMarkdownBadge", has_text=re.compile("live|stale")).first.wait_for(timeout=15_000)
    page.get_by_text("Which processes hold the host memory?").click()  # from here on
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(_FOCUS_ON_CHART):
            break
    page.locator(".stMarkdownBadge", has_text="paused").first.wait_for(timeout=15_000)
    page.wait_for_url("**live=false*")
    assert page.evaluate(_FOCUS_ON_CHART)
    assert complaints == []


def _base(page):
    return "/".join(page.url.split("/")[:3])


_FOCUS_ON_CHART = "() => document.activeElement.closest('.js-plotly-plot') !== null"
_RANGE = "() => document.querySelector('.js-plotly-plot').layout.xaxis.range"
_RECORDS = (
    "parseInt([...document.querySelectorAll('p')].map(p => p.innerText.match(/([\\d,]+) records ·/))"
    ".filter(Boolean)[0][1].replaceAll(',', ''))"
)


def _records_count(page):
    return page.evaluate(f"() => {_RECORDS}")
