"""Memory as a function of the batch size: a line through what was measured, and the largest batch that fits.

What a step takes besides the model grows in proportion to its samples: activations, their gradients, the batches in
queues. Where it does not (attention over padded lengths, a library that chooses another algorithm), the points lie
off the line, and the interval says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from collector.diagnosis.device_rows import devices
from collector.diagnosis.frames import SECOND_NS, floats, last, median, peak
from collector.diagnosis.host_memory import binding_limit, demand_series
from collector.diagnosis.loader_memory import FILL, held
from collector.diagnosis.loops import Loop
from collector.diagnosis.tables import RunTables

_INTERVAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A training at one batch size.

    Attributes:
        batch_size: samples per batch of the loop that has most batches.
        samples_per_second: in the second half of its batches, NaN with fewer than four.
        memory_bytes: the peak of the resource that binds, NaN if it was not sampled.
        room_bytes: what that may be at most, with the margin.
        resource: `GPU 0`, `host memory` or `cgroup`.

    """

    batch_size: float
    samples_per_second: float
    memory_bytes: float
    room_bytes: float
    resource: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Memory over batch size, by least squares over `n` points, whose scatter is `error_bytes`."""

    base_bytes: float
    sample_bytes: float
    error_bytes: float
    n: int
    mean_size: float
    spread: float

    def at(self, size: float) -> tuple[float, float, float]:
        """What is expected at a size, and its 90 % prediction interval; unbounded with two points."""
        middle = self.base_bytes + self.sample_bytes * size
        if self.n < 3:
            return middle, -math.inf, math.inf
        quantile = float(stats.t.ppf((1 + _INTERVAL) / 2, self.n - 2))
        off = quantile * self.error_bytes * math.sqrt(1 + 1 / self.n + (size - self.mean_size) ** 2 / self.spread)
        return middle, middle - off, middle + off

    def largest(self, room_bytes: float) -> tuple[int, int] | None:
        """The largest that fits by the upper end of the interval, and by the line; None if memory does not grow."""
        if self.n < 3 or not self.sample_bytes > 0:
            return None
        by_line = math.floor((room_bytes - self.base_bytes) / self.sample_bytes)
        low, high = 0, max(0, by_line)
        while low < high:  # the upper end grows with the size, at least beyond the points
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle)[2] <= room_bytes else (low, middle - 1)
        return low, max(0, by_line)


def sized(tables: RunTables, loop: Loop) -> Sized:
    """What the batches of a loop were like, and what they took."""
    size = median(floats(loop.batches, "samples_count"))
    rows = loop.batches.iloc[len(loop.batches) // 2 :]
    times, samples = floats(rows, "time_ns") / SECOND_NS, floats(rows, "samples_count")
    rate = samples[1:].sum() / (times[-1] - times[0]) if len(rows) > 1 and times[-1] > times[0] else math.nan
    memory, room, resource = _of_device(tables) or _of_host(tables, loop)
    return Sized(batch_size=size, samples_per_second=rate, memory_bytes=memory, room_bytes=room, resource=resource)


def fit(points: Sequence[Sized]) -> Line | None:
    """The line through the points; None with fewer than two sizes."""
    known = [point for point in points if math.isfinite(point.memory_bytes) and point.batch_size > 0]
    sizes = np.array([point.batch_size for point in known])
    if len(set(sizes)) < 2:
        return None
    memory = np.array([point.memory_bytes for point in known])
    found = stats.linregress(sizes, memory)
    left = memory - found.intercept - found.slope * sizes
    return Line(
        base_bytes=float(found.intercept),
        sample_bytes=float(found.slope),
        error_bytes=math.sqrt(float((left**2).sum()) / max(len(known) - 2, 1)),
        n=len(known),
        mean_size=float(sizes.mean()),
        spread=float(((sizes - sizes.mean()) ** 2).sum()),
    )


def micro_batch(effective: int, largest: int) -> tuple[int, int]:
    """The largest batch up to `largest` (1 at least) that divides `effective`, and how many of it make that."""
    size = next(size for size in range(max(1, min(effective, largest)), 0, -1) if effective % size == 0)
    return size, effective // size


def _of_device(tables: RunTables) -> tuple[float, float, str] | None:
    """The peak of the device that is fullest; what others and other libraries hold of it is not to be had."""
    found = []
    for _, device, samples, ranks in devices(tables):
        peak_bytes = sum(peak(rank.column("allocated_peak_bytes")) for rank in ranks)
        total = last(floats(samples, "total_bytes"))
        seconds = floats(samples, "time_ns") / SECOND_NS
        reserved = np.sum([rank.at(seconds, "reserved_bytes") for rank in ranks], axis=0)
        outside = peak(floats(samples, "used_bytes") - reserved)
        found.append((peak_bytes, FILL * total - float(np.nan_to_num(outside)), f"GPU {device}"))
    return max(found, default=None, key=lambda each: np.nan_to_num(each[0]))


def _of_host(tables: RunTables, loop: Loop) -> tuple[float, float, str]:
    """The peak of the loop's processes; what was used when the run began is not to be had."""
    name, limit = binding_limit(tables, loop.main[0])
    demand = demand_series(tables, loop.main[0])[1]
    before = demand[np.isfinite(demand)][:1]
    return held(tables, loop).most, FILL * limit - float(before[0] if len(before) else 0.0), name
