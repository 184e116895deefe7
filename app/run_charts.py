"""The charts of a run's pages outside the dashboard: whole run, all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence

from app.blocks import Block, Fold, Widget
from app.figures.base import Chart
from app.pages import COMPARE, PAGES, Page
from app.runtime.moment import Moment, Selection, View, build, moment_of
from app.theme import Theme, theme_of
from collector.diagnosis import Verdict
from collector.errors import TidegaugeError
from collector.store import Run, Snapshot, queries, read
from collector.store.queries import Extent

#: Pages of one run alone.
RUN_PAGES = tuple(page for page in PAGES if page is not COMPARE)


def charts_of(run: Run, verdict: Verdict, *, path: str | None, theme: str) -> list[tuple[Page, Chart]]:
    """Return the charts of the page with this path, or of all pages; none if the run left no records.

    Raises:
        TidegaugeError: there is no such page, or the run cannot be read.
    """
    pages = [page for page in RUN_PAGES if path in (None, page.path)]
    if not pages:
        raise TidegaugeError(f"no page {path!r}; there are {', '.join(page.path for page in RUN_PAGES)}")
    with read(run) as snapshot:
        reach = queries.extent(snapshot)
        if not reach:
            return []
        return [(page, chart) for page in pages for chart in _charts(page, run, snapshot, reach, verdict, theme)]


def page_moment(
    page: Page,
    run: Run,
    snapshot: Snapshot,
    reach: Extent,
    verdict: Verdict,
    *,
    theme: Theme,
    address: Callable[[Page], str],
) -> tuple[View, Moment]:
    """Return the view of a page, and the run at the moment of a snapshot as it shows it."""
    view: View = importlib.import_module(f"app.views.{page.module}").VIEW
    selection = Selection(run=run, rank=None, window="run", live=False)
    memo = queries.Memo(snapshot)
    return view, moment_of(view, selection, run, memo, reach, verdict=verdict, theme=theme, address=address)


def _charts(
    page: Page, run: Run, snapshot: Snapshot, reach: Extent, verdict: Verdict, theme: str
) -> Iterator[Chart]:
    view, moment = page_moment(
        page, run, snapshot, reach, verdict, theme=theme_of(theme), address=lambda _: ""
    )  # marks without links
    for panel in (panel for row in view.rows for panel in row):
        blocks = build(panel, moment)
        if not isinstance(blocks, str):
            yield from _charts_in(blocks)


def _charts_in(blocks: Sequence[Block]) -> Iterator[Chart]:
    for block in blocks:
        match block:
            case Chart():
                yield block
            case Widget():
                yield from _charts_in(block.initial())
            case Fold():
                yield from _charts_in(block.blocks)
