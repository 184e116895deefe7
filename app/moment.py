"""What a view is made of: one run at one moment, and panels that give blocks of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlencode

import pandas as pd

from app import marks
from app.blocks import Block
from app.figures.axis import Axis, along, in_unit, own_axis
from app.figures.base import Chart
from app.figures.marks import Mark, marked
from app.format import one_line
from app.pages import Page
from app.theme import Theme
from collector.diagnosis.verdict import Verdict
from collector.store import device_queries, loading_queries, moment_queries, queries
from collector.store.queries import Extent, Queryable, Span, Window
from collector.store.runs import Run

Found = TypeVar("Found")
#: Window -> what it is called, in the address too.
WINDOW_WORDS: dict[Window, str] = {"5min": "last 5 min", "500steps": "last 500 steps", "run": "whole run"}

#: Seconds after an out-of-memory error in which the record of that moment is written.
_ERROR_SECONDS = 0.1

_log = logging.getLogger("tidegauge.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the frame's controls say; `others` are the runs to compare with."""

    run: Run
    rank: int | None
    window: Window
    live: bool
    axis: Axis = "elapsed"
    others: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything that a panel may look at: one run at one moment, and beside it those it is compared with."""

    run: Run
    manifest: Mapping[str, Any]
    snapshot: Queryable
    span: Span
    whole: Span
    verdict: Verdict | None
    theme: Theme
    axis: Axis
    loaders: tuple[int, ...]
    loader: int | None
    address: Callable[[Page], str]
    others: tuple[Moment, ...] = ()
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def run_id(self) -> str:
        """Of the run."""
        return self.run.run_id

    @property
    def has_loader(self) -> bool:
        """True if a DataLoader of the run is known, used in the chosen window or not."""
        return not loading_queries.loaders(self.snapshot).empty

    def once(self, what: Hashable, find: Callable[[], Found]) -> Found:
        """What several panels want, looked for when the first of them asks."""
        if what not in self._found:
            self._found[what] = find()
        found: Found = self._found[what]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a view: its name, and the pure function that gives its blocks.

    A refresh of a live page builds the panels of one turn anew and leaves the others for the next.
    """

    name: str
    build: Callable[[Moment], Iterator[Block]]
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view: the question, the sentence that answers it, and rows of panels that stand side by side.

    The answer is of the first turn.
    """

    name: str
    rows: Sequence[Sequence[Panel]]
    question: str = ""
    answer: Callable[[Moment], str] = lambda _: ""
    by_loader: bool = False

    @property
    def turns_count(self) -> int:
        """How many refreshes it takes until all panels are new."""
        return 1 + max(panel.turn for row in self.rows for panel in row)


def moment_of(
    view: View,
    selection: Selection,
    run: Run,
    kept: queries.Memo,
    reach: Extent,
    *,
    verdict: Verdict | None,
    theme: Theme,
    address: Callable[[Page], str],
    loader: int | None = None,
) -> Moment:
    """A run at the moment of a snapshot, as the selection wants to see it; `loader`, or the busiest one.

    Marks lead to the `address` of a page.
    """
    manifest = run.manifest
    origin = queries.origin_ns(manifest) or reach.first_ns
    span = queries.span(kept, reach, origin=origin, window=selection.window, rank=selection.rank)
    loaders = loading_queries.used_loaders(kept, span) if view.by_loader else []
    return Moment(
        run=run,
        manifest=manifest,
        snapshot=kept,
        span=span,
        whole=queries.whole(span, reach),
        verdict=verdict,
        theme=theme,
        axis=selection.axis,
        loaders=tuple(loaders),
        loader=loader if loader in loaders else loaders[0] if loaders else None,
        address=lambda page: "" if page.path == view.name else address(page),
    )


def address_of(selection: Selection, page: Page) -> str:
    """The address of a page, from that of another, for the same selection, as the frame writes it; it is live."""
    chosen = {
        "run": selection.run.run_id,
        "rank": selection.rank,
        "window": None if selection.window == "run" else WINDOW_WORDS[selection.window],
        "x": None if selection.axis == "elapsed" else selection.axis,
    }
    return f"{page.path}?{urlencode({name: value for name, value in chosen.items() if value is not None})}"


def build(panel: Panel, moment: Moment) -> list[Block] | str:
    """The blocks of a panel along the chosen axis, or the line that says why there are none."""
    try:
        return [_along(block, moment) for block in panel.build(moment)]
    except Exception as error:  # noqa: BLE001 - one panel must not take the others along
        _log.exception("panel %s", panel.name)
        return one_line(error)


def answer_of(view: View, moment: Moment) -> str:
    """The sentence of a view, empty if there is no verdict to say it from."""
    try:
        return view.answer(moment) if moment.verdict else ""
    except Exception:  # noqa: BLE001 - the figures below are worth more than the sentence
        _log.exception("answer of %s", view.name)
        return ""


def _along(block: Block, moment: Moment) -> Block:
    if not isinstance(block, Chart) or own_axis(block) is None:
        return block
    clock = pd.DataFrame(columns=["elapsed", "step"], dtype=float)
    if {own_axis(block), moment.axis} != {"elapsed"}:
        clock = _step_clock(moment)
    block = along(block, moment.axis, clock)
    if not moment.others:  # whose figures are of several runs
        epochs, findings = moment.once("marks", lambda: _marks(moment))
        block = marked(block, epochs, findings, moment.theme, clock)
    return in_unit(block, (moment.span.to_ns - moment.span.from_ns) / 1e9)


def _step_clock(moment: Moment) -> pd.DataFrame:
    """Return the step at each time; a step that CUDA's memory ran out in never ended, and is there all the same."""
    clock = moment_queries.step_clock(moment.snapshot, moment.span)
    findings = moment.verdict.findings if moment.verdict else ()
    if not any(finding.kind == "cuda-oom" for finding in findings):
        return clock
    errors = device_queries.cuda_errors(moment.snapshot, moment.span)
    fatal = errors.loc[~errors["was_caught"].astype(bool), ["elapsed_seconds", "step"]].dropna().tail(1)
    fatal = fatal.rename(columns={"elapsed_seconds": "elapsed"}).astype(float)
    later = fatal[(fatal > clock.max()).all(axis=1)] if len(clock) else fatal[:0]
    return (
        pd.concat([clock, later, later.assign(elapsed=later["elapsed"] + _ERROR_SECONDS)]) if len(later) else clock
    )


def _marks(moment: Moment) -> tuple[list[Mark], list[Mark]]:
    findings = moment.verdict.findings if moment.verdict else ()
    what = moment.snapshot, moment.span
    told = [*marks.restarts(*what, moment.address), *marks.since(findings, *what, moment.address)]
    return marks.epochs(*what), told
