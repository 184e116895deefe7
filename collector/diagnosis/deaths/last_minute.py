"""The last minute of every process, for a post-mortem: its memory, and its progress."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import replaced_workers
from collector.diagnosis.run.allocators import without_errors
from collector.diagnosis.run.columns import (
    PROCESS,
    SECOND_NS,
    WRITER,
    floats,
    held_bytes,
    last,
    of_process,
    whole,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import RunTables, once, writer_of
from collector.store import ProcessKey
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_OTHER, ROLES

LAST_MINUTE_SECONDS = 60.0
_PLACE = ["role", "process_rank", "loader", "worker"]
_MEMORY = ["held_bytes", "rss_bytes", "pss_bytes", "private_dirty_bytes", "swap_bytes"]
_NAMES = {"process_pid": "pid", "process_start_ticks": "start_ticks", "process_rank": "rank"}
#: Stream -> the phase that begins when a record of it is written.
_NEXT_PHASES = {"step": "between steps", "batch": "forward or backward", "device_memory": "optimizer"}
#: The phase after a step without a DataLoader, where no record says that the forward pass begins.
_PHASE_WITHOUT_BATCHES = "outside the optimizer"


def last_minute(tables: RunTables) -> pd.DataFrame:
    """Return the samples of the last minute of each host, one row per process and tick, in order of time.

    Columns: `host`, `pid`, `start_ticks`, `role` (a word of `records.ROLES`), `rank`, `loader`, `worker`; `time_ns`
    and `seconds`, counted from the end of the training there, so mostly below 0; `held_bytes` (see
    `columns.held_bytes`), `rss_bytes`, `pss_bytes`, `private_dirty_bytes`, `swap_bytes`, NaN where not read.
    """
    samples = _samples(tables)
    return samples[samples["seconds"] >= -LAST_MINUTE_SECONDS].reset_index(drop=True)


def _earlier_trainings(tables: RunTables) -> pd.DataFrame:
    """Return the last minute of each training process that ended before the last minute of its host."""
    samples = _samples(tables)
    ended = samples.groupby(WRITER)["seconds"].transform("max")
    is_main = pd.MultiIndex.from_frame(samples[WRITER]).isin(lifecycle_of(tables).mains)
    is_last = samples["seconds"] >= ended - LAST_MINUTE_SECONDS
    return samples[is_main & is_last & (ended < -LAST_MINUTE_SECONDS)]


@once
def _samples(tables: RunTables) -> pd.DataFrame:
    """Return the samples of all processes of the run, with the columns of `last_minute`."""
    process = tables.stream("process")
    has_role = np.isin(floats(process, "role"), [role for role in range(len(ROLES)) if role != ROLE_COLLECTOR])
    rows = process[has_role & (floats(process, "alive") != 0)].dropna(subset=PROCESS)
    # The last role of a process counts: the main one is an "other" until it trains.
    rows = rows.assign(**rows.groupby(PROCESS)[_PLACE].transform("last"))
    held = [pd.Series(held_bytes(samples), samples.index) for _, samples in rows.groupby(PROCESS)]
    seconds = (floats(rows, "time_ns") - rows["host"].map(_ends_ns(tables, rows)).to_numpy(np.float64)) / SECOND_NS
    roles = [ROLES[int(role)] for role in floats(rows, "role")]
    rows = rows.assign(role=roles, seconds=seconds, held_bytes=pd.concat(held) if held else np.nan)
    samples: pd.DataFrame = rows[[*PROCESS, *_PLACE, "time_ns", "seconds", *_MEMORY]].rename(columns=_NAMES)
    return samples


def last_states(tables: RunTables) -> pd.DataFrame:
    """Return one row per process that lived in the last minute, and per training process that ended before.

    The training processes come first. Workers of earlier epochs that had ended are left out (`earlier_workers`): a
    short epoch would list many.

    Columns: those that name it in `last_minute`; `seconds` at which it was last sampled; its bytes as last
    read, before what an exception that ended it freed; `held_rise_bytes`, from the first sample of
    that minute; `step`, the last that it ended; `batch`, the index of the last that it got or made; and `phase`,
    which its last record began. Unknown values are NaN or None.
    """
    samples = pd.concat([last_minute(tables), _earlier_trainings(tables)], ignore_index=True)
    states = samples.groupby(WRITER, sort=False)[["role", "rank", "loader", "worker", "seconds"]].last()
    # A process that an exception ends gives back what its frames held before it is gone.
    raised_ns = {key: event["time_ns"] for key, event in lifecycle_of(tables).exceptions.items()}
    ends_ns = [raised_ns.get(key, math.inf) for key in samples[WRITER].itertuples(index=False, name=None)]
    memory = samples.groupby(WRITER, sort=False)[_MEMORY]
    before = samples[samples["time_ns"] <= ends_ns].groupby(WRITER, sort=False)[_MEMORY].last()
    latest = memory.last()
    before = before.reindex(latest.index)
    gave_back = latest["held_bytes"] < before["held_bytes"]
    latest.loc[gave_back] = before.loc[gave_back]
    states = states.join(latest)
    states["held_rise_bytes"] = latest["held_bytes"] - memory.first()["held_bytes"]
    earlier = earlier_workers(tables)
    keys: list[ProcessKey] = [(str(host), int(pid), int(ticks)) for host, pid, ticks in states.index]
    keys = [key for key in keys if key[:2] not in earlier]
    keys += [key for key in lifecycle_of(tables).mains if key not in keys]  # they outlived the collector
    states = states.reindex(pd.MultiIndex.from_tuples(keys, names=WRITER)).reset_index()
    streams = (*_NEXT_PHASES, "fetch")
    newest = {name: tables.stream(name) for name in streams}
    newest["device_memory"] = without_errors(newest["device_memory"])
    newest = {name: rows.drop_duplicates(WRITER, keep="last") for name, rows in newest.items()}
    progress = pd.DataFrame([_progress(tables, newest, key) for key in keys], columns=["step", "batch", "phase"])
    # A process is sampled before its events say that it trains, and a short run ends there.
    mains = set(lifecycle_of(tables).mains)
    roles = [ROLES[ROLE_MAIN] if key in mains else role for key, role in zip(keys, states["role"], strict=True)]
    ranks = [rank_of(tables, key) if key in mains else None for key in keys]
    states["rank"] = states["rank"].fillna(pd.Series(ranks, index=states.index, dtype=float))
    states = pd.concat([states.assign(role=roles, order=[ROLES.index(role) for role in roles]), progress], axis=1)
    return states.sort_values(["order", "rank", "loader", "worker"]).drop(columns="order")


def earlier_workers(tables: RunTables) -> set[tuple[str, int]]:
    """Return host and pid of the workers that ended, and whose place a worker of a later epoch took."""
    process = tables.stream("process")
    gone = process.loc[floats(process, "alive") == 0, ["host", "process_pid"]].dropna()
    ended = {(str(host), int(pid)) for host, pid in gone.itertuples(index=False)}
    ended |= {writer_of(event)[:2] for event in tables.events_of("worker-exit")}
    return replaced_workers(tables) & ended


def to_records(states: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of `last_states` for JSON: integers, except `seconds`; unknown values are None."""
    return [
        {str(name): value if isinstance(value, str) else _number(name, value) for name, value in row.items()}
        for row in states.to_dict("records")
    ]


def _number(name: Hashable, value: Any) -> int | float | None:
    return (None if pd.isna(value) else round(float(value), 3)) if name == "seconds" else whole(value)


def _ends_ns(tables: RunTables, samples: pd.DataFrame) -> dict[str, float]:
    """Return host -> time of the last sign of a training process or worker; of any process if there is none."""
    training = samples[floats(samples, "role") < ROLE_OTHER]
    records = [tables.stream(name)[["host", "time_ns"]] for name in ("step", "batch", "fetch")]
    signs = pd.concat([(samples if training.empty else training)[["host", "time_ns"]], *records])
    return {str(host): float(times.max()) for host, times in signs.groupby("host")["time_ns"]}


def _progress(
    tables: RunTables, newest: Mapping[str, pd.DataFrame], key: ProcessKey
) -> tuple[float, float, str | None]:
    """Return the last step and batch of a process, and the phase that its last record began."""
    records = {name: of_process(rows, key) for name, rows in newest.items()}
    batches = records["fetch"] if records["batch"].empty else records["batch"]
    times = {name: last(floats(records[name], "time_ns")) for name in _NEXT_PHASES if len(records[name])}
    framework_phases = [str(event["phase"]) for event in tables.events_of("phase", by=key)]
    newest_stream = max(times, key=times.__getitem__, default="")
    is_step_without_loader = newest_stream == "step" and "batch" not in times
    phase = _PHASE_WITHOUT_BATCHES if is_step_without_loader else _NEXT_PHASES.get(newest_stream)
    if framework_phases and framework_phases[-1] != "train":  # the framework knows better
        phase = framework_phases[-1]
    return last(floats(records["step"], "step")), last(floats(batches, "index")), phase
