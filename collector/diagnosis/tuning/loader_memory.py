"""Host memory of a loop: as measured, and as predicted for other numbers of workers and other prefetch.

It has two parts. One is the pages that the training process and the loop's workers have mapped, with shared pages
counted once (the sum of PSS). The other is the batches in /dev/shm, which no process maps while they are queued.

PSS is read as often as a budget allows, resident memory at each tick. The difference is the shared memory. It
changes slowly while the same workers run, and is about the same for all of them. So the difference is interpolated
between the readings of all workers, and added to the resident memory at each tick. Readings from before the workers
started are left out: a fork halves the PSS of the training process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.worker_limit import ranks_count
from collector.diagnosis.run.columns import between, floats, host_samples, last, mean, median, peak
from collector.diagnosis.run.host_memory import binding_limit, demand_series
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.replay import Prediction, Setting

#: Share of a memory limit that may be used: allocators round up, and other processes need some.
FILL_RATIO = 0.9
_RECENT_BATCHES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateMemory:
    """Private dirty memory of a worker, in bytes, by the worker's age in ns.

    It grows with the batches that the worker has made: caches fill, the heap gets holes. Pages of files that only
    one worker has mapped are left out, since more workers would share them.

    Attributes:
        ages, sizes: ages and private dirty memory of the samples of all workers, in order of age.
        copied: `sizes` less the resident memory. It rises as pages of the parent are copied, which the garbage
            collector does to all of them, however many batches a worker makes.
        late_ages: the ages in the later half of the loop's time.
    """

    ages: Floats
    sizes: Floats
    copied: Floats
    late_ages: Floats

    def mean_bytes(self, work: float) -> float:
        """Return the mean in the later half if a worker made `work` times the batches; NaN if not known.

        A worker that makes more batches than any did is taken to need no more memory.
        """
        if not len(self.ages):
            return float("nan")
        ages = work * self.late_ages
        copied, copied_now = (np.interp(at, self.ages, self.copied) for at in (ages, self.late_ages))
        return mean(np.interp(ages, self.ages, self.sizes) + np.maximum(copied_now - copied, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Measured memory of a loop, in bytes; NaN where its processes were read too seldom.

    Attributes:
        usual: median in the later half of the loop's time, while all of its workers lived.
        most: maximum since the first batch.
        worker: private memory of each worker, a part of both.
    """

    usual: float
    most: float
    worker: PrivateMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMemory:
    """Host memory of the loop's processes, in bytes; NaN where it was not sampled.

    Attributes:
        held: measured at the run's own setting.
        worker: private memory of each worker, a part of `held`.
        current: the replay's prediction for the run's own setting.
        payload, largest: bytes of a batch, mean and maximum; 0 if unknown.
        room, shm_room: headroom in all, and in /dev/shm.
        step: difference that is too small to matter (1 % of the limit).
    """

    held: float
    worker: PrivateMemory
    current: Prediction
    payload: float
    largest: float
    room: float
    shm_room: float
    step: float

    def needed(self, prediction: Prediction) -> float:
        """Return the memory while the loop runs, as long after its start as measured.

        Only the workers' private memory and the batches change with the setting. The training process, and the
        memory that the workers share with it and with each other, count once.
        """
        batches = prediction.held_batches - self.current.held_batches
        return self.held + self._private(prediction) - self._private(self.current) + batches * self.payload

    def most(self, prediction: Prediction) -> float:
        """Return the memory when the training pauses and the queues are full."""
        return (
            self.needed(prediction) - prediction.held_batches * self.payload + self.prefetched(prediction.setting)
        )

    def prefetched(self, setting: Setting) -> float:
        """Return the memory of the batches in flight (torch: `prefetch_factor * num_workers`) and in use."""
        return (setting.in_flight + 1) * self.largest

    def _private(self, prediction: Prediction) -> float:
        workers = prediction.setting.num_workers
        if not workers:
            return 0.0
        current = self.current
        faster = prediction.batches_per_second / current.batches_per_second
        return workers * self.worker.mean_bytes(faster * current.setting.num_workers / workers)


def held_memory(loop: Loop) -> HeldMemory:
    """Measure the memory of the training process, the loop's workers and its batches."""
    rows = _samples(loop)
    mapped = rows["rss"] + _difference(rows, "pss")
    total = mapped.groupby(rows["time"]).sum(min_count=loop.num_workers + 1).sort_index()
    total += _in_shm(loop, total.index.to_numpy(dtype=float))
    later = len(total) // 2
    private = rows.assign(copied=_difference(rows, "private"))[rows["worker"]]
    private = private.dropna(subset="copied").sort_values("age")
    return HeldMemory(
        usual=median(total.to_numpy()[later:]),
        most=peak(total.to_numpy()),
        worker=PrivateMemory(
            ages=floats(private, "age"),
            # Before the first reading, the difference may exceed the resident memory.
            sizes=np.maximum(floats(private, "rss") + floats(private, "copied"), 0.0),
            copied=floats(private, "copied"),
            late_ages=floats(private[private["time"].isin(total.index[later:])], "age"),
        ),
    )


def loader_memory(loop: Loop, current: Prediction) -> LoaderMemory:
    """Measure the memory of the loop's processes, and the headroom; `current` predicts the run's own setting."""
    host = loop.main[0]
    until = loop.batches["time_ns"].iloc[-1]  # later, the loop gives its memory back
    _, limit = binding_limit(loop.tables, host)
    samples = host_samples(loop.tables, host)
    ran = floats(samples, "time_ns") <= until
    held, payload = held_memory(loop), _payloads(loop)
    shm_total, shm_used = (last(floats(samples, name)[ran]) for name in ("shm_total_bytes", "shm_used_bytes"))
    return LoaderMemory(
        held=held.usual,
        worker=held.worker,
        current=current,
        payload=float(np.nan_to_num(mean(payload))),
        largest=float(np.nan_to_num(peak(payload))),
        room=(FILL_RATIO * limit - last(demand_series(loop.tables, host)[1][ran])) / ranks_count(loop.tables, host),
        shm_room=(FILL_RATIO * shm_total - shm_used) / ranks_count(loop.tables, host),
        step=limit / 100,
    )


def _samples(loop: Loop) -> pd.DataFrame:
    """Return the samples of the training process and the workers while all of them lived and batches came; bytes.

    A batch that a process has mapped is subtracted: it is in /dev/shm too, and counted there.
    """
    pids = [loop.main[1], *loop.fetches["pid"].unique()]
    rows = between(loop.tables.stream("process"), *loop.batches["time_ns"].iloc[[0, -1]])
    rows = rows[(rows["host"] == loop.main[0]) & rows["process_pid"].isin(pids)]
    rows = rows[np.isfinite(floats(rows, "rss_bytes"))]
    batch = np.minimum(np.nan_to_num(floats(rows, "shm_bytes")), np.nan_to_num(peak(_payloads(loop))))
    first_ns = rows["time_ns"].groupby([rows["process_pid"], rows["process_start_ticks"]]).transform("min")
    samples = pd.DataFrame(
        {
            "time": floats(rows, "time_ns"),
            "age": floats(rows, "time_ns") - first_ns.to_numpy(dtype=float),
            "worker": floats(rows, "process_pid") != loop.main[1],
            "rss": floats(rows, "rss_bytes") - batch,
            "pss": floats(rows, "pss_bytes") - batch,
            "private": floats(rows, "private_dirty_bytes") - batch,
        }
    )
    workers = samples["worker"].groupby(samples["time"])
    all_alive = (workers.transform("sum") == loop.num_workers) & (
        workers.transform("count") == loop.num_workers + 1
    )
    return samples[all_alive]


def _difference(rows: pd.DataFrame, name: str) -> Floats:
    """Return column `name` minus the resident memory, interpolated between the few readings of that column."""
    difference = np.full(len(rows), np.nan)
    times, is_worker = rows["time"].to_numpy(), rows["worker"].to_numpy(dtype=bool)
    for role in (is_worker, ~is_worker):
        readings = rows[role & rows[name].notna()].sort_values("time")
        if len(readings):
            difference[role] = np.interp(times[role], readings["time"], readings[name] - readings["rss"])
    return difference


def _in_shm(loop: Loop, times: Floats) -> Floats:
    """Return the growth of /dev/shm since the loop's first fetch began, up to the size of the loop's batches."""
    host = loop.tables.stream("host")
    host = host[host["host"] == loop.main[0]]
    used, at = floats(host, "shm_used_bytes"), floats(host, "time_ns")
    if not len(host):
        return np.zeros(len(times))
    first = loop.fetches.iloc[:1]
    before = last(used[at < np.nanmin(floats(first, "time_ns") - floats(first, "getitem_ns"), initial=np.inf)])
    sample = np.maximum(np.searchsorted(at, times, side="right") - 1, 0)
    most = (loop.num_workers * loop.prefetch_factor + 1) * np.nan_to_num(peak(_payloads(loop)))
    return np.clip(np.nan_to_num(used[sample] - before) / ranks_count(loop.tables, loop.main[0]), 0.0, most)


def _payloads(loop: Loop) -> Floats:
    """Return the bytes of the recent batches."""
    return floats(loop.batches.iloc[-_RECENT_BATCHES:], "payload_bytes")
