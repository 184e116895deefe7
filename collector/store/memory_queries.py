"""The named queries about memory: of processes, and of the host's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from collector.store.engine import quoted
from collector.store.line_queries import Lines, lines, tiled_lines
from collector.store.queries import (
    GRID_BUCKETS,
    GRID_STEP_NS,
    Queryable,
    Span,
    only,
    pieces,
    tiled,
)
from collector.store.tiling import slope
from training_harness.records import ROLES

#: A process that was sampled this long ago and did not end is taken to be there still.
CARRY_NS = 2_000_000_000
#: limit -> SQL of what is used and of the capacity, over `host`.
HOST_LIMITS = {
    "cgroup": ("cgroup_usage_bytes", "cgroup_limit_bytes"),
    "host": ("memory_total_bytes - memory_available_bytes", "memory_total_bytes"),
    "shm": ("shm_used_bytes", "shm_total_bytes"),
}
_PROCESS = "host, process_pid, process_start_ticks"
#: One number for a process: with it pandas puts rows together in half the time.
_PROCESS_KEY = f"(hash({_PROCESS}) >> 1)::BIGINT AS process"
#: The place that a process has in the run: a restarted worker has the same place as the one before.
_SERIES = (
    "CASE WHEN process_rank IS NULL THEN '' ELSE 'rank ' || process_rank || ' ' END || "
    "CASE role WHEN 0 THEN 'main' WHEN 1 THEN 'loader ' || coalesce(loader::VARCHAR, '?') || ' worker ' || "
    "coalesce(worker::VARCHAR, '?') WHEN 3 THEN 'collector' ELSE 'other ' || process_pid END"
)
_PLACE = ("role", "loader", "worker", "process_rank")


def process_metric(snapshot: Queryable, within: Span, wanted: str) -> str | None:
    """`wanted` if any process has it in the span, else `rss_bytes`, else None."""
    row = snapshot.query(
        f"SELECT coalesce(sum({wanted}_n), 0) wanted, coalesce(sum(rss_bytes_n), 0) rss "
        f"FROM {tiled(within, 'process')} WHERE time_ns BETWEEN $from_ns AND $to_ns",
        only(within.params, "from_ns", "to_ns"),
    ).iloc[0]
    if row["wanted"]:
        return wanted
    return "rss_bytes" if row["rss"] else None


def memory_by_role(snapshot: Queryable, within: Span, metric: str, host: str | None = None) -> pd.DataFrame:
    """A process metric summed by role on one grid of time, of one host or of all.

    Returns:
        elapsed_seconds, and one column (bytes) for each role that occurs, of the buckets in which a process was
        sampled. Each counts with its largest value in a bucket, carried forward while it lives.

    """
    source, width = pieces(snapshot, within, "process", GRID_BUCKETS)
    width = max(width, GRID_STEP_NS)
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, ((time_ns - $from_ns) // {width})::INTEGER bucket, max({metric}_high)::DOUBLE v, "
        f"min(alive_low) alive FROM {source} WHERE time_ns BETWEEN $from_ns AND $to_ns "
        "AND ($host IS NULL OR host = $host) GROUP BY ALL ORDER BY bucket",
        {**only(within.params, "from_ns", "to_ns"), "host": host},
    )
    table = table.merge(_places(snapshot, within)[["process", "role"]], on="process")
    count = 0 if table.empty else int(table["bucket"].max()) + 1
    totals = _held(table, count, CARRY_NS // width + 1)
    elapsed = (within.from_ns + np.arange(count) * width - within.origin_ns) / 1e9
    grid = pd.DataFrame({"elapsed_seconds": elapsed, **{role: totals[role] for role in ROLES if role in totals}})
    return grid.iloc[np.unique(table["bucket"])].reset_index(drop=True)


def processes(snapshot: Queryable, within: Span, *, fewest: int | None = 2) -> pd.DataFrame:
    """One row per process of the span.

    Args:
        snapshot: of the run.
        within: the span.
        fewest: samples that make a slope; of fewer it is NaN. None: slopes are not asked for, and not there.

    Returns:
        series (`main`, `loader 0 worker 2`, …), pid, role, first_seconds, last_seconds, ended, restart
        (there was another process in this place before), the last value (bytes) of private_dirty, pss and rss,
        the largest of pss and rss, and, of private_dirty and rss while it trains (`training`), the slope (bytes
        per second) with the number of samples.

    """
    table = snapshot.query(
        f"SELECT {_PROCESS}, {_PROCESS_KEY}, min(time_ns) first_ns, max(time_ns + last_after_ns) last_ns, "
        "min(alive_low) = 0 ended, arg_max(private_dirty_bytes_newest, time_ns) private_dirty_bytes, "
        "arg_max(pss_bytes_newest, time_ns) pss_bytes, max(pss_bytes_high) pss_peak_bytes, "
        "arg_max(rss_bytes_newest, time_ns) rss_bytes, max(rss_bytes_high) rss_peak_bytes "
        f"FROM {tiled(within, 'process')} "
        "WHERE time_ns BETWEEN $from_ns AND $to_ns GROUP BY ALL ORDER BY first_ns, process_pid",
        only(within.params, "from_ns", "to_ns"),
    )
    table = table.merge(_places(snapshot, within), on="process")
    if fewest is not None:
        table = table.merge(_slopes(snapshot, within, fewest), on="process", how="left")
        counts = ["private_dirty_count", "rss_count"]
        table[counts] = table[counts].fillna(0).astype("int64")
    table = table.drop(columns="process").rename(columns={"process_pid": "pid", "process_start_ticks": "ticks"})
    table["restart"] = table.duplicated("series") & table["role"].isin([0, 1])
    table["first_seconds"] = within.elapsed(table["first_ns"])
    table["last_seconds"] = within.elapsed(table["last_ns"])
    return table


def training(snapshot: Queryable, within: Span) -> Span | None:
    """The part of the span from the run's first step (or batch) to its last one; None if it has none.

    Before and after, what is used is that of starting and of tidying up, and no trend.
    """
    reach = snapshot.query(
        "SELECT (SELECT first_ns FROM step_reach) step_ns, (SELECT first_ns FROM batch_reach) batch_ns, "
        "greatest((SELECT last_ns FROM step_reach), (SELECT last_ns FROM batch_reach)) last_ns"
    )
    step_ns, batch_ns, last_ns = (reach[name].iloc[0] for name in ("step_ns", "batch_ns", "last_ns"))
    first_ns = batch_ns if pd.isna(step_ns) else step_ns
    if pd.isna(first_ns) or first_ns > within.to_ns or last_ns < within.from_ns:
        return None
    return replace(within, from_ns=max(within.from_ns, int(first_ns)), to_ns=min(within.to_ns, int(last_ns)))


def _slopes(snapshot: Queryable, within: Span, fewest: int) -> pd.DataFrame:
    """Of each process the slopes while it trains, or over the span where nothing tells of training."""
    # The tiles of the whole are taken for its part too, without the one in which the first step lies.
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, {slope('private_dirty_bytes')} private_dirty_slope, "
        "sum(private_dirty_bytes_n)::BIGINT private_dirty_count, "
        f"{slope('rss_bytes')} rss_slope, sum(rss_bytes_n)::BIGINT rss_count "
        f"FROM {tiled(within, 'process')} WHERE time_ns BETWEEN $from_ns AND $to_ns GROUP BY {_PROCESS}",
        only((training(snapshot, within) or within).params, "from_ns", "to_ns"),
    )
    for name in ("private_dirty", "rss"):
        table[f"{name}_slope"] = table[f"{name}_slope"].where(table[f"{name}_count"] >= fewest)
    return table


def last_alive(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """When each process was last sampled alive in a short span: host, pid, ticks, alive_seconds."""
    table = snapshot.query(
        "SELECT host, process_pid pid, process_start_ticks ticks, max(time_ns) last_ns FROM process "
        "WHERE time_ns BETWEEN $from_ns AND $to_ns AND alive IS DISTINCT FROM 0 GROUP BY ALL",
        only(within.params, "from_ns", "to_ns"),
    )
    table["alive_seconds"] = within.elapsed(table.pop("last_ns"))
    return table


def _places(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """The role and the place of each process of the span's rank, or of none."""
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, role, series, process_rank FROM {_placed(tiled(within, 'process'))}",
        only(within.params, "from_ns"),
    )
    rank = table.pop("process_rank")
    return table if within.rank is None else table[rank.isna() | (rank == within.rank)]


def _placed(source: str) -> str:
    """SQL: the place in the run of each process of `source`, as tiles, since `$from_ns`.

    A process counts as what it has turned out to be, also later: the main one is an "other" until it trains.
    """
    newest = ", ".join(f"arg_max({name}_newest, time_ns) AS {name}" for name in _PLACE)
    of_each = f"(SELECT {_PROCESS}, {newest} FROM {source} WHERE time_ns >= $from_ns GROUP BY ALL)"
    return f"(SELECT *, {_SERIES} AS series FROM {of_each})"


def process_lines(
    snapshot: Queryable, within: Span, metric: str, series: list[str], *, lacking: str | None = None
) -> Lines:
    """A line per place (main, worker k of loader l) of a process metric, thinned.

    With `lacking`, another metric, of those processes alone of which that one was never read in the span.
    """
    names = ", ".join(quoted(name) for name in series) or "''"
    source, width = pieces(snapshot, within, "process", GRID_BUCKETS)
    of_each = f"{source} JOIN {_placed(tiled(within, 'process'))} USING ({_PROCESS})"
    if lacking is not None:
        of_each += (
            f" JOIN (SELECT {_PROCESS} FROM {tiled(within, 'process')} WHERE time_ns BETWEEN $from_ns AND $to_ns "
            f"GROUP BY {_PROCESS} HAVING sum({lacking}_n) = 0) USING ({_PROCESS})"
        )
    where = f"series IN ({names})"
    return tiled_lines(snapshot, within, of_each, [metric], where=where, series="series", width=width)[metric]


def host_limits(snapshot: Queryable) -> pd.DataFrame:
    """Usage now, peak and capacity (bytes) of each limit of each host, over the whole run.

    Returns:
        limit (`cgroup`, `host`, `shm`), host, now_bytes, peak_bytes, capacity_bytes. A limit that is not
        there, as an unlimited cgroup, has no row.

    """
    facts = ", ".join(
        f"arg_max({used}, time_ns) {name}_now, max({used}) {name}_peak, arg_max({total}, time_ns) {name}_capacity"
        for name, (used, total) in HOST_LIMITS.items()
    )
    of_each = " UNION ALL ".join(
        f"SELECT '{name}' AS \"limit\", host, {name}_now AS now_bytes, {name}_peak AS peak_bytes, "
        f"{name}_capacity AS capacity_bytes FROM found"
        for name in HOST_LIMITS
    )
    table = snapshot.query(
        f"WITH found AS MATERIALIZED (SELECT host, {facts} FROM host GROUP BY host) "
        f"SELECT * FROM ({of_each}) WHERE capacity_bytes > 0"
    )
    return table.sort_values(["host", "limit"], ignore_index=True)


def tightest_limit(snapshot: Queryable) -> dict[str, Any] | None:
    """The memory limit that the run came nearest to, as a row of `host_limits`; None if no host was sampled.

    Of each host that limit counts which is smaller: its memory, or that of the cgroup.
    """
    table = host_limits(snapshot)
    table = table[table["limit"].isin(["cgroup", "host"])].sort_values("capacity_bytes")
    binding = table.drop_duplicates("host")
    if binding.empty:
        return None
    nearest = int((binding["peak_bytes"] / binding["capacity_bytes"]).to_numpy().argmax())
    return {str(name): value for name, value in binding.iloc[nearest].items()}


def host_lines(snapshot: Queryable, within: Span, limit: str, host: str) -> dict[str, Lines]:
    """The usage of one limit of one host over time; of a cgroup also its anonymous part."""
    values = {"used": HOST_LIMITS[limit][0]}
    if limit == "cgroup":
        values["anonymous"] = "cgroup_anon_bytes"
    where = f"host = {quoted(host)}"
    return lines(snapshot, within, "host", values, where=where)


def open_files(snapshot: Queryable) -> pd.DataFrame:
    """Open file descriptors of each place in the run, over the whole run, the nearest to its limit first.

    Returns:
        series, now_count, peak_count, limit_count. Processes whose limit was not read have no row.

    """
    return snapshot.query(
        "SELECT series, arg_max(present, last_ns) now_count, max(highest) peak_count, "
        f"arg_max(allowed, last_ns) limit_count FROM (SELECT {_PROCESS}, max(time_ns + last_after_ns) last_ns, "
        "arg_max(fd_count_newest, time_ns) present, max(fd_count_high) highest, "
        "arg_max(fd_limit_count_newest, time_ns) allowed FROM process_tiled GROUP BY ALL) "
        f"JOIN {_placed('process_tiled')} USING ({_PROCESS}) WHERE role < 3 GROUP BY series "
        "HAVING limit_count > 0 AND peak_count > 0 ORDER BY peak_count / limit_count DESC, series",
        {"from_ns": 0},
    )


def _held(table: pd.DataFrame, count: int, carry: int) -> dict[str, np.ndarray[Any, Any]]:
    """By role, what its processes hold in each of `count` buckets, of which `table` has a row each, in order.

    Each counts with its first value from first sight, then with each value until the next or to its end. One that
    has not ended is held for `carry` buckets beyond its last sample.
    """
    rows = table.groupby("process")
    ends = rows["bucket"].max() + np.where(rows["alive"].min() == 0, 0, carry)
    measured = table.dropna(subset="v")  # smaps are read later than the rest: it was there already
    begins = measured["bucket"].where(measured.duplicated("process"), measured["process"].map(rows["bucket"].min()))
    at_least = measured["process"].map(ends).clip(lower=measured["bucket"] + 1)
    stops = measured.groupby("process")["bucket"].shift(-1).fillna(at_least).clip(upper=count)
    totals = {}
    for role, held in measured.groupby("role"):
        come, go = (
            np.bincount(at[held.index].astype(int), weights=held["v"], minlength=count + 1)
            for at in (begins, stops)
        )
        totals[ROLES[int(str(role))]] = (come - go).cumsum()[:count]
    return totals
