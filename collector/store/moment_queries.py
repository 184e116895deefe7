"""The named queries about when something happened: events, epochs, and which step was made at which time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from collector.store import tiles
from collector.store.line_queries import LINE_BUCKETS
from collector.store.queries import OF_SPAN, Queryable, Span, only, pieces, tiled

#: Of ranks, which begin their epochs together, one tells.
_OF_FIRST_RANK = "rank IS NOT DISTINCT FROM (SELECT min(rank) FROM told)"


def told(snapshot: Queryable, *kinds: str) -> pd.DataFrame:
    """The events of these kinds, newest first: time_ns, kind, host, pid, rank, body (JSON)."""
    return snapshot.query(
        f"SELECT time_ns, kind, host, pid, rank, body FROM event WHERE kind IN ({', '.join('?' * len(kinds))}) "
        "ORDER BY time_ns DESC",
        list(kinds),
    )


def epoch_starts(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """The epochs of each loader that began in the span, as the first of its ranks saw them.

    An iterator with workers tells when it is made. Where none does, an epoch begins with its first batch, which is
    looked for among no more than `tiles.TILED_BEYOND` of them: in a longer run no epoch is known.

    Returns:
        elapsed_seconds (ascending), loader, epoch.

    """
    begun = snapshot.query(
        "WITH told AS MATERIALIZED (SELECT rank, time_ns, body FROM event WHERE kind = 'epoch-start' "
        "AND ($rank IS NULL OR rank = $rank)) "
        "SELECT coalesce(TRY_CAST(body->>'$.begun_ns' AS BIGINT), time_ns) time_ns, "
        "TRY_CAST(body->>'$.loader' AS INTEGER) loader, TRY_CAST(body->>'$.epoch' AS INTEGER) epoch FROM told "
        f"WHERE {_OF_FIRST_RANK} ORDER BY 1",
        only(within.params, "rank"),
    )
    if begun.empty and snapshot.query("SELECT n FROM batch_reach")["n"].iloc[0] <= tiles.TILED_BEYOND:
        begun = snapshot.query(
            f'WITH told AS (FROM batch WHERE "index" = 0 AND {OF_SPAN}) '
            "SELECT time_ns - coalesce(wait_ns, 0) time_ns, loader, epoch FROM told "
            f"WHERE {_OF_FIRST_RANK} ORDER BY 1",
            within.params,
        )
    begun = begun[begun["time_ns"].between(within.from_ns, within.to_ns)]
    begun.insert(0, "elapsed_seconds", within.elapsed(begun.pop("time_ns")))
    return begun.reset_index(drop=True)


def steps_elapsed(snapshot: Queryable, within: Span, steps: Sequence[int]) -> list[float | None]:
    """When each of these steps ended, in seconds since the run was made; None if it was not in the span.

    Of a long run, when the tile ended that it is in.
    """
    reached = ", ".join(f"min(time_ns + last_after_ns) FILTER (step_high >= {step:d})" for step in steps)
    found = snapshot.query(
        f"SELECT min(step_high) AS low, {reached} FROM {tiled(within, 'step')} WHERE {OF_SPAN}", within.params
    ).iloc[0]
    low = -1 if within.from_ns <= within.first_ns else found["low"]
    return [
        None if pd.isna(time_ns) or step < low else (int(time_ns) - within.origin_ns) / 1e9
        for step, time_ns in zip(steps, found.iloc[1:], strict=True)
    ]


def step_clock(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """When the run was at which step, on a grid of time.

    Returns:
        elapsed, step: both rise from row to row. The ranks step together; steps that an attempt made anew stay
        at the highest reached.

    """
    source, width = pieces(snapshot, within, "step", LINE_BUCKETS)
    table = snapshot.query(
        "SELECT max(time_ns + last_after_ns) time_ns, max(step_high)::DOUBLE AS step "
        f"FROM {source} WHERE {OF_SPAN} GROUP BY (time_ns - $from_ns) // {width} ORDER BY 1",
        within.params,
    )
    clock = pd.DataFrame({"elapsed": within.elapsed(table["time_ns"]), "step": table["step"].cummax()})
    return clock.drop_duplicates("step", ignore_index=True)
