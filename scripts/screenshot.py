"""Takes pictures of the dashboard in a real Chromium.

python scripts/screenshot.py HOME --out docs/dashboard.png
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import click
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
VIEWS = {"overview": "", "oom-risk": "oom-risk", "leak-timeline": "leak-timeline", "worker-stalls": "worker-stalls"}
START_SECONDS = 30


@contextmanager
def dashboard(home: Path, *, log: Path | None = None) -> Iterator[str]:
    """Serve `streamlit run app` from the repository root for that home; gives its address.

    Raises:
        RuntimeError: it did not answer in time.

    """
    port = _free_port()
    command = [str(Path(sys.executable).with_name("streamlit")), "run", "app", "--server.port", str(port)]
    environment = {**os.environ, "TIDEGAUGE_HOME": str(home)}
    with (log or Path(os.devnull)).open("wb") as sink:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _await_health(f"http://localhost:{port}", server)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium: the system's where there is one, else Playwright's own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=[
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


def address(base: str, view: str, **query: str) -> str:
    """The address of a view with its query parameters."""
    return f"{base}/{VIEWS[view]}" + (f"?{urlencode(query)}" if query else "")


def await_view(page: Page) -> None:
    """Wait until the view stands: its status line, its charts, and nothing that still runs."""
    page.get_by_text("data as of").wait_for(timeout=20_000)
    drawn = "document.querySelectorAll('.js-plotly-plot .main-svg').length > 0"
    settled = "!document.querySelector('[data-testid=stSkeleton]')"
    page.wait_for_function(f"() => {drawn} && {settled}", timeout=20_000)


@click.command()
@click.argument("home", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs" / "dashboard.png")
@click.option("--view", type=click.Choice([*VIEWS]), default="overview")
@click.option("--run", "run_id", default=None, help="Run id; the newest by default.")
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light")
@click.option("--size", type=(int, int), default=(1280, 900), help="Width and height of the window in pixels.")
@click.option("--whole/--fold", default=False, help="The whole page, or what is above the fold.")
def main(
    home: Path, out: Path, view: str, run_id: str | None, theme: str, size: tuple[int, int], whole: bool
) -> None:
    """Photograph one view of a run in HOME."""
    with dashboard(home) as base, chromium() as browser:
        width, height = size
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
        )
        page.goto(address(base, view, **({"run": run_id} if run_id else {})))
        await_view(page)
        if whole:
            page.set_viewport_size({"width": width, "height": _content_height(page)})
        page.wait_for_timeout(1500)  # Plotly draws once more after a resize
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=out)
    click.echo(f"wrote {out}")


def _content_height(page: Page) -> int:
    return int(page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollHeight + 40"))


def _free_port() -> int:
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
