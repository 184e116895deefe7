"""Rollups: aggregates of 10 or 30 s of rows, stored with the rows so that queries over a long run read few of them.

Compaction of the lake writes them: one row per bucket of time and rank, loader, worker, process or GPU, with
counts, sums, extremes and their times, and a sample for quantiles. A single row can stand as a rollup of itself, so
one query serves every run: it reads the rollups, and the rows that are not rolled up yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collector.store.duck import Ask, parquet_rows
from collector.store.rollups.facts import (
    WIDE_ROLLUP_NS,
    Rollup,
    aggregate,
    counter,
    extremes,
    newest,
    regression,
    total,
)
from collector.store.rollups.gpu_peak import GpuPeakRollup

#: Above this many rows, quantiles are sampled.
EXACT_QUANTILE_ROWS = 1_000_000
#: Above this many rows, a stream gets rollups; fewer are cheap to read.
ROWS_WITHOUT_ROLLUPS = 100_000
#: Suffix of a table of rollups. Lakes on disk have these names.
TABLE_SUFFIX = "_tile"
#: Suffix of the view that reads rollups where there are any, and of the same view from rows alone, for short spans.
ROLLUP_VIEW, ROW_VIEW = "_tiled", "_rows"

_RANK, _LOADER, _WORKER = (("rank", "INTEGER"), ("loader", "INTEGER"), ("worker", "INTEGER"))
#: A step without a duration is not timed; the first one has none.
_IS_TIMED = "duration_ns IS NOT NULL"
_DEVICE = (("host", "VARCHAR"), ("device", "SMALLINT"))
_STREAM_ROLLUPS = (
    Rollup(
        stream="step",
        keys=(_RANK,),
        facts=(
            aggregate("step_high", "max", "step"),
            aggregate("timed_step_low", "min", f"CASE WHEN {_IS_TIMED} THEN step END"),
            aggregate("timed_n", "count", "duration_ns", "INTEGER"),
            total("duration_ns"),
            aggregate("slowest_ns", "max", "duration_ns"),
            aggregate("wait_ns", "sum", f"CASE WHEN {_IS_TIMED} THEN data_wait_ns END"),
            aggregate("rest_ns", "sum", "greatest(duration_ns - coalesce(data_wait_ns, 0), 0)"),
        ),
        sample="duration_ns",
        most_buckets=1000,
    ),
    Rollup(
        stream="batch",
        keys=(_RANK, _LOADER),
        facts=(
            *extremes("wait_ns"),
            *extremes("parked_count"),
            *extremes("ready_count"),
            *extremes("outstanding_count"),
            total("samples_count"),
            aggregate("samples_count_first", "first", "samples_count"),
        ),
        sample="wait_ns",
        most_buckets=500,
    ),
    Rollup(
        stream="fetch",
        keys=(_RANK, _LOADER, _WORKER),
        facts=(
            *map(total, ("idle_ns", "getitem_ns", "collate_ns", "cpu_ns", "run_queue_ns", "blocked_ns")),
            aggregate("longest_ns", "max", "getitem_ns + coalesce(collate_ns, 0)"),
        ),
        sample="getitem_ns + coalesce(collate_ns, 0)",
        most_buckets=200,
        width_ns=WIDE_ROLLUP_NS,
    ),
    Rollup(
        stream="device_memory",
        keys=(*_DEVICE, _RANK, ("pid", "INTEGER"), ("start_ticks", "BIGINT")),
        facts=(
            *extremes("allocated_bytes"),
            *extremes("reserved_bytes"),
            newest("reserved_bytes"),
            # Each record has the highest value so far, and the present one may be higher.
            aggregate("allocated_peak_bytes", "max", "greatest(allocated_bytes, allocated_peak_bytes)"),
            aggregate("reserved_peak_bytes", "max", "greatest(reserved_bytes, reserved_peak_bytes)"),
            *counter("alloc_retry_count"),
            *counter("oom_count"),
        ),
        most_buckets=500,
        width_ns=WIDE_ROLLUP_NS,
    ),
    Rollup(
        stream="device",
        keys=_DEVICE,
        facts=(*extremes("used_bytes"), newest("used_bytes"), aggregate("total_bytes", "max", "total_bytes")),
        most_buckets=500,
        width_ns=WIDE_ROLLUP_NS,
    ),
    Rollup(
        stream="process",
        keys=(("host", "VARCHAR"), ("process_pid", "INTEGER"), ("process_start_ticks", "BIGINT")),
        facts=(
            *map(newest, ("role", "loader", "worker", "process_rank")),
            aggregate("alive_low", "min", "alive"),
            *extremes("private_dirty_bytes"),
            *extremes("pss_bytes"),
            *extremes("rss_bytes"),
            *extremes("fd_count"),
            *map(newest, ("private_dirty_bytes", "pss_bytes", "rss_bytes", "fd_count", "fd_limit_count")),
            *regression("private_dirty_bytes"),
            *regression("rss_bytes"),
        ),
        most_buckets=400,
        width_ns=WIDE_ROLLUP_NS,
    ),
)
#: Name -> rollup: the streams that pages query most over whole runs, and the GPUs' peaks.
ROLLUPS = {rollup.stream: rollup for rollup in (*_STREAM_ROLLUPS, GpuPeakRollup(stream="gpu", most_buckets=500))}
#: table -> ((column, SQL type), ...), as in the lake.
TABLES = {f"{name}{TABLE_SUFFIX}": rollup.columns for name, rollup in ROLLUPS.items()}


def sample_every(rows_count: int) -> int:
    """Return k such that a sample of one row in k has at most `EXACT_QUANTILE_ROWS` rows."""
    return max(rows_count - 1, 0) // EXACT_QUANTILE_ROWS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The number of rows, and the times of the first and the last (ns)."""

    rows_count: int
    first_ns: int | None
    last_ns: int | None

    @classmethod
    def merge(cls, rows: Iterable[tuple[Any, ...]]) -> Reach:
        """Return the reach of several sources together, given the row of `reach_sql` for each."""
        counts, firsts, lasts = zip(*rows, strict=True)
        times_ns = [ns for ns in (*firsts, *lasts) if ns is not None]
        return cls(
            rows_count=sum(counts), first_ns=min(times_ns, default=None), last_ns=max(times_ns, default=None)
        )

    @classmethod
    def of_lake(cls, ask: Ask, lake: str, streams: Iterable[str]) -> Reach:
        """Return the reach of streams in a lake; the catalog alone answers it."""
        return cls.merge(ask(reach_sql(f"{lake}.{stream}"))[0] for stream in streams)

    @property
    def sql(self) -> str:
        """SQL for one row of n, first_ns and last_ns."""
        ends = ((self.first_ns, "first_ns"), (self.last_ns, "last_ns"))
        columns = (f"{'NULL' if ns is None else ns}::BIGINT AS {name}" for ns, name in ends)
        return f"SELECT {self.rows_count}::BIGINT AS n, {', '.join(columns)}"


def reach_sql(source: str) -> str:
    """Return SQL for the reach of a source; for a table of a lake, the catalog alone answers it."""
    return f"SELECT count(*), min(time_ns), max(time_ns) FROM {source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollups:
    """SQL for the rollups in a lake, which cover all rows before `until_ns`, and for the newer rows."""

    first_ns: int
    until_ns: int
    rollups: str
    newer_rows: str


def find_rollups(ask: Ask, lake: str, name: str) -> StoredRollups | None:
    """Return the rollups in a lake; None if there are none, or if they lack a row that came late.

    The catalog knows the number of all rows, so only the newest are counted. The SQL names the files themselves:
    they stay while a read session lasts, and DuckLake would take 4 ms per query to find them again.
    """
    rollup = ROLLUPS[name]
    width_ns, table = rollup.width_ns, f"{lake}.{name}{TABLE_SUFFIX}"
    stored = ask(f"SELECT filename, max(time_ns // {width_ns}), sum(n) FROM {table} GROUP BY filename")
    if not stored:
        return None
    files, last_buckets, counts = zip(*stored, strict=True)
    until_ns = (int(max(last_buckets)) + 1) * width_ns
    since, rows_count, newer_rows = f"WHERE time_ns >= {until_ns}", sum(counts), {}
    for stream in rollup.stream_columns:
        newer_files = ask(f"SELECT filename, count(*) FROM {lake}.{stream} {since} GROUP BY filename")
        rows_of_files = f"({parquet_rows([file for file, _ in newer_files])} {since})"
        newer_rows[stream] = rows_of_files if newer_files else f"(FROM {lake}.{stream} LIMIT 0)"
        rows_count += sum(count for _, count in newer_files)
    whole = Reach.of_lake(ask, lake, rollup.stream_columns)
    if rows_count != whole.rows_count or whole.first_ns is None:
        return None
    return StoredRollups(
        first_ns=whole.first_ns,
        until_ns=until_ns,
        rollups=f"({parquet_rows(files)})",
        newer_rows=rollup.union_sql(newer_rows.__getitem__),
    )
