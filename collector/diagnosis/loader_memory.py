"""Host memory of a loop: what it held while it ran, and what it would hold with other workers and prefetch.

Held are the pages that the training process and the loop's workers have mapped, those that several of them share
counted once (the sum of their PSS), and the batches in /dev/shm, which no process maps while they stand in a queue.

PSS is read as often as a budget allows, the resident memory at each tick. While the same workers are there, what
lies between the two is what is shared, and that changes slowly. So it is taken from the readings, those of all
workers together, for they are alike; and at each tick the resident memory says the rest. Readings from before the
workers started say nothing: a fork halves the PSS of the training process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.frames import floats, last, mean, median, peak
from collector.diagnosis.host_memory import binding_limit, demand_series
from collector.diagnosis.limits import ranks_count
from collector.diagnosis.loops import Loop
from collector.diagnosis.replay import Prediction, Setting
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats

FILL = 0.9  # of the memory limit: allocators round up, and others use some
_RECENT_BATCHES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """What one worker has for itself alone and wrote (private dirty), in bytes, by its age in ns.

    It grows with the batches that the worker has made: caches fill, the heap gets holes. Pages of files that only
    it has mapped are left out, for others would share them.

    Attributes:
        ages, sizes: of the samples of all workers, in order of age.
        copied: of the same samples, `sizes` less the resident memory. It rises where pages of the parent are
            copied, which the garbage collector does to all of them whatever a worker makes.
        late: the ages in the later half of the loop's time.

    """

    ages: Floats
    sizes: Floats
    copied: Floats
    late: Floats

    def after(self, work: float) -> float:
        """The mean in the later half if a worker made so many times the batches; NaN if not known.

        As far as was seen: a worker that does more than any did is taken to have no more.
        """
        if not len(self.ages):
            return float("nan")
        then, now = (np.interp(late, self.ages, self.copied) for late in (work * self.late, self.late))
        return mean(np.interp(work * self.late, self.ages, self.sizes) + np.maximum(now - then, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a loop held, in bytes; NaN where its processes were read too seldom to tell.

    Attributes:
        usual: in the later half of its time, while all of its workers lived: the median of the samples.
        most: the most of all samples since its first batch.
        worker: of that, what each worker had for itself.

    """

    usual: float
    most: float
    worker: Private


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory of the loop's processes, in bytes; NaN where it was not sampled.

    Attributes:
        held: with the run's own setting, as measured.
        worker: of that, what each worker had for itself.
        own: what the replay gives for the run's own setting.
        payload, largest: of a batch, on average and at most; 0 if unknown.
        room, shm_room: how much more there may be, in all and in /dev/shm.
        step: less of it makes no difference (1 % of the limit).

    """

    held: float
    worker: Private
    own: Prediction
    payload: float
    largest: float
    room: float
    shm_room: float
    step: float

    def needed(self, prediction: Prediction) -> float:
        """While the loop runs, as long after its start: other workers, and as many batches as the replay tells of.

        The training process, and what the workers share with it and with each other, are there only once.
        """
        batches = prediction.held_batches - self.own.held_batches
        return self.held + self._private(prediction) - self._private(self.own) + batches * self.payload

    def most(self, prediction: Prediction) -> float:
        """When the training pauses and the queues are full."""
        return (
            self.needed(prediction) - prediction.held_batches * self.payload + self.prefetched(prediction.setting)
        )

    def prefetched(self, setting: Setting) -> float:
        """Of the batches in flight and in use: torch dispatches no more (`prefetch_factor * num_workers`)."""
        return (setting.in_flight + 1) * self.largest

    def _private(self, prediction: Prediction) -> float:
        workers = prediction.setting.num_workers
        if not workers:
            return 0.0
        work = prediction.batches_per_second / self.own.batches_per_second * self.own.setting.num_workers / workers
        return workers * self.worker.after(work)


def held(tables: RunTables, loop: Loop) -> Held:
    """What the training process, the loop's workers and its batches held."""
    rows = _samples(tables, loop)
    mapped = rows["rss"] + _between(rows, "pss")
    total = mapped.groupby(rows["time"]).sum(min_count=loop.num_workers + 1).sort_index()
    total += _in_shm(tables, loop, total.index.to_numpy(dtype=float))
    later = len(total) // 2
    alone = rows.assign(copied=_between(rows, "private"))[rows["worker"]].dropna(subset="copied").sort_values("age")
    return Held(
        usual=median(total.to_numpy()[later:]),
        most=peak(total.to_numpy()),
        worker=Private(
            ages=floats(alone, "age"),
            sizes=np.maximum(floats(alone, "rss") + floats(alone, "copied"), 0.0),  # the first readings come later
            copied=floats(alone, "copied"),
            late=floats(alone[alone["time"].isin(total.index[later:])], "age"),
        ),
    )


def memory_of(tables: RunTables, loop: Loop, own: Prediction) -> Memory:
    """What the loop's processes take in memory, and how much more there may be.

    Args:
        tables: the run.
        loop: of the run.
        own: what the replay gives for the run's own setting.

    """
    host = loop.main[0]
    until = loop.batches["time_ns"].iloc[-1]  # later, what the loop held is given back
    _, limit = binding_limit(tables, host)
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    ran = floats(samples, "time_ns") <= until
    found, payload = held(tables, loop), _payloads(loop)
    shm_total, shm_used = (last(floats(samples, name)[ran]) for name in ("shm_total_bytes", "shm_used_bytes"))
    return Memory(
        held=found.usual,
        worker=found.worker,
        own=own,
        payload=float(np.nan_to_num(mean(payload))),
        largest=float(np.nan_to_num(peak(payload))),
        room=(FILL * limit - last(demand_series(tables, host)[1][ran])) / ranks_count(tables, host),
        shm_room=(FILL * shm_total - shm_used) / ranks_count(tables, host),
        step=limit / 100,
    )


def _samples(tables: RunTables, loop: Loop) -> pd.DataFrame:
    """Of the training process and the workers, while all of them lived and batches came; bytes.

    A batch that a process has mapped is in /dev/shm too, and counted there.
    """
    process = tables.stream("process")
    times, batches = floats(process, "time_ns"), loop.batches["time_ns"]
    pids = [loop.main[1], *loop.fetches["pid"].unique()]
    inside = (times >= batches.iloc[0]) & (times <= batches.iloc[-1]) & np.isfinite(floats(process, "rss_bytes"))
    mine = process[inside & (process["host"] == loop.main[0]) & process["process_pid"].isin(pids)]
    batch = np.minimum(np.nan_to_num(floats(mine, "shm_bytes")), np.nan_to_num(peak(_payloads(loop))))
    seen = mine["time_ns"].groupby([mine["process_pid"], mine["process_start_ticks"]]).transform("min")
    rows = pd.DataFrame(
        {
            "time": floats(mine, "time_ns"),
            "age": floats(mine, "time_ns") - seen.to_numpy(dtype=float),
            "worker": floats(mine, "process_pid") != loop.main[1],
            "rss": floats(mine, "rss_bytes") - batch,
            "pss": floats(mine, "pss_bytes") - batch,
            "private": floats(mine, "private_dirty_bytes") - batch,
        }
    )
    workers = rows["worker"].groupby(rows["time"])
    all_there = (workers.transform("sum") == loop.num_workers) & (
        workers.transform("count") == loop.num_workers + 1
    )
    return rows[all_there]


def _between(rows: pd.DataFrame, name: str) -> Floats:
    """What to add to the resident memory of each sample to get that one, of which there are few readings."""
    added = np.full(len(rows), np.nan)
    times, working = rows["time"].to_numpy(), rows["worker"].to_numpy(dtype=bool)
    for who in (working, ~working):
        readings = rows[who & rows[name].notna()].sort_values("time")
        if len(readings):
            added[who] = np.interp(times[who], readings["time"], readings[name] - readings["rss"])
    return added


def _in_shm(tables: RunTables, loop: Loop, times: Floats) -> Floats:
    """Of /dev/shm, what came since the loop's first batch was begun, as far as it can be this loop's batches."""
    host = tables.stream("host")
    host = host[host["host"] == loop.main[0]]
    used, at = floats(host, "shm_used_bytes"), floats(host, "time_ns")
    if not len(host):
        return np.zeros(len(times))
    first = loop.fetches.iloc[:1]
    before = last(used[at < np.nanmin(floats(first, "time_ns") - floats(first, "getitem_ns"), initial=np.inf)])
    here = np.maximum(np.searchsorted(at, times, side="right") - 1, 0)
    most = (loop.num_workers * loop.prefetch_factor + 1) * np.nan_to_num(peak(_payloads(loop)))
    return np.clip(np.nan_to_num(used[here] - before) / ranks_count(tables, loop.main[0]), 0.0, most)


def _payloads(loop: Loop) -> Floats:
    """Bytes of its recent batches."""
    return floats(loop.batches.iloc[-_RECENT_BATCHES:], "payload_bytes")
