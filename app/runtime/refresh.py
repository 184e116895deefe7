"""Refresh a view: read one snapshot, build its panels, draw them. An error in one panel stays in it.

The package's docstring explains threads, caches and pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import streamlit as st

from app.format import first_line
from app.runtime.drawing import LOADER, Drawing, ViewContent, draw_failure
from app.runtime.moment import Selection, View, address_of, answer_of, build, moment_of
from app.runtime.verdicts import current_verdict, status_of
from app.theme import Theme, theme_of
from collector.store import Run, Snapshot, queries, read

REFRESH_SECONDS = 1
_MAX_CONTENTS, _MAX_RUNS = 32, 8
#: Cells of the largest answer that is cached.
_MAX_CELLS = 250_000
#: Keys of the session's state: the frame's selection, and the last content.
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


@dataclass(slots=True)
class _Slot:
    """A value that sessions share."""

    value: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@lru_cache(_MAX_CONTENTS)
def _content_slot(request: tuple[Any, ...]) -> _Slot:
    """Return the place for the content of a request: view, selection, theme and loader."""
    return _Slot()


@lru_cache(_MAX_RUNS)
def _answers_slot(path: Path) -> _Slot:
    """Return the place for the version of a run's newest snapshot, and the answers to that snapshot's queries."""
    return _Slot((None, {}))


def show(view: View) -> None:
    """Draw a view for the frame's selection, again and again while the run is live."""
    selection: Selection | None = st.session_state.get(SELECTION)
    if selection is None:  # the frame shows the reason
        return
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
    text = st.query_params.get(LOADER, "")
    of_address = int(text) if text.isdecimal() else None
    loader = st.session_state.get(LOADER, of_address)  # the control is drawn with the first content
    request = (view.name, replace(selection, live=False), theme, loader)
    # This session's last content stays on the page while the view is paused.
    last_request, content, was_live = st.session_state.get(_CONTENT, (None, None, False))
    if last_request != request:
        content, was_live = None, False
    drawing = Drawing(view=view.name, status=status, run=run, live=live, has_timer=live or was_pending)
    if content is None or _is_out_of_date(content, status, is_pending=is_pending, live=live, was_live=was_live):
        build_after = partial(_build_content, view, selection, theme, loader)
        try:
            with closing(_shared_content(request, build_after, is_pending=is_pending, live=live)) as contents:
                for new_content in contents:
                    drawing.draw_new_rows(new_content)
            content = new_content
        except Exception as error:  # noqa: BLE001 - any error is shown as one clear line
            _log.exception("view %s of %s", view.name, run.path)
            draw_failure(f"{run.run_id}: {first_line(error)}", run.run_id)
    if content is not None:
        drawing.draw_new_rows(content)
        drawing.finish(content)
        st.session_state[_CONTENT] = request, content, live


def _is_out_of_date(content: ViewContent, status: str, *, is_pending: bool, live: bool, was_live: bool) -> bool:
    """Return whether a session's content must be replaced; that of a run that goes on stays while it is paused."""
    if content.is_pending != is_pending:
        return True
    if live:
        return content.is_due or not was_live
    return not is_pending and status != "running"


def _is_verdict_pending(selection: Selection) -> bool:
    return any(current_verdict(run).is_pending for run in (selection.run, *selection.others))


def _shared_content(
    request: tuple[Any, ...],
    build_after: Callable[[ViewContent | None], Generator[ViewContent, None, ViewContent]],
    *,
    is_pending: bool,
    live: bool,
) -> Generator[ViewContent]:
    """Yield the content for a request, row by row if this session is the one that builds it.

    `build_after` builds it, given the content whose panels of other turns stay, or None. A content is out of date
    if it awaits a verdict that is no longer pending, or the reverse.
    """
    slot = _content_slot(request)
    with slot.lock:
        shared: ViewContent | None = slot.value
        if shared is None or shared.is_due or shared.is_pending != is_pending:
            is_reusable = live and shared is not None and shared.is_reusable and shared.is_pending == is_pending
            slot.value = yield from build_after(shared if is_reusable else None)
            return
    yield shared  # drawn without the lock: no session waits for the drawing of another


def _build_content(
    view: View, selection: Selection, theme: Theme, loader: int | None, previous: ViewContent | None
) -> Generator[ViewContent, None, ViewContent]:
    """Read the run and build the view: first all above its rows, then one more row with each yield.

    Panels of another turn are taken from the `previous` content. The return value is the whole content.
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
            return content
        own_verdict, *other_verdicts = [current_verdict(run) for run in (selection.run, *selection.others)]
        moment_at = partial(moment_of, view, selection, theme=theme)
        address = partial(address_of, selection)
        moment = moment_at(selection.run, memo, reach, verdict=own_verdict.verdict, address=address, loader=loader)
        for run, state in zip(selection.others, other_verdicts, strict=True):
            _, other_memo = stack.enter_context(_open_snapshot(run))
            if (other_reach := queries.extent(other_memo)) is not None:
                other = moment_at(run, other_memo, other_reach, verdict=state.verdict, address=address)
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
        content = replace(content, problems=snapshot.problems, cost_ns=cost_ns)
        yield content
        return content


def _clocks_ns() -> tuple[int, int]:
    return time.monotonic_ns(), time.process_time_ns()


def _cost_ns(start: tuple[int, int]) -> int:
    """Return the smaller of wall time and the server's CPU time since then: other programs must not slow a page."""
    return min(now - then for now, then in zip(_clocks_ns(), start, strict=True))


@contextmanager
def _open_snapshot(run: Run) -> Iterator[tuple[Snapshot, queries.Memo]]:
    """Open a run's snapshot, and a memo with the cached answers if no record came since the last one."""
    with read(run) as snapshot:
        slot, version = _answers_slot(run.path), snapshot.version
        cached_version, answers = slot.value
        memo = queries.Memo(snapshot, answers if cached_version == version else {})
        yield snapshot, memo
        if version is not None and snapshot.version == version:  # else a file could not be read meanwhile
            small = {sql: table for sql, table in memo.answers.items() if table.size <= _MAX_CELLS}
            slot.value = version, small
