"""The frame around the views: which run, which rank, which window, live or not. All of it is in the URL."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app.panel import SELECTION, Selection, one_line, ranks_of
from collector.store import queries
from collector.store.runs import LATEST, Run, list_runs
from training_harness.layout import home_path

VIEWS = (
    st.Page("views/overview.py", title="Overview", icon=":material/dashboard:", url_path="overview", default=True),
    st.Page("views/oom_risk.py", title="OOM risk", icon=":material/memory:", url_path="oom-risk"),
    st.Page(
        "views/leak_timeline.py", title="Leak timeline", icon=":material/trending_up:", url_path="leak-timeline"
    ),
    st.Page("views/worker_stalls.py", title="Worker stalls", icon=":material/hourglass:", url_path="worker-stalls"),
)
WINDOW_WORDS = {"5min": "last 5 min", "500steps": "last 500 steps", "run": "whole run"}
QUICK_START = """tidegauge run -- python train.py     # your own script, unchanged
tidegauge job images                 # or a built-in job
tidegauge report                     # the verdict in the terminal"""


def main() -> None:
    """Draw the frame, then the chosen view."""
    st.set_page_config(page_title="Tidegauge", page_icon=str(Path(__file__).with_name("icon.svg")), layout="wide")
    page = st.navigation(list(VIEWS), position="top")
    st.session_state[SELECTION] = _select(home_path())
    page.run()


def _select(home: Path) -> Selection | None:
    try:
        found = list_runs(home)
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader needs one line, not a traceback
        st.error(
            f"Cannot read the runs in {home}: {one_line(error)}. Mend it, or set TIDEGAUGE_HOME to another home.",
            icon=":material/error:",
        )
        return None
    if not found:
        st.subheader("No runs yet", anchor=False)
        st.markdown(f"Nothing has been recorded in `{home}`. Start a training under Tidegauge:")
        st.code(QUICK_START, language="bash")
        return None
    with st.container(horizontal=True, vertical_alignment="bottom"):
        run = _pick_run(found)
        rank = _pick_rank(run)
        window = st.segmented_control(
            "Window",
            queries.WINDOWS,
            default="run",
            required=True,
            format_func=lambda name: WINDOW_WORDS[name],
            key="window",
            bind="query-params",
        )
        live = st.toggle("Live", value=True, key="live", bind="query-params", help="Refresh while the run goes on")
    return Selection(run=run, rank=rank, window=window or "run", live=live)


def _pick_run(runs: list[Run]) -> Run:
    """The chosen run; `latest`, which the URL does not name, is whichever is newest."""
    by_id = {LATEST: runs[0], **{run.run_id: run for run in runs}}
    chosen = st.selectbox(
        "Run",
        list(by_id),
        format_func=lambda name: f"{LATEST} ({runs[0].run_id})" if name == LATEST else name,
        key="run",
        bind="query-params",
        width=420,
    )
    return by_id[chosen]


def _pick_rank(run: Run) -> int | None:
    ranks = ranks_of(run)
    if not ranks:
        return None
    words = ["all ranks", *map(str, ranks)]
    chosen = st.selectbox("Rank", words, key="rank", bind="query-params", width=140)
    return None if chosen == "all ranks" else int(chosen)


main()
