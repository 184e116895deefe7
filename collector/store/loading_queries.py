"""The named queries about data loading: loaders, what their workers did, what the training waited for."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from collector.store.line_queries import LINE_BUCKETS, Lines, tiled_lines
from collector.store.queries import (
    GRID_BUCKETS,
    GRID_STEP_NS,
    OF_SPAN,
    Queryable,
    Span,
    pieces,
    quantile,
    sampled,
    tiled,
)

#: What a fetch is made of, and what its time went by.
_PARTS = ("idle_ms", "getitem_ms", "collate_ms", "cpu_ms", "run_queue_ms", "blocked_ms")
_OF_LOADER = f"{OF_SPAN} AND loader = $loader"


def starts(snapshot: Queryable) -> pd.DataFrame:
    """The events of who trains and of which loaders there are, in order of time."""
    return snapshot.query("FROM event WHERE kind IN ('loader', 'process-start') ORDER BY time_ns")


def loaders(snapshot: Queryable) -> pd.DataFrame:
    """The DataLoaders of the run: loader, rank, num_workers, prefetch_factor, batch_size, dataset."""
    told = starts(snapshot)
    table = told[told["kind"] == "loader"].reset_index(drop=True)
    fields = ("loader", "num_workers", "prefetch_factor", "batch_size", "dataset")
    rows = [{key: json.loads(body).get(key) for key in fields} for body in table["body"]]
    frame = pd.DataFrame(rows, columns=list(fields))
    frame.insert(1, "rank", table["rank"])
    return frame.drop_duplicates(["loader", "rank"], ignore_index=True)


def used_loaders(snapshot: Queryable, within: Span) -> list[int]:
    """The loaders that yielded batches in the span, busiest first."""
    table = snapshot.query(
        f"SELECT loader FROM {tiled(within, 'batch')} WHERE {OF_SPAN} GROUP BY loader ORDER BY sum(n) DESC",
        within.params,
    )
    return [int(loader) for loader in table["loader"]]


def throughput(snapshot: Queryable, within: Span, training_loaders: Sequence[int] | None = None) -> pd.Series:
    """Return n, batches and samples per second of the batches yielded in the span, all ranks together.

    Args:
        snapshot: of the run.
        within: the span.
        training_loaders: the loaders whose samples count, without those of validation; all by default.
    """
    loaders = ", ".join(map(str, training_loaders or ())) or "NULL"
    chosen = "" if training_loaders is None else f" FILTER (loader IN ({loaders}))"
    seconds, trained = (
        f"nullif((max(time_ns + last_after_ns){part} - min(time_ns){part}) / 1e9, 0)" for part in ("", chosen)
    )
    samples = f"sum(samples_count){chosen} - arg_min(samples_count_first, time_ns){chosen}"
    return snapshot.query(
        f"SELECT coalesce(sum(n), 0)::BIGINT n, (sum(n) - 1) / {seconds} batches_per_second, "
        f"({samples}) / {trained} samples_per_second FROM {tiled(within, 'batch')} WHERE {OF_SPAN}",
        within.params,
    ).iloc[0]


def worker_split(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """What each worker of a loader did with its time.

    Returns:
        rank, worker, n (batches), median_ms and p95_ms of getitem plus collate, and the totals of
        idle_ms, getitem_ms, collate_ms, cpu_ms, run_queue_ms, blocked_ms (NaN where not measured).

    """
    made = _made(snapshot, within, loader)
    sums = made.groupby(["rank", "worker"], dropna=False)[["n", *_PARTS]].sum(min_count=1).reset_index()
    count = int(made["n"].sum())
    took = snapshot.query(
        "SELECT rank, worker, q[1] / 1e6 median_ms, q[2] / 1e6 p95_ms FROM (SELECT rank, worker, "
        f"{quantile(within, count)}(value, [0.5, 0.95]) q "
        f"FROM {sampled(within, 'fetch', _OF_LOADER, count)} GROUP BY rank, worker)",
        {**within.params, "loader": loader},
    )
    return sums.merge(took, on=["rank", "worker"], how="left")


def fetch_heat(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """The longest fetch (getitem plus collate) by worker and bucket of time.

    Returns:
        rank, worker, elapsed_seconds (start of the bucket), fetch_ms, n.

    """
    table = _made(snapshot, within, loader)
    table["elapsed_seconds"] = within.elapsed(table["time_ns"])
    return table[["rank", "worker", "fetch_ms", "n", "elapsed_seconds"]]


def _made(snapshot: Queryable, within: Span, loader: int) -> pd.DataFrame:
    """Of the batches that each worker made in each bucket of time: how many, the longest fetch, and the sums."""
    source, width = pieces(snapshot, within, "fetch", GRID_BUCKETS // 2)
    width = max(width, GRID_STEP_NS)
    sums = ", ".join(f"sum({name.removesuffix('_ms')}_ns)::DOUBLE / 1e6 {name}" for name in _PARTS)
    return snapshot.query(
        f"SELECT rank, worker, $from_ns + (time_ns - $from_ns) // {width} * {width} AS time_ns, "
        f"max(longest_ns) / 1e6 fetch_ms, sum(n)::BIGINT n, {sums} "
        f"FROM {source} WHERE {_OF_LOADER} GROUP BY ALL ORDER BY rank, worker, time_ns",
        {**within.params, "loader": loader},
    )


def batch_lines(snapshot: Queryable, within: Span, loader: int) -> dict[str, Lines]:
    """Per batch yielded: the wait (ms), and the batches parked, ready and outstanding."""
    columns = ("wait_ns", "parked_count", "ready_count", "outstanding_count")
    source, width = pieces(snapshot, within, "batch", LINE_BUCKETS // 2)
    where = f"loader = {loader:d} AND ($rank IS NULL OR rank = $rank)"
    found = tiled_lines(snapshot, within, source, columns, where=where, series="''", width=width)
    found["wait_ns"].points["value"] /= 1e6
    return {name.rpartition("_")[0]: lines for name, lines in found.items()}
