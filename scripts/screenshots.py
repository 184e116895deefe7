"""Takes pictures of the dashboard in a real Chromium.

python scripts/screenshots.py           the pictures of the README, of a job that it records
python scripts/screenshots.py HOME      every view of the newest run there, into test-artifacts/
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import click
from playwright.sync_api import Browser, Page, sync_playwright

from app.pages import PAGES

ROOT = Path(__file__).resolve().parent.parent
#: Paths of the views.
VIEWS = tuple(page.path for page in PAGES)
SIZES = ((1440, 900), (390, 844))
README_JOB = ("fault", "slow-worker")
START_SECONDS = 30
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
#: JavaScript: true once the status line of a view stands, with the sentence that answers its question below it.
ANSWERED = (
    "[...document.querySelectorAll('[data-testid=stCaptionContainer]')]"
    ".some(each => /data as of|ended/.test(each.textContent))"
)
#: JavaScript: true once nothing runs on the server for the page.
RESTS = "document.querySelector('.stApp')?.dataset.testScriptState === 'notRunning'"
#: JavaScript: true once all of the view stands, with every chart and the verdict, and nothing still runs.
STANDS = " && ".join(
    (
        ANSWERED,
        RESTS,
        "!document.querySelector('[data-testid=stSkeleton]')",
        "[...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(c => c.querySelector('.main-svg'))",
        "!document.body.textContent.includes('verdict is being computed')",
    )
)
#: JavaScript: true once all in sight stands. The page is drawn from its top: something stands below by then.
FILLS = f"""(() => {{
    const charts = '[data-testid=stPlotlyChart]:not(:has(.main-svg))';
    const tops = which => [...document.querySelectorAll(which)].map(each => each.getBoundingClientRect().top);
    return {ANSWERED} && ({RESTS} || tops('[data-testid=stElementContainer]').some(top => top >= innerHeight))
        && !tops('[data-stale=true], [data-testid=stSkeleton], ' + charts).some(top => top < innerHeight);
}})()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Screenshot of a view: its theme, the window's width and height (pixels), whole or above the fold."""

    view: str
    theme: str = "light"
    size: tuple[int, int] = (1280, 900)
    query: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


#: Pictures of the README, high enough to show charts.
README_PICTURES = {
    ROOT / "docs" / "dashboard.png": Picture(view="overview", size=(1280, 1560), whole=False),
    ROOT / "docs" / "worker-stalls.png": Picture(
        view="worker-stalls", theme="dark", size=(1280, 1285), whole=False
    ),
}


@contextmanager
def dashboard(
    home: Path, *, log: Path | None = None, port: int | None = None, options: Sequence[str] = ()
) -> Iterator[str]:
    """Serve `streamlit run app` from the repository root for that home; gives its address.

    Raises:
        RuntimeError: it did not answer in time.
    """
    port = port or free_port()
    streamlit = str(Path(sys.executable).with_name("streamlit"))
    command = [streamlit, "run", "app", "--server.port", str(port), *options]
    environment = {**os.environ, "TIDEGAUGE_HOME": str(home)}
    with (log or Path(os.devnull)).open("wb") as sink:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _await_health(f"http://localhost:{port}", server)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait(60)  # for a verdict that is being computed


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium: the system's where there is one, else Playwright's own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def executable() -> str | None:
    """The system's Chromium, if there is one."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def address(base: str, view: str, **query: str | Sequence[str]) -> str:
    """The address of a view with its query parameters."""
    return f"{base}/{view}" + (f"?{urlencode(query, doseq=True)}" if query else "")


def await_view(page: Page) -> None:
    """Wait until the view stands."""
    page.wait_for_function(f"() => {STANDS}", timeout=60_000)


@click.command()
@click.argument("home", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "test-artifacts", help="Folder.")
@click.option("--view", "views", multiple=True, type=click.Choice([*VIEWS]), help="All by default.")
@click.option("--run", "run_id", default=None, help="Run id; the newest by default.")
def main(home: Path | None, out: Path, views: tuple[str, ...], run_id: str | None) -> None:
    """Photograph the views of a run in HOME, whole, in both themes and two sizes.

    Without HOME, a real job is recorded, and the pictures of the README are taken of it.
    """
    if home is None:
        with tempfile.TemporaryDirectory() as scratch:
            _record(Path(scratch))
            _photograph(Path(scratch), README_PICTURES)
        return
    query = {"run": run_id} if run_id else {}
    _photograph(
        home,
        {
            out / f"{view}-{theme}-{width}.png": Picture(view=view, theme=theme, size=(width, height), query=query)
            for view in views or VIEWS
            for theme in ("light", "dark")
            for width, height in SIZES
        },
    )


def _record(home: Path) -> None:
    """A training that has something to show: two workers, one of them slow."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "TIDEGAUGE_HOME": str(home)}
    subprocess.run([str(programs / "tidegauge"), "job", *README_JOB], cwd=ROOT, env=environment, check=True)


def _photograph(home: Path, pictures: Mapping[Path, Picture]) -> None:
    with dashboard(home) as base, chromium() as browser:
        for path, picture in pictures.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened(browser, base, picture) as page:
                page.screenshot(path=path)
            click.echo(f"wrote {path}")


@contextmanager
def opened(browser: Browser, base: str, picture: Picture) -> Iterator[Page]:
    """The page of a view as a picture shows it, once all of it stands."""
    width, height = picture.size
    scheme: Literal["dark", "light"] = "dark" if picture.theme == "dark" else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(address(base, picture.view, **picture.query))
    await_view(page)
    if picture.whole:
        show_whole(page, width)
    page.wait_for_timeout(1500)  # Plotly draws once more after a resize
    yield page
    page.close()


def show_whole(page: Page, width: int) -> None:
    """Make the window as high as the page: Streamlit scrolls a part of it, which a picture would cut."""
    page.set_viewport_size({"width": width, "height": SIZES[0][1]})
    height = int(page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollHeight + 40"))
    page.set_viewport_size({"width": width, "height": height})


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _await_health(base: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/_stcore/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the dashboard did not answer at {base} within {START_SECONDS} s")


if __name__ == "__main__":
    main()
