"""`streamlit run app`, as a user starts it, while a real job runs, in a real Chromium."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import screenshot

from collector.store import queries
from collector.store.reader import read
from collector.store.runs import list_runs
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "test-artifacts"
START_SECONDS = 60
#: From a step's end to its point in the dashboard.
FRESH_SECONDS = 2.0
WINDOW = "last 5 min"
#: Streamlit looks for its server beside the page before it looks at the root.
PROBES = ("/_stcore/health", "/_stcore/host-config")


@contextmanager
def training(home):
    """A real job under `tidegauge run`; gives its run once it has made steps."""
    tidegauge = Path(sys.executable).with_name("tidegauge")
    script = [sys.executable, "examples/plain_train.py", "--steps", "1000000"]
    job = subprocess.Popen(
        [tidegauge, "run", "--name", "browser", "--", *script],
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
        for run in list_runs(home):
            with read(run) as snapshot:
                reach = queries.extent(snapshot)
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
    deadline = time.monotonic() + 20
    ages = []
    while time.monotonic() < deadline:
        ages.append(newest_seconds(page))
        if ages[-1] <= FRESH_SECONDS:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"the newest point was never less than {FRESH_SECONDS} s old: {ages}")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A page of a dashboard that follows a live job, and everything in it that should not be."""
    home = tmp_path_factory.mktemp("home")
    ARTIFACTS.mkdir(exist_ok=True)
    with (
        training(home) as run,
        screenshot.dashboard(home, log=ARTIFACTS / "streamlit.log") as base,
        screenshot.chromium() as browser,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, timezone_id="UTC")
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", lambda answer: _note_failure(answer, complaints))
        page.on("console", lambda message: _note_console(message, complaints))
        page.on("request", lambda request: _note_stranger(request.url, base, complaints))
        page.goto(screenshot.address(base, "overview", run=run.run_id, window=WINDOW))
        screenshot.await_view(page)
        yield page, run, complaints


@pytest.mark.parametrize("view", ["Overview", "OOM risk", "Leak timeline", "Worker stalls"])
def test_a_view_is_live_and_clean_while_a_job_runs(live, view):
    page, run, complaints = live
    name = view.lower().replace(" ", "-")
    try:
        _look(page, view, name)
    finally:  # a picture tells most when the test fails
        page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True)
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.locator("[data-testid=stAlertContentError]").all_inner_texts() == []
    assert complaints == []
    # the selection travels in the address
    assert f"run={run.run_id}" in page.url
    assert "window=last+5+min" in page.url


def _look(page, view, name):
    page.get_by_role("link", name=view).first.click()
    page.wait_for_url(f"**/{'' if view == 'Overview' else name}?*")
    screenshot.await_view(page)
    page.locator(".stMarkdownBadge", has_text="live").first.wait_for(timeout=15_000)
    page.wait_for_function(f"seen => {_SAMPLES} > seen", arg=_samples(page), timeout=15_000)  # it moves by itself
    # a chart is replaced when its data change: wait for the moment in which all stand
    page.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 2", timeout=15_000
    )
    await_fresh(page)


_SAMPLES = (
    "parseInt([...document.querySelectorAll('p')].map(p => p.innerText.match(/([\\d,]+) samples ·/))"
    ".filter(Boolean)[0][1].replaceAll(',', ''))"
)


def _samples(page):
    return page.evaluate(f"() => {_SAMPLES}")


def _note_failure(answer, complaints):
    if answer.status >= 400 and not answer.url.endswith(PROBES):
        complaints.append(f"{answer.status} {answer.url}")


def _note_console(message, complaints):
    probe = message.location.get("url", "").endswith(PROBES)
    if message.type == "error" and not probe:
        complaints.append(message.text)


def _note_stranger(url, base, complaints):
    if not url.startswith((base, base.replace("http", "ws"), "data:", "blob:")):
        complaints.append(f"asked {url}")
