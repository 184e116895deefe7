"""Runs a view: one snapshot per refresh, pure panels, then drawing. An error in one panel stays in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app.format import one_line
from app.judging import judged, status_of
from app.moment import Selection, View, address_of, answer_of, build, moment_of
from app.picture import LOADER, Drawing, Picture
from app.status import draw_failure
from app.theme import Theme, theme_of
from collector.store import queries
from collector.store.reader import Snapshot, read
from collector.store.runs import Run

REFRESH_SECONDS = 1
SELECTION = "tidegauge-selection"
_PICTURE = "tidegauge-picture"
#: A chart whose data change is a new chart to Streamlit: its zoom, what was hidden and the focus are gone. So who
#: takes hold of one, or comes to it by the keyboard, pauses. A finger may be about to scroll.
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
_KEPT_PICTURES = 32
_pictures: dict[tuple[Any, ...], Picture] = {}
#: Of each run's newest look, answers of no more cells: of one that stands still, each view asks much the same.
_answers: dict[Path, tuple[Hashable, dict[str, pd.DataFrame]]] = {}
_KEPT_RUNS, _KEPT_CELLS = 8, 250_000
_taking: dict[tuple[Any, ...], threading.Lock] = {}
_sharing = threading.Lock()


def show(view: View) -> None:
    """Draw a view for the frame's selection, again and again while the run is live."""
    selection: Selection | None = st.session_state.get(SELECTION)
    if selection is None:  # the frame has said why
        return
    if view.question:
        st.header(view.question, anchor=False)
    live = selection.live and status_of(selection.run) == "running"
    awaits = _awaits(selection)
    st.fragment(_refresh, run_every=REFRESH_SECONDS if live or awaits else None)(view, selection, live, awaits)
    if live:  # below the rest, which must not move when it goes
        with st.container(key="follows"):
            st.html(_PAUSE_ON_TOUCH, unsafe_allow_javascript=True)


def _refresh(view: View, selection: Selection, live: bool, awaits: bool) -> None:
    run, theme = selection.run, theme_of(st.context.theme.type)
    status, awaits_still = status_of(run), _awaits(selection)
    if (live and status != "running") or (awaits and not awaits_still and not live):
        st.rerun()  # the whole page, without the timer
    loader = st.session_state.get(LOADER, _asked_loader())  # the control comes with the first picture
    asked = (view.name, replace(selection, live=False), theme, loader)
    picture, was_live = _kept(asked)
    if picture is None or picture.awaits != awaits_still:
        rests = False
    elif live:
        rests = was_live and not picture.is_due
    else:
        rests = status == "running" or awaits_still
    drawing = Drawing(view=view.name, status=status, run_id=run.run_id, live=live, follows=live or awaits)
    if not rests:
        try:
            picture = _shared(
                asked,
                awaits_still,
                lambda before: _take(view, selection, theme, loader, before if live else None),
                drawing.go_on,
            )
        except Exception as error:  # noqa: BLE001 - one clear line for whatever went wrong
            _log.exception("view %s of %s", view.name, run.path)
            draw_failure(f"{run.run_id}: {one_line(error)}", run.run_id)
    if picture is not None:
        drawing.go_on(picture)
        drawing.end(picture)
        st.session_state[_PICTURE] = asked, picture, live


def _asked_loader() -> int | None:
    """The DataLoader of the address."""
    asked = st.query_params.get(LOADER, "")
    return int(asked) if asked.isdecimal() else None


def _awaits(selection: Selection) -> bool:
    """Whether a verdict is still being drawn up."""
    return any(judged(run).is_awaited for run in (selection.run, *selection.others))


def _kept(asked: tuple[Any, ...]) -> tuple[Picture | None, bool]:
    """The last picture if it is of what is asked for, and whether it was live; it stands while a view is paused."""
    of, picture, live = st.session_state.get(_PICTURE, (None, None, False))
    return (picture, live) if of == asked else (None, False)


def _shared(
    asked: tuple[Any, ...],
    awaits: bool,
    take: Callable[[Picture | None], Generator[Picture]],
    grown: Callable[[Picture], None],
) -> Picture:
    """The picture that is asked for: many who look at the same share what one of them has read, row by row.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with _sharing:
        taking = _taking.setdefault(asked, threading.Lock())
    with taking:
        picture = _pictures.get(asked)
        if picture is None or picture.is_due or picture.awaits != awaits:
            before = picture if picture and picture.may_stay and picture.awaits == awaits else None
            with closing(take(before)) as pictures:
                for picture in pictures:
                    grown(picture)
        assert picture is not None
        with _sharing:
            _pictures.pop(asked, None)
            _pictures[asked] = picture
            for old in list(_pictures)[:-_KEPT_PICTURES]:
                del _pictures[old]
                _taking.pop(old, None)
    return picture


def _take(
    view: View, selection: Selection, theme: Theme, loader: int | None, before: Picture | None
) -> Generator[Picture]:
    """Read the run and build the view: first what stands above its rows, then with one row more each time.

    What has not its turn stays as it was in the picture `before`.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with ExitStack() as stack:
        begun = _clocks_ns()
        manifest = selection.run.manifest
        snapshot, kept = stack.enter_context(_look(selection.run))
        reach = queries.extent(kept)
        picture = Picture(
            reach=reach,
            manifest=manifest,
            now_ns=snapshot.now_ns,
            taken_ns=time.monotonic_ns(),
            problems=snapshot.problems,
        )
        if before is not None:
            picture = replace(picture, turn=(before.turn + 1) % view.turns_count)
        if reach is None:
            yield picture
            return
        own, *others = [judged(run) for run in (selection.run, *selection.others)]
        moment = moment_of(
            view,
            selection,
            selection.run,
            kept,
            reach,
            verdict=own.verdict,
            theme=theme,
            address=partial(address_of, selection),
            loader=loader,
        )
        for run, of_other in zip(selection.others, others, strict=True):
            _, other = stack.enter_context(_look(run))
            if (other_reach := queries.extent(other)) is not None:
                verdict = of_other.verdict
                one = moment_of(
                    view, selection, run, other, other_reach, verdict=verdict, theme=theme, address=moment.address
                )
                moment = replace(moment, others=(*moment.others, one))
        picture = replace(
            picture,
            loaders=moment.loaders,
            judged=own,
            awaits=any(each.is_awaited for each in (own, *others)),
            answer=before.answer if before and picture.turn else answer_of(view, moment),
        )
        cost_ns = _spent_ns(begun)  # without what drawing takes in between
        yield picture
        for place, row in enumerate(view.rows):
            begun = _clocks_ns()
            built = before.rows[place] if before else [None] * len(row)
            blocks = [
                was if was and panel.turn != picture.turn else (panel.name, build(panel, moment))
                for panel, was in zip(row, built, strict=True)
            ]
            cost_ns += _spent_ns(begun)
            picture = replace(picture, rows=(*picture.rows, blocks))
            yield picture
        yield replace(picture, problems=snapshot.problems, cost_ns=cost_ns)


def _clocks_ns() -> tuple[int, int]:
    return time.monotonic_ns(), time.process_time_ns()


def _spent_ns(begun: tuple[int, int]) -> int:
    """Since then, by the clock or in CPU time of the server, the less: others on the cores make no page older."""
    return min(now - then for now, then in zip(_clocks_ns(), begun, strict=True))


@contextmanager
def _look(run: Run) -> Iterator[tuple[Snapshot, queries.Memo]]:
    """A run at one moment, with the answers of the last look that saw the same records.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    with read(run) as snapshot:
        version = snapshot.version
        of, known = _answers.get(run.path, (None, {}))
        kept = queries.Memo(snapshot, known if of == version else {})
        yield snapshot, kept
        if version is None or snapshot.version != version:  # by now there is something that could not be read
            return
        small = {sql: table for sql, table in kept.answers.items() if table.size <= _KEPT_CELLS}
    with _sharing:
        _answers.pop(run.path, None)
        _answers[run.path] = version, small
        for old in list(_answers)[:-_KEPT_RUNS]:
            del _answers[old]
