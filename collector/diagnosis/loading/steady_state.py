"""The pace of one loading loop in its steady state, measured on both sides: the loop and its workers.

The loop's side gives its wait and its own work per batch; the workers' side gives their idle time and what each
fetch costs. With N workers that take w seconds per batch, a loop that needs c seconds per batch keeps them busy
`w / (N c)` of the time: at 1 and above they cannot keep up, however deep the prefetch is.

A steady state may begin late in a run: `since_change` looks for the batch since which fetches take another time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.run.columns import SECOND_NS, finite, floats, mean, median
from collector.diagnosis.run.training import step_at
from collector.diagnosis.statistics.growth import Floats, spread
from collector.diagnosis.statistics.jumps import jump, rises, spell
from collector.units import after_steps, duration

#: Share of its time that a worker idles, below which it has none to spare.
BUSY_IDLE = 0.15
#: Batches that a verdict on a loop, or on a part of it, needs.
MIN_BATCHES = 10
_REGIME_RATIO = 1.5  # of fetch times before a change and since, beyond the error
_LEAST_SINCE = 0.1  # share of the fetches since a change, and before it
_MOST_BEFORE = 0.5  # largest share of the fetches before a jump to shorter ones
#: Share of the fetches of other epochs that change at the same index; above it, the change belongs to each epoch.
_MOST_ALIKE = 0.5
_ALWAYS_BUSY = 0.9  # share of the time; the rest is too short to be what the loop mostly waits for
#: A pause (validation, a checkpoint) is rarer than this and that many times longer than usual.
_PAUSE_QUANTILE, _PAUSE_FACTOR = 0.95, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPace:
    """One worker slot in the steady state; times in seconds."""

    worker: int
    fetches: int
    fetch_median: float
    fetch_mean: float
    fetch_log_error: float
    idle_ratio: float
    blame_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One loop in the steady state; times in seconds, per batch.

    Attributes:
        interval: between two yields, pauses of the loop cut off.
        wait: in the DataLoader: `starved` until a worker had made the batch, then `transfer` (queue, unpickling,
            pinning). All of it is `starved` where the workers set the pace: the thread of a worker that sends a
            batch waits for the worker's GIL, so a batch is late while the next one is made.
        consumer: the rest of the interval, and the transfer: what the loop needs if its batches are ready.
        capacity_ratio: mean fetch time over (workers x consumer time).
        tail_wait_ratio: share of the starving at batches that took 3 times the usual fetch.
        tail_ratio: share of such batches.
        first_ns, last_ns: the window.
    """

    batches: int
    interval: float
    wait: float
    wait_ratio: float
    starved: float
    starved_ratio: float
    transfer: float
    consumer: float
    workers: tuple[WorkerPace, ...]
    fetch_mean: float
    collate_mean: float
    capacity_ratio: float
    tail_wait_ratio: float
    tail_ratio: float
    first_ns: float
    last_ns: float

    @property
    def idle_ratio(self) -> float:
        """Share of time that the median worker idles, NaN if no worker reports."""
        return median(np.array([worker.idle_ratio for worker in self.workers]))


def steady_fetches(loop: Loop) -> pd.DataFrame:
    """Return the fetches of the steady state, with `fetch_ns` and `idle_ns`.

    The ramp-up is left out, and so is each process's first fetch of an epoch: it idled while workers started or
    between epochs.
    """
    rows = loop.fetches
    first = ~rows.duplicated(["epoch", "pid"])
    rows = rows[~first & (floats(rows, "index") >= (loop.ramp if loop.num_workers else 1))]
    return rows.assign(fetch_ns=fetch_ns(rows), idle_ns=floats(rows, "idle_ns"))


def fetch_ns(fetches: pd.DataFrame) -> Floats:
    """Return the time of each fetch in ns, collating included."""
    durations: Floats = floats(fetches, "getitem_ns") + np.nan_to_num(floats(fetches, "collate_ns"))
    return durations


def pace(loop: Loop) -> Pace | None:
    """Measure the steady state of a loop; return None if no batch lies in it."""
    order = np.lexsort((floats(loop.batches, "time_ns"), floats(loop.batches, "epoch")))
    rows = loop.batches[["epoch", "index", "worker", "time_ns", "wait_ns"]].iloc[order]
    times, waits, epochs = floats(rows, "time_ns"), floats(rows, "wait_ns"), floats(rows, "epoch")
    intervals = np.diff(times, prepend=np.nan)
    intervals[np.diff(epochs, prepend=np.nan) != 0] = np.nan
    steady = (floats(rows, "index") >= loop.ramp) & (intervals > 0) & np.isfinite(waits)
    if not steady.any():
        return None
    rows, times, waits, intervals = rows[steady], times[steady], waits[steady], intervals[steady]
    fetches = steady_fetches(loop)
    fetch_mean = mean(floats(fetches, "fetch_ns")) / SECOND_NS
    starved = waits if _sets_the_pace(loop, fetch_mean, intervals, waits) else starved_ns(loop, rows, times, waits)
    work = without_pauses(np.maximum(intervals - starved, 0.0))
    waits = starved + np.minimum(waits - starved, work)  # a pause that is cut off may lie in a transfer
    rows = rows.assign(starved_ns=starved)
    tail, tail_starved = _tail(rows, fetches)
    consumer = float(work.mean()) / SECOND_NS
    total = max(float((work + starved).sum()), 1.0)
    return Pace(
        batches=len(rows),
        interval=total / len(rows) / SECOND_NS,
        wait=float(waits.mean()) / SECOND_NS,
        wait_ratio=float(waits.sum()) / total,
        starved=float(starved.mean()) / SECOND_NS,
        starved_ratio=float(starved.sum()) / total,
        transfer=float((waits - starved).mean()) / SECOND_NS,
        consumer=consumer,
        workers=_worker_paces(loop, rows, fetches),
        fetch_mean=fetch_mean,
        collate_mean=mean(floats(fetches, "collate_ns")) / SECOND_NS,
        capacity_ratio=fetch_mean / (max(loop.num_workers, 1) * max(consumer, 1e-9)),
        tail_wait_ratio=tail_starved,
        tail_ratio=tail,
        first_ns=float(times[0]),
        last_ns=float(times.max()),
    )


def _sets_the_pace(loop: Loop, fetch_seconds: float, intervals: Floats, waits: Floats) -> bool:
    """Return whether the workers are always busy and the loop alone would take more batches than they make."""
    interval = float(without_pauses(intervals).mean()) / SECOND_NS
    workers_interval = fetch_seconds / max(loop.num_workers, 1)
    return workers_interval >= max(_ALWAYS_BUSY * interval, interval - float(waits.mean()) / SECOND_NS)


def starved_ns(loop: Loop, rows: pd.DataFrame, times: Floats, waits: Floats) -> Floats:
    """Return the ns of each wait until a worker had made the batch; all of it where that is not recorded."""
    if not loop.num_workers:
        return waits
    made = loop.fetches.assign(made_ns=floats(loop.fetches, "time_ns"))[["epoch", "index", "made_ns"]]
    joined = rows[["epoch", "index"]].merge(
        made.drop_duplicates(["epoch", "index"]), how="left", on=["epoch", "index"]
    )
    starved: Floats = np.clip(floats(joined, "made_ns") - (times - waits), 0.0, waits)
    return np.where(np.isfinite(starved), starved, waits)


def _worker_paces(loop: Loop, batches: pd.DataFrame, fetches: pd.DataFrame) -> tuple[WorkerPace, ...]:
    if not loop.num_workers:
        return ()
    waits = batches.groupby("worker")["starved_ns"].sum()
    total_wait = float(waits.sum()) or float("nan")
    paces = []
    for _, rows in fetches.groupby("worker"):
        costs, idle = floats(rows, "fetch_ns"), floats(rows, "idle_ns")
        known = np.isfinite(costs) & np.isfinite(idle)
        costs, idle = costs[known], without_pauses(idle[known])
        if not len(costs):
            continue
        logs = np.log(np.maximum(costs, 1.0))
        paces.append(
            WorkerPace(
                worker=int(floats(rows, "worker")[0]),
                fetches=len(costs),
                fetch_median=float(np.median(costs)) / SECOND_NS,
                fetch_mean=float(costs.mean()) / SECOND_NS,
                fetch_log_error=1.25 * spread(logs) / np.sqrt(len(costs)),
                idle_ratio=float(idle.sum()) / max(float(idle.sum() + costs.sum()), 1.0),
                blame_ratio=float(waits.get(floats(rows, "worker")[0], 0.0)) / total_wait,
            )
        )
    return tuple(paces)


def _tail(batches: pd.DataFrame, fetches: pd.DataFrame) -> tuple[float, float]:
    """Return the share of batches with three times the usual fetch time, and their share of the starving."""
    if fetches.empty:
        return float("nan"), float("nan")
    tail = fetches.assign(tail=is_tail(fetches))[["epoch", "index", "tail"]]
    joined = batches[["epoch", "index", "starved_ns"]].merge(tail, on=["epoch", "index"])
    waiting = float(joined["starved_ns"].sum())
    if joined.empty or not waiting:
        return float("nan"), float("nan")
    return float(joined["tail"].mean()), float(joined.loc[joined["tail"], "starved_ns"].sum()) / waiting


def is_tail(fetches: pd.DataFrame) -> pd.Series:
    """Return which steady fetches took over three times the median of their worker."""
    return fetches["fetch_ns"] > 3 * fetches.groupby("worker")["fetch_ns"].transform("median")


def without_pauses(durations: Floats) -> Floats:
    """Return the durations with the rare, far longer ones cut: the loop did something else then."""
    known = finite(durations)
    if not len(known):
        return durations
    usual = max(_PAUSE_FACTOR * float(np.median(known)), float(np.quantile(known, _PAUSE_QUANTILE)))
    return np.minimum(durations, usual)


_Kind = Literal["jump", "spell", "drift", "first epoch"]
_Place = tuple[float, ...]  # epoch and index of a batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change of the pace of a loop.

    Attributes:
        since, before: the loop since the change, and before it; of a spell, the loop outside of it, and in it.
        kind: whether fetches take another time at once, are longer for a while, become longer and longer, or are
            others in the first epoch.
        worker: the one whose fetches changed, None if it is not one alone.
        takes, took: the usual time of a fetch since and before, in words.
    """

    since: Loop
    before: Loop
    kind: _Kind
    worker: int | None
    takes: str
    took: str

    @property
    def end_words(self) -> str:
        """A sentence on the end of a cause that `before` has and `since` lacks."""
        if self.kind == "first epoch":
            return "That was so in the first epoch."
        last_ns = floats(self.before.batches, "time_ns").max()
        after = self.since.batches[floats(self.since.batches, "time_ns") > last_ns]
        end = since_words(dataclasses.replace(self.since, batches=after))
        began = f"began {since_words(self.before)} and " if self.kind == "spell" else ""
        return f"That {began}ended {end}."

    def words(self, *, is_new: bool) -> str:
        """Return a sentence on the change, for a cause that is new since then or not."""
        if self.kind == "first epoch":
            return f"The first epoch is left out: a fetch took {self.took} in it and takes {self.takes} since."
        if self.kind == "spell":
            whose = "" if self.worker is None else f" of worker {self.worker}"
            ratios = "the shares above leave that time out"
            return f"For a while, a fetch{whose} took {self.took}, and {self.takes} otherwise; {ratios}."
        begin = since_words(self.since)
        if self.kind == "drift":
            judged = f"the verdict is on those {begin} ({self.takes}, before {self.took})"
            return f"The fetches of this loader become longer: {judged}."
        whose = "" if self.worker is None else f" of worker {self.worker}"
        what = f"a fetch{whose} takes {self.takes}, and took {self.took} before."
        return f"That began {begin}: {what}" if is_new else f"The verdict is on the batches {begin}: {what}"


def since_change(loop: Loop) -> Change | None:
    """Return the change of a loop since which it is to be judged, None without one.

    Fetches of all workers, or of one, may jump to another time, or be longer for a while; they may become longer
    and longer; and those of the first epoch may take another time, as where a cache fills.
    """
    fetches = _in_order(loop)
    least, second_epoch = max(MIN_BATCHES, 2 * loop.ramp), (loop.batches["epoch"].min() + 1, 0)
    places = _jumps(fetches, least)
    if places and places != [second_epoch]:
        return _change(loop, places)
    if not places:
        for worker in map(int, np.unique(floats(fetches, "worker"))):
            places = _jumps(fetches[fetches["worker"] == worker], MIN_BATCHES)
            if places and (change := _change(loop, places, worker=worker)):
                return change
        if rises(_cost(fetches), least):
            return _change(loop, _places(fetches, len(fetches) * 2 // 3), kind="drift")
    return _change(loop, [second_epoch], kind="first epoch")


def _in_order(loop: Loop) -> pd.DataFrame:
    """Return the fetches of a loop whose time is known, in the order of their batches."""
    fetches = loop.fetches.sort_values(["epoch", "index"])
    return fetches[np.isfinite(fetch_ns(fetches))]


def _cost(fetches: pd.DataFrame) -> Floats:
    """Return the logarithm of each known fetch time (ns)."""
    return np.log(np.fmax(finite(fetch_ns(fetches)), 1.0))


def _jumps(fetches: pd.DataFrame, least: int) -> list[_Place]:
    """Return the batch since which fetches take another time, or begin and end of a spell of longer ones."""
    cost = _cost(fetches)
    least = max(least, round(_LEAST_SINCE * len(cost)))
    place = jump(cost, least)
    if place is None:
        found = spell(cost, least)
        return [] if found is None or _may_end_epoch(fetches, *found) else _places(fetches, *found)
    return [] if _is_of_index(fetches, cost, place) else _places(fetches, place)


def _is_of_index(fetches: pd.DataFrame, cost: Floats, place: int) -> bool:
    """Return whether the fetches of another epoch change at the same batch.

    They may, if the last epoch becomes faster late in the run and no other one shows how it ends.
    """
    epochs, indices = floats(fetches, "epoch"), floats(fetches, "index")
    before, since = (float(np.median(part)) for part in (cost[:place], cost[place:]))
    is_since = np.abs(cost - since) < np.abs(cost - before)
    earlier = is_since[(epochs < epochs[place]) & (indices >= indices[place])]
    later = is_since[(epochs > epochs[place]) & (indices < indices[place])]
    if earlier.size or later.size:
        return bool(np.mean(np.concatenate([earlier, ~later])) > _MOST_ALIKE)
    return since < before and place > _MOST_BEFORE * len(cost) and epochs[-1] == epochs[place]


def _may_end_epoch(fetches: pd.DataFrame, begin: int, end: int) -> bool:
    """Return whether a spell lasts into the next epoch, and no other epoch shows how long its batches take."""
    indices, epochs = floats(fetches, "index"), floats(fetches, "epoch")
    others = np.delete(indices, slice(begin, end))
    return bool(epochs[begin] != epochs[end] and not np.isin(others, indices[begin:end]).any())


def _places(fetches: pd.DataFrame, *places: int) -> list[_Place]:
    """Return the batches at these places of the fetches."""
    return [tuple(fetches[["epoch", "index"]].iloc[place]) for place in places]


def _change(
    loop: Loop, places: list[_Place], *, kind: _Kind | None = None, worker: int | None = None
) -> Change | None:
    """Return the change of a loop, or of one of its workers: a jump at one of its batches, or a spell between two.

    None if the usual times of a fetch before and since do not differ, or a part has too few batches.
    """
    tables: list[tuple[pd.DataFrame, pd.DataFrame]] = []
    for rows in (loop.batches, loop.fetches):
        epochs, indices = floats(rows, "epoch"), floats(rows, "index")
        is_past = [(epochs > epoch) | ((epochs == epoch) & (indices >= index)) for epoch, index in places]
        is_since = is_past[0] if len(places) == 1 else ~is_past[0] | is_past[1]
        tables.append((rows[~is_since], rows[is_since]))
    before, since = (
        dataclasses.replace(loop, batches=batches, fetches=fetches)
        for batches, fetches in zip(*tables, strict=True)
    )
    fetches = (part.fetches for part in (before, since))
    costs = [_cost(rows if worker is None else rows[rows["worker"] == worker]) for rows in fetches]
    steady_count = int((floats(since.batches, "index") >= loop.ramp).sum())
    if min(len(costs[0]), len(costs[1]), steady_count) < MIN_BATCHES:
        return None
    usual = [float(np.median(cost)) for cost in costs]
    error = 3 * 1.25 * math.hypot(*(float(cost.std()) / math.sqrt(len(cost)) for cost in costs))
    if abs(usual[1] - usual[0]) <= math.log(_REGIME_RATIO) + error:
        return None
    took, takes = (duration(math.exp(cost) / 1e9) for cost in usual)
    kind = kind or ("jump" if len(places) == 1 else "spell")
    return Change(since=since, before=before, kind=kind, worker=worker, takes=takes, took=took)


def change_within_epochs(loop: Loop) -> str:
    """Return a sentence on the index from which on the fetches of each epoch take another time, "" without one.

    Only indices that several epochs have count: a single epoch may change for another reason.
    """
    fetches = _in_order(loop)
    by_index = pd.Series(_cost(fetches), index=floats(fetches, "index")).groupby(level=0).agg(["median", "count"])
    levels = by_index.loc[by_index["count"] > 1, "median"]
    costs = levels.to_numpy(dtype=float)
    place = jump(costs, max(MIN_BATCHES, loop.ramp))
    if place is None:
        return ""
    before, since = (float(np.median(part)) for part in (costs[:place], costs[place:]))
    if abs(since - before) <= math.log(_REGIME_RATIO):
        return ""
    took, takes = (duration(math.exp(level) / 1e9) for level in (before, since))
    return f"In each epoch, a fetch takes {takes} from batch {levels.index[place]:.0f} on, and {took} before."


def since_words(loop: Loop) -> str:
    """Return when the batches of a part of a loop begin, in words."""
    step = step_at(loop.tables, loop.main, floats(loop.batches, "time_ns").min())
    return "late in the run" if step is None else after_steps(step)
