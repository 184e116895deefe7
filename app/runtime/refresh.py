"""Refresh a view: read one snapshot, build its panels, draw them. An error in one panel stays in it.

Rows are drawn one by one: the answer at the top of the page does not wait for the figures below.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.blocks import Block, draw
from app.figures.base import Chart
from app.format import first_line, plain
from app.runtime.moment import Selection, View, address_of, answer_of, build, moment_of
from app.runtime.status import draw_failure, draw_no_records, draw_problems, draw_status
from app.runtime.verdicts import VerdictState, current_verdict, status_of
from app.theme import Theme, theme_of
from collector.store import Run, Snapshot, queries, read
from collector.store.queries import Extent

REFRESH_SECONDS = 1
SELECTION = "tidegauge-selection"
_CONTENT = "tidegauge-content"
#: Streamlit replaces a chart whose data change: zoom, hidden lines and focus are lost. So a mouse press on a chart
#: or the keyboard's focus on it switches Live off. A touch does so on the legend only, since it may be a scroll.
_PAUSE_ON_TOUCH = """<script>
if (!window.tidegaugePauses) {
  window.tidegaugePauses = true;
  const pause = () => {
    const live = document.querySelector(".st-key-live input");
    if (live?.checked && document.querySelector(".st-key-follows")) live.click();
  };
  document.addEventListener("pointerdown", (event) => {
    const held = event.target.closest(".js-plotly-plot :is(.draglayer, .legend)");
    if (held && (event.pointerType === "mouse" || held.matches(".legend"))) pause();
  }, true);
  document.addEventListener("focusin", (event) => {
    if (event.target.matches(".js-plotly-plot :focus-visible")) pause();
  }, true);
}
</script>"""

_log = logging.getLogger("tidegauge.app")
_MAX_CONTENTS = 32
_contents: dict[tuple[Any, ...], ViewContent] = {}
#: Run directory -> version of its newest snapshot, and the answers to that snapshot's queries: the views of a run
#: that no longer changes ask much the same.
_answers: dict[Path, tuple[Hashable, dict[str, pd.DataFrame]]] = {}
#: Runs with cached answers, and cells of the largest answer that is cached.
_MAX_RUNS, _MAX_CELLS = 8, 250_000
_content_locks: dict[tuple[Any, ...], threading.Lock] = {}
_cache_lock = threading.Lock()
#: Pause after reading a live view, in multiples of the reading's cost.
REST_PER_COST = 3
#: Content older than this is built as a whole, not by turns: a reader left the page and comes back.
REUSE_LIMIT_NS = 5 * 10**9
#: Seconds between the answer and the first charts of a page. A browser that gets both at once evaluates Plotly's
#: script, for a second or so, before it paints either.
PAINT_SECONDS = 0.2
_HAS_CHARTS = "tidegauge-has-charts"
#: Key of the control that chooses a DataLoader.
LOADER = "loader"
#: Panels that stand side by side: each a name, and its blocks or the line that says why there are none.
Row = Sequence[tuple[str, list[Block] | str]]


def show(view: View) -> None:
    """Draw a view for the frame's selection, again and again while the run is live."""
    selection: Selection | None = st.session_state.get(SELECTION)
    if selection is None:  # the frame shows the reason
        return
    if view.question:
        st.header(view.question, anchor=False)
    live = selection.live and status_of(selection.run) == "running"
    is_pending = _is_verdict_pending(selection)
    has_timer = live or is_pending
    st.fragment(_refresh, run_every=REFRESH_SECONDS if has_timer else None)(view, selection, live, is_pending)
    if live:  # at the end of the page, which must not move when this goes
        with st.container(key="follows"):
            st.html(_PAUSE_ON_TOUCH, unsafe_allow_javascript=True)


def _refresh(view: View, selection: Selection, live: bool, was_pending: bool) -> None:
    """Draw a view once; read the run first if the content of this session is out of date.

    `was_pending` says whether a verdict was awaited when the timer was set.
    """
    run, theme = selection.run, theme_of(st.context.theme.type)
    status, is_pending = status_of(run), _is_verdict_pending(selection)
    if (live and status != "running") or (was_pending and not is_pending and not live):
        st.rerun()  # the whole page, without the timer
    loader = st.session_state.get(LOADER, _loader_of_address())  # the control is drawn with the first content
    request = (view.name, replace(selection, live=False), theme, loader)
    content, was_live = _session_content(request)
    if content is None or content.is_pending != is_pending:
        must_read = True
    elif live:
        must_read = not was_live or content.is_due
    else:
        must_read = status != "running" and not is_pending
    drawing = Drawing(view=view.name, status=status, run_id=run.run_id, live=live, has_timer=live or was_pending)
    if must_read:
        try:
            content = _shared_content(
                request,
                is_pending,
                lambda previous: _build_content(view, selection, theme, loader, previous if live else None),
                drawing.draw_new_rows,
            )
        except Exception as error:  # noqa: BLE001 - any error is shown as one clear line
            _log.exception("view %s of %s", view.name, run.path)
            draw_failure(f"{run.run_id}: {first_line(error)}", run.run_id)
    if content is not None:
        drawing.draw_new_rows(content)
        drawing.finish(content)
        st.session_state[_CONTENT] = request, content, live


def _loader_of_address() -> int | None:
    text = st.query_params.get(LOADER, "")
    return int(text) if text.isdecimal() else None


def _is_verdict_pending(selection: Selection) -> bool:
    return any(current_verdict(run).is_pending for run in (selection.run, *selection.others))


def _session_content(request: tuple[Any, ...]) -> tuple[ViewContent | None, bool]:
    """Return (this session's last content if it answers the same request, it was live).

    It stays on the page while the view is paused.
    """
    last_request, content, was_live = st.session_state.get(_CONTENT, (None, None, False))
    return (content, was_live) if last_request == request else (None, False)


def _shared_content(
    request: tuple[Any, ...],
    is_pending: bool,
    build_after: Callable[[ViewContent | None], Generator[ViewContent]],
    draw_rows: Callable[[ViewContent], None],
) -> ViewContent:
    """Return the content for a request. Sessions with the same request share what one of them reads.

    Args:
        request: view, selection, theme and loader.
        is_pending: True while a verdict is awaited; content with another value is out of date.
        build_after: builds the content row by row, given the previous content or None.
        draw_rows: called with the content after each row.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with _cache_lock:
        content_lock = _content_locks.setdefault(request, threading.Lock())
    with content_lock:
        content = _contents.get(request)
        if content is None or content.is_due or content.is_pending != is_pending:
            is_reusable = content is not None and content.is_reusable and content.is_pending == is_pending
            with closing(build_after(content if is_reusable else None)) as contents:
                for content in contents:
                    draw_rows(content)
        assert content is not None
        with _cache_lock:
            _contents.pop(request, None)
            _contents[request] = content
            for old in list(_contents)[:-_MAX_CONTENTS]:
                del _contents[old]
                _content_locks.pop(old, None)
    return content


def _build_content(
    view: View, selection: Selection, theme: Theme, loader: int | None, previous: ViewContent | None
) -> Generator[ViewContent]:
    """Read the run and build the view: first all above its rows, then one more row with each yield.

    Panels of another turn are taken from the `previous` content.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with ExitStack() as stack:
        start = _clocks_ns()
        manifest = selection.run.manifest
        snapshot, memo = stack.enter_context(_open_snapshot(selection.run))
        reach = queries.extent(memo)
        content = ViewContent(
            reach=reach,
            manifest=manifest,
            now_ns=snapshot.now_ns,
            read_ns=time.monotonic_ns(),
            problems=snapshot.problems,
        )
        if previous is not None:
            content = replace(content, turn=(previous.turn + 1) % view.turns_count)
        if reach is None:
            yield content
            return
        own_verdict, *other_verdicts = [current_verdict(run) for run in (selection.run, *selection.others)]
        moment = moment_of(
            view,
            selection,
            selection.run,
            memo,
            reach,
            verdict=own_verdict.verdict,
            theme=theme,
            address=partial(address_of, selection),
            loader=loader,
        )
        for run, state in zip(selection.others, other_verdicts, strict=True):
            _, other_memo = stack.enter_context(_open_snapshot(run))
            if (other_reach := queries.extent(other_memo)) is not None:
                other = moment_of(
                    view,
                    selection,
                    run,
                    other_memo,
                    other_reach,
                    verdict=state.verdict,
                    theme=theme,
                    address=moment.address,
                )
                moment = replace(moment, others=(*moment.others, other))
        content = replace(
            content,
            loaders=moment.loaders,
            verdict=own_verdict,
            is_pending=any(state.is_pending for state in (own_verdict, *other_verdicts)),
            answer=previous.answer if previous and content.turn else answer_of(view, moment),
        )
        cost_ns = _cost_ns(start)  # excludes drawing, which happens at each yield
        yield content
        for place, row in enumerate(view.rows):
            start = _clocks_ns()
            previous_row = previous.rows[place] if previous else [None] * len(row)
            blocks = [
                old if old and panel.turn != content.turn else (panel.name, build(panel, moment))
                for panel, old in zip(row, previous_row, strict=True)
            ]
            cost_ns += _cost_ns(start)
            content = replace(content, rows=(*content.rows, blocks))
            yield content
        yield replace(content, problems=snapshot.problems, cost_ns=cost_ns)


def _clocks_ns() -> tuple[int, int]:
    return time.monotonic_ns(), time.process_time_ns()


def _cost_ns(start: tuple[int, int]) -> int:
    """Return the smaller of wall time and the server's CPU time since then: other programs must not slow a page."""
    return min(now - then for now, then in zip(_clocks_ns(), start, strict=True))


@contextmanager
def _open_snapshot(run: Run) -> Iterator[tuple[Snapshot, queries.Memo]]:
    """Open a run's snapshot, and a memo with the cached answers if no record came since the last one.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with read(run) as snapshot:
        version = snapshot.version
        cached_version, answers = _answers.get(run.path, (None, {}))
        memo = queries.Memo(snapshot, answers if cached_version == version else {})
        yield snapshot, memo
        if version is None or snapshot.version != version:  # a file could not be read meanwhile
            return
        small = {sql: table for sql, table in memo.answers.items() if table.size <= _MAX_CELLS}
    with _cache_lock:
        _answers.pop(run.path, None)
        _answers[run.path] = version, small
        for old in list(_answers)[:-_MAX_RUNS]:
            del _answers[old]


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
    run_id: str
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
        for row in content.rows[self._rows_count :]:
            _let_paint(row)
            columns = st.columns(len(row)) if len(row) > 1 else [st.container()]
            for (name, blocks), column in zip(row, columns, strict=True):
                with column:
                    _draw_panel(self.view, name, "as above" if blocks == why_not else blocks)
        self._rows_count = len(content.rows)

    def _draw_top(self, content: ViewContent) -> DeltaGenerator:
        """Draw all above the rows, and return the container for read problems."""
        draw_status(
            self.status,
            content.reach,
            content.manifest,
            self.run_id,
            now_ns=content.now_ns + time.monotonic_ns() - content.read_ns,
            shown_ns=content.now_ns,
            live=self.live,
            verdict_seconds=content.verdict.age_seconds,
        )
        problems = st.container()
        if why_not := content.verdict.why_not:
            draw_failure(f"No verdict: {why_not}", self.run_id)
        if content.is_pending:
            st.caption(":material/hourglass_top: The verdict is being drawn up; the figures need not wait for it.")
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

    def finish(self, content: ViewContent) -> None:
        """Draw the read problems, which the last row may add to."""
        assert self._problems is not None
        with self._problems:
            draw_problems(content.problems)
            if content.reach is None and not content.problems:
                draw_no_records(self.status)


def _let_paint(row: Row) -> None:
    """Wait before the first charts of a browser session."""
    has_chart = any(isinstance(block, Chart) for _, blocks in row for block in blocks)
    if _HAS_CHARTS not in st.session_state and has_chart:
        st.session_state[_HAS_CHARTS] = True
        time.sleep(PAINT_SECONDS)


def _draw_panel(view: str, panel: str, content: list[Block] | str) -> None:
    if isinstance(content, str):
        st.error(plain(f"{panel} cannot be shown: {content}"), icon=":material/error:")
        return
    for number, block in enumerate(content):
        draw(block, key=f"{view}-{panel}-{number}")
