"""The data loading of the last part of a run as tables, at a cost that does not grow with the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from collector.diagnosis.frames import whole
from collector.diagnosis.tables import RunTables, look_backs, newest_since_ns, totals_of
from collector.store import loading_queries
from collector.store.queries import Queryable
from training_harness.records import IDENTITY, STREAMS

#: Of all loops of a rank; each is looked at over its last `exposed.RECENT_BATCHES`.
BATCHES = 50_000
_LEAD = 20
#: Ranks make batches at different rates, and now at another one than before: so many times as many as are wanted
#: are looked at, for a second look costs more.
_UNEVEN = 2
_SAMPLED, _SAMPLES = ("process", "host"), 5_000
#: Before the batches that are looked at, of each loader: the epoch that they are in, and the one before.
_EPOCHS_BEFORE = 2


class _Streams(dict[str, pd.DataFrame]):
    """The tables that are there, and others when they are first asked for: those of samples are read then."""

    def __init__(self, snapshot: Queryable) -> None:
        super().__init__()
        self._snapshot = snapshot

    def __missing__(self, name: str) -> pd.DataFrame:
        if name in _SAMPLED:
            total = totals_of(self._snapshot, [name])[name]
            self[name] = _rows(self._snapshot, name, newest_since_ns(self._snapshot, name, total, _SAMPLES))
        else:
            self[name] = pd.DataFrame(columns=_columns(name))
        return self[name]


def recent_loading(
    snapshot: Queryable,
    manifest: Mapping[str, Any],
    *,
    from_ns: int,
    rank: int | None,
    batches_count: int = BATCHES,
) -> RunTables:
    """What the rules about loops need: a rank's last batches since `from_ns`, and what it recorded meanwhile.

    Without `rank` it is of all. Of `process` and `host` there are the last samples of all, to be had as long as the
    snapshot is; the other streams are empty.
    """
    streams, events = _Streams(snapshot), _bodies(loading_queries.starts(snapshot))
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


def longest_waiting(snapshot: Queryable, *, from_ns: int, loader: int | None) -> int | None:
    """The rank that waited longest over the last batches since `from_ns`: of `loader` if it has any.

    None where ranks are not known.
    """
    total = totals_of(snapshot, ["batch"])["batch"]
    since_ns = max(from_ns, newest_since_ns(snapshot, "batch", total, BATCHES))
    waited = "sum(greatest(wait_ns, 0))"
    found = snapshot.query(
        f"SELECT rank FROM batch WHERE time_ns >= {since_ns} GROUP BY rank "
        f"ORDER BY {waited} FILTER (loader = $loader) DESC NULLS LAST, {waited} DESC LIMIT 1",
        {"loader": loader},
    )["rank"]
    return whole(found.iloc[0]) if len(found) else None


def _newest(snapshot: Queryable, from_ns: int, most: int, of_rank: str, share: int) -> pd.DataFrame:
    """The newest batches of a rank, which made one in `share` of all: looked for further back while too few."""
    total = totals_of(snapshot, ["batch"])["batch"]
    for begin_ns in look_backs(total, _UNEVEN * most * share, from_ns=from_ns):
        found = _rows(snapshot, "batch", begin_ns, of_rank, f"DESC LIMIT {most}")
        if len(found) == most:
            break
    return found.iloc[::-1].reset_index(drop=True)


def _columns(name: str) -> list[str]:
    return [column.name for column in (*STREAMS[name].columns, *IDENTITY)]


def _rows(snapshot: Queryable, name: str, since_ns: int, where: str = "TRUE", order: str = "ASC") -> pd.DataFrame:
    columns = ", ".join(f'"{column}"' for column in _columns(name))
    return snapshot.query(
        f'SELECT {columns} FROM "{name}" WHERE time_ns >= {since_ns} AND {where} ORDER BY time_ns {order}'
    )


def _epochs(snapshot: Queryable, since_ns: int, of_rank: str) -> list[dict[str, Any]]:
    """The epochs of a rank since then, whose workers are named there, and the last ones that began before."""
    of_loader = f"host, pid, start_ticks, body->>'$.loader', time_ns >= {since_ns}"
    newest = f"row_number() OVER (PARTITION BY {of_loader} ORDER BY time_ns DESC) <= {_EPOCHS_BEFORE}"
    return _bodies(
        snapshot.query(
            f"FROM event WHERE kind = 'epoch-start' AND {of_rank} QUALIFY time_ns >= {since_ns} OR {newest}"
        )
    )


def _bodies(found: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = found.to_dict("records")  # type: ignore[assignment]
    return [{**json.loads(row.pop("body")), **row, "rank": whole(row["rank"])} for row in rows]
