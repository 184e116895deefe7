"""The device of a training process: its allocator's records, and the driver's samples of the same device.

The allocator is recorded at one place in the step, just before the optimizer runs. So its series have no sawtooth
of forward and backward passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import WRITER, by_process, floats, seconds, whole
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import training_end_ns
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Locus
from collector.store import ProcessKey

#: Size of a segment for blocks of 1 to 10 MiB (c10/cuda/CUDACachingAllocator.cpp, `kLargeBuffer`).
_SEGMENT_BYTES = 20 * (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """The allocator of one process on one device: its `device_memory` records in order of time."""

    key: ProcessKey
    rank: int | None
    device: int
    rows: pd.DataFrame

    @property
    def locus(self) -> Locus:
        """Its place in the run."""
        return Locus(host=self.key[0], rank=self.rank, device=self.device, role="main", pid=self.key[1])

    @property
    def seconds(self) -> Floats:
        """Times of its records."""
        return seconds(self.rows)

    @property
    def steps(self) -> Floats:
        """Steps of its records."""
        return floats(self.rows, "step")

    def column(self, name: str) -> Floats:
        """Return one of its gauges."""
        return floats(self.rows, name)

    @property
    def held_bytes(self) -> Floats:
        """Memory that the allocator can't give back: tensors, and the holes between them."""
        return self.column("allocated_bytes") + np.nan_to_num(self.column("inactive_split_bytes"))

    def peaks_above(self, seconds: Floats) -> Floats:
        """Return, for each time, how far the highest peak since the previous time rose above `held_bytes`.

        A step needs this memory for a while, as activations. It comes in whole segments of the allocator, as far as
        the cache shows that it took them. 0 before the first record, or if peaks are not known.
        """
        above = np.maximum(np.nan_to_num(self.column("allocated_peak_bytes") - self.held_bytes), 0.0)
        cached = np.nan_to_num(self.column("reserved_bytes") - self.held_bytes)
        above = np.where(above > 0, np.maximum(above, np.minimum(cached, above + _SEGMENT_BYTES)), 0.0)
        ends = np.searchsorted(self.seconds, seconds, side="right")
        begins = np.maximum(np.minimum(np.append(0, ends[:-1]), ends - 1), 0)
        return np.array([above[begin:end].max(initial=0.0) for begin, end in zip(begins, ends, strict=True)])

    def before(self, time_ns: float) -> Allocator:
        """Return the allocator with its records up to a time."""
        return dataclasses.replace(self, rows=self.rows[floats(self.rows, "time_ns") <= time_ns])

    def before_optimizer_of(self, step: int | None) -> bool:
        """Return whether its newest record was made just before the optimizer of this step."""
        rows = without_errors(self.rows)
        return bool(len(rows) and floats(rows, "step")[-1] == step)

    def at(self, seconds: Floats, name: str) -> Floats:
        """Return a gauge at other times: that of the newest record at each, NaN before the first."""
        place = np.searchsorted(self.seconds, seconds, side="right") - 1
        return np.where(place >= 0, self.column(name)[np.maximum(place, 0)], np.nan)


def allocators(rows: pd.DataFrame) -> list[Allocator]:
    """Return one allocator for each process and device, from rows of `device_memory` in order of time."""
    return [
        Allocator(
            key=key, rank=whole(records["rank"].iloc[-1]), device=int(records["device"].iloc[-1]), rows=records
        )
        for key, of_one in by_process(rows, WRITER)
        for _, records in of_one.groupby("device")
    ]


def without_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `device_memory` in which no error is new: an error writes a row of its own."""
    counts = pd.Series(floats(rows, "oom_count"), rows.index)
    new = counts.groupby([rows[name] for name in (*WRITER, "device")]).diff().fillna(counts)
    return rows[~(new > 0).to_numpy()]


def devices(tables: RunTables) -> Iterator[tuple[str, int, pd.DataFrame, list[Allocator]]]:
    """Yield host, device, the driver's samples of it, and the allocators of the run's processes there.

    There may be no samples. There are no allocators if only the driver reports that the run uses the device.
    Records of earlier attempts are left out, those of processes without steps, which record at an error alone, and
    samples after the training.
    """
    samples, end = tables.stream("device"), training_end_ns(tables)
    samples = samples[floats(samples, "time_ns") <= end]
    life = lifecycle_of(tables)
    run_allocators = allocators(life.of_last_attempt(tables.stream("device_memory")))
    in_use = samples[np.isfinite(floats(samples, "process_used_bytes"))]
    places = {(allocator.key[0], allocator.device) for allocator in run_allocators}
    places |= set(zip(in_use["host"].astype(str), in_use["device"].astype(int), strict=True))
    recorded = [allocator for allocator in run_allocators if allocator.key in life.mains]
    for host, device in sorted(places):
        rows = samples[(samples["host"] == host) & (floats(samples, "device") == device)]
        yield host, device, rows, [a for a in recorded if (a.key[0], a.device) == (host, device)]


def capacity_of(tables: RunTables, allocator: Allocator) -> tuple[float, float]:
    """Return the memory of a process's device, and how much of it the process may use, as PyTorch reports them.

    Both are in bytes, NaN if unknown. The second is also NaN if the process may use all. NVML's total is larger by
    the memory that the driver keeps.
    """
    events = tables.events_of("cuda-device", by=allocator.key)
    events = [event for event in events if event["device"] == allocator.device]
    if not events:
        return math.nan, math.nan
    total, ratio = float(events[-1]["total_bytes"]), events[-1].get("allowed_ratio")
    return total, math.nan if ratio is None or ratio >= 1 else total * float(ratio)


def record_at(rows: pd.DataFrame, time_ns: float) -> Mapping[str, float | None]:
    """Return the newest record at that time, or the first if all are later; {} if there are no rows.

    Missing values are None.
    """
    if rows.empty:
        return {}
    place = max(0, int(np.searchsorted(floats(rows, "time_ns"), time_ns, side="right")) - 1)
    values = {str(name): floats(rows.iloc[[place]], str(name))[0] for name in rows.columns if name != "host"}
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
