"""The loading loops of a run: which process drives which DataLoader, and what its workers recorded.

A loop is one DataLoader in one training process. Its batches are recorded by that process, its fetches by
the workers; `epoch-start` says which worker pids belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.frames import floats, key_of, whole, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey
from training_harness.records import INLINE_WORKER

_DEFAULT_PREFETCH = 2  # torch.utils.data.DataLoader, when num_workers > 0 and the user says nothing
#: Loaders with the same settings in one process are one loop; fewer suffice where one line made them.
_REMADE, _REMADE_AT_ONE_LINE = 3, 2
_EPOCHS = 1e6  # more passes than one loader ever makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One DataLoader in one training process, with its records in order of time."""

    main: ProcessKey
    rank: int | None
    loader: int
    num_workers: int
    prefetch_factor: int
    in_order: bool
    start_method: str | None
    batches: pd.DataFrame
    fetches: pd.DataFrame

    @property
    def ramp(self) -> int:
        """Batches at the start of an epoch that say nothing about the steady state."""
        return max(1, self.num_workers * self.prefetch_factor)


def loops(tables: RunTables) -> list[Loop]:
    """Every loop that has yielded a batch."""
    return tables.once("loops", lambda: _loops(tables))


def _loops(tables: RunTables) -> list[Loop]:
    batch = Lifecycle(tables).of_last_attempt(tables.stream("batch"))
    if batch.empty:
        return []
    fetch = _with_owner(tables)
    settings = loader_settings(tables)
    found = []
    for _, rows in batch.groupby(["host", "pid", "start_ticks"], sort=True):
        writer = rows.iloc[0]
        key = (str(writer["host"]), int(writer["pid"]), int(writer["start_ticks"]))
        one_loop = same_loop(tables, settings, key)
        batches = _joined(rows, one_loop)
        fetches = _joined(fetch[(fetch["owner_pid"] == key[1]) & (fetch["host"] == key[0])], one_loop)
        for loader in sorted(int(number) for number in np.unique(floats(batches, "loader"))):
            mine, made = (part[floats(part, "loader") == loader] for part in (batches, fetches))
            found.append(_loop(key, loader, settings.get((key, loader), {}), mine, made))
    return found


def loader_settings(tables: RunTables) -> dict[tuple[ProcessKey | None, int | None], Mapping[str, Any]]:
    """(training process, loader) -> what `loader` said of it."""
    return tables.once(
        "loader settings",
        lambda: {(key_of(event), whole(event.get("loader"))): event for event in tables.events_of("loader")},
    )


def same_loop(
    tables: RunTables, settings: Mapping[tuple[ProcessKey | None, int | None], Mapping[str, Any]], key: ProcessKey
) -> dict[int, int]:
    """Loader -> the last of its kind, for scripts that make the same DataLoader anew in each epoch.

    Of loaders that look alike (sampler and length of the dataset too), only those are one that follow on
    each other: loaders that are in use by turns are different ones.
    """
    if sum(main == key for main, _ in settings) < _REMADE_AT_ONE_LINE:
        return {}
    last_used = _last_used(written(tables, "batch", key))
    alike: dict[str, list[list[int]]] = {}
    for (main, loader), event in sorted(settings.items(), key=lambda item: item[1]["time_ns"]):
        if main != key or loader is None:
            continue
        signature = {name: value for name, value in event.items() if name not in ("time_ns", "loader")}
        chains = alike.setdefault(repr(sorted(signature.items())), [])
        free = [chain for chain in chains if last_used.get(chain[-1], 0.0) <= event["time_ns"]]
        if free:
            free[-1].append(loader)
        else:
            chains.append([loader])
    return {
        loader: max(chain)
        for chains in alike.values()
        for chain in chains
        if len(chain) >= (_REMADE_AT_ONE_LINE if settings[key, chain[0]].get("line") else _REMADE)
        for loader in chain
    }


def _last_used(batch: pd.DataFrame) -> dict[int, float]:
    """Loader -> the time of its last batch, ns; batches come in order of time."""
    latest_first = floats(batch, "loader")[::-1]
    used, position = np.unique(latest_first, return_index=True)
    times = floats(batch, "time_ns")[::-1][position]
    return {int(loader): float(time) for loader, time in zip(used, times, strict=True)}


def _joined(rows: pd.DataFrame, one_loop: Mapping[int, int]) -> pd.DataFrame:
    """The records with loaders of one loop under one number; each of their passes is an epoch of its own."""
    if not one_loop:
        return rows
    loader = floats(rows, "loader")
    joined = pd.Series(loader).map(one_loop).fillna(pd.Series(loader)).to_numpy()
    return rows.assign(loader=joined, epoch=floats(rows, "epoch") + _EPOCHS * loader)


def worker_slots(tables: RunTables) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
    """(host, worker pid) -> (training process, loader, worker id), from `epoch-start` and `worker-start`."""
    slots: dict[tuple[str, int], tuple[ProcessKey, int, int]] = {}
    for event in tables.events_of("epoch-start"):
        owner, loader = key_of(event), whole(event.get("loader"))
        if owner is None or loader is None:
            continue
        for worker, pid in enumerate(event.get("worker_pids") or ()):
            if (known := whole(pid)) is not None:
                slots[(owner[0], known)] = (owner, loader, worker)
    return slots


def _loop(
    key: ProcessKey, loader: int, setting: Mapping[str, Any], batches: pd.DataFrame, fetches: pd.DataFrame
) -> Loop:
    workers = whole(setting.get("num_workers"))
    if workers is None:
        workers = max(0, int(np.nanmax(floats(batches, "worker"), initial=INLINE_WORKER)) + 1)
    return Loop(
        main=key,
        rank=whole(batches["rank"].iloc[-1]),
        loader=loader,
        num_workers=workers,
        prefetch_factor=(whole(setting.get("prefetch_factor")) or _DEFAULT_PREFETCH) if workers else 0,
        in_order=setting.get("in_order") is not False,
        start_method=setting.get("start_method"),
        batches=batches,
        fetches=fetches,
    )


def _with_owner(tables: RunTables) -> pd.DataFrame:
    """The fetches with the pid of the training process they were made for, in `owner_pid`."""
    fetch = tables.stream("fetch")
    mains = tables.stream("batch")["pid"].unique()
    only = float(mains[0]) if len(mains) == 1 else np.nan
    owner = pd.Series(floats(fetch, "pid"), index=fetch.index)  # inline: the training process itself
    pid_of_owner: dict[str, dict[int, float]] = {}
    for (host, pid), (main, _, _) in worker_slots(tables).items():
        pid_of_owner.setdefault(host, {})[pid] = float(main[1])
    by_worker = fetch[floats(fetch, "worker") != INLINE_WORKER]
    for host, pids in by_worker.groupby("host")["pid"]:
        owner[pids.index] = pids.map(pid_of_owner.get(str(host), {})).astype(float).fillna(only)
    return fetch.assign(owner_pid=owner)
