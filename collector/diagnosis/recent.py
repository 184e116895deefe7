"""The data loading of the last part of a run as tables, at a cost that does not grow with the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from collector.diagnosis.frames import whole
from collector.diagnosis.tables import RunTables, newest_since_ns, totals_of
from collector.store.queries import Queryable
from training_harness.records import IDENTITY, STREAMS

#: Of all loops together; each is looked at over its last `exposed.RECENT_BATCHES`.
BATCHES = 50_000
_LEAD = 20
_SAMPLED, _SAMPLES = ("process", "host"), 5_000
_EPOCHS = 2_000


class _Streams(dict[str, pd.DataFrame]):
    """The tables, of which those of samples are read when they are first asked for: most looks need none."""

    def __init__(self, snapshot: Queryable) -> None:
        super().__init__({name: pd.DataFrame(columns=_columns(name)) for name in STREAMS if name not in _SAMPLED})
        self._snapshot = snapshot

    def __missing__(self, name: str) -> pd.DataFrame:
        total = totals_of(self._snapshot, [name])[name]
        self[name] = _rows(self._snapshot, name, newest_since_ns(self._snapshot, name, total, _SAMPLES))
        return self[name]


def recent_since_ns(snapshot: Queryable, *, from_ns: int, batches_count: int = BATCHES) -> int:
    """Since when there are no more than so many batches of all loops: `from_ns`, or later."""
    total = totals_of(snapshot, ["batch"])["batch"]
    return (
        from_ns
        if total.rows_count <= batches_count
        else max(from_ns, newest_since_ns(snapshot, "batch", total, batches_count))
    )


def recent_loading(
    snapshot: Queryable, manifest: Mapping[str, Any], *, since_ns: int, rank: int | None, loader: int | None
) -> RunTables:
    """What the rules about loops need of one rank: its batches since `since_ns`, and what it recorded meanwhile.

    Without `rank` it is the one that waited longest, for batches of `loader` if there are any. Of `process` and
    `host` there are the last samples of all, to be had as long as the snapshot is; the other streams are empty.
    """
    streams = _Streams(snapshot)
    chosen = _longest_waiting(snapshot, since_ns, loader) if rank is None else rank
    of_rank = "TRUE" if chosen is None else f"rank = {chosen:d}"
    streams["batch"] = _rows(snapshot, "batch", since_ns, of_rank)
    times = streams["batch"]["time_ns"]
    now_ns = int(times.iloc[-1]) if len(times) else since_ns
    for name in ("fetch", "stage"):  # batches that lay ready were made before
        streams[name] = _rows(snapshot, name, since_ns - (now_ns - since_ns) // _LEAD, of_rank)
    return RunTables(
        manifest=manifest,
        events=_events(snapshot),
        streams=streams,
        living=None,
        now_ns=now_ns,
    )


def _longest_waiting(snapshot: Queryable, since_ns: int, loader: int | None) -> int | None:
    waited = "sum(greatest(wait_ns, 0))"
    found = snapshot.query(
        f"SELECT rank FROM batch WHERE time_ns >= {since_ns} GROUP BY rank "
        f"ORDER BY {waited} FILTER (loader = $loader) DESC NULLS LAST, {waited} DESC LIMIT 1",
        {"loader": loader},
    )["rank"]
    return whole(found.iloc[0]) if len(found) else None


def _columns(name: str) -> list[str]:
    return [column.name for column in (*STREAMS[name].columns, *IDENTITY)]


def _rows(snapshot: Queryable, name: str, since_ns: int, where: str = "TRUE") -> pd.DataFrame:
    columns = ", ".join(f'"{column}"' for column in _columns(name))
    return snapshot.query(
        f'SELECT {columns} FROM "{name}" WHERE time_ns >= {since_ns} AND {where} ORDER BY time_ns'
    )


def _events(snapshot: Queryable) -> list[dict[str, Any]]:
    """The loaders, who trains, and the last epochs, whose workers are named there."""
    found = snapshot.query(
        "FROM event WHERE kind IN ('loader', 'process-start') UNION ALL "
        f"FROM (FROM event WHERE kind = 'epoch-start' ORDER BY time_ns DESC LIMIT {_EPOCHS}) ORDER BY time_ns"
    )
    rows: list[dict[str, Any]] = found.to_dict("records")  # type: ignore[assignment]
    return [{**json.loads(row.pop("body")), **row, "rank": whole(row["rank"])} for row in rows]
