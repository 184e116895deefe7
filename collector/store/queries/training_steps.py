"""Queries about training steps: their phases, and the pace of each rank."""

from __future__ import annotations

import pandas as pd

from collector.store.queries.spans import (
    GRID_BUCKETS,
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

#: Number of newest steps whose median gives the samples of a step.
_NEWEST_STEPS = 100


def steps(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return step time step by step, or in groups of steps if there are many.

    Returns:
        step (first of its group), n, the means wait_ms (waiting for data; NaN where no wait for a DataLoader is
        recorded) and rest_ms, and median_ms, p95_ms and slowest_ms of the whole step.
    """
    source, _ = bucket_source(snapshot, within, "step", 2 * GRID_BUCKETS)
    reach = rank_steps(snapshot, within)
    low = 0 if reach["low"].isna().all() else int(reach["low"].min())
    count = 0 if reach.empty else int(reach["step"].max()) - low + 1
    width = 1 if count <= MOST_SINGLE else count // MOST_GROUPS + 1
    group = f"(timed_step_low - {low}) // {width} AS place"
    timed = f"timed_n > 0 AND {IN_SPAN} GROUP BY place ORDER BY place"
    table = snapshot.query(
        f"SELECT {group}, min(timed_step_low) AS step, sum(timed_n)::BIGINT n, "
        "sum(wait_ns) / sum(timed_n) / 1e6 wait_ms, sum(rest_ns) / sum(timed_n) / 1e6 rest_ms, "
        f"max(slowest_ns) / 1e6 slowest_ms FROM {source} WHERE {timed}",
        within.params,
    )
    quantiles = snapshot.query(
        f"SELECT {group}, quantile_cont(value / 1e6, [0.5, 0.95]) q FROM {with_values(source, 'slowest_ns')} "
        f"WHERE {timed}",
        within.params,
    )
    return with_quantiles(table, quantiles, "slowest_ms").drop(columns="place")


def step_samples(snapshot: Queryable, within: Span) -> float | None:
    """Return the samples of a step, over the span's ranks together: the median of the newest steps in the span.

    None if the samples were not recorded.
    """
    newest = rank_steps(snapshot, within)["step"].max()
    if pd.isna(newest):
        return None
    # A literal step number lets DuckDB skip the files of earlier steps.
    newest_steps = f"FROM step WHERE {IN_SPAN} AND step > {int(newest) - _NEWEST_STEPS}"
    per_rank = f"SELECT step, max(samples_count) n {newest_steps} GROUP BY step, rank"
    samples = snapshot.query(
        f"SELECT median(n) n FROM (SELECT sum(n) n FROM ({per_rank}) GROUP BY step)", within.params
    )["n"].iloc[0]
    return None if pd.isna(samples) else float(samples)


def step_summary(snapshot: Queryable, within: Span) -> pd.Series:
    """Return n, newest step, p50_ms, p95_ms and wait_ratio of the steps in the span."""
    ranks = rank_steps(snapshot, within)
    count, (waited, took) = int(ranks["n"].sum()), ranks[["wait_ns", "duration_ns"]].sum(min_count=1)
    sums = pd.Series({"n": count, "step": ranks["step"].max(), "wait_ratio": waited / took})
    quantiles = snapshot.query(
        "SELECT q[1] / 1e6 p50_ms, q[2] / 1e6 p95_ms FROM "
        f"(SELECT {quantile_function(within, count)}(value, [0.5, 0.95]) q "
        f"FROM {quantile_source(within, 'step', IN_SPAN, count)})",
        within.params,
    ).iloc[0]
    summary: pd.Series = pd.concat([sums, quantiles])
    return summary


def rank_steps(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Summarize the steps in the span by rank (NaN outside a distributed job).

    Returns:
        rank, n (timed steps), low (the first timed step), step (the newest), duration_ns and wait_ns (sums),
        slowest_ns.
    """
    return snapshot.query(
        "SELECT rank, sum(timed_n)::BIGINT n, min(timed_step_low) AS low, max(step_high) AS step, "
        "sum(duration_ns)::DOUBLE duration_ns, sum(wait_ns)::DOUBLE wait_ns, max(slowest_ns) slowest_ns "
        f"FROM {rollup_view(within, 'step')} WHERE {IN_SPAN} GROUP BY rank ORDER BY rank",
        within.params,
    )
