"""Draw the content of a view: the state of the run and the age of its data, the answer, and the rows of panels."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.blocks import Block, draw
from app.figures.base import Chart
from app.format import ago, clock, date, plain
from app.runtime.verdicts import VerdictState
from collector.store import Run, queries
from collector.store.queries import Extent
from collector.units import MISSING, duration

#: Pause after reading a live view, in multiples of the reading's cost.
REST_PER_COST = 3
#: Content older than this is built as a whole, not by turns: a reader left the page and comes back.
REUSE_LIMIT_NS = 5 * 10**9
#: Seconds between the answer and the first charts of a page. A browser that gets both at once evaluates Plotly's
#: script, for a second or so, before it paints either.
PAINT_SECONDS = 0.2
#: Seconds after which a page shows the age of its verdict.
OLD_SECONDS = 15
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
        "Save this as one file to share:",
        "tidegauge report {run} --format html --output run.html",
    ),
    "failed": ("How the run ended, with evidence:", "tidegauge report {run}"),
    "stale": (
        "No new records: the training is stuck or suspended. Check this machine, then follow the run again:",
        f"{_DOCTOR}\ntidegauge collect {{run}}",
    ),
}
_NEXT |= {"paused": _NEXT["running"], "killed": _NEXT["failed"]}
_MAX_PROBLEMS = 5
#: Key of the session's state: charts were drawn.
_HAS_CHARTS = "tidegauge-has-charts"
#: Key of the control that chooses a DataLoader.
LOADER = "loader"
#: Panels that stand side by side: each a name, and its blocks or the line that says why there are none.
Row = Sequence[tuple[str, list[Block] | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContent:
    """All that a view shows, as of one moment (`now_ns` on the run's host, `read_ns` on this machine).

    `cost_ns` is what reading and building took. `turn` is the turn whose panels are new (-1: all are); the others
    are as old as the previous content. `is_pending` is True while a verdict is awaited, of the run or of one that
    it is compared with.
    """

    reach: Extent | None
    manifest: Mapping[str, Any]
    now_ns: int
    read_ns: int
    problems: tuple[str, ...]
    cost_ns: int = 0
    turn: int = -1
    loaders: tuple[int, ...] = ()
    verdict: VerdictState = field(default_factory=VerdictState)
    is_pending: bool = False
    answer: str = ""
    rows: Sequence[Row] = ()

    @property
    def is_due(self) -> bool:
        """True if the pause that its cost asks for is over."""
        return time.monotonic_ns() - self.read_ns > (1 + REST_PER_COST) * self.cost_ns

    @property
    def is_reusable(self) -> bool:
        """True if panels of other turns may stay while those of one turn are built."""
        return bool(self.rows) and time.monotonic_ns() - self.read_ns < REUSE_LIMIT_NS


@dataclass(slots=True, kw_only=True)
class Drawing:
    """The progress of drawing one content, row by row; `has_timer` says whether the page refreshes itself."""

    view: str
    status: str
    run: Run
    live: bool
    has_timer: bool
    _problems: DeltaGenerator | None = None
    _rows_count: int = 0

    def draw_new_rows(self, content: ViewContent) -> None:
        """Draw all that is not on the page yet."""
        if self._problems is None:
            if content.is_pending and not self.has_timer:
                st.rerun()  # with the timer: the files of a finished run changed while it was read
            self._problems = self._draw_top(content)
        why_not = content.verdict.why_not
        for whole_row in content.rows[self._rows_count :]:
            row = [(name, blocks) for name, blocks in whole_row if blocks]  # a panel without blocks leaves no hole
            has_chart = any(isinstance(block, Chart) for _, blocks in row for block in blocks)
            if has_chart and _HAS_CHARTS not in st.session_state:
                st.session_state[_HAS_CHARTS] = True
                time.sleep(PAINT_SECONDS)
            columns = st.columns(len(row)) if len(row) > 1 else [st.container() for _ in row]
            for (name, blocks), column in zip(row, columns, strict=True):
                with column:
                    _draw_panel(self.view, name, "as above" if blocks == why_not else blocks)
        self._rows_count = len(content.rows)

    def _draw_top(self, content: ViewContent) -> DeltaGenerator:
        """Draw all above the rows, and return the container for read problems."""
        self._draw_status(content)
        problems = st.container()
        if why_not := content.verdict.why_not:
            draw_failure(f"No verdict: {why_not}", self.run.run_id)
        if content.is_pending:
            st.caption(":material/hourglass_top: The verdict is being computed. The figures below are current.")
        if content.answer:
            st.markdown(f"**{plain(content.answer)}**")
        if len(content.loaders) > 1:
            st.segmented_control(
                "DataLoader",
                sorted(content.loaders),
                default=content.loaders[0],
                required=True,
                key=LOADER,
                bind="query-params",
            )
        return problems

    def _draw_status(self, content: ViewContent) -> None:
        """Draw the run's state, the age of its data, and the command that a reader may want next."""
        reach, running = content.reach, self.status == "running"
        now_ns = content.now_ns + time.monotonic_ns() - content.read_ns
        age_seconds = None if reach is None else max(0.0, (now_ns - reach.newest_ns) / 1e9)
        state = "paused" if running and not self.live else self.status
        if self.live and age_seconds is not None and age_seconds > STALE_AFTER_SECONDS:
            state = "stale"
        icon, colour, word = _CHIPS[state]
        newest_ns = content.now_ns if running or reach is None else reach.newest_ns
        as_of, dates = queries.wall_ns(content.manifest, newest_ns), None
        if running or reach is None or as_of is None:
            words = [f"data as of {clock(as_of, viewer_zone()) if as_of is not None else MISSING}"]
        else:
            words = [self.run.name, f"ended {ago(time.time() - as_of / 1e9)}"]
            dates = _dates(content.manifest, reach)
        if reach is not None:
            words.append(f"{reach.records_count:,} records")
        if running and age_seconds is not None:
            words.append(f"newest record {age_seconds:.1f} s old")
        if self.live and content.verdict.age_seconds > OLD_SECONDS:
            words.append(f"verdict {duration(content.verdict.age_seconds)} old")
        with st.container(horizontal=True, vertical_alignment="center"):
            badge = f"{word} {duration(age_seconds)}" if state == "stale" else word
            st.badge(badge, icon=icon, color=colour)  # type: ignore[arg-type]
            st.caption(plain(" · ".join(words)), width="content", help=dates)
            if running and not self.live:
                st.caption("Switch Live on to follow the run again.", width="content")
            say, command = _NEXT[state]
            with st.popover("Terminal", icon=":material/terminal:", type="tertiary"):
                st.caption(say)
                st.code(command.format(run=shlex.quote(self.run.run_id)), language="bash", wrap_lines=True)

    def finish(self, content: ViewContent) -> None:
        """Draw the read problems, which the last row may add to."""
        assert self._problems is not None
        with self._problems:
            _draw_problems(content.problems)
            if content.reach is None and not content.problems:
                _draw_no_records(self.status)


def _dates(manifest: Mapping[str, Any], reach: Extent) -> str:
    """Return when the first and the last record of a run were made, in the visitor's time zone."""
    zone = viewer_zone()
    first, last = (queries.wall_ns(manifest, time_ns) for time_ns in (reach.first_ns, reach.newest_ns))
    return f"{date(first, zone)} to {date(last, zone)} ({zone.key})" if first and last else MISSING


def _draw_panel(view: str, panel: str, content: list[Block] | str) -> None:
    if isinstance(content, str):
        st.error(plain(f"{panel} cannot be shown: {content}"), icon=":material/error:")
        return
    for number, block in enumerate(content):
        draw(block, key=f"{view}-{panel}-{number}")


def _draw_problems(problems: Sequence[str]) -> None:
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


def _draw_no_records(status: str) -> None:
    if status == "running":
        st.info(
            "No records yet: they begin with the first DataLoader iterator, optimizer step or third forward pass.",
            icon=":material/hourglass_top:",
        )
    else:
        st.info(
            "This run left no records: the command ended before a DataLoader or an optimizer was used. "
            "Check this machine:",
            icon=":material/info:",
        )
    st.code(_DOCTOR, language="bash")


def viewer_zone() -> ZoneInfo:
    """Return the time zone of the visitor's browser."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")
