"""The last minute of every process: what it held, and how far it was. Where a post-mortem begins."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS, floats, held_bytes, key_of, last, of_process, whole
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey
from training_harness.records import ROLE_COLLECTOR, ROLE_OTHER, ROLES

WINDOW_SECONDS = 60.0
_KEY = ["host", "process_pid", "process_start_ticks"]
_PLACE = ["role", "process_rank", "loader", "worker"]
_HELD = ["held_bytes", "rss_bytes", "pss_bytes", "private_dirty_bytes", "swap_bytes"]
_NAMES = {"process_pid": "pid", "process_start_ticks": "start_ticks", "process_rank": "rank"}
#: A record of this stream is the end of one thing, and so the beginning of the next.
_BEGUN = {"step": "between steps", "batch": "forward or backward", "device_memory": "optimizer"}


def last_minute(tables: RunTables) -> pd.DataFrame:
    """The samples of the last minute of each host, one row per process and tick, in order of time.

    Columns: `host`, `pid`, `start_ticks`, `role` (a word of `records.ROLES`), `rank`, `loader`, `worker`; `time_ns`
    and `seconds`, counted from the end of the training there, so mostly below 0; `held_bytes` (see
    `frames.held_bytes`), `rss_bytes`, `pss_bytes`, `private_dirty_bytes`, `swap_bytes`, NaN where not read.
    """
    process = tables.stream("process")
    rows = process[(floats(process, "role") != ROLE_COLLECTOR) & (floats(process, "alive") != 0)]
    # A process counts as what it has turned out to be: the main one is an "other" until it trains.
    rows = rows.assign(**rows.groupby(_KEY, dropna=False)[_PLACE].transform("last"))
    held = [pd.Series(held_bytes(each), each.index) for _, each in rows.groupby(_KEY, dropna=False)]
    seconds = (floats(rows, "time_ns") - rows["host"].map(_ends_ns(tables, rows)).to_numpy(np.float64)) / SECOND_NS
    roles = [ROLES[int(role)] for role in floats(rows, "role")]
    rows = rows.assign(role=roles, seconds=seconds, held_bytes=pd.concat(held) if held else np.nan)[
        [*_KEY, *_PLACE, "time_ns", "seconds", *_HELD]
    ]
    return rows[seconds >= -WINDOW_SECONDS].rename(columns=_NAMES).reset_index(drop=True)


def last_states(tables: RunTables) -> pd.DataFrame:
    """One row per process that was there in the last minute, the training processes first.

    Columns: those that name it in `last_minute`; `seconds` at which it was last sampled; its bytes as last
    read; `held_rise_bytes`, from the first to the last sample of that minute; `step`, the last that it ended;
    `batch`, the index of the last one that it got or made; and `phase`, what its last record began.
    NaN and None are what is not known.
    """
    samples, life = last_minute(tables), Lifecycle(tables)
    names = ["host", "pid", "start_ticks"]
    held = samples.groupby(names, dropna=False, sort=False)
    states = held[["role", "rank", "loader", "worker", "seconds", *_HELD]].last()
    states["held_rise_bytes"] = held["held_bytes"].last() - held["held_bytes"].first()
    found = states.reset_index().to_dict("records")
    seen = {(row["host"], row["pid"], row["start_ticks"]) for row in found}
    # Those that outlived the collector have no sample.
    found += [dict(zip(names, key, strict=True)) | {"role": ROLES[0]} for key in life.mains if key not in seen]
    told = [row | _progress(tables, (str(row["host"]), int(row["pid"]), int(row["start_ticks"]))) for row in found]
    columns = [*names, *states.columns, "step", "batch", "phase"]
    table = pd.DataFrame(told, columns=columns)
    order = table["role"].map(ROLES.index)
    return table.assign(order=order).sort_values(["order", "rank", "loader", "worker"]).drop(columns="order")


def as_records(states: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table for JSON: whole numbers as such, and what is not known None."""
    return [
        {name: value if isinstance(value, str) else _plain(name, value) for name, value in row.items()}
        for row in states.to_dict("records")
    ]


def _plain(name: Hashable, value: Any) -> int | float | None:
    return (None if pd.isna(value) else round(float(value), 3)) if name == "seconds" else whole(value)


def _ends_ns(tables: RunTables, samples: pd.DataFrame) -> dict[str, float]:
    """When, on each host, the last of its training processes and workers was seen, else anything."""
    own = samples[floats(samples, "role") < ROLE_OTHER]
    written = [tables.stream(name)[["host", "time_ns"]] for name in ("step", "batch", "fetch")]
    seen = pd.concat([(samples if own.empty else own)[["host", "time_ns"]], *written])
    return {str(host): float(times.max()) for host, times in seen.groupby("host")["time_ns"]}


def _progress(tables: RunTables, key: ProcessKey) -> dict[str, Any]:
    """The last step and batch of a process, and what it had begun when it wrote last."""
    records = {name: of_process(tables.stream(name), key).iloc[-1:] for name in (*_BEGUN, "fetch")}
    batches = records["fetch"] if records["batch"].empty else records["batch"]
    times = {name: last(floats(records[name], "time_ns")) for name in _BEGUN if len(records[name])}
    told = [str(event["phase"]) for event in tables.events_of("phase") if key_of(event) == key]
    phase = _BEGUN[max(times, key=times.__getitem__)] if times else None
    return {
        "step": last(floats(records["step"], "step")),
        "batch": last(floats(batches, "index")),
        "phase": told[-1] if told and told[-1] != "train" else phase,  # a framework that says so knows better
    }
