"""Runs a view: one snapshot per refresh, pure panels, then drawing. An error in one panel stays in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from app.blocks import Block, draw
from app.format import clock, plain
from app.theme import Theme, theme_of
from collector.diagnosis.tables import load_tables
from collector.diagnosis.verdict import Verdict, diagnose
from collector.store import loading_queries, queries
from collector.store.queries import Extent, Queryable, Span, Window
from collector.store.reader import read
from collector.store.runs import Run
from collector.wording import MISSING, duration

REFRESH_SECONDS = 1
#: A running run whose newest record is older than this is called stale.
STALE_AFTER_SECONDS = 5.0
#: The verdict of a live run is drawn up this often, beside the refreshes, which show the one before meanwhile.
VERDICT_SECONDS = 10
SELECTION = "tidegauge-selection"

_log = logging.getLogger("tidegauge.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the frame's controls say."""

    run: Run
    rank: int | None
    window: Window
    live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything that a panel may look at: one run at one moment."""

    run_id: str
    snapshot: Queryable
    span: Span
    whole: Span
    verdict: Verdict | None
    theme: Theme
    loader: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a view: its name, and the pure function that gives its blocks."""

    name: str
    build: Callable[[Moment], Iterator[Block]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view: rows of panels; the panels of one row stand side by side."""

    name: str
    rows: Sequence[Sequence[Panel]]
    by_loader: bool = False


def show(view: View) -> None:
    """Draw a view for the frame's selection, again and again while the run is live."""
    selection: Selection | None = st.session_state.get(SELECTION)
    if selection is None:  # the frame has said why
        return
    live = selection.live and status_of(selection.run) == "running"
    st.fragment(_refresh, run_every=REFRESH_SECONDS if live else None)(view, selection, live)


def one_line(error: BaseException) -> str:
    """The error as one clear line."""
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def status_of(run: Run) -> str:
    """`running`, `finished`, `failed` or `killed`; what the manifest says if no verdict can be had."""
    verdict = _verdict(run)
    if verdict is not None:
        return verdict.status
    try:
        exit_status = run.manifest.get("exit_status")
    except Exception:  # noqa: BLE001 - whatever it is, the refresh tells of it
        _log.exception("manifest of %s", run.path)
        return "failed"
    return "running" if exit_status is None else "finished" if exit_status == 0 else "failed"


def ranks_of(run: Run) -> tuple[int, ...]:
    """The ranks that said hello, ascending; none outside a distributed job, or if the run cannot be read."""
    judged = _judged(run)
    return judged[1] if judged else ()


def _verdict(run: Run) -> Verdict | None:
    judged = _judged(run)
    return judged[0] if judged else None


def _judged(run: Run) -> tuple[Verdict, tuple[int, ...]] | None:
    try:
        return _cached_verdict(str(run.path), _version(run))
    except Exception:  # noqa: BLE001 - without a verdict, the records are still worth a look
        _log.exception("diagnosis of %s", run.path)
        return None


@st.cache_data(ttl=VERDICT_SECONDS, refresh_mode="background", max_entries=8, show_spinner=False)
def _cached_verdict(path: str, version: tuple[Any, ...]) -> tuple[Verdict, tuple[int, ...]]:
    """The verdict, and the ranks that the same tables name."""
    del version  # a key alone
    tables = load_tables(Run(Path(path)))
    ranks = {event["rank"] for event in tables.events_of("process-start")} - {None}
    return diagnose(tables), tuple(sorted(ranks))


def _version(run: Run) -> tuple[Any, ...]:
    """Changes when an old verdict must not be shown any more: at the end of a run, then with its files."""
    if run.manifest.get("end_time_ns") is None:
        return ()
    files = (run.path / "run.json", run.path / "lake.sqlite", run.journal_dir, run.events_dir)
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


def _refresh(view: View, selection: Selection, live: bool) -> None:
    run = selection.run
    status = status_of(run)
    if live and status != "running":
        st.rerun()  # the whole page, without the timer
    try:
        manifest = run.manifest
        with read(run) as snapshot:
            reach = queries.extent(snapshot)
            _draw_status(status, reach, manifest, snapshot.now_ns)
            _draw_problems(snapshot.problems)
            if reach is None:
                if not snapshot.problems:
                    _draw_no_records(status)
                return
            moment = _moment(view, selection, queries.Memo(snapshot), reach, manifest)
            if moment.verdict is None:
                st.error("No verdict: the diagnosis failed, see the server's log.", icon=":material/error:")
            built = [[_build(panel, moment) for panel in row] for row in view.rows]
    except Exception as error:  # noqa: BLE001 - one clear line for whatever went wrong
        _log.exception("view %s of %s", view.name, run.path)
        st.error(plain(f"{run.run_id}: {one_line(error)}"), icon=":material/error:")
        return
    for row, blocks in zip(view.rows, built, strict=True):
        columns = st.columns(len(row)) if len(row) > 1 else [st.container()]
        for panel, column, content in zip(row, columns, blocks, strict=True):
            with column:
                _draw_panel(view, panel, content)


def _moment(
    view: View, selection: Selection, snapshot: Queryable, reach: Extent, manifest: dict[str, Any]
) -> Moment:
    origin = queries.origin_ns(manifest) or reach.first_ns
    span = queries.span(snapshot, reach, origin=origin, window=selection.window, rank=selection.rank)
    return Moment(
        run_id=selection.run.run_id,
        snapshot=snapshot,
        span=span,
        whole=queries.whole(span, reach),
        verdict=_verdict(selection.run),
        theme=theme_of(st.context.theme.type),
        loader=_pick_loader(loading_queries.fetching_loaders(snapshot, span)) if view.by_loader else None,
    )


def _build(panel: Panel, moment: Moment) -> list[Block] | str:
    """The blocks of a panel, or the line that says why there are none."""
    try:
        return list(panel.build(moment))
    except Exception as error:  # noqa: BLE001 - one panel must not take the others along
        _log.exception("panel %s", panel.name)
        return one_line(error)


def _draw_panel(view: View, panel: Panel, content: list[Block] | str) -> None:
    if isinstance(content, str):
        st.error(plain(f"{panel.name} cannot be shown: {content}"), icon=":material/error:")
        return
    for number, block in enumerate(content):
        draw(block, key=f"{view.name}-{panel.name}-{number}")


def _draw_status(status: str, reach: Extent | None, manifest: dict[str, Any], now_ns: int) -> None:
    age = None if reach is None else max(0.0, (now_ns - reach.newest_ns) / 1e9)
    icon, colour, word = _chip(status, age)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(word, icon=icon, color=colour)  # type: ignore[arg-type]
        as_of = queries.wall_ns(manifest, now_ns if status == "running" or reach is None else reach.newest_ns)
        words = [f"data as of {clock(as_of, _zone()) if as_of is not None else MISSING}"]
        if reach is not None:
            words.append(f"{reach.records_count:,} samples")
        if status == "running" and age is not None:
            words.append(f"newest record {age:.1f} s old")
        st.caption(" · ".join(words), width="content")


def _chip(status: str, age_seconds: float | None) -> tuple[str, str, str]:
    """Icon, colour and word of the status chip."""
    if status == "running" and age_seconds is not None and age_seconds > STALE_AFTER_SECONDS:
        return ":material/hourglass_bottom:", "gray", f"stale {duration(age_seconds)}"
    return {
        "running": (":material/sensors:", "green", "live"),
        "finished": (":material/check_circle:", "blue", "finished"),
        "failed": (":material/cancel:", "red", "failed"),
        "killed": (":material/dangerous:", "red", "killed"),
    }[status]


def _draw_problems(problems: Sequence[str]) -> None:
    if problems:
        shown = [f"- {plain(problem)}" for problem in problems[:5]]
        more = [f"- and {len(problems) - 5} more"] if len(problems) > 5 else []
        text = "\n".join(["Some records could not be read; the rest is shown.", *shown, *more])
        st.warning(text, icon=":material/warning:")


def _draw_no_records(status: str) -> None:
    if status == "running":
        st.info(
            "No records yet: they begin with the first DataLoader iterator or optimizer step.",
            icon=":material/hourglass_top:",
        )
    else:
        st.info(
            "This run left no records: the command ended before a DataLoader or an optimizer was used. "
            "`tidegauge doctor` says what works here.",
            icon=":material/info:",
        )


def _pick_loader(loaders: list[int]) -> int | None:
    if len(loaders) < 2:
        return loaders[0] if loaders else None
    chosen = st.segmented_control(
        "DataLoader", sorted(loaders), default=loaders[0], required=True, format_func=lambda n: f"loader {n}"
    )
    return loaders[0] if chosen is None else int(chosen)


def _zone() -> ZoneInfo:
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")
