"""The last minute of every process: what it held, and how far it was. Where a post-mortem begins."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
_WHO = ["host", "pid", "start_ticks"]
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
    named = np.isin(floats(process, "role"), [role for role in range(len(ROLES)) if role != ROLE_COLLECTOR])
    rows = process[named & (floats(process, "alive") != 0)].dropna(subset=_KEY)
    # A process counts as what it has turned out to be: the main one is an "other" until it trains.
    rows = rows.assign(**rows.groupby(_KEY)[_PLACE].transform("last"))
    held = [pd.Series(held_bytes(each), each.index) for _, each in rows.groupby(_KEY)]
    seconds = (floats(rows, "time_ns") - rows["host"].map(_ends_ns(tables, rows)).to_numpy(np.float64)) / SECOND_NS
    roles = [ROLES[int(role)] for role in floats(rows, "role")]
    rows = rows.assign(role=roles, seconds=seconds, held_bytes=pd.concat(held) if held else np.nan)
    rows = rows[seconds >= -WINDOW_SECONDS][[*_KEY, *_PLACE, "time_ns", "seconds", *_HELD]]
    samples: pd.DataFrame = rows.rename(columns=_NAMES).reset_index(drop=True)
    return samples


def last_states(tables: RunTables) -> pd.DataFrame:
    """One row per process that was there in the last minute, the training processes first.

    Columns: those that name it in `last_minute`; `seconds` at which it was last sampled; its bytes as last
    read; `held_rise_bytes`, from the first to the last sample of that minute; `step`, the last that it ended;
    `batch`, the index of the last one that it got or made; and `phase`, what its last record began.
    NaN and None are what is not known.
    """
    samples = last_minute(tables)
    held = samples.groupby(_WHO, sort=False)
    states = held[["role", "rank", "loader", "worker", "seconds", *_HELD]].last()
    states["held_rise_bytes"] = held["held_bytes"].last() - held["held_bytes"].first()
    keys: list[ProcessKey] = [(str(host), int(pid), int(ticks)) for host, pid, ticks in states.index]
    keys += [key for key in Lifecycle(tables).mains if key not in keys]  # they outlived the collector
    states = states.reindex(pd.MultiIndex.from_tuples(keys, names=_WHO)).reset_index()
    newest = {name: tables.stream(name).drop_duplicates(_WHO, keep="last") for name in (*_BEGUN, "fetch")}
    progress = pd.DataFrame([_progress(tables, newest, key) for key in keys], columns=["step", "batch", "phase"])
    roles = [role if isinstance(role, str) else ROLES[0] for role in states["role"]]
    states = pd.concat([states.assign(role=roles, order=[ROLES.index(role) for role in roles]), progress], axis=1)
    return states.sort_values(["order", "rank", "loader", "worker"]).drop(columns="order")


def as_records(states: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table for JSON: whole numbers as such, and what is not known None."""
    return [
        {str(name): value if isinstance(value, str) else _plain(name, value) for name, value in row.items()}
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


def _progress(
    tables: RunTables, newest: Mapping[str, pd.DataFrame], key: ProcessKey
) -> tuple[float, float, str | None]:
    """The last step and batch of a process, and what it had begun when it wrote last."""
    records = {name: of_process(rows, key) for name, rows in newest.items()}
    batches = records["fetch"] if records["batch"].empty else records["batch"]
    times = {name: last(floats(records[name], "time_ns")) for name in _BEGUN if len(records[name])}
    told = [str(event["phase"]) for event in tables.events_of("phase") if key_of(event) == key]
    phase = _BEGUN[max(times, key=times.__getitem__)] if times else None
    if told and told[-1] != "train":  # a framework that says so knows better
        phase = told[-1]
    return last(floats(records["step"], "step")), last(floats(batches, "index")), phase
