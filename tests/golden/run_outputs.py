"""The report and pages of a recorded run, by the command line alone, in a form that can be compared.

The pages are read from the HTML report, which has every page but Compare: the words in order, and each figure as
Plotly draws it, with its long arrays digested. The report is the public JSON of the same verdict.

What depends on the machine that reads is set before it is read: the run keeps the name of its archive, its boot is
one that no machine has (so its processes are neither alive nor dead, and now is its last record), and there is no
home. The version of the reader is in none of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from streamlit.testing.v1 import AppTest

from app import html_report
from app.pages import PAGES
from collector.commands.report import as_report
from tests.golden.cases import COMPARED, steady_pages
from tests.golden.page_reader import PageReader, figure
from tests.recorded_runs import unpack

DASHBOARD = Path(__file__).parents[2] / "app" / "frame.py"


def judge(name: str, home: Path, pages: Collection[str] = ()) -> dict[str, Any]:
    """Return the report and these pages of a recorded run, or all, unpacked in an empty folder."""
    run = unpack(name, home)
    chosen = [page for page in PAGES if page.path in (pages or steady_pages(name))]
    output = home / "report.html"
    with (
        patch.object(html_report, "RUN_PAGES", chosen),
        patch.object(html_report, "render", wraps=html_report.render) as render,
    ):
        run_command("report", str(run), "--format", "html", "--output", str(output))
    reader = PageReader()
    reader.feed(output.read_text().rpartition("<body>")[2])
    # The same verdict: to print the report would take as long again.
    return {"report": json.loads(json.dumps(as_report(*render.call_args.args))), "pages": reader.pages}


def printed_report(run: Path) -> Any:
    """Return what `tidegauge report --format json` says of a run."""
    return json.loads(run_command("report", str(run), "--format", "json"))


def compare(home: Path, names: Sequence[str] = COMPARED) -> dict[str, Any]:
    """Return what `tidegauge compare` and the page Compare show for several recorded runs."""
    runs = [unpack(name, home) for name in names]
    table = json.loads(run_command("compare", *map(str, runs), "--format", "json"))
    return {"table": table, "figures": compared_figures(home, names)}


def compared_figures(home: Path, names: Sequence[str]) -> list[Any]:
    """Return the figures of the page Compare, as a browser gets them."""
    page = AppTest.from_file(str(DASHBOARD), default_timeout=60)
    page.query_params["run"], page.query_params["compare"] = names[0], list(names[1:])
    with environment(TIDEGAUGE_HOME=str(home)):
        page.run()
        page.switch_page("views/compare.py").run()
    if page.exception:
        raise RuntimeError(page.exception[0].value)
    specs = [json.loads(chart.proto.spec) for chart in page.get("plotly_chart")]
    return [figure(spec["data"], spec["layout"]) for spec in specs]


def run_command(*words: str) -> str:
    """Run `python -m collector` in this process, where its modules are loaded once, and return its output."""
    output, argv = io.StringIO(), sys.argv
    with (
        tempfile.TemporaryDirectory() as home,
        environment(TIDEGAUGE_HOME=home),
        contextlib.redirect_stdout(output),
    ):
        sys.argv = ["tidegauge", *words]
        try:
            runpy.run_module("collector", run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"tidegauge {' '.join(words)}: exit status {ended.code}") from None
        finally:
            sys.argv = argv
    return output.getvalue()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set these variables for the block, and of Tidegauge's no others."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("TIDEGAUGE")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
