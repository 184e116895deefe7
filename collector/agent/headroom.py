"""Estimate how soon a limit may be met, from the newest samples alone: cheap enough for every tick.

It only decides how soon a verdict is worth its cost. The verdict itself, which asks much more, is `diagnosis`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from collector.agent.host import headroom_bytes
from collector.agent.samples import Sample

#: Seconds of samples that are compared: its first third with its last third.
WINDOW_SECONDS = 30.0
_FEWEST = 6  # samples
_NOISE_RATIO = 0.01  # of what is left: a smaller loss is none


class Headroom:
    """Headroom of each limit over the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._left: dict[str, deque[tuple[float, float]]] = {}

    def note(self, now_seconds: float, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Take the samples of one tick, by the name of their stream."""
        for name, left in _left(samples):
            series = self._left.setdefault(name, deque())
            series.append((now_seconds, left))
            while series[0][0] < now_seconds - WINDOW_SECONDS:
                series.popleft()

    @property
    def nearest_seconds(self) -> float:
        """The time until the first limit is met at the present rate; infinite if none is approached."""
        return min(map(seconds_left, self._left.values()), default=math.inf)


def seconds_left(series: Sequence[tuple[float, float]]) -> float:
    """Return when a series of (seconds, what is left) reaches 0, counted from its end. A spike changes nothing."""
    if len(series) < _FEWEST:
        return math.inf
    third = len(series) // 3
    points = list(series)
    first, last = points[:third], points[-third:]
    before, now = (statistics.median(left for _, left in part) for part in (first, last))
    passed = statistics.median(at for at, _ in last) - statistics.median(at for at, _ in first)
    if passed <= 0 or before - now <= _NOISE_RATIO * max(now, 0.0):
        return math.inf
    return max(0.0, now) * passed / (before - now)


def _left(samples: Mapping[str, Sequence[Sample]]) -> Iterator[tuple[str, float]]:
    for host in samples.get("host", ()):
        if (left := headroom_bytes(host)) is not None:
            yield "host", left
        total, used = host.get("shm_total_bytes"), host.get("shm_used_bytes")
        if total is not None and used is not None:
            yield "shm", total - used
    for device in samples.get("device", ()):
        total, used = device.get("total_bytes"), device.get("used_bytes")
        if total is not None and used is not None:
            yield f"device {device.get('device')}", total - used
