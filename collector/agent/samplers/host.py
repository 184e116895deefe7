"""The host that the run is on: memory and its limits, /dev/shm, pressure, usable cores.

Limits and quotas come from the control groups of the command, version 1 or 2 (the kernel's cgroup-v1/memory and
cgroup-v2 documents). A limit binds wherever it stands between the process's own group and the root (SLURM and
Kubernetes put it on a parent), so every level counts. In a container the path in /proc/PID/cgroup may be the host's
while the mount shows the container's own group as its root; then the mount itself is the level. A collector in a
container next to that of the training sees the training's groups and /dev/shm through /proc/PID/root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Set
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from collector.agent.samplers.procfs import field, kibibytes, read_file, read_stat
from collector.agent.samplers.samples import Sample
from training_harness.records import HOST

#: Column -> the file in the binding group and the name in it; a file without names holds one number.
_MEMORY_V1 = {
    "cgroup_usage_bytes": ("memory.usage_in_bytes", b""),
    "cgroup_anon_bytes": ("memory.stat", b"total_rss "),
    "cgroup_file_bytes": ("memory.stat", b"total_cache "),
    "cgroup_shmem_bytes": ("memory.stat", b"total_shmem "),
    "cgroup_oom_count": ("memory.failcnt", b""),
}
_MEMORY_V2 = {
    "cgroup_usage_bytes": ("memory.current", b""),
    "cgroup_anon_bytes": ("memory.stat", b"anon "),
    "cgroup_file_bytes": ("memory.stat", b"file "),
    "cgroup_shmem_bytes": ("memory.stat", b"shmem "),
    "cgroup_slab_reclaimable_bytes": ("memory.stat", b"slab_reclaimable "),
    "cgroup_oom_count": ("memory.events", b"oom "),
}
#: Unit of `st_blocks` (stat(2)).
_BLOCK_BYTES = 512
#: Files in /dev/shm whose sizes are read at a tick, at most: they take 2 ms.
_MOST_FILES = 1000
_UNKNOWN: Sample = {column.name: None for column in HOST.columns if column.name.startswith("cgroup_")}


class HostSampler:
    """A sampler of the host: one sample per tick.

    The command's control groups can vanish together with it (a container that was stopped). Their last readings
    stay in the samples, since they show why the command died.

    Args:
        pid: the process whose limits count; None until one is known: the collector may be in another container.
        root: root of the file system; a test can lay out its own tree.
        affinity: returns the cores that a process may use (sched_getaffinity(2)).
    """

    def __init__(
        self, pid: int | None, *, root: Path = Path("/"), affinity: Callable[[int], Set[int]] = os.sched_getaffinity
    ) -> None:
        #: The process whose limits count.
        self.pid = pid
        self._root = root
        self._affinity = affinity
        self._view = View(str(root), "self")
        #: The group whose memory limit binds; None without a limit.
        self.limit: MemoryLimit | None = None
        self._found_for: tuple[int | None, bytes] = (pid, b"")
        self._levels: dict[str, Levels | None] = {}
        self._memory = _UNKNOWN
        self._cores_count: float | None = None
        #: Core -> ticks in which it was busy, and all its ticks, at the last sample.
        self._ticks: dict[bytes, tuple[int, int]] = {}

    def sample(self) -> Sample:
        """Return one sample of the `host` stream."""
        meminfo, vmstat = self._read("meminfo"), self._read("vmstat")
        total_bytes = kibibytes(meminfo, b"MemTotal:")
        self._find_groups()
        levels = self._levels.get("memory")
        if levels is not None and total_bytes is not None:
            binding = find_binding(levels, total_bytes)
            memory = read_memory(levels, binding)
            if memory is not None:
                self._memory, self.limit = memory, self._limit(levels, binding) or self.limit
            else:  # A group that is gone counts no kill, and its parent's limit is another one.
                self._memory = {**self._memory, "cgroup_oom_kill_count": None}
        return {
            "memory_total_bytes": total_bytes,
            "memory_available_bytes": kibibytes(meminfo, b"MemAvailable:"),
            "memory_shmem_bytes": kibibytes(meminfo, b"Shmem:"),
            "host_oom_kill_count": field(vmstat, b"oom_kill "),
            "usable_cores_count": self._usable_cores(),
            "busy_cores_count": self._busy_cores(),
            **self._memory,
            **self._shm(),
            **self._pressure(),
        }

    def _read(self, name: str) -> bytes:
        return b"\n" + (read_file(f"{self._root}/proc/{name}") or b"")

    def _find_groups(self) -> None:
        """Find the process's groups while it lives: version 1 shows a zombie in the root group."""
        if self.pid is None:
            return
        membership = read_file(f"{self._root}/proc/{self.pid}/cgroup")
        stat = read_stat(f"{self._root}/proc", self.pid)
        if membership is None or stat is None or stat.has_ended or (self.pid, membership) == self._found_for:
            return
        self._found_for = self.pid, membership
        self._view = _view_of(self._root, self.pid)
        for controller in ("memory", "cpu"):
            levels = find_levels(controller, membership, self._root, self._view)
            self._levels[controller] = levels or self._levels.get(controller)

    def _limit(self, levels: Levels, binding: tuple[int, str] | None) -> MemoryLimit | None:
        member = _membership("memory", self._found_for[1])
        if binding is None or member is None:
            return None
        limit_bytes, directory = binding
        # A mount in a container shows its own group as the root: then there is one level, and its path is whole.
        above = levels.directories.index(directory)
        # The path from the group of another container to this one says nothing about either.
        parts = [] if "/../" in member[1] else [part for part in member[1].split("/") if part]
        return MemoryLimit("/" + "/".join(parts[: len(parts) - above]), limit_bytes, self._container())

    def _container(self) -> str | None:
        marks = {
            "kubernetes": "var/run/secrets/kubernetes.io",
            "docker": ".dockerenv",
            "podman": "run/.containerenv",
        }
        root = f"{self._root}/proc/{self.pid}/root"
        return next((name for name, mark in marks.items() if os.path.exists(f"{root}/{mark}")), None)

    def _usable_cores(self) -> float | None:
        try:
            cores_count = float(len(self._affinity(self.pid or 0)))
        except OSError:  # The command has ended.
            return self._cores_count
        levels = self._levels.get("cpu")
        quota = read_cpu_quota(levels) if levels else None
        self._cores_count = cores_count if quota is None else min(cores_count, quota)
        return self._cores_count

    def _busy_cores(self) -> float | None:
        """Return how many of the command's cores were busy since the last sample (/proc/stat, proc_stat(5))."""
        before, self._ticks = self._ticks, core_ticks(self._read("stat"))
        try:
            names = [b"cpu%d" % core for core in self._affinity(self.pid or 0)]
        except OSError:  # The command has ended.
            return None
        spans = [
            (now[0] - then[0], now[1] - then[1])
            for name in names
            if (now := self._ticks.get(name)) and (then := before.get(name)) and now[1] > then[1]
        ]
        return sum(max(busy, 0) / total for busy, total in spans) if spans else None

    def _shm(self) -> Sample:
        try:
            shm = os.statvfs(f"{self._view.root}/dev/shm")
        except OSError:
            return {}
        return {
            "shm_used_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "shm_total_bytes": shm.f_blocks * shm.f_frsize,
            "shm_unwritten_bytes": unwritten_bytes(f"{self._view.root}/dev/shm"),
        }

    def _pressure(self) -> Sample:
        memory = self._read("pressure/memory")
        return {
            "memory_some_avg10_ratio": _avg10(memory, b"some"),
            "memory_full_avg10_ratio": _avg10(memory, b"full"),
            "cpu_some_avg10_ratio": _avg10(self._read("pressure/cpu"), b"some"),
            "io_some_avg10_ratio": _avg10(self._read("pressure/io"), b"some"),
        }


def core_ticks(stat: bytes) -> dict[bytes, tuple[int, int]]:
    """Return core -> ticks in which it was busy, and all its ticks. What a hypervisor takes away counts as busy."""
    lines = [line.split() for line in stat.splitlines() if line.startswith(b"cpu") and not line.startswith(b"cpu ")]
    ticks = {name: [int(value) for value in values[:8]] for name, *values in lines}  # guests are in user and nice
    return {name: (sum(values) - sum(values[3:5]), sum(values)) for name, values in ticks.items()}


def unwritten_bytes(folder: str) -> int | None:
    """Return the size of the files in a folder beyond the pages that they have; None with too many files."""
    unwritten = 0
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= _MOST_FILES:
                    return None
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if S_ISREG(status.st_mode):
                        unwritten += max(0, status.st_size - status.st_blocks * _BLOCK_BYTES)
    except OSError:
        return None
    return unwritten


def headroom_bytes(sample: Sample) -> float | None:
    """Return the headroom before the binding limit; page cache counts as free, since the kernel reclaims it."""
    limit, anon = sample.get("cgroup_limit_bytes"), sample.get("cgroup_anon_bytes")
    headrooms = [sample.get("memory_available_bytes")]
    if limit is not None and anon is not None:
        headrooms.append(limit - anon - (sample.get("cgroup_shmem_bytes") or 0))
    return min((value for value in headrooms if value is not None), default=None)


def _avg10(text: bytes, kind: bytes) -> float | None:
    """Return the share of the last 10 s, from a line such as `some avg10=1.50 avg60=0.30 …` (in percent)."""
    percent = text.partition(b"\n" + kind + b" avg10=")[2].split(None, 1)
    return float(percent[0]) / 100 if percent else None


class View(NamedTuple):
    """The files as a process sees them: their root, and the name in /proc that has the table of mounts."""

    root: str
    process: str

    def mounts(self, root: Path) -> bytes:
        """Return the table of mounts; `root` holds proc."""
        return read_file(f"{root}/proc/{self.process}/mountinfo") or b""


class Levels(NamedTuple):
    """Directories from a process's own group up to the visible root; `version` is 1 or 2."""

    version: int
    directories: tuple[str, ...]


class MemoryLimit(NamedTuple):
    """The memory limit that binds: path of its group, size, and kind of container (None outside of one)."""

    path: str
    limit_bytes: int
    container: str | None


def find_levels(controller: str, membership: bytes, root: Path, view: View | None = None) -> Levels | None:
    """Return the groups of a process under one controller; None if they are gone, or no hierarchy is mounted.

    Args:
        controller: `memory` or `cpu`; a version 1 hierarchy that has it comes before version 2.
        membership: content of the process's /proc/PID/cgroup.
        root: root of the file system that holds proc and the mounts.
        view: the files as the process sees them. They count if this process's own mounts do not show the group.
    """
    member = _membership(controller, membership)
    if member is None:
        return None
    version, path = member
    if path.endswith(" (deleted)"):
        return None
    own = View(str(root), "self")
    files, mount = own, _mount(controller, version, path, own.mounts(root))
    if view is not None and view != own and (mount is None or not _shows(mount[0], path)):
        files, mount = view, _mount(controller, version, path, view.mounts(root))
    if mount is None:
        return None
    # A mount may show only a part of the hierarchy, from `mount_root` on. For a group outside of it, take its top.
    mount_root, mount_point = mount
    top = f"{files.root}/{mount_point.lstrip('/')}"
    below_mount = path.removeprefix(mount_root.rstrip("/")) if _is_below(path, mount_root) else ""
    parts = [part for part in below_mount.split("/") if part]
    if ".." in parts or not os.path.isdir("/".join([top, *parts])):
        parts = []
    directories = ["/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return Levels(version=version, directories=tuple(directories))


def read_memory(levels: Levels, binding: tuple[int, str] | None) -> Sample | None:
    """Return the binding memory limit and the usage under it; None if the process's own group is gone.

    They are the `cgroup_` columns of a sample. `levels` are those of the memory controller, and `binding` is what
    `find_binding` returns. The number of kills is known without a limit too: then it counts those in the process's
    own group. Version 1 does not report reclaimable slab.
    """
    version, directories = levels
    if not os.path.isdir(directories[0]):
        return None
    kill_file, columns = ("memory.oom_control", _MEMORY_V1) if version == 1 else ("memory.events", _MEMORY_V2)
    # Version 2 counts a kill at every level above it too. The innermost group may lack the controller, as that of a
    # SLURM task does. Version 1 counts it in the victim's own group alone, so add up all levels.
    counting = (binding[1],) if binding and version == 2 else directories
    counts = [_field(directory, kill_file, b"oom_kill ") for directory in counting]
    kills = [count for count in counts if count is not None]
    kill_count = None if not kills else sum(kills) if version == 1 else kills[0]
    sample = {**_UNKNOWN, "cgroup_oom_kill_count": kill_count}
    if binding is None:
        return sample
    limit_bytes, directory = binding
    texts = {file: b"\n" + (read_file(f"{directory}/{file}") or b"") for file, _ in columns.values()}
    usage = {column: field(texts[file], name) for column, (file, name) in columns.items()}
    return {**sample, "cgroup_limit_bytes": limit_bytes, **usage}


def find_binding(levels: Levels, unlimited_bytes: int) -> tuple[int, str] | None:
    """Return the memory limit that binds (bytes) and its directory; None without one below `unlimited_bytes`.

    `unlimited_bytes` is the machine's memory. The outermost of equal limits binds: it is charged with the others'
    usage too.
    """
    limit_file = "memory.limit_in_bytes" if levels.version == 1 else "memory.max"
    binding: tuple[int, str] | None = None
    for directory in reversed(levels.directories):
        limit_bytes = _field(directory, limit_file)
        if limit_bytes is not None and limit_bytes < (binding[0] if binding else unlimited_bytes):
            binding = (limit_bytes, directory)
    return binding


def read_cpu_quota(levels: Levels) -> float | None:
    """Return the number of cores that the tightest CFS quota allows; None without a quota."""
    quotas = []
    for directory in levels.directories:
        if levels.version == 1:
            quota, period = _field(directory, "cpu.cfs_quota_us"), _field(directory, "cpu.cfs_period_us")
        else:
            fields = (read_file(f"{directory}/cpu.max") or b"").split()
            numbers = [int(text) if text.isdigit() else None for text in fields]
            quota, period = numbers if len(numbers) == 2 else (None, None)
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _view_of(root: Path, pid: int) -> View:
    """Return the files as a process sees them; this process's own if its mounts are the same or can't be read."""
    own, other = f"{root}/proc/self", f"{root}/proc/{pid}"
    try:
        if os.readlink(f"{own}/ns/mnt") != os.readlink(f"{other}/ns/mnt") and os.path.isdir(f"{other}/root/"):
            return View(f"{other}/root", str(pid))
    except OSError:
        pass
    return View(str(root), "self")


def _membership(controller: str, text: bytes) -> tuple[int, str] | None:
    """Parse version and path of a process's group from /proc/PID/cgroup (`id:controllers:path`)."""
    unified = None
    for line in text.decode(errors="replace").splitlines():
        identifier, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return 1, path
        if identifier == "0" and not controllers:
            unified = 2, path
    return unified


def _mount(controller: str, version: int, path: str, text: bytes) -> tuple[str, str] | None:
    """Return root within the hierarchy and mount point of the mount that shows `path` (/proc/self/mountinfo)."""
    mounts = []
    for line in text.decode(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(None, 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(","):
            mounts.append((fields[3], fields[4]))
    matching = [mount for mount in mounts if _is_below(path, mount[0])]
    return next(iter(matching or mounts), None)


def _shows(mount_root: str, path: str) -> bool:
    """Return whether a mount with this root shows a group, which may be that of another container."""
    return _is_below(path, mount_root) and ".." not in path.removeprefix(mount_root).split("/")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _field(directory: str, file: str, name: bytes = b"") -> int | None:
    """Return a number in a file of a group; None for `max`, -1 and any other form of "no limit"."""
    text = read_file(f"{directory}/{file}")
    return None if text is None else field(b"\n" + text, name)
