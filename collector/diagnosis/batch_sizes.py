"""Memory as a function of the batch size: which size to try next, and the largest that fits.

What a step takes besides the model grows in proportion to its samples, but that shows only where it is more than
what other parts of the step take: the optimizer's temporaries hide the activations of small batches. So a size is
told only after it ran, and no trial is more than four times as large as the largest that ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.device_rows import devices
from collector.diagnosis.frames import SECOND_NS, floats, last, median, peak
from collector.diagnosis.host_memory import binding_limit, demand_series
from collector.diagnosis.loader_memory import FILL, held
from collector.diagnosis.loops import Loop
from collector.diagnosis.tables import RunTables

_MOST_TIMES = 4  # as large as the largest that ran
_NEAR = 1.08  # times the largest that ran: not worth another trial
_SAME_SLOPE = 1.25  # two stretches of the curve whose slopes differ by less are one line
_DEVICE_FILL = 0.97  # of what a device has for tensors: the allocator's blocks are larger than what is asked for
_ROUND = 8  # sizes from 64 on are multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A training at one batch size.

    Attributes:
        batch_size: samples per batch of the loop that has most batches.
        samples_per_second: in the second half of its batches; NaN if those are fewer than four, or than in flight.
        memory_bytes: the peak of the resource that binds, NaN if it was not sampled.
        room_bytes: what that may be at most, with the margin.
        resource: `GPU 0`, `host memory` or `cgroup`.
        is_device: whether that is a device's.

    """

    batch_size: float
    samples_per_second: float
    memory_bytes: float
    room_bytes: float
    resource: str
    is_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line through the two largest sizes that ran: memory without samples, and of each sample."""

    base_bytes: float
    sample_bytes: float

    def at(self, size: float) -> float:
        """Return the memory that it gives for a size, in bytes."""
        return self.base_bytes + self.sample_bytes * size


def sized(tables: RunTables, loop: Loop) -> Sized:
    """What the batches of a loop were like, and what they took."""
    size = median(floats(loop.batches, "samples_count"))
    rows = loop.batches.iloc[len(loop.batches) // 2 :]
    times, samples = floats(rows, "time_ns") / SECOND_NS, floats(rows, "samples_count")
    enough = len(rows) > max(3, loop.num_workers * loop.prefetch_factor) and times[-1] > times[0]
    rate = samples[1:].sum() / (times[-1] - times[0]) if enough else math.nan
    device = _of_device(tables)
    memory, room, resource = device or _of_host(tables, loop)
    return Sized(
        batch_size=size,
        samples_per_second=rate,
        memory_bytes=memory,
        room_bytes=room,
        resource=resource,
        is_device=device is not None,
    )


def line_through(points: Sequence[Sized]) -> Line | None:
    """Return the line, if memory follows the batch: the three largest sizes that ran lie on one."""
    known = sorted((point for point in points if math.isfinite(point.memory_bytes)), key=lambda p: p.batch_size)
    if len({point.batch_size for point in known}) < 3:
        return None
    sizes, memory = (np.array([getattr(p, name) for p in known[-3:]]) for name in ("batch_size", "memory_bytes"))
    below, slope = np.diff(memory) / np.diff(sizes)
    if not 0 < slope / _SAME_SLOPE < below < slope * _SAME_SLOPE:
        return None
    return Line(base_bytes=float(memory[-1] - slope * sizes[-1]), sample_bytes=float(slope))


def next_size(points: Sequence[Sized], refused: Sequence[float]) -> int | None:
    """Return the next size to try; None if the largest that ran is as good as the largest that fits.

    Where memory follows the batch, the line tells. Where it does not yet, memory grows at most in proportion to the
    size, since a part of it is there with any batch. A device is asked for twice the size even if that might not
    fit: a trial that runs out of its memory harms nothing.

    Args:
        points: sizes that ran.
        refused: sizes that ran out of memory.

    """
    least = min(refused, default=math.inf)
    if not points:
        return max(1, math.floor(least / _MOST_TIMES)) if 1 < least < math.inf else None
    largest = max(points, key=lambda point: point.batch_size)
    size, room, memory = largest.batch_size, largest.room_bytes, largest.memory_bytes
    if not (math.isfinite(room) and memory > 0):
        return None
    line = line_through(points)
    if line:
        wanted = (room - line.base_bytes) / line.sample_bytes
    else:
        wanted = size * max(room / memory, 2.0 if largest.is_device else 0.0)
    wanted = min(wanted, _MOST_TIMES * size)
    if wanted >= least:
        wanted = (size + least) / 2
    rounded = math.floor(wanted / _ROUND) * _ROUND if wanted >= _ROUND**2 else math.floor(wanted)
    return rounded if rounded >= max(size + 1, _NEAR * size) else None


def micro_batch(effective: int, largest: int) -> tuple[int, int]:
    """The largest batch up to `largest` (1 at least) that divides `effective`, and how many of it make that."""
    size = next(size for size in range(max(1, min(effective, largest)), 0, -1) if effective % size == 0)
    return size, effective // size


def _of_device(tables: RunTables) -> tuple[float, float, str] | None:
    """The peak of the fullest device; the driver's own memory, other processes and libraries leave the room."""
    found = []
    for _, device, samples, ranks in devices(tables):
        peak_bytes = sum(peak(rank.column("allocated_peak_bytes")) for rank in ranks)
        total = last(floats(samples, "total_bytes"))
        seconds = floats(samples, "time_ns") / SECOND_NS
        reserved = np.sum([rank.at(seconds, "reserved_bytes") for rank in ranks], axis=0)
        outside = floats(samples, "used_bytes") - reserved
        beside = median(outside[len(outside) // 2 :])
        found.append((peak_bytes, _DEVICE_FILL * (total - beside), f"GPU {device}"))
    return max(found, default=None, key=lambda each: np.nan_to_num(each[0]))


def _of_host(tables: RunTables, loop: Loop) -> tuple[float, float, str]:
    """The peak of the loop's processes; what was used when the run began is not to be had."""
    name, limit = binding_limit(tables, loop.main[0])
    demand = demand_series(tables, loop.main[0])[1]
    before = demand[np.isfinite(demand)][:1]
    return held(tables, loop).most, FILL * limit - float(before[0] if len(before) else 0.0), name
