"""The line above every view: the state of the run, the age of its data, and problems with them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from app.format import clock, plain
from app.runtime.verdicts import OLD_SECONDS
from collector.store import queries
from collector.store.queries import Extent
from collector.units import MISSING, duration

#: Age of the newest record, in seconds, above which a running run is called stale.
STALE_AFTER_SECONDS = 5.0
_CHIPS = {
    "running": (":material/sensors:", "green", "live"),
    "stale": (":material/hourglass_bottom:", "gray", "stale"),
    "paused": (":material/pause_circle:", "gray", "paused"),
    "finished": (":material/check_circle:", "blue", "finished"),
    "failed": (":material/cancel:", "red", "failed"),
    "killed": (":material/dangerous:", "red", "killed"),
}
_DOCTOR = "tidegauge doctor"
#: State -> words and command for what a reader is likely to want next.
_NEXT = {
    "running": ("The verdict so far, in the terminal:", "tidegauge report {run}"),
    "finished": (
        "All of this as one file, to hand over:",
        "tidegauge report {run} --format html --output run.html",
    ),
    "failed": ("What ended it, with the evidence:", "tidegauge report {run}"),
    "stale": (
        "Nothing is recorded any more: the training is stuck or suspended. What works here, and what follows it:",
        f"{_DOCTOR}\ntidegauge collect {{run}}",
    ),
}
_NEXT |= {"paused": _NEXT["running"], "killed": _NEXT["failed"]}
_MAX_PROBLEMS = 5


def draw_status(
    status: str,
    reach: Extent | None,
    manifest: Mapping[str, Any],
    run_id: str,
    *,
    now_ns: int,
    shown_ns: int,
    live: bool,
    verdict_seconds: float,
) -> None:
    """Draw the run's state, the age of its data, and the command that a reader may want next.

    Args:
        status: of the run.
        reach: first and newest time of its records, None if it has none.
        manifest: of the run.
        run_id: of the run.
        now_ns: monotonic time on the run's host.
        shown_ns: time at which the figures were read, on the same clock; earlier than now if they are cached.
        live: whether the page reads the run again and again.
        verdict_seconds: age of the verdict, NaN if there is none.

    """
    running = status == "running"
    age_seconds = None if reach is None else max(0.0, (now_ns - reach.newest_ns) / 1e9)
    state = "paused" if running and not live else status
    if live and age_seconds is not None and age_seconds > STALE_AFTER_SECONDS:
        state = "stale"
    icon, colour, word = _CHIPS[state]
    words = []
    as_of = queries.wall_ns(manifest, shown_ns if running or reach is None else reach.newest_ns)
    words.append(f"data as of {clock(as_of, _zone()) if as_of is not None else MISSING}")
    if reach is not None:
        words.append(f"{reach.records_count:,} samples")
    if running and age_seconds is not None:
        words.append(f"newest record {age_seconds:.1f} s old")
    if live and verdict_seconds > OLD_SECONDS:
        words.append(f"verdict {duration(verdict_seconds)} old")
    with st.container(horizontal=True, vertical_alignment="center"):
        badge = f"{word} {duration(age_seconds)}" if state == "stale" else word
        st.badge(badge, icon=icon, color=colour)  # type: ignore[arg-type]
        st.caption(" · ".join(words), width="content")
        if running and not live:
            st.caption("Switch Live on to follow the run again.", width="content")
        say, command = _NEXT[state]
        with st.popover("Terminal", icon=":material/terminal:", type="tertiary"):
            st.caption(say)
            st.code(command.format(run=shlex.quote(run_id)), language="bash", wrap_lines=True)


def draw_problems(problems: Sequence[str]) -> None:
    """Draw a list of records that could not be read, if there are any."""
    if problems:
        shown = [f"- {plain(problem)}" for problem in problems[:_MAX_PROBLEMS]]
        more_count = len(problems) - _MAX_PROBLEMS
        more = [f"- and {more_count} more"] if more_count > 0 else []
        text = "\n".join(["Some records could not be read; the rest is shown.", *shown, *more])
        st.warning(text, icon=":material/warning:")
        st.code(_DOCTOR, language="bash")


def draw_failure(what: str, run_id: str) -> None:
    """Draw the reason why a run cannot be shown, and the commands that explain more."""
    st.error(plain(what), icon=":material/error:")
    st.code(f"{_DOCTOR}\ntidegauge report {shlex.quote(run_id)}", language="bash", wrap_lines=True)


def draw_no_records(status: str) -> None:
    """Draw the note that a run has no records yet, or never will."""
    if status == "running":
        st.info(
            "No records yet: they begin with the first DataLoader iterator, optimizer step or third forward pass.",
            icon=":material/hourglass_top:",
        )
    else:
        st.info(
            "This run left no records: the command ended before a DataLoader or an optimizer was used. "
            "This says what works here:",
            icon=":material/info:",
        )
    st.code(_DOCTOR, language="bash")


def _zone() -> ZoneInfo:
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")
