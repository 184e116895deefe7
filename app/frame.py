"""The frame around the views, with the controls for run, rank, window, axis and Live. All are in the URL."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

from app import terms
from app.blocks import FOCUS
from app.figures.base import AXES
from app.format import plain
from app.pages import COMPARE, MENU, OVERVIEW, RUNS
from app.runtime.moment import WINDOW_WORDS, Selection
from app.runtime.refresh import SELECTION
from app.runtime.verdicts import ranks_of, status_of
from app.runtime.visitors import may_enter, runs_or_reason
from collector.store import LATEST, Run, is_trial, own_first, queries
from training_harness.layout import home_path, name_in_run_id

#: Keys of the controls whose values are in the address.
_CONTROLS = ("run", "rank", "window", "x")
#: Runs that can be compared with the chosen one, at most.
MAX_OTHERS = 3
#: Streamlit leaves a hand's breadth empty above a page, and on a phone wide margins at its sides.
_STYLE = """<style>
.stMainBlockContainer { padding: 4rem 3rem 3rem; }
.stMainBlockContainer h2 { padding: 0; }
.stMainBlockContainer [data-testid=stCaptionContainer] code { color: inherit; }
.stMainBlockContainer table :is(th, td) { padding: 0.2rem 0.6rem; }
.stMainBlockContainer td:nth-child(2):last-child { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .stMainBlockContainer { padding: 4rem 0.75rem 2rem; }
  .stMainBlockContainer [data-testid=stMetric] { padding: 0.4rem 0.6rem; }
  .stMainBlockContainer [data-testid=stMetricValue] { font-size: 1.2rem; }
}
</style>"""
LIVE_HELP = "Refresh while the run is active. Zooming into a chart switches this off"


def main() -> None:
    """Draw the frame, then the chosen view."""
    st.set_page_config(page_title="Tidegauge", page_icon=str(Path(__file__).with_name("icon.svg")), layout="wide")
    st.html(_STYLE)
    if not may_enter():
        return
    pages = [st.Page(page.file, title=page.title, icon=page.icon, url_path=page.path) for page in MENU]
    words = st.Page("views/terms.py", title="Terms", url_path=terms.PATH, visibility="hidden")
    # Streamlit serves its default page at / alone. With one of its own there, Overview has a path like the others.
    start = st.Page(_start, title="Tidegauge", default=True, visibility="hidden")
    page = st.navigation([*pages, words, start], position="top")
    if page.url_path not in (terms.PATH, start.url_path, RUNS.path):
        st.session_state[SELECTION] = _select(home_path(), compares=page.url_path == COMPARE.path)
    page.run()


def _start() -> None:
    st.switch_page(OVERVIEW.file, query_params={name: st.query_params.get_all(name) for name in st.query_params})


def _select(home: Path, *, compares: bool) -> Selection | None:
    runs = own_first(runs_or_reason(home))
    if not runs:
        return None
    _settle_address()
    requested = st.query_params.get("run", LATEST)
    if requested != LATEST and all(run.run_id != requested for run in runs):
        words = f"No run {requested} in {home}: it may be deleted, or in another home. The newest one is shown."
        st.warning(plain(words), icon=":material/warning:")
    with st.container(horizontal=True, vertical_alignment="center"):
        run = _pick_run(runs)
        rank = _pick_rank(run)
        window = st.segmented_control(
            "Window",
            queries.WINDOWS,
            default="run",
            required=True,
            format_func=lambda name: WINDOW_WORDS[name],
            key="window",
            bind="query-params",
            label_visibility="collapsed",
        )
        axis = st.segmented_control(
            "X axis",
            AXES,
            default="elapsed",
            required=True,
            key="x",
            bind="query-params",
            label_visibility="collapsed",
        )
        is_over = status_of(run) != "running"
        live = st.toggle("Live", value=True, key="live", bind="query-params", help=LIVE_HELP, disabled=is_over)
    others = _pick_others(run, runs) if compares else ()
    focus = _focus()
    if focus is not None:
        words = "The charts show {:.0f} to {:.0f} s. Show all".format(*focus)
        st.button(words, icon=":material/zoom_out_map:", on_click=_drop_focus)
    return Selection(
        run=run,
        rank=rank,
        window=window or "run",
        axis=axis or "elapsed",
        live=live,
        others=others,
        focus=focus,
    )


def _settle_address() -> None:
    """Write the value of each control into the address once.

    A finding's link has all of them, since it may be opened in a new tab. Streamlit repeats them if it is clicked.
    Where a link asks for another value than the control last had, the link's is the one that counts.
    """
    for name in _CONTROLS:
        if name in st.query_params and st.session_state.get(name) == st.query_params[name]:
            st.session_state[name] = st.session_state[name]


def _drop_focus() -> None:
    del st.query_params[FOCUS]


def _focus() -> tuple[float, float] | None:
    """Return the time that the address asks charts to zoom to, None without a valid one."""
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", st.query_params.get(FOCUS, ""))
    if match is None or float(match[1]) >= float(match[2]):
        return None
    return float(match[1]), float(match[2])


def _pick_run(runs: list[Run]) -> Run:
    """Return the chosen run; `latest`, the default that the URL leaves out, is the first one."""
    by_id = {LATEST: runs[0], **{run.run_id: run for run in runs}}

    def words(name: str) -> str:
        if name == LATEST:
            return f"{LATEST} ({runs[0].run_id})"
        return f"{name} (trial)" if is_trial(by_id[name]) else name

    chosen = st.selectbox(
        "Run",
        list(by_id),
        format_func=words,
        key="run",
        bind="query-params",
        width=420,
        label_visibility="collapsed",
    )
    return by_id[chosen]


def _pick_rank(run: Run) -> int | None:
    ranks = ranks_of(run.path)
    if not ranks:
        return None
    words = ["all ranks", *map(str, ranks)]
    chosen = st.selectbox("Rank", words, key="rank", bind="query-params", width=140, label_visibility="collapsed")
    return None if chosen == "all ranks" else int(chosen)


def _pick_others(run: Run, runs: list[Run]) -> tuple[Run, ...]:
    """Return the runs to compare with, the baseline first; by default the run before the chosen one.

    One of the same script comes before the others.
    """
    by_id = {other.run_id: other for other in runs if other.run_id != run.run_id}
    older = [other.run_id for other in runs[runs.index(run) + 1 :] if is_trial(other) == is_trial(run)]
    before = [name for name in older if name_in_run_id(name) == name_in_run_id(run.run_id)] or older or list(by_id)
    chosen = st.multiselect(
        "Compare with (the first is the baseline)",
        list(by_id),
        default=before[:1],
        max_selections=MAX_OTHERS,
        key="compare",
        bind="query-params",
    )
    return tuple(by_id[name] for name in chosen)


if __name__ == "__main__":
    main()
