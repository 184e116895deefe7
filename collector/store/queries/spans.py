"""The part of a run that a figure shows, and the source that answers a query over it.

Each named query takes a snapshot and returns a small table: however long the run, DuckDB reduces it to
a few thousand points at most before pandas gets it. Times are seconds since the run was made
(`elapsed_seconds`), sizes are bytes, durations are milliseconds. A missing value is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import pandas as pd

from collector.store.rollups import tables

Window = Literal["5min", "500steps", "run"]
WINDOWS: tuple[Window, ...] = ("5min", "500steps", "run")
#: Streams that show how far a run has come; every other stream keeps pace with one of them.
PULSE_STREAMS = ("step", "batch", "process", "host")
#: Buckets of a stack or a heat map, in which every series shares one grid of time.
GRID_BUCKETS = 400
#: A figure needs this many buckets to show when something happened.
_FEWEST_BUCKETS = 40
#: Smallest step of a grid: a grid finer than the fastest sampling would have holes.
GRID_STEP_NS = 500_000_000
#: Steps or batches that a figure shows one by one, at most. Above it they are in groups, this number at most: more
#: points become a mesh on a screen.
MOST_SINGLE, MOST_GROUPS = 300, 100
#: SQL: the row or rollup is in the time of the span, and of its rank too.
IN_TIME = "time_ns BETWEEN $from_ns AND $to_ns"
IN_SPAN = f"{IN_TIME} AND ($rank IS NULL OR rank = $rank)"


class Queryable(Protocol):
    """The part of a snapshot that queries need (`collector.store.lake.reader.Snapshot`)."""

    def query(self, sql: str, params: Any = None) -> pd.DataFrame:
        """Run SQL over the stream views and `event`."""


class Memo:
    """A snapshot that runs each query once, and none that `answers` has already: panels share many queries."""

    def __init__(self, snapshot: Queryable, answers: Mapping[str, pd.DataFrame] = MappingProxyType({})) -> None:
        self._snapshot = snapshot
        self._answers = dict(answers)

    @property
    def answers(self) -> Mapping[str, pd.DataFrame]:
        """The results of all queries so far, by SQL and parameters."""
        return self._answers

    def query(self, sql: str, params: Any = None) -> pd.DataFrame:
        """Run SQL as the snapshot does; each caller gets a copy of the result."""
        key = f"{sql}{params}"
        if key not in self._answers:
            self._answers[key] = self._snapshot.query(sql, params)
        return self._answers[key].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a run that is shown: a window of time (ns, both ends included) and a rank.

    `elapsed_seconds` counts from `origin_ns`; `rank` None means all ranks. The run has records from `first_ns` to
    `newest_ns`.
    """

    origin_ns: int
    from_ns: int
    to_ns: int
    first_ns: int
    newest_ns: int
    rank: int | None = None

    @property
    def bounds(self) -> dict[str, int]:
        """The parameters of `IN_TIME`; DuckDB refuses one that the SQL does not name."""
        return {"from_ns": self.from_ns, "to_ns": self.to_ns}

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of `IN_SPAN`."""
        return {**self.bounds, "rank": self.rank}

    @property
    def is_whole(self) -> bool:
        """True for the whole run. Only then can rollups answer: none has rows beyond the edges of the span."""
        return self.from_ns <= self.first_ns and self.newest_ns <= self.to_ns

    def elapsed(self, time_ns: pd.Series) -> pd.Series:
        """Return seconds since the run was made."""
        return (time_ns.astype("int64") - self.origin_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Times of the first and the newest record of a run (ns), and the number of records."""

    first_ns: int
    newest_ns: int
    records_count: int


def origin_ns(manifest: Mapping[str, Any]) -> int | None:
    """Return the monotonic time at which the run was made, on the host that made it."""
    anchor = manifest.get("anchors", {}).get(manifest.get("host"))
    return int(anchor["time_ns"]) if anchor else None


def wall_ns(manifest: Mapping[str, Any], time_ns: int) -> int | None:
    """Return a monotonic time of the run's host as wall time."""
    anchor = manifest.get("anchors", {}).get(manifest.get("host"))
    return int(anchor["wall_ns"]) + time_ns - int(anchor["time_ns"]) if anchor else None


def extent(snapshot: Queryable) -> Extent | None:
    """Return the extent of the streams that show how far a run has come; None if they have no record."""
    parts = [f"FROM {name}_reach" for name in PULSE_STREAMS]
    row = snapshot.query(
        f"SELECT min(first_ns) lo, max(last_ns) hi, sum(n)::BIGINT n FROM ({' UNION ALL '.join(parts)})"
    ).iloc[0]
    if not row["n"]:
        return None
    return Extent(first_ns=int(row["lo"]), newest_ns=int(row["hi"]), records_count=int(row["n"]))


def span(snapshot: Queryable, whole: Extent, *, origin: int, window: Window, rank: int | None) -> Span:
    """Return the span that a window names; it ends at the newest record."""
    start = min(whole.first_ns, origin)
    if window == "5min":
        start = max(start, whole.newest_ns - 300 * 10**9)
    elif window == "500steps":
        of_rank = "FROM step WHERE ($rank IS NULL OR rank = $rank)"
        newest = snapshot.query(f"SELECT max(step) step {of_rank}", {"rank": rank})["step"].iloc[0]
        # A literal step number lets DuckDB skip the files of earlier steps.
        since = snapshot.query(
            f"SELECT min(time_ns) t {of_rank} AND step > {-1 if pd.isna(newest) else int(newest) - 500}",
            {"rank": rank},
        )["t"].iloc[0]
        start = max(start, int(since)) if pd.notna(since) else start
    return Span(
        origin_ns=origin,
        from_ns=start,
        to_ns=whole.newest_ns,
        first_ns=whole.first_ns,
        newest_ns=whole.newest_ns,
        rank=rank,
    )


def rollup_view(within: Span, stream: str) -> str:
    """Return the view of a stream as rollups that can answer a span."""
    return f"{stream}{tables.ROLLUP_VIEW if within.is_whole else tables.ROW_VIEW}"


def bucket_source(snapshot: Queryable, within: Span, stream: str, buckets: int) -> tuple[str, int]:
    """Return the view of a stream that serves a figure of `buckets` buckets, and their width (ns).

    A bucket cannot be narrower than a rollup. A whole run with many rows in a short time therefore gets fewer,
    wider buckets. If that leaves too few for a figure, the rows are read instead.
    """
    width, rollup_ns = width_ns(within, buckets), tables.ROLLUPS[stream].width_ns
    if width < rollup_ns:
        rows_count = snapshot.query(f"SELECT n FROM {stream}_reach")["n"].iloc[0]
        is_long = within.to_ns - within.from_ns >= _FEWEST_BUCKETS * rollup_ns
        if not (within.is_whole and is_long and rows_count > tables.EXACT_QUANTILE_ROWS):
            return f"{stream}{tables.ROW_VIEW}", width
        width = rollup_ns * 5 // 4  # a rollup is placed at its first row: a bucket of its width may get none
    return rollup_view(within, stream), width


def with_values(source: str, of_row: str) -> str:
    """Return SQL for the rows of `source` (of `bucket_source`), each with a `value` to take quantiles of.

    That is the column `of_row` where rows are read, and each value in the sample of rollups.
    """
    value = of_row if source.endswith(tables.ROW_VIEW) else "unnest(sample)"
    return f"(SELECT *, {value} AS value FROM {source})"


def with_quantiles(table: pd.DataFrame, quantiles: pd.DataFrame, highest: str) -> pd.DataFrame:
    """Return a table of groups with median_ms and p95_ms from `quantiles`: place and q, a pair of values in ms.

    A group without a value in the sample has its highest one.
    """
    pairs = dict(zip(quantiles["place"], quantiles["q"], strict=True))
    for name, position in (("median_ms", 0), ("p95_ms", 1)):
        values = [pairs[place][position] if place in pairs else math.nan for place in table["place"]]
        table[name] = pd.Series(values, table.index, dtype=float).fillna(table[highest])
    return table


def quantile_source(within: Span, stream: str, where: str, rows_count: int) -> str:
    """Return SQL for the values that quantiles are taken of, with the keys of the stream's rollups.

    Sorting is their cost, so above `tables.EXACT_QUANTILE_ROWS` rows a sample is taken; `rows_count` is the number
    of rows. With a million rows its median has a standard error of 0.2 % of the rows; in each of four groups, 0.4
    %.
    """
    rollup = tables.ROLLUPS[stream]
    keys = ", ".join(name for name, _ in rollup.keys)
    if _is_sampled(within, rows_count):
        return f"(SELECT {keys}, unnest(sample) AS value FROM {rollup_view(within, stream)} WHERE {where})"
    is_in_sample = f"hash(time_ns) % {tables.sample_every(rows_count)} = 0"
    return f'(SELECT {keys}, {rollup.sample} AS value FROM "{stream}" WHERE {where} AND {is_in_sample})'


def quantile_function(within: Span, rows_count: int) -> str:
    """Return the SQL function for quantiles; for a sample, that without interpolation takes half the time."""
    return "quantile_disc" if _is_sampled(within, rows_count) else "quantile_cont"


def _is_sampled(within: Span, rows_count: int) -> bool:
    return within.is_whole and rows_count > tables.EXACT_QUANTILE_ROWS


def whole(within: Span, reach: Extent) -> Span:
    """Return the same rank over the whole run."""
    return replace(within, from_ns=min(reach.first_ns, within.origin_ns), to_ns=reach.newest_ns)


def width_ns(within: Span, buckets: int) -> int:
    """Return the width of a bucket (ns) when the span has `buckets` of them."""
    return (within.to_ns - within.from_ns) // buckets + 1
