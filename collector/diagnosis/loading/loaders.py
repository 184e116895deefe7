"""The loading loops of a run: which process drives which DataLoader, and what its workers recorded.

A loop is one DataLoader in one training process. Its batches are recorded by that process, its fetches by
the workers; `epoch-start` says which worker pids belong to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from collector.diagnosis.loading.child_processes import with_living_children
from collector.diagnosis.run.columns import (
    SECOND_NS,
    WRITER,
    by_process,
    finite,
    floats,
    seconds,
    whole,
    worker_samples,
    written,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables, once, writer_of
from collector.diagnosis.statistics.growth import Floats
from collector.store import ProcessKey
from training_harness.records import INLINE_WORKER

#: Training process and number of a loader, as its events have them.
LoaderKey: TypeAlias = tuple[ProcessKey, int | None]
_DEFAULT_PREFETCH = 2  # torch.utils.data.DataLoader, when num_workers > 0 and the user says nothing
#: Loaders with the same settings that make one loop, at least; fewer suffice where one line of code made them.
_LEAST_LOADERS, _LEAST_LOADERS_OF_ONE_LINE = 3, 2
#: Share of the batches whose samples workers counted, from which the samples of all are known well enough.
_MOST_COUNTED = 0.99
#: Time over which the usual size of a batch is taken: some batches, and little of a growth.
_BATCH_SIZES_WINDOW = "10s"
_MOST_EPOCHS = 1e6  # more than one loader ever makes
#: Waits of a loop are recorded if the thread that trains waits in `next()`. Where another thread loads ahead, they
#: are estimated, or not known.
Waits: TypeAlias = Literal["recorded", "estimated", "unknown"]
#: Share of a loop's waits that the steps of its process contain at least, if the thread that steps iterates it.
_SHARE_IN_STEPS = 0.5
#: Share of an epoch's steps after its last batch arrived, from which the training had batches in store.
_SHARE_IN_STORE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One DataLoader in one training process, with its records in order of time, and the tables of its run.

    Attributes:
        waits: how the training's waits for the batches are known.
    """

    tables: RunTables = field(repr=False)
    main: ProcessKey
    rank: int | None
    loader: int
    num_workers: int
    prefetch_factor: int
    in_order: bool
    batches: pd.DataFrame
    fetches: pd.DataFrame
    waits: Waits

    @property
    def setting(self) -> Mapping[str, Any]:
        """Its `loader` event; empty if that was not recorded."""
        return loader_settings(self.tables).get((self.main, self.loader), {})

    @property
    def ramp(self) -> int:
        """Number of batches at the start of an epoch that say nothing about the steady state."""
        return max(1, self.num_workers * self.prefetch_factor)

    @property
    def wait_seconds(self) -> float:
        """Seconds that training waited for the recorded batches."""
        return float(np.fmax(floats(self.batches, "wait_ns"), 0.0).sum()) / SECOND_NS


def loops(tables: RunTables) -> list[Loop]:
    """Return every loop that has yielded a batch, with the last setting of its DataLoader."""
    replaced = replaced_loaders(tables)
    return [loop for loop in all_loops(tables) if (loop.main, loop.loader) not in replaced]


@once
def all_loops(tables: RunTables) -> list[Loop]:
    """Return every loop that has yielded a batch, with each setting of its DataLoader."""
    batch = lifecycle_of(tables).of_last_attempt(tables.stream("batch"))
    if batch.empty:
        return []
    fetch = with_living_children(tables, _with_owner(tables))
    settings = loader_settings(tables)
    found_loops = []
    for key, rows in by_process(batch, WRITER):
        last_loader = recreated_loaders(tables, key)
        batches = _join_loaders(rows, last_loader)
        fetches = _join_loaders(fetch[(fetch["owner_pid"] == key[1]) & (fetch["host"] == key[0])], last_loader)
        for loader in sorted(int(number) for number in np.unique(floats(batches, "loader"))):
            of_loader = (part[floats(part, "loader") == loader] for part in (batches, fetches))
            loop = _loop(tables, key, loader, settings.get((key, loader), {}), *of_loader)
            found_loops.append(_without_traced_times(loop))
    return found_loops


def _without_traced_times(loop: Loop) -> Loop:
    """Return the loop without fetches and waits while Tidegauge itself slowed one of its processes down.

    A trace of allocations or a profile makes a fetch many times as long.
    """
    batches, fetches = loop.batches, loop.fetches
    traces = [event for event in loop.tables.events_of("snapshot") if event.get("what") in ("growth", "profile")]
    if not traces:
        return loop
    pids = {loop.main[1], *fetches["pid"].unique()}
    for event in traces:
        if event.get("begun_ns") is not None and event["host"] == loop.main[0] and event["pid"] in pids:
            of_batch, of_fetch = (
                (floats(rows, "time_ns") >= event["begun_ns"]) & (floats(rows, "time_ns") <= event["time_ns"])
                for rows in (batches, fetches)
            )
            batches = batches.assign(wait_ns=np.where(of_batch, np.nan, floats(batches, "wait_ns")))
            fetches = fetches[~of_fetch]
    return replace(loop, batches=batches, fetches=fetches)


@once
def loader_settings(tables: RunTables) -> dict[LoaderKey, Mapping[str, Any]]:
    """Return the `loader` event by (training process, loader)."""
    return {(writer_of(event), whole(event.get("loader"))): event for event in tables.events_of("loader")}


def has_batches_left(tables: RunTables, key: ProcessKey) -> bool | None:
    """Return whether a training process is in an epoch whose last batch it has not had; None if that is unknown."""
    batches = written(tables, "batch", key)
    if batches.empty:
        return None
    loader, index = (int(batches[name].iloc[-1]) for name in ("loader", "index"))
    settings = loader_settings(tables).get((key, loader), {})
    length, batch_size = whole(settings.get("dataset_length")), whole(settings.get("batch_size"))
    return None if length is None or batch_size is None else (index + 2) * batch_size <= length


@once
def replaced_loaders(tables: RunTables) -> dict[LoaderKey, int]:
    """Map each setting of a DataLoader that gave way to another one to the loader number of the one that runs last.

    That is the one with the newest batch. Findings and predictions concern it alone.
    """
    first: dict[LoaderKey, LoaderKey] = {}
    for (main, loader), event in loader_settings(tables).items():  # in order of time
        before = main, whole(event.get("replaces"))
        first[main, loader] = first.get(before, (main, loader))
    members: dict[LoaderKey, list[LoaderKey]] = {}
    for place, begin in first.items():
        members.setdefault(begin, []).append(place)
    replaced: dict[LoaderKey, int] = {}
    for (main, _), places in members.items():
        if len(places) < 2:
            continue
        used = _last_used(written(tables, "batch", main))
        newest = max((used.get(loader, 0.0), loader) for _, loader in places if loader is not None)[1]
        replaced |= {place: newest for place in places if place[1] != newest}
    return replaced


@once
def recreated_loaders(tables: RunTables, key: ProcessKey) -> dict[int, int]:
    """Map each re-created loader to the last of its chain, for scripts that make a DataLoader in each epoch.

    A chain has loaders with equal settings (sampler and length of the dataset too), each of which is made after
    the last batch of the one before. The length may change if one line makes them and none comes back, as for a
    dataset that grows. Loaders that are in use by turns stay separate.
    """
    settings = loader_settings(tables)
    events = [event for (main, loader), event in settings.items() if main == key and loader is not None]
    if len(events) < _LEAST_LOADERS_OF_ONE_LINE:
        return {}
    last_used = _last_used(written(tables, "batch", key))
    joined = [chain for chain in _chains(events, last_used, "dataset_length") if _changes_length(chain)]
    changing = {event["loader"] for chain in joined for event in chain}
    for chain in _chains([event for event in events if event["loader"] not in changing], last_used):
        least = _LEAST_LOADERS_OF_ONE_LINE if chain[0].get("line") else _LEAST_LOADERS
        joined += [chain] if len(chain) >= least else []
    return {event["loader"]: max(one["loader"] for one in chain) for chain in joined for event in chain}


def is_made_again(loop: Loop) -> bool:
    """Return whether the script creates the DataLoader of a loop again, mostly for each epoch."""
    again = {whole(event.get("loader")) for event in loop.tables.events_of("loader-again", by=loop.main)}
    return loop.loader in again or loop.loader in recreated_loaders(loop.tables, loop.main)


def _changes_length(chain: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one line made loaders of several lengths, each for a while."""
    lengths = [length for length, _ in itertools.groupby(event.get("dataset_length") for event in chain)]
    return bool(chain[0].get("line")) and len(lengths) == len(set(lengths)) >= _LEAST_LOADERS


def _chains(
    events: Sequence[Mapping[str, Any]], last_used: Mapping[int, float], *ignored: str
) -> list[list[Mapping[str, Any]]]:
    """Join the `loader` events with equal fields, each after the last batch of the one before."""
    by_signature: dict[str, list[list[Mapping[str, Any]]]] = {}
    for event in sorted(events, key=lambda event: event["time_ns"]):
        signature = {name: value for name, value in event.items() if name not in ("time_ns", "loader", *ignored)}
        chains = by_signature.setdefault(repr(sorted(signature.items())), [])
        unused = [chain for chain in chains if last_used.get(chain[-1]["loader"], 0.0) <= event["time_ns"]]
        if unused:
            unused[-1].append(event)
        else:
            chains.append([event])
    return [chain for chains in by_signature.values() for chain in chains]


def _last_used(batch: pd.DataFrame) -> dict[int, float]:
    """Return the time of each loader's last batch in ns; `batch` is in order of time."""
    latest_first = floats(batch, "loader")[::-1]
    used, position = np.unique(latest_first, return_index=True)
    times = floats(batch, "time_ns")[::-1][position]
    return {int(loader): float(time) for loader, time in zip(used, times, strict=True)}


def _join_loaders(rows: pd.DataFrame, last_loader: Mapping[int, int]) -> pd.DataFrame:
    """Give the loaders of a chain one number, and each of their passes an epoch number of its own."""
    if not last_loader:
        return rows
    loader = floats(rows, "loader")
    joined = pd.Series(loader).map(last_loader).fillna(pd.Series(loader)).to_numpy()
    return rows.assign(loader=joined, epoch=floats(rows, "epoch") + _MOST_EPOCHS * loader)


def joined_batches(tables: RunTables, key: ProcessKey) -> pd.DataFrame:
    """Return the batches of a training process, with one number for loaders that it makes again."""
    return _join_loaders(written(tables, "batch", key), recreated_loaders(tables, key))


def samples_of(tables: RunTables, batches: pd.DataFrame) -> Floats:
    """Return the samples of each of these rows of `batch`; all NaN if neither the loop nor workers counted most.

    A worker that collates what an iterable dataset yields knows how many samples a batch has, the loop does not.
    """
    counts = floats(batches, "samples_count")
    if np.isfinite(counts).any():
        return counts
    keys = ["host", "loader", "epoch", "index"]
    made = _with_owner(tables)[[*keys, "owner_pid", "samples_count"]].dropna()
    made = made.drop_duplicates([*keys, "owner_pid"], keep=False)
    asked = batches[keys].assign(owner_pid=floats(batches, "pid"))
    counts = floats(asked.merge(made, how="left", on=[*keys, "owner_pid"]), "samples_count")
    is_known = np.isfinite(counts).sum() >= _MOST_COUNTED * len(counts)
    return counts if is_known else np.full(len(counts), np.nan)


class Epoch(NamedTuple):
    """The start of an epoch: its event, its training process and loader, and its workers by number."""

    event: Mapping[str, Any]
    main: ProcessKey
    loader: int
    pids: dict[int, int]


def epochs_of(tables: RunTables) -> list[Epoch]:
    """Return the starts of all epochs, in order of time."""
    return [
        Epoch(
            event,
            writer_of(event),
            loader,
            {
                worker: worker_pid
                for worker, pid in enumerate(event.get("worker_pids") or ())
                if (worker_pid := whole(pid)) is not None
            },
        )
        for event in tables.events_of("epoch-start")
        if (loader := whole(event.get("loader"))) is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedBatch:
    """The batch that a loop waits for, its worker, and whether the worker recorded that it is made."""

    index: int
    worker: int
    pid: int
    is_made: bool

    @property
    def words(self) -> str:
        """The batch and its worker, in words."""
        what = "made, and which did not arrive" if self.is_made else "had not made"
        return f"batch {self.index}, which worker {self.worker} (pid {self.pid}) {what}"


def awaited_batch(tables: RunTables, key: ProcessKey, loader: int) -> AwaitedBatch | None:
    """Return the batch of a loader that a training process waits for; None if the records leave it open.

    The workers take turns (torch/utils/data/dataloader.py, `_try_put_index`), those of an iterable dataset until
    one has no more.
    """
    epoch = next((one for one in reversed(epochs_of(tables)) if (one.main, one.loader) == (key, loader)), None)
    setting = loader_settings(tables).get((key, loader), {})
    if epoch is None or not epoch.pids or setting.get("in_order") is False or setting.get("iterable"):
        return None
    had, made = (
        rows[(rows["loader"] == loader) & (rows["epoch"] == epoch.event["epoch"])]
        for rows in (written(tables, "batch", key), tables.stream("fetch"))
    )
    made = made[(made["host"] == key[0]) & made["pid"].isin(epoch.pids.values())]
    index = int(np.nanmax(floats(had, "index"), initial=-1)) + 1
    worker = index % len(epoch.pids)
    is_in_turn = (floats(made, "index") % len(epoch.pids) == floats(made, "worker")).all()
    if worker not in epoch.pids or not is_in_turn:
        return None
    return AwaitedBatch(
        index=index, worker=worker, pid=epoch.pids[worker], is_made=bool((made["index"] == index).any())
    )


def worker_slots(tables: RunTables) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
    """Map (host, worker pid) to (training process, loader, worker id), in the order of their last epochs."""
    slots: dict[tuple[str, int], tuple[ProcessKey, int, int]] = {}
    for epoch in epochs_of(tables):
        for worker, pid in epoch.pids.items():
            slots.pop((epoch.main[0], pid), None)  # a persistent worker, or a pid that is used again
            slots[(epoch.main[0], pid)] = (epoch.main, epoch.loader, worker)
    return slots


def living_workers(tables: RunTables, key: ProcessKey, times_seconds: Floats) -> Floats:
    """Return how many DataLoader workers of a training process lived at each time, those of kept iterators too.

    Each has a thread in the training process, which feeds its queue of indices, and some open files.
    """
    of_key = {pid for (host, pid), (main, _, _) in worker_slots(tables).items() if main == key and host == key[0]}
    rows = worker_samples(tables)
    rows = rows[(rows["host"] == key[0]) & rows["process_pid"].isin(of_key)]
    lives = rows.groupby(["process_pid", "process_start_ticks"])["time_ns"].agg(["min", "max"]) / SECOND_NS
    begun = np.searchsorted(np.sort(floats(lives, "min")), times_seconds, side="right")
    counts: Floats = (begun - np.searchsorted(np.sort(floats(lives, "max")), times_seconds)).astype(np.float64)
    return counts


def replaced_workers(tables: RunTables) -> set[tuple[str, int]]:
    """Return host and pid of the workers whose place in their loader a worker of a later epoch took."""
    slots = worker_slots(tables)
    newest = {slot: address for address, slot in slots.items()}
    return {address for address, slot in slots.items() if newest[slot] != address}


def _loop(
    tables: RunTables,
    key: ProcessKey,
    loader: int,
    setting: Mapping[str, Any],
    batches: pd.DataFrame,
    fetches: pd.DataFrame,
) -> Loop:
    workers = whole(setting.get("num_workers"))
    if workers is None:
        workers = max(0, int(np.nanmax(floats(batches, "worker"), initial=INLINE_WORKER)) + 1)
    ahead, one_loop = tables.events_of("loads-ahead", by=key), recreated_loaders(tables, key)
    if ahead and loader not in {one_loop.get(event["loader"], event["loader"]) for event in ahead}:
        waits: Waits = "recorded"  # such as those of an evaluation
    else:
        waits, batches = _with_waits_of_training(batches, written(tables, "step", key))
    return Loop(
        tables=tables,
        main=key,
        rank=whole(batches["rank"].iloc[-1]),
        loader=loader,
        num_workers=workers,
        prefetch_factor=(whole(setting.get("prefetch_factor")) or _DEFAULT_PREFETCH) if workers else 0,
        in_order=setting.get("in_order") is not False,
        batches=batches,
        fetches=fetches,
        waits=waits,
    )


def _with_waits_of_training(batches: pd.DataFrame, steps: pd.DataFrame) -> tuple[Waits, pd.DataFrame]:
    """Return how the training's waits for the batches of a loop are known, and the batches with these waits.

    A thread that loads ahead, and hands the batches over in a queue of its own, waits in `next()` in place of the
    training. The training waits for the thread, in its time outside the step that it does not compute.
    """
    ends, in_steps = floats(steps, "time_ns"), floats(steps, "data_wait_ns")
    if (floats(steps, "batches_count") > 0).any() and not np.isfinite(in_steps).any():
        return _with_waits_for_thread(batches, steps)
    if not np.isfinite(in_steps[1:]).any():
        return "recorded", batches
    times, waits = floats(batches, "time_ns"), floats(batches, "wait_ns")
    loop_ns = float(np.nansum(waits[(times > ends[0]) & (times <= ends[-1])]))
    is_part = float(np.nansum(in_steps[1:][ends[1:] > times[0]])) >= _SHARE_IN_STEPS * loop_ns
    return ("recorded" if is_part else "unknown"), batches


def _with_waits_for_thread(batches: pd.DataFrame, steps: pd.DataFrame) -> tuple[Waits, pd.DataFrame]:
    """Estimate the waits of a training for a thread; unknown if its computing outside the steps is not recorded.

    In all, they are at most the time outside the steps that the training did not compute. They are also at most
    what the thread waited more than it did something else: while it puts a batch into a full queue, no one waits
    for it. And a wait lasts until a batch comes, so that no step ends in it. Each batch has its share. Where many
    steps follow the last batch of an epoch, the training had batches in store.
    """
    waits, times = np.fmax(floats(batches, "wait_ns"), 0.0), floats(batches, "time_ns")
    epochs = batches["epoch"].to_numpy()
    begins = np.flatnonzero(np.append(True, epochs[1:] != epochs[:-1]))
    firsts, lasts = times[begins], times[np.append(begins[1:], len(times)) - 1]

    ends = floats(steps, "time_ns")
    rows, ends = steps[ends > firsts[0]], ends[ends > firsts[0]]
    is_during = ends <= lasts[np.searchsorted(firsts, ends) - 1]
    idle = (floats(rows, "other_ns") - floats(rows, "outside_cpu_ns"))[is_during]
    if not np.isfinite(idle).any():
        return "unknown", batches
    total_ns = max(float(waits.sum()), 1.0)
    elsewhere_ns = float((lasts - firsts).sum()) - total_ns + float(waits[begins].sum())
    before = np.maximum(np.append(-np.inf, times[:-1]), times - waits)
    ended = np.append(-np.inf, ends)[np.searchsorted(ends, times, side="right")]
    without_step_ns = float((times - np.maximum(before, ended)).sum())
    waited_ns = min(float(np.nanmean(idle)) * len(idle), total_ns - max(0.0, elsewhere_ns), without_step_ns)
    share = max(0.0, waited_ns) / total_ns if is_during.mean() > 1 - _SHARE_IN_STORE else 0.0
    waits, blocked = waits * share, floats(batches, "blocked_ns")
    return "estimated", batches.assign(wait_ns=waits, blocked_ns=np.minimum(blocked, waits))


def own_pass(loader: float, epoch: float) -> tuple[int, int]:
    """Return the loader of a pass and its epoch as its events number them, also for a pass of a chain."""
    chained, own_epoch = divmod(epoch, _MOST_EPOCHS)
    return int(chained or loader), int(own_epoch)


def _with_owner(tables: RunTables) -> pd.DataFrame:
    """Return the fetches with the pid of the training process that they were made for, in `owner_pid`."""
    fetch = tables.stream("fetch")
    mains = tables.stream("batch")["pid"].unique()
    only_main = float(mains[0]) if len(mains) == 1 else np.nan
    owner = pd.Series(floats(fetch, "pid"), index=fetch.index)  # inline: the training process itself
    pid_of_owner: dict[str, dict[int, float]] = {}
    for (host, pid), (main, _, _) in worker_slots(tables).items():
        pid_of_owner.setdefault(host, {})[pid] = float(main[1])
    by_worker = fetch[floats(fetch, "worker") != INLINE_WORKER]
    for host, pids in by_worker.groupby("host")["pid"]:
        owner[pids.index] = pids.map(pid_of_owner.get(str(host), {})).astype(float).fillna(only_main)
    return fetch.assign(owner_pid=owner)


def inline_batch_growth(tables: RunTables, key: ProcessKey, times_seconds: Floats) -> Floats:
    """Return by how much the batches that a process makes itself have grown by each time, in bytes; 0 if less.

    Where sizes grow, as with a curriculum, the batch in use takes more memory, which is no leak. Medians over
    `_BATCH_SIZES_WINDOW` leave out single larger batches, which are freed at once, and the last one of an epoch.
    """
    batches = written(tables, "batch", key).sort_values("time_ns")
    batches = batches[~(floats(batches, "worker") >= 0)]  # those of workers lie in shared memory
    sizes = pd.Series(floats(batches, "payload_bytes"), pd.to_datetime(floats(batches, "time_ns")))
    usual = sizes.rolling(_BATCH_SIZES_WINDOW).median().to_numpy()
    if not np.isfinite(usual).any():
        return np.zeros(len(times_seconds))
    made = np.searchsorted(seconds(batches), times_seconds, side="right") - 1
    grown: Floats = np.nan_to_num(usual[np.maximum(made, 0)] - finite(usual)[0])
    return np.maximum(grown, 0.0)
