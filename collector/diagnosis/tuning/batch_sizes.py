"""Memory as a function of the batch size: which size to try next, and the largest that fits.

The memory of a step besides the model grows in proportion to its samples. That shows only where other parts of the
step do not need more: the optimizer's temporaries hide the activations of small batches. So a size is recommended
only after it ran, and no trial is more than four times as large as the largest that ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.run.allocators import capacity_of, devices
from collector.diagnosis.run.columns import SECOND_NS, finite, floats, last, median, peak
from collector.diagnosis.run.host_memory import binding_limit, demand_series
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.tuning.loader_memory import FILL_RATIO, held_memory

_MOST_GROWTH = 4  # size of a trial over the largest that ran
_LEAST_GROWTH = 1.08  # a smaller step up is not worth another trial
_SAME_SLOPE = 1.25  # ratio of two slopes of memory over size, below which the three sizes lie on one line
_DEVICE_FILL_RATIO = 0.97  # the allocator's blocks are larger than the tensors in them
_ROUND = 8  # sizes from 64 on are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeRun:
    """A training at one batch size.

    Attributes:
        batch_size: samples per batch of the loop that has most batches.
        samples_per_second: rate in the second half of its batches; NaN if those are fewer than four, or than in
            flight.
        memory_bytes: peak of the resource that binds, NaN if it was not sampled.
        room_bytes: highest allowed peak, with a margin below the limit.
        resource: `GPU 0`, `host memory` or `cgroup`.
        is_device: whether the resource is a device.
    """

    batch_size: float
    samples_per_second: float
    memory_bytes: float
    room_bytes: float
    resource: str
    is_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line through the two largest sizes that ran: memory without samples, and per sample."""

    base_bytes: float
    sample_bytes: float

    def at(self, size: float) -> float:
        """Return the predicted memory of a batch size in bytes."""
        return self.base_bytes + self.sample_bytes * size


def batch_size_run(loop: Loop) -> BatchSizeRun:
    """Measure the batch size of a loop, its rate and its memory."""
    size = median(floats(loop.batches, "samples_count"))
    rows = loop.batches.iloc[len(loop.batches) // 2 :]
    times, samples = floats(rows, "time_ns") / SECOND_NS, floats(rows, "samples_count")
    enough = len(rows) > max(3, loop.num_workers * loop.prefetch_factor) and times[-1] > times[0]
    rate = samples[1:].sum() / (times[-1] - times[0]) if enough else math.nan
    device = _fullest_device(loop.tables)
    memory, room, resource = device or _host_memory(loop)
    return BatchSizeRun(
        batch_size=size,
        samples_per_second=rate,
        memory_bytes=memory,
        room_bytes=room,
        resource=resource,
        is_device=device is not None,
    )


def line_through(points: Sequence[BatchSizeRun]) -> Line | None:
    """Return the line through memory over batch size, or None if the three largest sizes do not lie on one."""
    measured = sorted((point for point in points if math.isfinite(point.memory_bytes)), key=lambda p: p.batch_size)
    if len({point.batch_size for point in measured}) < 3:
        return None
    largest = measured[-3:]
    sizes, memory = (np.array([getattr(p, name) for p in largest]) for name in ("batch_size", "memory_bytes"))
    below, slope = np.diff(memory) / np.diff(sizes)
    if not 0 < slope / _SAME_SLOPE < below < slope * _SAME_SLOPE:
        return None
    return Line(base_bytes=float(memory[-1] - slope * sizes[-1]), sample_bytes=float(slope))


def next_size(points: Sequence[BatchSizeRun], refused: Sequence[float]) -> int | None:
    """Return the next size to try, after those that ran and those that ran out of memory (`refused`).

    It is None if the largest that ran is as good as the largest that fits.

    If memory follows the batch size, the line gives the size. If it does not yet, memory grows at most in
    proportion to the size, since a part of it is there with any batch. On a device the trial is at least twice as
    large, even if that might not fit: running out of device memory harms nothing.
    """
    least = min(refused, default=math.inf)
    if not points:
        return max(1, math.floor(least / _MOST_GROWTH)) if 1 < least < math.inf else None
    largest = max(points, key=lambda point: point.batch_size)
    size, room, memory = largest.batch_size, largest.room_bytes, largest.memory_bytes
    if not (math.isfinite(room) and memory > 0):
        return None
    line = line_through(points)
    if line:
        wanted = (room - line.base_bytes) / line.sample_bytes
    else:
        wanted = size * max(room / memory, 2.0 if largest.is_device else 0.0)
    wanted = min(wanted, _MOST_GROWTH * size)
    if wanted >= least:
        wanted = (size + least) / 2
    rounded = math.floor(wanted / _ROUND) * _ROUND if wanted >= _ROUND**2 else math.floor(wanted)
    return rounded if rounded >= max(size + 1, _LEAST_GROWTH * size) else None


def micro_batch(effective: int, largest: int) -> tuple[int, int]:
    """Return the largest size up to `largest` (at least 1) that divides `effective`, and the quotient."""
    size = next(size for size in range(max(1, min(effective, largest)), 0, -1) if effective % size == 0)
    return size, effective // size


def _fullest_device(tables: RunTables) -> tuple[float, float, str] | None:
    """Return (peak, highest allowed peak, name) of the fullest device.

    The driver, other processes and libraries leave only a part of the device to PyTorch's allocator, and the
    processes may limit themselves to shares of it (`set_per_process_memory_fraction`).
    """
    peaks = []
    for _, device, samples, ranks in devices(tables):
        peak_bytes = sum(peak(rank.column("allocated_peak_bytes")) for rank in ranks)
        total = last(floats(samples, "total_bytes"))
        seconds = floats(samples, "time_ns") / SECOND_NS
        reserved = np.sum([rank.at(seconds, "reserved_bytes") for rank in ranks], axis=0)
        outside = floats(samples, "used_bytes") - reserved
        outside_bytes = median(outside[len(outside) // 2 :])
        shares_bytes = math.fsum(capacity_of(tables, rank)[1] for rank in ranks) if ranks else math.nan
        room_bytes = float(np.fmin(total - outside_bytes, shares_bytes))
        peaks.append((peak_bytes, _DEVICE_FILL_RATIO * room_bytes, f"GPU {device}"))
    return max(peaks, default=None, key=lambda fullest: np.nan_to_num(fullest[0]))


def _host_memory(loop: Loop) -> tuple[float, float, str]:
    """Return (peak, highest allowed peak, name) of the loop's processes, without memory used before the run."""
    name, limit = binding_limit(loop.tables, loop.main[0])
    demand = demand_series(loop.tables, loop.main[0])[1]
    before = float(known[0]) if len(known := finite(demand)) else 0.0
    return held_memory(loop).most, FILL_RATIO * limit - before, name
