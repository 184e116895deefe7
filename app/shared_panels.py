"""Panels that several views show: open files, and the memory of hosts against its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from app.blocks import Block
from app.figures import memory
from app.runtime.moment import Moment
from collector.store import queries

#: Number of processes whose open files are drawn.
MAX_PROCESSES = 4


def shared_memory(moment: Moment) -> Iterator[Block]:
    """Draw /dev/shm, which carries the batches of workers."""
    table = queries.host_limits(moment.snapshot)
    yield from host_charts(moment, table[table["limit"] == "shm"])


def open_files(moment: Moment) -> Iterator[Block]:
    """Draw the open files of the processes that are nearest to their limit."""
    all_places = queries.open_files(moment.snapshot)
    places = all_places.head(MAX_PROCESSES)
    if places.empty:
        return
    lines = queries.process_lines(moment.snapshot, moment.span, "fd_count", places["series"].tolist())
    if not lines.points.empty:
        chart = memory.open_files(
            lines,
            moment.theme,
            limit_count=float(places["limit_count"].min()),
        )
        selection = f" Drawn: the {len(places)} of {len(all_places)} processes nearest to their limit."
        yield replace(chart, caption=chart.caption + (selection if len(places) < len(all_places) else ""))


def host_charts(moment: Moment, table: pd.DataFrame) -> Iterator[Block]:
    """Draw one chart per row of `queries.host_limits`: use against the limit."""
    for _, row in table.iterrows():
        name = limit_name(row, table)
        yield memory.against_limit(
            queries.host_lines(moment.snapshot, moment.span, row["limit"], row["host"]),
            moment.theme,
            name=name,
            capacity_bytes=row["capacity_bytes"],
        )


def limit_name(row: pd.Series, table: pd.DataFrame) -> str:
    """Return a limit's name, with its host where there are several."""
    name = memory.LIMIT_WORDS[row["limit"]]
    return f"{name} of {row['host']}" if table["host"].nunique() > 1 else name
