"""Queries about data loading: loaders, the time of their workers, the waits of the training."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from collector.store.queries.lines import Lines, rollup_lines
from collector.store.queries.spans import (
    GRID_BUCKETS,
    GRID_STEP_NS,
    IN_SPAN,
    MOST_GROUPS,
    MOST_SINGLE,
    Queryable,
    Span,
    bucket_source,
    quantile_function,
    quantile_source,
    rollup_view,
    with_quantiles,
    with_values,
)
from collector.store.rollups.tables import ROW_VIEW

#: Times of a fetch: idle before it, its two parts, and how its thread spent them.
_FETCH_TIMES = ("idle_ms", "getitem_ms", "collate_ms", "cpu_ms", "run_queue_ms", "blocked_ms")
_IS_LOADER = f"{IN_SPAN} AND loader = $loader"


def starts(snapshot: Queryable) -> pd.DataFrame:
    """Return the events that name the training processes and the loaders, in order of time."""
    return snapshot.query("FROM event WHERE kind IN ('loader', 'process-start') ORDER BY time_ns")


def loaders(snapshot: Queryable) -> pd.DataFrame:
    """Return the DataLoaders of the run: loader, rank, num_workers, prefetch_factor, batch_size, dataset."""
    events = starts(snapshot)
    table = events[events["kind"] == "loader"].reset_index(drop=True)
    fields = ("loader", "num_workers", "prefetch_factor", "batch_size", "dataset")
    rows = [{key: json.loads(body).get(key) for key in fields} for body in table["body"]]
    frame = pd.DataFrame(rows, columns=list(fields))
    frame.insert(1, "rank", table["rank"])
    return frame.drop_duplicates(["loader", "rank"], ignore_index=True)


def used_loaders(snapshot: Queryable, within: Span) -> list[int]:
    """Return the loaders that yielded batches in the span, busiest first."""
    table = snapshot.query(
        f"SELECT loader FROM {rollup_view(within, 'batch')} WHERE {IN_SPAN} GROUP BY loader ORDER BY sum(n) DESC",
        within.params,
    )
    return [int(loader) for loader in table["loader"]]


def throughput(snapshot: Queryable, within: Span, training_loaders: Sequence[int] | None = None) -> pd.Series:
    """Return n, batches and samples per second of the batches yielded in the span, all ranks together.

    Args:
        snapshot: of the run.
        within: the span.
        training_loaders: the loaders whose samples count; leave out those of validation. All by default.
    """
    loaders = ", ".join(map(str, training_loaders or ())) or "NULL"
    is_training = "" if training_loaders is None else f" FILTER (loader IN ({loaders}))"
    seconds, training_seconds = (
        f"nullif((max({name}_to_ns) - min({name}_from_ns)) / 1e9, 0)" for name in ("all", "training")
    )
    # The first batch of each rank marks its start: it was made before.
    return snapshot.query(
        f"SELECT coalesce(sum(n), 0)::BIGINT n, (sum(n) - count(*)) / {seconds} batches_per_second, "
        f"sum(samples) / {training_seconds} samples_per_second FROM (SELECT sum(n) n, "
        "min(time_ns) all_from_ns, max(time_ns + last_after_ns) all_to_ns, "
        f"min(time_ns){is_training} training_from_ns, max(time_ns + last_after_ns){is_training} training_to_ns, "
        f"sum(samples_count){is_training} - arg_min(samples_count_first, time_ns){is_training} samples "
        f"FROM {rollup_view(within, 'batch')} WHERE {IN_SPAN} GROUP BY rank)",
        within.params,
    ).iloc[0]


def worker_split(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """Return how each worker of a loader spent its time.

    Returns:
        rank, worker, n (batches), median_ms and p95_ms of getitem plus collate, and the totals of
        idle_ms, getitem_ms, collate_ms, cpu_ms, run_queue_ms, blocked_ms (NaN where not measured).
    """
    buckets = _fetch_buckets(snapshot, within, loader)
    sums = buckets.groupby(["rank", "worker"], dropna=False)[["n", *_FETCH_TIMES]].sum(min_count=1).reset_index()
    count = int(buckets["n"].sum())
    quantiles = snapshot.query(
        "SELECT rank, worker, q[1] / 1e6 median_ms, q[2] / 1e6 p95_ms FROM (SELECT rank, worker, "
        f"{quantile_function(within, count)}(value, [0.5, 0.95]) q "
        f"FROM {quantile_source(within, 'fetch', _IS_LOADER, count)} GROUP BY rank, worker)",
        {**within.params, "loader": loader},
    )
    return sums.merge(quantiles, on=["rank", "worker"], how="left")


def fetch_heat(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """Return the longest fetch (getitem plus collate) by worker and bucket of time.

    Returns:
        rank, worker, elapsed_seconds (start of the bucket), fetch_ms, n.
    """
    table = _fetch_buckets(snapshot, within, loader)
    table["elapsed_seconds"] = within.elapsed(table["time_ns"])
    return table[["rank", "worker", "fetch_ms", "n", "elapsed_seconds"]]


def _fetch_buckets(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    source, width = bucket_source(snapshot, within, "fetch", GRID_BUCKETS // 2)
    width = max(width, GRID_STEP_NS)
    sums = ", ".join(f"sum({name.removesuffix('_ms')}_ns)::DOUBLE / 1e6 {name}" for name in _FETCH_TIMES)
    return snapshot.query(
        f"SELECT rank, worker, $from_ns + (time_ns - $from_ns) // {width} * {width} AS time_ns, "
        f"max(longest_ns) / 1e6 fetch_ms, sum(n)::BIGINT n, {sums} "
        f"FROM {source} WHERE {_IS_LOADER} GROUP BY ALL ORDER BY rank, worker, time_ns",
        {**within.params, "loader": loader},
    )


def batch_waits(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """Return the wait for each batch yielded, or for groups of batches if there are many.

    Returns:
        elapsed_seconds, n, and median_ms, p95_ms and longest_ms of the wait.
    """
    source, width = bucket_source(snapshot, within, "batch", MOST_GROUPS)
    yielded = f"{IN_SPAN} AND loader = {loader:d} AND wait_ns_n > 0"
    count = snapshot.query(f"SELECT sum(n)::BIGINT n FROM {source} WHERE {yielded}", within.params)["n"].iloc[0]
    if pd.isna(count) or count <= MOST_SINGLE:
        source, width = f"batch{ROW_VIEW}", 1
    group = f"(time_ns - $from_ns) // {width} AS place"
    grouped = f"{yielded} GROUP BY place ORDER BY place"
    table = snapshot.query(
        f"SELECT {group}, avg(time_ns)::BIGINT time_ns, sum(wait_ns_n)::BIGINT n, "
        f"max(wait_ns_high) / 1e6 longest_ms FROM {source} WHERE {grouped}",
        within.params,
    )
    quantiles = snapshot.query(
        f"SELECT {group}, quantile_cont(value / 1e6, [0.5, 0.95]) q FROM {with_values(source, 'wait_ns_high')} "
        f"WHERE {grouped}",
        within.params,
    )
    table = with_quantiles(table, quantiles, "longest_ms").drop(columns="place")
    table["elapsed_seconds"] = within.elapsed(table.pop("time_ns"))
    return table


def queue_lines(snapshot: Queryable, within: Span, loader: int) -> dict[str, Lines]:
    """Return lines over the batches yielded: how many were parked, ready and outstanding."""
    columns = ("parked_count", "ready_count", "outstanding_count")
    source, width = bucket_source(snapshot, within, "batch", MOST_GROUPS)
    where = f"loader = {loader:d} AND ($rank IS NULL OR rank = $rank)"
    by_column = rollup_lines(snapshot, within, source, columns, where=where, series="''", width=width)
    return {name.rpartition("_")[0]: lines for name, lines in by_column.items()}
