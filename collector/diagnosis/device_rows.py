"""The device of a training process: its allocator's records, and what the driver says of the same device.

Records of the allocator are made at one place in the step, just before the optimizer runs: so a series of them has
no sawtooth of forward and backward passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS, floats, key_of, training_end_ns, whole
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats
from collector.store.runs import ProcessKey

#: Segment for blocks of 1 to 10 MiB (c10/cuda/CUDACachingAllocator.cpp, `kLargeBuffer`).
_SEGMENT_BYTES = 20 * (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """What one process holds of one device."""

    key: ProcessKey
    rank: int | None
    device: int
    rows: pd.DataFrame

    @property
    def seconds(self) -> Floats:
        """When its records were made."""
        return floats(self.rows, "time_ns") / SECOND_NS

    @property
    def steps(self) -> Floats:
        """The steps in which its records were made."""
        return floats(self.rows, "step")

    def column(self, name: str) -> Floats:
        """One of its gauges."""
        return floats(self.rows, name)

    @property
    def held_bytes(self) -> Floats:
        """Memory that the allocator can't give back: tensors, and the holes between them."""
        return self.column("allocated_bytes") + np.nan_to_num(self.column("inactive_split_bytes"))

    def peaks_above(self, seconds: Floats) -> Floats:
        """Return how far the highest peak since the time before lay above what was held after it.

        So much a step needs for a while, as activations, in whole segments of the allocator, as far as its cache
        shows that it took them; 0 before the first record, or if peaks are not known.
        """
        above = np.maximum(np.nan_to_num(self.column("allocated_peak_bytes") - self.held_bytes), 0.0)
        cached = np.nan_to_num(self.column("reserved_bytes") - self.held_bytes)
        above = np.where(above > 0, np.maximum(above, np.minimum(cached, above + _SEGMENT_BYTES)), 0.0)
        ends = np.searchsorted(self.seconds, seconds, side="right")
        begins = np.maximum(np.minimum(np.append(0, ends[:-1]), ends - 1), 0)
        return np.array([above[begin:end].max(initial=0.0) for begin, end in zip(begins, ends, strict=True)])

    def before(self, time_ns: float) -> Allocator:
        """The same, up to a time."""
        return dataclasses.replace(self, rows=self.rows[floats(self.rows, "time_ns") <= time_ns])

    def at(self, seconds: Floats, name: str) -> Floats:
        """A gauge as it was at other times: the newest record then, NaN before the first."""
        place = np.searchsorted(self.seconds, seconds, side="right") - 1
        return np.where(place >= 0, self.column(name)[np.maximum(place, 0)], np.nan)


def allocators(rows: pd.DataFrame) -> list[Allocator]:
    """Of each process and device that it uses, from rows of `device_memory` in order of time."""
    found = []
    for _, mine in rows.groupby(["host", "pid", "start_ticks", "device"]):
        who = mine.iloc[-1]
        key = (str(who["host"]), int(who["pid"]), int(who["start_ticks"]))
        found.append(Allocator(key=key, rank=whole(who["rank"]), device=int(who["device"]), rows=mine))
    return found


def devices(tables: RunTables) -> Iterator[tuple[str, int, pd.DataFrame, list[Allocator]]]:
    """Return host, device, the driver's samples of it and the allocators of the run's processes there.

    There may be no samples; or no allocators, if only the driver tells that the run uses the device. Records of
    earlier attempts are left out, and samples after the training.
    """
    samples, end = tables.stream("device"), training_end_ns(tables)
    samples = samples[floats(samples, "time_ns") <= end]
    found = allocators(Lifecycle(tables).of_last_attempt(tables.stream("device_memory")))
    named = samples[np.isfinite(floats(samples, "process_used_bytes"))]
    of_driver = zip(named["host"].astype(str), named["device"].astype(int), strict=True)
    for host, device in sorted({*((one.key[0], one.device) for one in found), *of_driver}):
        mine = samples[(samples["host"] == host) & (floats(samples, "device") == device)]
        yield host, device, mine, [one for one in found if (one.key[0], one.device) == (host, device)]


def capacity_of(tables: RunTables, allocator: Allocator) -> tuple[float, float]:
    """Return the memory of a process's device and the share of it that the process may use, as PyTorch tells.

    Both are in bytes, NaN if unknown; so is a share that is all of it. NVML's total is larger by the memory that
    the driver keeps.
    """
    events = [
        event
        for event in tables.events_of("cuda-device")
        if key_of(event) == allocator.key and event["device"] == allocator.device
    ]
    if not events:
        return math.nan, math.nan
    total, ratio = float(events[-1]["total_bytes"]), events[-1].get("allowed_ratio")
    return total, math.nan if ratio is None or ratio >= 1 else total * float(ratio)


def record_at(rows: pd.DataFrame, time_ns: float) -> Mapping[str, float | None]:
    """The newest record at that time, what is missing as None; the first if all are later, {} if there is none."""
    if rows.empty:
        return {}
    place = max(0, int(np.searchsorted(floats(rows, "time_ns"), time_ns, side="right")) - 1)
    values = {str(name): floats(rows.iloc[[place]], str(name))[0] for name in rows.columns if name != "host"}
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
