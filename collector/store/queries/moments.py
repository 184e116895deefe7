"""Queries about when something happened: events, epochs, and the step at each time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from collector.store.queries.lines import LINE_BUCKETS
from collector.store.queries.spans import IN_SPAN, Queryable, Span, bucket_source, rollup_view
from collector.store.rollups import tables

#: SQL: the first rank alone, since ranks begin their epochs together.
_IS_FIRST_RANK = "rank IS NOT DISTINCT FROM (SELECT min(rank) FROM epoch_start)"


def events(snapshot: Queryable, *kinds: str) -> pd.DataFrame:
    """Return the events of these kinds, newest first: time_ns, kind, host, pid, rank, body (JSON)."""
    return snapshot.query(
        f"SELECT time_ns, kind, host, pid, rank, body FROM event WHERE kind IN ({', '.join('?' * len(kinds))}) "
        "ORDER BY time_ns DESC",
        list(kinds),
    )


def epoch_starts(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return the epochs of each loader that began in the span, as its first rank recorded them.

    An iterator with workers records its start. Without such events, an epoch begins with its first batch. That
    batch is searched for in runs of up to `tables.ROWS_WITHOUT_ROLLUPS` batches; longer runs show no epochs.

    Returns:
        elapsed_seconds (ascending), loader, epoch.
    """
    starts = snapshot.query(
        "WITH epoch_start AS MATERIALIZED (SELECT rank, time_ns, body FROM event WHERE kind = 'epoch-start' "
        "AND ($rank IS NULL OR rank = $rank)) "
        "SELECT coalesce(TRY_CAST(body->>'$.begun_ns' AS BIGINT), time_ns) time_ns, "
        "TRY_CAST(body->>'$.loader' AS INTEGER) loader, TRY_CAST(body->>'$.epoch' AS INTEGER) epoch "
        f"FROM epoch_start WHERE {_IS_FIRST_RANK} ORDER BY 1",
        {"rank": within.rank},
    )
    if starts.empty and snapshot.query("SELECT n FROM batch_reach")["n"].iloc[0] <= tables.ROWS_WITHOUT_ROLLUPS:
        starts = snapshot.query(
            f'WITH epoch_start AS (FROM batch WHERE "index" = 0 AND {IN_SPAN}) '
            "SELECT time_ns - coalesce(wait_ns, 0) time_ns, loader, epoch FROM epoch_start "
            f"WHERE {_IS_FIRST_RANK} ORDER BY 1",
            within.params,
        )
    starts = starts[starts["time_ns"].between(within.from_ns, within.to_ns)]
    starts.insert(0, "elapsed_seconds", within.elapsed(starts.pop("time_ns")))
    return starts.reset_index(drop=True)


def steps_elapsed(snapshot: Queryable, within: Span, steps: Sequence[int]) -> list[float | None]:
    """Return when each step ended, in seconds since the run was made; None if it was not in the span.

    In a long run, return the end of the rollup that holds the step.
    """
    ends = ", ".join(f"min(time_ns + last_after_ns) FILTER (step_high >= {step:d})" for step in steps)
    row = snapshot.query(
        f"SELECT min(step_high) AS low, {ends} FROM {rollup_view(within, 'step')} WHERE {IN_SPAN}", within.params
    ).iloc[0]
    low = -1 if within.from_ns <= within.first_ns else row["low"]
    return [
        None if pd.isna(time_ns) or step < low else (int(time_ns) - within.origin_ns) / 1e9
        for step, time_ns in zip(steps, row.iloc[1:], strict=True)
    ]


def step_clock(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return the step that the run had reached, on a grid of time.

    Returns:
        elapsed, step: both rise from row to row. The ranks step together. While a new attempt repeats steps, the
        highest step so far stays.
    """
    source, width = bucket_source(snapshot, within, "step", LINE_BUCKETS)
    table = snapshot.query(
        "SELECT max(time_ns + last_after_ns) time_ns, max(step_high)::DOUBLE AS step "
        f"FROM {source} WHERE {IN_SPAN} GROUP BY (time_ns - $from_ns) // {width} ORDER BY 1",
        within.params,
    )
    clock = pd.DataFrame({"elapsed": within.elapsed(table["time_ns"]), "step": table["step"].cummax()})
    return clock.drop_duplicates("step", ignore_index=True)
