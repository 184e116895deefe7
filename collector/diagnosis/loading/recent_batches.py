"""The data loading of the last part of a run as tables, at a cost that does not grow with the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from collector.diagnosis.run.columns import whole
from collector.diagnosis.run.tables import RunTables, as_events, columns_sql, look_backs, newest_since_ns, totals_of
from collector.store.queries import Queryable, loading
from training_harness.records import IDENTITY, STREAMS

#: Batches that are read, over all loops of a rank. Each loop is judged by its last `wait_breakdown.RECENT_BATCHES`.
BATCHES = 50_000
_LEAD = 20  # fetches are read from 1/20 of the batches' time before the first batch
#: The first query covers this many times the wanted batches, for ranks make them at uneven rates and a second
#: query costs more.
_UNEVEN = 2
_SAMPLED_STREAMS, _SAMPLES = ("process", "host"), 5_000
#: Epochs of each loader that began before the first batch read: the one of that batch, and the one before.
_EPOCHS_BEFORE = 2


class _Streams(dict[str, pd.DataFrame]):
    """Tables by stream. Tables of samples are read at first use; other missing ones are empty."""

    def __init__(self, snapshot: Queryable) -> None:
        super().__init__()
        self._snapshot = snapshot

    def __missing__(self, name: str) -> pd.DataFrame:
        if name in _SAMPLED_STREAMS:
            total = totals_of(self._snapshot, [name])[name]
            self[name] = _rows(self._snapshot, name, newest_since_ns(self._snapshot, name, total, _SAMPLES))
        else:
            self[name] = pd.DataFrame(columns=[column.name for column in (*STREAMS[name].columns, *IDENTITY)])
        return self[name]


def recent_loading(
    snapshot: Queryable,
    manifest: Mapping[str, Any],
    *,
    from_ns: int,
    rank: int | None,
    batches_count: int,
) -> RunTables:
    """Read the tables that the rules about loops need: the last batches since `from_ns`, and what goes with them.

    The batches, fetches and stages are those of `rank`, or of all ranks without it. `process` and `host` have the
    last samples of all ranks, as long as `snapshot` is open. The other streams are empty.
    """
    streams, events = _Streams(snapshot), as_events(loading.starts(snapshot))
    ranks_count = len({event["rank"] for event in events if event["kind"] == "process-start"})
    of_rank, share = ("TRUE", 1) if rank is None else (f"rank = {rank:d}", max(1, ranks_count))
    batch = _newest(snapshot, from_ns, batches_count, of_rank, share)
    streams["batch"] = batch
    now_ns = int(batch["time_ns"].iloc[-1]) if len(batch) else from_ns
    since_ns = int(batch["time_ns"].iloc[0]) if len(batch) == batches_count else from_ns
    made_ns = since_ns - (now_ns - since_ns) // _LEAD  # batches that lay ready were made before
    for name in ("fetch", "stage"):
        streams[name] = _rows(snapshot, name, made_ns, of_rank)
    return RunTables(
        manifest=manifest,
        events=sorted([*events, *_epochs(snapshot, made_ns, of_rank)], key=lambda event: event["time_ns"]),
        streams=streams,
        living=None,
        now_ns=now_ns,
    )


def longest_waiting_rank(snapshot: Queryable, *, from_ns: int, loader: int | None) -> int | None:
    """Return the rank that waited longest over the last batches since `from_ns`; None where ranks are not known.

    Ranks that used `loader` come first, by their wait in it.
    """
    total = totals_of(snapshot, ["batch"])["batch"]
    since_ns = max(from_ns, newest_since_ns(snapshot, "batch", total, BATCHES))
    waited = "sum(greatest(wait_ns, 0))"
    ranks = snapshot.query(
        f"SELECT rank FROM batch WHERE time_ns >= {since_ns} GROUP BY rank "
        f"ORDER BY {waited} FILTER (loader = $loader) DESC NULLS LAST, {waited} DESC LIMIT 1",
        {"loader": loader},
    )["rank"]
    return whole(ranks.iloc[0]) if len(ranks) else None


def _newest(snapshot: Queryable, from_ns: int, most: int, of_rank: str, share: int) -> pd.DataFrame:
    """Return the newest batches of a rank that made 1 in `share` of all; go further back while they are too few."""
    total = totals_of(snapshot, ["batch"])["batch"]
    for begin_ns in look_backs(total, _UNEVEN * most * share, from_ns=from_ns):
        newest = _rows(snapshot, "batch", begin_ns, of_rank, f"DESC LIMIT {most}")
        if len(newest) == most:
            break
    return newest.iloc[::-1].reset_index(drop=True)


def _rows(snapshot: Queryable, name: str, since_ns: int, where: str = "TRUE", order: str = "ASC") -> pd.DataFrame:
    return snapshot.query(
        f'SELECT {columns_sql(name)} FROM "{name}" WHERE time_ns >= {since_ns} AND {where} ORDER BY time_ns {order}'
    )


def _epochs(snapshot: Queryable, since_ns: int, of_rank: str) -> list[dict[str, Any]]:
    """Return the `epoch-start` events, which name the workers, since `since_ns`, and each loader's last before."""
    of_loader = f"host, pid, start_ticks, body->>'$.loader', time_ns >= {since_ns}"
    newest = f"row_number() OVER (PARTITION BY {of_loader} ORDER BY time_ns DESC) <= {_EPOCHS_BEFORE}"
    epochs = f"FROM event WHERE kind = 'epoch-start' AND {of_rank} QUALIFY time_ns >= {since_ns} OR {newest}"
    return as_events(snapshot.query(epochs))
