"""The host that the run is on: memory and its limits, /dev/shm, pressure, usable cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from pathlib import Path

from collector.agent import cgroups
from collector.agent.procfs import field, read_file, read_stat
from collector.agent.samples import Sample


class HostSampler:
    """One sample per tick.

    The command's control groups can vanish together with it (a container that was stopped); what
    was read of them last stays, since that is what tells why the command died.

    Args:
        pid: the process whose limits count; the collector itself where no command is known.
        root: of the file system, for a tree laid out by a test.
        affinity: the cores that a process may use (sched_getaffinity(2)).

    """

    def __init__(
        self,
        pid: int,
        *,
        root: Path = Path("/"),
        affinity: Callable[[int], Set[int]] = os.sched_getaffinity,
    ) -> None:
        self._pid = pid
        self._root = root
        self._affinity = affinity
        self._membership = b""
        self._levels: dict[str, cgroups.Levels | None] = {}
        self._memory = cgroups.Memory()
        self._cores_count: float | None = None

    def sample(self) -> Sample:
        """What the host has now; the names are those of the `host` stream."""
        meminfo = b"\n" + (read_file(f"{self._root}/proc/meminfo") or b"")
        total_bytes = _kibibytes(meminfo, b"MemTotal:")
        self._find_groups()
        vmstat = b"\n" + (read_file(f"{self._root}/proc/vmstat") or b"")
        return {
            "memory_total_bytes": total_bytes,
            "memory_available_bytes": _kibibytes(meminfo, b"MemAvailable:"),
            "memory_shmem_bytes": _kibibytes(meminfo, b"Shmem:"),
            "host_oom_kill_count": field(vmstat, b"oom_kill "),
            "usable_cores_count": self._usable_cores(),
            **self._cgroup(total_bytes),
            **self._shm(),
            **self._pressure(),
        }

    def _cgroup(self, total_bytes: int | None) -> Sample:
        levels = self._levels.get("memory")
        if levels is not None and total_bytes is not None:
            self._memory = cgroups.read_memory(levels, unlimited_bytes=total_bytes) or self._memory
        memory = self._memory
        return {
            "cgroup_limit_bytes": memory.limit_bytes,
            "cgroup_usage_bytes": memory.usage_bytes,
            "cgroup_anon_bytes": memory.anon_bytes,
            "cgroup_file_bytes": memory.file_bytes,
            "cgroup_shmem_bytes": memory.shmem_bytes,
            "cgroup_slab_reclaimable_bytes": memory.slab_reclaimable_bytes,
            "cgroup_oom_count": memory.oom_count,
            "cgroup_oom_kill_count": memory.oom_kill_count,
        }

    def _find_groups(self) -> None:
        """Look which groups the process is in while it lives: version 1 shows a zombie in the root group."""
        membership = read_file(f"{self._root}/proc/{self._pid}/cgroup")
        stat = read_stat(f"{self._root}/proc", self._pid)
        if membership is None or stat is None or stat.ended or membership == self._membership:
            return
        self._membership = membership
        for controller in ("memory", "cpu"):
            levels = cgroups.find_levels(controller, membership, self._root)
            self._levels[controller] = levels or self._levels.get(controller)

    def _usable_cores(self) -> float | None:
        try:
            cores_count = float(len(self._affinity(self._pid)))
        except OSError:  # the command has ended
            return self._cores_count
        levels = self._levels.get("cpu")
        quota = cgroups.read_cpu_quota(levels) if levels else None
        self._cores_count = cores_count if quota is None else min(cores_count, quota)
        return self._cores_count

    def _shm(self) -> Sample:
        try:
            shm = os.statvfs(self._root / "dev/shm")
        except OSError:
            return {}
        return {
            "shm_used_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "shm_total_bytes": shm.f_blocks * shm.f_frsize,
        }

    def _pressure(self) -> Sample:
        memory = read_file(f"{self._root}/proc/pressure/memory")
        return {
            "memory_some_avg10_ratio": _avg10(memory, b"some"),
            "memory_full_avg10_ratio": _avg10(memory, b"full"),
            "cpu_some_avg10_ratio": _avg10(read_file(f"{self._root}/proc/pressure/cpu"), b"some"),
            "io_some_avg10_ratio": _avg10(read_file(f"{self._root}/proc/pressure/io"), b"some"),
        }


def headroom_bytes(sample: Sample) -> float | None:
    """What is left before the binding limit; page cache does not count as used, since the kernel takes it back."""
    limit, anon = sample.get("cgroup_limit_bytes"), sample.get("cgroup_anon_bytes")
    left = [sample.get("memory_available_bytes")]
    if limit is not None and anon is not None:
        left.append(limit - anon - (sample.get("cgroup_shmem_bytes") or 0))
    return min((value for value in left if value is not None), default=None)


def _kibibytes(text: bytes, name: bytes) -> int | None:
    value = field(text, name)
    return None if value is None else value * 1024


def _avg10(text: bytes | None, kind: bytes) -> float | None:
    """The share of the last 10 s, from a line such as `some avg10=1.50 avg60=0.30 …` (in percent)."""
    for line in (text or b"").splitlines():
        words = line.split()
        if words[:1] == [kind] and len(words) > 1:
            return float(words[1].removeprefix(b"avg10=")) / 100
    return None
