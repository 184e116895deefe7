"""Queries about host memory: of the training's processes, and against the host's limits.

Tidegauge's own process has its memory on Agent health (`collector_lines`), and is left out here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from collector.store.duck import quote
from collector.store.queries.lines import Lines, lines, rollup_lines
from collector.store.queries.spans import (
    GRID_BUCKETS,
    GRID_STEP_NS,
    IN_TIME,
    Queryable,
    Span,
    bucket_source,
    rollup_view,
)
from collector.store.rollups.facts import slope
from training_harness.records import ROLE_COLLECTOR, ROLES

#: A process without an end counts as alive for this long after its last sample.
CARRY_NS = 2_000_000_000
#: limit -> SQL for usage and for capacity, over `host`.
HOST_LIMITS = {
    "cgroup": ("cgroup_usage_bytes", "cgroup_limit_bytes"),
    "host": ("memory_total_bytes - memory_available_bytes", "memory_total_bytes"),
    "shm": ("shm_used_bytes", "shm_total_bytes"),
}
_PROCESS = "host, process_pid, process_start_ticks"
#: One number per process: pandas groups by it in half the time.
_PROCESS_KEY = f"(hash({_PROCESS}) >> 1)::BIGINT AS process"
#: Place of the training process, after its rank if there are several.
MAIN_PLACE = "training process"
#: Place of a process in the run: a restarted worker has the place of its predecessor.
_SERIES = (
    "CASE WHEN process_rank IS NULL THEN '' ELSE 'rank ' || process_rank || ' ' END || "
    f"CASE role WHEN 0 THEN '{MAIN_PLACE}' "
    "WHEN 1 THEN 'loader ' || coalesce(loader::VARCHAR, '?') || ' worker ' || coalesce(worker::VARCHAR, '?') "
    "ELSE 'other ' || process_pid END"
)
_PLACE = ("role", "loader", "worker", "process_rank")


def process_metric(snapshot: Queryable, within: Span, wanted: str) -> str | None:
    """Return `wanted` if any process has it in the span, else `rss_bytes`; None without either."""
    row = snapshot.query(
        f"SELECT coalesce(sum({wanted}_n), 0) wanted, coalesce(sum(rss_bytes_n), 0) rss "
        f"FROM {rollup_view(within, 'process')} WHERE {IN_TIME}",
        within.bounds,
    ).iloc[0]
    if row["wanted"]:
        return wanted
    return "rss_bytes" if row["rss"] else None


def memory_by_role(snapshot: Queryable, within: Span, metric: str, host: str | None = None) -> pd.DataFrame:
    """Return a process metric summed by role on one grid of time, for one host or for all.

    Returns:
        elapsed_seconds, and one column (bytes) for each role that occurs, in the buckets in which a process was
        sampled. Each process counts with its largest value in a bucket, carried forward while it lives.
    """
    source, width = bucket_source(snapshot, within, "process", GRID_BUCKETS)
    width = max(width, GRID_STEP_NS)
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, ((time_ns - $from_ns) // {width})::INTEGER bucket, max({metric}_high)::DOUBLE v, "
        f"arg_max(time_ns + {metric}_high_after_ns, {metric}_high) - $from_ns AS at_ns, "
        f"min(time_ns) - $from_ns AS first_ns, min(alive_low) alive "
        f"FROM {source} WHERE {IN_TIME} AND ($host IS NULL OR host = $host) GROUP BY ALL ORDER BY bucket",
        {**within.bounds, "host": host},
    )
    totals = _sum_by_role(table.merge(_places(snapshot, within)[["process", "role"]], on="process"), width)
    elapsed = (within.from_ns + totals.index.to_numpy() * width - within.origin_ns) / 1e9
    totals.insert(0, "elapsed_seconds", elapsed)
    return totals.reset_index(drop=True)


def sum_processes(samples: pd.DataFrame, from_ns: int, to_ns: int) -> pd.Series:
    """Return the sum of a metric over processes in each bucket of a grid, as `memory_by_role` has it.

    Args:
        samples: in order of time: process, role, time_ns, v (the metric, NaN where it was not read), alive.
        from_ns: begin of the grid.
        to_ns: end of the grid.
    """
    width = max((to_ns - from_ns) // GRID_BUCKETS + 1, GRID_STEP_NS)
    after_ns = samples["time_ns"].astype("int64") - from_ns
    rows = samples.assign(bucket=after_ns // width, first_ns=after_ns)
    by_bucket = rows.groupby(["bucket", "process"])
    table = by_bucket.agg(
        v=("v", "max"), first_ns=("first_ns", "min"), alive=("alive", "min"), role=("role", "last")
    )
    highest = (
        rows.dropna(subset="v").sort_values("v", kind="stable").groupby(["bucket", "process"])["first_ns"].last()
    )
    return _sum_by_role(table.assign(at_ns=highest).reset_index(), width).sum(axis=1)


def processes(snapshot: Queryable, within: Span, *, fewest: int | None = 2) -> pd.DataFrame:
    """Return one row per process of the span.

    Args:
        snapshot: of the run.
        within: the span.
        fewest: samples that a slope needs; with fewer it is NaN. None leaves the slopes out.

    Returns:
        series (`main`, `loader 0 worker 2`, …), pid, role, first_seconds, last_seconds, ended, restart
        (another process had this place before), the last value (bytes) of private_dirty, pss and rss, the largest
        of pss and rss, and the slope (bytes per second) of private_dirty and rss while the run trains
        (`training`), with the number of samples.
    """
    table = snapshot.query(
        f"SELECT {_PROCESS}, {_PROCESS_KEY}, min(time_ns) first_ns, max(time_ns + last_after_ns) last_ns, "
        "min(alive_low) = 0 ended, arg_max(private_dirty_bytes_newest, time_ns) private_dirty_bytes, "
        "arg_max(pss_bytes_newest, time_ns) pss_bytes, max(pss_bytes_high) pss_peak_bytes, "
        "arg_max(rss_bytes_newest, time_ns) rss_bytes, max(rss_bytes_high) rss_peak_bytes "
        f"FROM {rollup_view(within, 'process')} "
        f"WHERE {IN_TIME} GROUP BY ALL ORDER BY first_ns, process_pid",
        within.bounds,
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
    """Return the part of the span from the run's first step (or batch) to its last one; None if it has none.

    Memory use before and after it comes from start-up and shutdown, and is no trend.
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
    """Return the slopes of each process while it trains, or over the span if no step or batch is recorded."""
    # For the training part, too, rollups of the whole run serve, without the rollup that holds the first step.
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, {slope('private_dirty_bytes')} private_dirty_slope, "
        "sum(private_dirty_bytes_n)::BIGINT private_dirty_count, "
        f"{slope('rss_bytes')} rss_slope, sum(rss_bytes_n)::BIGINT rss_count "
        f"FROM {rollup_view(within, 'process')} WHERE {IN_TIME} GROUP BY {_PROCESS}",
        (training(snapshot, within) or within).bounds,
    )
    for name in ("private_dirty", "rss"):
        table[f"{name}_slope"] = table[f"{name}_slope"].where(table[f"{name}_count"] >= fewest)
    return table


def last_alive(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return when each process was last sampled alive in a short span: host, pid, ticks, alive_seconds."""
    table = snapshot.query(
        "SELECT host, process_pid pid, process_start_ticks ticks, max(time_ns) last_ns FROM process "
        f"WHERE {IN_TIME} AND alive IS DISTINCT FROM 0 GROUP BY ALL",
        within.bounds,
    )
    table["alive_seconds"] = within.elapsed(table.pop("last_ns"))
    return table


def _places(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return role and place of each process that has the span's rank, or no rank."""
    table = snapshot.query(
        f"SELECT {_PROCESS_KEY}, role, series, process_rank FROM {_place_sql(rollup_view(within, 'process'))}",
        {"from_ns": within.from_ns},
    )
    rank = table.pop("process_rank")
    return table if within.rank is None else table[rank.isna() | (rank == within.rank)]


def _place_sql(source: str) -> str:
    """Return SQL for the place in the run of each process in the rollups of `source` since `$from_ns`.

    A process has the role it is recorded with last: the main one is an "other" until it trains.
    """
    newest = ", ".join(f"arg_max({name}_newest, time_ns) AS {name}" for name in _PLACE)
    processes = f"(SELECT {_PROCESS}, {newest} FROM {source} WHERE time_ns >= $from_ns GROUP BY ALL)"
    return f"(SELECT *, {_SERIES} AS series FROM {processes} WHERE role IS DISTINCT FROM {ROLE_COLLECTOR})"


def process_lines(
    snapshot: Queryable, within: Span, metric: str, series: list[str], *, lacking: str | None = None
) -> Lines:
    """Return thinned lines of a process metric, one per place (main, worker k of loader l).

    `lacking` names another metric: then only processes for which it was never read in the span have a line.
    """
    names = ", ".join(quote(name) for name in series) or "''"
    source, width = bucket_source(snapshot, within, "process", GRID_BUCKETS)
    rows = f"{source} JOIN {_place_sql(rollup_view(within, 'process'))} USING ({_PROCESS})"
    if lacking is not None:
        rows += (
            f" JOIN (SELECT {_PROCESS} FROM {rollup_view(within, 'process')} "
            f"WHERE {IN_TIME} GROUP BY {_PROCESS} HAVING sum({lacking}_n) = 0) USING ({_PROCESS})"
        )
    where = f"series IN ({names})"
    return rollup_lines(snapshot, within, rows, [metric], where=where, series="series", width=width)[metric]


def host_limits(snapshot: Queryable) -> pd.DataFrame:
    """Return current usage, peak and capacity (bytes) of each limit of each host, over the whole run.

    Returns:
        limit (`cgroup`, `host`, `shm`), host, now_bytes, peak_bytes, capacity_bytes. A limit that does not
        exist, such as that of an unlimited cgroup, has no row.
    """
    facts = ", ".join(
        f"arg_max({used}, time_ns) {name}_now, max({used}) {name}_peak, arg_max({total}, time_ns) {name}_capacity"
        for name, (used, total) in HOST_LIMITS.items()
    )
    limits = " UNION ALL ".join(
        f"SELECT '{name}' AS \"limit\", host, {name}_now AS now_bytes, {name}_peak AS peak_bytes, "
        f"{name}_capacity AS capacity_bytes FROM usage"
        for name in HOST_LIMITS
    )
    table = snapshot.query(
        f"WITH usage AS MATERIALIZED (SELECT host, {facts} FROM host GROUP BY host) "
        f"SELECT * FROM ({limits}) WHERE capacity_bytes > 0"
    )
    return table.sort_values(["host", "limit"], ignore_index=True)


def tightest_limit(snapshot: Queryable) -> dict[str, Any] | None:
    """Return the memory limit that the run came nearest to, as a row of `host_limits`; None without host samples.

    Each host counts with its smaller limit: its memory, or its cgroup's limit.
    """
    table = host_limits(snapshot)
    table = table[table["limit"].isin(["cgroup", "host"])].sort_values("capacity_bytes", kind="stable")
    binding = table.drop_duplicates("host")
    if binding.empty:
        return None
    nearest = int((binding["peak_bytes"] / binding["capacity_bytes"]).to_numpy().argmax())
    return {str(name): value for name, value in binding.iloc[nearest].items()}


def host_lines(snapshot: Queryable, within: Span, limit: str, host: str) -> dict[str, Lines]:
    """Return lines of the usage of one limit of one host; for a cgroup also of its anonymous part."""
    values = {"used": HOST_LIMITS[limit][0]}
    if limit == "cgroup":
        values["anonymous"] = "cgroup_anon_bytes"
    return lines(snapshot, within, "host", values, where=f"host = {quote(host)}")


def open_files(snapshot: Queryable) -> pd.DataFrame:
    """Return open file descriptors of each place over the whole run, the nearest to its limit first.

    Returns:
        series, now_count, peak_count, limit_count. Processes whose limit was not read have no row.
    """
    return snapshot.query(
        "SELECT series, arg_max(present, last_ns) now_count, max(highest) peak_count, "
        f"arg_max(allowed, last_ns) limit_count FROM (SELECT {_PROCESS}, max(time_ns + last_after_ns) last_ns, "
        "arg_max(fd_count_newest, time_ns) present, max(fd_count_high) highest, "
        "arg_max(fd_limit_count_newest, time_ns) allowed FROM process_tiled GROUP BY ALL) "
        f"JOIN {_place_sql('process_tiled')} USING ({_PROCESS}) GROUP BY series "
        "HAVING limit_count > 0 AND peak_count > 0 ORDER BY peak_count / limit_count DESC, series",
        {"from_ns": 0},
    )


def _starts(rows: Any, measured: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return by process, in order of time, first_ns and the bucket from which it counts.

    That is the next one if another process was read before it started, in the same bucket.
    """
    starts: pd.DataFrame = rows.agg({"first_ns": "min", "bucket": "max"}).sort_values("first_ns")
    first_bucket = starts["first_ns"] // width
    first_reading = first_bucket.map(measured.groupby("bucket")["at_ns"].min())
    later = first_bucket + (first_reading < starts["first_ns"])
    starts["bucket"] = later.clip(upper=starts["bucket"])
    return starts


def _sum_by_role(table: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return, by role, the sum over its processes in each bucket in which one was sampled.

    A process counts with its first value from its first sample on, then with each value until the next one, or
    until its end. Without an end it counts for `CARRY_NS` after its last sample. A process that starts shares pages
    of others: from then on these count with their next value.

    Args:
        table: one row per process and bucket with a sample, in order of the buckets: process, role, bucket, v (the
            value), at_ns (its time since the start of the grid), first_ns (time of the first sample), alive.
        width: of a bucket (ns).
    """
    count = 0 if table.empty else int(table["bucket"].max()) + 1
    rows = table.groupby("process")
    ends = rows["bucket"].max() + np.where(rows["alive"].min() == 0, 0, CARRY_NS // width + 1)
    measured = table.dropna(subset="v")
    starts = _starts(rows, measured, width)
    # A value counts from its own bucket on, or from the first start of a process since the value before it. The
    # first value counts from the start of its process: smaps are read later than the rest.
    before = measured.groupby("process")["at_ns"].shift()
    starts_before = np.searchsorted(starts["first_ns"], before.fillna(-1), side="right")
    next_start = np.append(starts["bucket"], count)[starts_before]
    own_start = measured["process"].map(starts["bucket"])
    begins = measured["bucket"].clip(upper=next_start).where(before.notna(), own_start)
    # It counts until the next value begins, and the last one until the process ends.
    end = measured["process"].map(ends).clip(lower=measured["bucket"] + 1)
    stops = begins.groupby(measured["process"]).shift(-1).fillna(end).clip(upper=count)
    totals = {}
    for role, rows_of_role in measured.groupby("role"):
        increase, decrease = (
            np.bincount(buckets[rows_of_role.index].astype(int), weights=rows_of_role["v"], minlength=count + 1)
            for buckets in (begins, stops)
        )
        totals[ROLES[int(str(role))]] = (increase - decrease).cumsum()[:count]
    every_bucket = pd.DataFrame({role: totals[role] for role in ROLES if role in totals}, range(count))
    return every_bucket.iloc[np.unique(table["bucket"])]
