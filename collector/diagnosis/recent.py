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
_SAMPLES = 5_000
_EPOCHS = 2_000


def recent_loading(
    snapshot: Queryable, manifest: Mapping[str, Any], *, from_ns: int, batches_count: int = BATCHES
) -> RunTables:
    """What the rules about loops need: the last batches since `from_ns`, and what was recorded meanwhile.

    Of `process` and `host` there are the last samples; the other streams are empty.
    """
    totals = totals_of(snapshot, ("batch", "process", "host"))
    since_ns = max(from_ns, newest_since_ns(snapshot, "batch", totals["batch"], batches_count))
    streams = {name: pd.DataFrame(columns=_columns(name)) for name in STREAMS}
    streams["batch"] = _rows(snapshot, "batch", since_ns)
    times = streams["batch"]["time_ns"]
    now_ns = int(times.iloc[-1]) if len(times) else since_ns
    for name in ("fetch", "stage"):  # batches that lay ready were made before
        streams[name] = _rows(snapshot, name, since_ns - (now_ns - since_ns) // _LEAD)
    for name in ("process", "host"):
        streams[name] = _rows(snapshot, name, newest_since_ns(snapshot, name, totals[name], _SAMPLES))
    return RunTables(
        manifest=manifest,
        events=_events(snapshot),
        streams=streams,
        living=None,
        now_ns=now_ns,
    )


def _columns(name: str) -> list[str]:
    return [column.name for column in (*STREAMS[name].columns, *IDENTITY)]


def _rows(snapshot: Queryable, name: str, since_ns: int) -> pd.DataFrame:
    columns = ", ".join(f'"{column}"' for column in _columns(name))
    return snapshot.query(f'SELECT {columns} FROM "{name}" WHERE time_ns >= {since_ns} ORDER BY time_ns')


def _events(snapshot: Queryable) -> list[dict[str, Any]]:
    """The loaders, who trains, and the last epochs, whose workers are named there."""
    found = snapshot.query(
        "FROM event WHERE kind IN ('loader', 'process-start') UNION ALL "
        f"FROM (FROM event WHERE kind = 'epoch-start' ORDER BY time_ns DESC LIMIT {_EPOCHS}) ORDER BY time_ns"
    )
    rows: list[dict[str, Any]] = found.to_dict("records")  # type: ignore[assignment]
    return [{**json.loads(row.pop("body")), **row, "rank": whole(row["rank"])} for row in rows]
