"""Levels of the limits that a run can meet, from the newest samples, and cheap estimates of when it will meet one.

A verdict knows more, but comes every 10 to 30 seconds at best.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from collector.agent.samplers.host import headroom_bytes
from collector.agent.samplers.samples import Sample

#: Seconds of samples in an estimate, which compares the first third with the last.
WINDOW_SECONDS = 30.0
_LEAST_SAMPLES = 6
#: Share of the headroom below which a loss is noise.
_NOISE_RATIO = 0.01
#: Share of a limit above which a growing use is met at once.
_NEARLY_FULL_RATIO = 0.95
#: Share of a limit above which it is near if the next samples would come too late, and these seconds of samples.
_FAST_RATIO = 0.8
_FAST_SECONDS = 3.0
#: Share of its limit of open files below which a process is not watched: a run may have a hundred processes.
_FEW_FILES_RATIO = 0.5
#: Share of a limit below which a rise is noise.
_LEAST_RISE_RATIO = 0.002


class Level(NamedTuple):
    """Use of one limit.

    Attributes:
        risk: kind of the finding that it will be met.
        name: the limit, in words.
        used: the use, in bytes or file descriptors.
        total: the limit.
        device: GPU; None for other limits.
        pid: process whose own limit it is; None for other limits.
    """

    risk: str
    name: str
    used: float
    total: float
    device: int | None = None
    pid: int | None = None

    @property
    def unit(self) -> str:
        """Unit of use and limit."""
        return "count" if self.risk == "fd-exhaustion-risk" else "bytes"


def levels(samples: Mapping[str, Sequence[Sample]]) -> Iterator[Level]:
    """Yield the level of each limit that samples show, by the name of their stream."""
    for host in samples.get("host", ()):
        headroom, limit = headroom_bytes(host), host.get("cgroup_limit_bytes")
        total = host.get("memory_total_bytes")
        if headroom is not None and total is not None:
            is_cgroup = limit is not None and headroom != host.get("memory_available_bytes")
            name, bound = ("cgroup", limit) if is_cgroup and limit is not None else ("host memory", total)
            yield Level("host-oom-risk", name, bound - headroom, bound)
        total, used = host.get("shm_total_bytes"), host.get("shm_used_bytes")
        if total is not None and used is not None:
            yield Level("shm-exhaustion-risk", "/dev/shm", used, total)
    for device in samples.get("device", ()):
        total, used, number = device.get("total_bytes"), device.get("used_bytes"), device.get("device")
        if total is not None and used is not None and number is not None:
            yield Level("gpu-oom-risk", f"GPU {number:.0f}", used, total, device=int(number))
    for process in samples.get("process", ()):
        total, used, pid = process.get("fd_limit_count"), process.get("fd_count"), process.get("process_pid")
        if total is not None and used is not None and pid is not None and used >= _FEW_FILES_RATIO * total:
            yield Level("fd-exhaustion-risk", "RLIMIT_NOFILE", used, total, pid=int(pid))


class Headroom:
    """Levels of each limit over the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, int | None, int | None], deque[tuple[float, Level]]] = {}

    def note(self, now_seconds: float, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Add the samples of one moment, by the name of their stream."""
        for level in levels(samples):
            series = self._series.setdefault((level.risk, level.device, level.pid), deque())
            if series and series[-1][1].total != level.total:  # another limit binds now
                series.clear()
            series.append((now_seconds, level))
        for key, series in list(self._series.items()):
            while series and series[0][0] < now_seconds - WINDOW_SECONDS:
                series.popleft()
            if not series:
                del self._series[key]

    @property
    def nearest_seconds(self) -> float:
        """Time until the first limit is met at the present rate; infinite if none comes nearer."""
        return min(
            (
                seconds_left([(at, level.total - level.used) for at, level in series])
                for series in self._series.values()
            ),
            default=math.inf,
        )

    def nearly_full(self) -> Iterator[tuple[Level, float]]:
        """Yield the limits that are all but met, each with the growth of its use per second.

        A GPU is not among them: healthy trainings fill one too, since PyTorch's allocator keeps what it once had.
        """
        for series in self._series.values():
            level = series[-1][1]
            if level.device is not None or level.used < _FAST_RATIO * level.total:
                continue
            rise, left = _recent_rise(series), level.total - level.used
            is_near = left <= (1 - _NEARLY_FULL_RATIO) * level.total
            is_fast = left <= rise and _only_rises(series)
            if rise > _LEAST_RISE_RATIO * level.total and (is_near or is_fast):
                yield level, rise / _FAST_SECONDS


def _only_rises(series: Sequence[tuple[float, Level]]) -> bool:
    """Return whether the use never fell over the last `_FAST_SECONDS`: batches of varying sizes come and go."""
    uses = [level.used for at, level in series if at >= series[-1][0] - _FAST_SECONDS]
    noise = _LEAST_RISE_RATIO * series[-1][1].total
    return all(after >= before - noise for before, after in itertools.pairwise(uses))


def _recent_rise(series: Sequence[tuple[float, Level]]) -> float:
    """Return the rise of the use over the last `_FAST_SECONDS`, from a line through them; 0 if too little was seen.

    The line counts for the whole span, however little of it was seen.
    """
    end = series[-1][0]
    points = [(at, level.used) for at, level in series if at >= end - _FAST_SECONDS]
    if len(points) < 3 or points[0][0] == points[-1][0]:
        return 0.0
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    return slope * _FAST_SECONDS


def seconds_left(series: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from the end of a series of (seconds, headroom) until 0. Medians ignore a spike."""
    if len(series) < _LEAST_SAMPLES:
        return math.inf
    third = len(series) // 3
    points = list(series)
    first, last = points[:third], points[-third:]
    before, now = (statistics.median(headroom for _, headroom in part) for part in (first, last))
    elapsed = statistics.median(at for at, _ in last) - statistics.median(at for at, _ in first)
    if elapsed <= 0 or before - now <= _NOISE_RATIO * max(now, 0.0):
        return math.inf
    return max(0.0, now) * elapsed / (before - now)
