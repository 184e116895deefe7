"""Open pages of the dashboard as a browser would, and read what they show."""

import json
from pathlib import Path

from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app.pages import PAGES
from training_harness import layout

ENTRY = Path(__file__).parents[2] / "app" / "frame.py"
VIEWS = tuple(page.module for page in PAGES)
#: View -> words and a command that it shows in place of charts, if the run has nothing to draw.
INSTEAD = {"gpu_memory": ("CPU-only run", "tidegauge doctor"), "compare": ("No other run", "tidegauge run")}
#: Views without charts if the run is alone in its home: for a run of `make_run`, and for the recorded run on a GPU.
EMPTY_ON_CPU, EMPTY_ON_GPU = ("gpu_memory", "compare"), ("compare",)


def run_of(home):
    return next((home / "runs").iterdir())


def open_view(monkeypatch, home, view, **query):
    monkeypatch.setenv(layout.HOME_VARIABLE, str(home))
    at = AppTest.from_file(str(ENTRY), default_timeout=30)
    for name, value in query.items():
        at.query_params[name] = value
    if view != VIEWS[0]:
        at._page_hash = calc_hash(view.replace("_", "-"))  # switch_page() would need a first page
    at.run()
    assert not at.exception, at.exception
    return at


def figures(at):
    return [json.loads(chart.proto.spec) for chart in at.get("plotly_chart")]


def texts(at):
    """Return all text of the page in one string."""
    parts = [*at.caption, *at.markdown, *at.header, *at.info, *at.warning, *at.error, *at.subheader, *at.code]
    expanders = [expander.label for expander in at.expander]
    return "\n".join([*(str(part.value) for part in parts), *expanders])


def checked_figures(at, view, *, cuda=False):
    """Return the figures of a page; without any, check that it says why and what to type."""
    shown = figures(at)
    if view in (EMPTY_ON_GPU if cuda else EMPTY_ON_CPU):
        said, command = INSTEAD[view]
        assert not shown
        assert said in texts(at)
        assert any(command in code.value for code in at.code)
    else:
        assert shown
    return shown


def trace_names(figure):
    return [trace["name"] for trace in figure["data"]]


def longest_trace(figure):
    """Return the points of the longest trace; arrays travel as typed base64 blocks."""
    widths = {"f4": 4, "f8": 8, "i1": 1, "i2": 2, "i4": 4}
    lengths = [0]
    for trace in figure["data"]:
        x = trace["x"]
        lengths.append(len(x["bdata"]) * 3 // 4 // widths[x["dtype"]] if isinstance(x, dict) else len(x))
    return max(lengths)


def walk(monkeypatch, home, **query):
    """Yield (name, page) of every view of a home, opened in one session."""
    at = open_view(monkeypatch, home, VIEWS[0], **query)
    for view in VIEWS:
        if view != VIEWS[0]:
            at.switch_page(f"views/{view}.py").run()
        assert not at.exception, at.exception
        yield view, at
