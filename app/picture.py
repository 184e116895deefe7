"""What a view shows at one moment, drawn as it grows: the answer does not wait for the figures below it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.blocks import Block, draw
from app.figures.base import Chart
from app.format import plain
from app.judging import Judged
from app.status import draw_failure, draw_no_records, draw_problems, draw_status
from collector.store.queries import Extent

#: A live view that costs much is read less often: so long as this is not over, in times of what it cost.
REST_PER_COST = 3
#: No part of a picture stays that is older: somebody left the page, and comes back.
OLD_NS = 5 * 10**9
#: A browser that is sent its first chart right behind the answer evaluates Plotly's script, for a second or so,
#: before it paints either. It has this time for the answer.
PAINT_SECONDS = 0.2
_HAS_CHARTS = "tidegauge-has-charts"
#: The key of the control that chooses a DataLoader.
LOADER = "loader"


#: Of the panels that stand side by side: the name, and the blocks or the line that says why there are none.
Row = Sequence[tuple[str, list[Block] | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a view shows: all that was read and built at one moment (`now_ns` there, `taken_ns` on this machine).

    `cost_ns` is what it took, and `turn` whose turn it was (-1: everyone's): what is not of that turn is as old
    as the picture before. It may `await` a verdict, of the run or of one that it is compared with.
    """

    reach: Extent | None
    manifest: Mapping[str, Any]
    now_ns: int
    taken_ns: int
    problems: tuple[str, ...]
    cost_ns: int = 0
    turn: int = -1
    loaders: tuple[int, ...] = ()
    judged: Judged = field(default_factory=Judged)
    awaits: bool = False
    answer: str = ""
    rows: Sequence[Row] = ()

    @property
    def is_due(self) -> bool:
        """Whether it may be taken anew by what the last time cost."""
        return time.monotonic_ns() - self.taken_ns > (1 + REST_PER_COST) * self.cost_ns

    @property
    def may_stay(self) -> bool:
        """Whether there is something that may stay while what has its turn is renewed."""
        return bool(self.rows) and time.monotonic_ns() - self.taken_ns < OLD_NS


@dataclass(slots=True, kw_only=True)
class Drawing:
    """Draws a picture as it grows; `follows` says whether there is a timer."""

    view: str
    status: str
    run_id: str
    live: bool
    follows: bool
    _problems: DeltaGenerator | None = None
    _rows_count: int = 0

    def go_on(self, picture: Picture) -> None:
        """Draw what is not yet there."""
        if self._problems is None:
            if picture.awaits and not self.follows:
                st.rerun()  # with the timer: the files of a run that is over changed while it was read
            self._problems = self._begin(picture)
        why_not = picture.judged.why_not
        for row in picture.rows[self._rows_count :]:
            _let_paint(row)
            columns = st.columns(len(row)) if len(row) > 1 else [st.container()]
            for (name, content), column in zip(row, columns, strict=True):
                with column:
                    _draw_panel(self.view, name, "as above" if content == why_not else content)
        self._rows_count = len(picture.rows)

    def _begin(self, picture: Picture) -> DeltaGenerator:
        """Draw what stands above the rows, and give the place of what could not be read."""
        draw_status(
            self.status,
            picture.reach,
            picture.manifest,
            self.run_id,
            now_ns=picture.now_ns + time.monotonic_ns() - picture.taken_ns,
            shown_ns=picture.now_ns,
            live=self.live,
            verdict_seconds=picture.judged.age_seconds,
        )
        problems = st.container()
        if why_not := picture.judged.why_not:
            draw_failure(f"No verdict: {why_not}", self.run_id)
        if picture.awaits:
            st.caption(":material/hourglass_top: The verdict is being drawn up; the figures need not wait for it.")
        if picture.answer:
            st.markdown(f"**{plain(picture.answer)}**")
        if len(picture.loaders) > 1:
            st.segmented_control(
                "DataLoader",
                sorted(picture.loaders),
                default=picture.loaders[0],
                required=True,
                key=LOADER,
                bind="query-params",
            )
        return problems

    def end(self, picture: Picture) -> None:
        """Say what could not be read, which the last row may have met."""
        assert self._problems is not None
        with self._problems:
            draw_problems(picture.problems)
            if picture.reach is None and not picture.problems:
                draw_no_records(self.status)


def _let_paint(row: Row) -> None:
    """Wait before the first charts of a browser's window."""
    if _HAS_CHARTS not in st.session_state and any(isinstance(block, Chart) for _, found in row for block in found):
        st.session_state[_HAS_CHARTS] = True
        time.sleep(PAINT_SECONDS)


def _draw_panel(view: str, panel: str, content: list[Block] | str) -> None:
    if isinstance(content, str):
        st.error(plain(f"{panel} cannot be shown: {content}"), icon=":material/error:")
        return
    for number, block in enumerate(content):
        draw(block, key=f"{view}-{panel}-{number}")
