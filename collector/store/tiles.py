"""Tiles: what the rows of some seconds come to, kept beside them so that a look at a long run reads few of them.

The upkeep of a lake lays them: one row for each piece of time and each rank, loader, worker, process or GPU, with
counts, sums, extremes and their times, and a sample for quantiles. Whoever looks takes a tile and a row for the
same thing: a row stands for itself. So one query serves all runs, what is in tiles and the rows that are not yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collector.store.engine import Ask, rows_of
from collector.store.fullest import Fullest
from collector.store.tiling import (
    WIDE_TILE_NS,
    Fact,
    Summary,
    Tiling,
    counter,
    extremes,
    least,
    most,
    newest,
    own_peak,
    regression,
    total,
)

#: Of no more rows than this they are exact.
SAMPLED_BEYOND = 1_000_000
#: Of no more than this there are no tiles: to read the rows costs little.
TILED_BEYOND = 100_000
#: Of what the name of a table of tiles ends with, and that of the view that has tiles where there are any.
TILE, TILED = "_tile", "_tiled"
#: The same view of rows alone: for what is shorter than tiles.
ROWS = "_rows"

_RANK, _LOADER, _WORKER = (("rank", "INTEGER"), ("loader", "INTEGER"), ("worker", "INTEGER"))
_FETCH_SUMS = ("idle_ns", "getitem_ns", "collate_ns", "cpu_ns", "run_queue_ns", "blocked_ns")
#: A step without a duration, as the first one, is not timed.
_IS_TIMED = "duration_ns IS NOT NULL"
_REST = "greatest(duration_ns - coalesce(data_wait_ns, 0), 0)"
_DEVICE = (("host", "VARCHAR"), ("device", "SMALLINT"))
_PROCESS = (("pid", "INTEGER"), ("start_ticks", "BIGINT"))
_SUMMARIES = (
    Summary(
        stream="step",
        keys=(_RANK,),
        facts=(
            most("step_high", "max(step)", "step"),
            least("timed_step_low", f"min(step) FILTER ({_IS_TIMED})", f"CASE WHEN {_IS_TIMED} THEN step END"),
            Fact("timed_n", "count(duration_ns)", f"({_IS_TIMED})::INTEGER", "INTEGER"),
            total("duration_ns"),
            most("slowest_ns", "max(duration_ns)", "duration_ns"),
            Fact(
                "wait_ns", f"sum(data_wait_ns) FILTER ({_IS_TIMED})", f"CASE WHEN {_IS_TIMED} THEN data_wait_ns END"
            ),
            Fact("rest_ns", f"sum({_REST})", _REST),
        ),
        sample="duration_ns",
        most_buckets=1000,
    ),
    Summary(
        stream="batch",
        keys=(_RANK, _LOADER),
        facts=(
            *extremes("wait_ns"),
            *extremes("parked_count"),
            *extremes("ready_count"),
            *extremes("outstanding_count"),
            total("samples_count"),
            Fact(
                "samples_count_first",
                "arg_min(samples_count, time_ns)",
                "samples_count",
                of_tiles="arg_min(samples_count_first, time_ns)",
            ),
        ),
        most_buckets=500,
    ),
    Summary(
        stream="fetch",
        keys=(_RANK, _LOADER, _WORKER),
        facts=(
            *map(total, _FETCH_SUMS),
            most(
                "longest_ns",
                "max(getitem_ns + coalesce(collate_ns, 0))",
                "getitem_ns + coalesce(collate_ns, 0)",
            ),
        ),
        sample="getitem_ns + collate_ns",
        most_buckets=200,
        width_ns=WIDE_TILE_NS,
    ),
    Summary(
        stream="device_memory",
        keys=(*_DEVICE, _RANK, *_PROCESS),
        facts=(
            *extremes("allocated_bytes"),
            *extremes("reserved_bytes"),
            newest("reserved_bytes"),
            *map(own_peak, ("allocated", "reserved")),
            *counter("alloc_retry_count"),
            *counter("oom_count"),
        ),
        most_buckets=500,
        width_ns=WIDE_TILE_NS,
    ),
    Summary(
        stream="device",
        keys=_DEVICE,
        facts=(
            *extremes("used_bytes"),
            newest("used_bytes"),
            most("total_bytes", "max(total_bytes)", "total_bytes"),
        ),
        most_buckets=500,
        width_ns=WIDE_TILE_NS,
    ),
    Summary(
        stream="process",
        keys=(("host", "VARCHAR"), ("process_pid", "INTEGER"), ("process_start_ticks", "BIGINT")),
        facts=(
            *map(newest, ("role", "loader", "worker", "process_rank")),
            least("alive_low", "min(alive)", "alive"),
            *extremes("private_dirty_bytes"),
            *extremes("pss_bytes"),
            *extremes("rss_bytes"),
            *extremes("fd_count"),
            *map(newest, ("private_dirty_bytes", "pss_bytes", "rss_bytes", "fd_count", "fd_limit_count")),
            *regression("private_dirty_bytes"),
            *regression("rss_bytes"),
        ),
        most_buckets=400,
        width_ns=WIDE_TILE_NS,
    ),
)
SUMMARIES = {each.stream: each for each in _SUMMARIES}
#: What is laid -> how: the streams of which most is asked for of whole runs, and GPUs.
TILINGS: dict[str, Tiling] = {**SUMMARIES, "gpu": Fullest(most_buckets=500)}
#: table -> ((column, SQL type), ...), as in the lake.
TABLES = {f"{name}{TILE}": tiling.columns for name, tiling in TILINGS.items()}


def one_in(rows_count: int) -> int:
    """One row in how many is in a sample of so many."""
    return max(rows_count - 1, 0) // SAMPLED_BEYOND + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How many rows there are, and the times of the first and the last."""

    rows_count: int
    first_ns: int | None
    last_ns: int | None

    @classmethod
    def of(cls, found: Iterable[tuple[Any, ...]]) -> Reach:
        """Of what `reach` has asked of each source."""
        counts, firsts, lasts = zip(*found, strict=True)
        known = [ns for ns in (*firsts, *lasts) if ns is not None]
        return cls(rows_count=sum(counts), first_ns=min(known, default=None), last_ns=max(known, default=None))

    @property
    def told(self) -> str:
        """SQL: one row of n, first_ns and last_ns."""
        ends = ((self.first_ns, "first_ns"), (self.last_ns, "last_ns"))
        known = (f"{'NULL' if ns is None else ns}::BIGINT AS {name}" for ns, name in ends)
        return f"SELECT {self.rows_count}::BIGINT AS n, {', '.join(known)}"


def reach(source: str) -> str:
    """SQL: how far a source reaches, all from the catalog where it is a table of a lake."""
    return f"SELECT count(*), min(time_ns), max(time_ns) FROM {source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """The tiles of a lake, which hold all rows from one time to before another, and the rows since, both as SQL."""

    first_ns: int
    until_ns: int
    tiles: str
    newer: str


def find_laid(ask: Ask, lake: str, name: str) -> Laid | None:
    """What is laid of a lake; None if nothing is, or a row came late.

    The catalog knows how many rows there are, so only the newest ones are looked at. The files are named as they
    are: they stay while a look lasts, and DuckLake would take 4 ms for each query to find them anew.

    Raises:
        duckdb.Error: the tiles cannot be read.

    """
    tiling = TILINGS[name]
    width_ns = tiling.width_ns
    found = ask(f"SELECT filename, max(time_ns // {width_ns}), sum(n) FROM {lake}.{name}{TILE} GROUP BY filename")
    if not found:
        return None
    files, lasts, tiled_counts = zip(*found, strict=True)
    until_ns = (int(max(lasts)) + 1) * width_ns
    since, known_count, newer = f"WHERE time_ns >= {until_ns}", sum(tiled_counts), {}
    for stream in tiling.parts:
        added = ask(f"SELECT filename, count(*) FROM {lake}.{stream} {since} GROUP BY filename")
        of_files = f"({rows_of([file for file, _ in added])} {since})"
        newer[stream] = of_files if added else f"(FROM {lake}.{stream} LIMIT 0)"
        known_count += sum(count for _, count in added)
    whole = Reach.of(ask(reach(f"{lake}.{stream}"))[0] for stream in tiling.parts)
    if known_count != whole.rows_count or whole.first_ns is None:
        return None
    return Laid(
        first_ns=whole.first_ns,
        until_ns=until_ns,
        tiles=f"({rows_of(files)})",
        newer=tiling.gathered(newer.__getitem__),
    )
