"""Memory limits and CPU quotas of the control groups that a process is in, version 1 or 2.

A limit binds wherever it stands between the process's own group and the root (SLURM and Kubernetes
put it on a parent), so every level counts. In a container the path in /proc/PID/cgroup may be the
host's while the mount shows the container's own group as its root; then the mount itself is the level.
Files are those of the kernel's cgroup-v1/memory and cgroup-v2 documents.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from collector.agent.procfs import field, read_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Directories from a process's own group up to the root that can be seen; `version` is 1 or 2."""

    version: int
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The smallest limit and what is charged where it stands; None is unknown, or no limit.

    `oom_kill_count` is known without a limit too: the kills in the process's own group then. Version 1 does not
    tell how much of its slab the kernel would give back.
    """

    limit_bytes: int | None = None
    usage_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    slab_reclaimable_bytes: int | None = None
    oom_count: int | None = None
    oom_kill_count: int | None = None


def find_levels(controller: str, membership: bytes, root: Path = Path("/")) -> Levels | None:
    """The groups of a process under one controller (`memory`, `cpu`).

    Args:
        controller: its name; a version 1 hierarchy that has it comes before version 2.
        membership: the process's /proc/PID/cgroup.
        root: of the file system that holds proc and the mounts.

    Returns:
        None if the group is gone, or no hierarchy is mounted.

    """
    member = _membership(controller, membership)
    if member is None:
        return None
    version, path = member
    if path.endswith(" (deleted)"):
        return None
    mount = _mount(controller, version, path, read_file(f"{root}/proc/self/mountinfo") or b"")
    if mount is None:
        return None
    mount_root, mount_point = mount
    top = f"{root}/{mount_point.lstrip('/')}"
    inside = path.removeprefix(mount_root.rstrip("/")) if _is_below(path, mount_root) else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts or not os.path.isdir("/".join([top, *parts])):
        parts = []
    directories = ["/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return Levels(version=version, directories=tuple(directories))


def read_memory(levels: Levels, *, unlimited_bytes: int) -> Memory | None:
    """The binding memory limit and the usage under it.

    Args:
        levels: of the memory controller.
        unlimited_bytes: a limit of this size or above limits nothing (the machine's memory).

    Returns:
        None if the process's own group is gone.

    """
    if not os.path.isdir(levels.directories[0]):
        return None
    name = "memory.limit_in_bytes" if levels.version == 1 else "memory.max"
    limits = [(_number(f"{directory}/{name}"), directory) for directory in levels.directories]
    # Of equal limits the outermost binds: it is charged with the others' usage too. So scan outside in.
    binding: tuple[int, str] | None = None
    for limit_bytes, directory in reversed(limits):
        if limit_bytes is not None and limit_bytes < (binding[0] if binding else unlimited_bytes):
            binding = (limit_bytes, directory)
    return (_memory_v1 if levels.version == 1 else _memory_v2)(levels, binding)


def read_cpu_quota(levels: Levels) -> float | None:
    """Cores that the tightest CFS quota allows; None without a quota."""
    quotas = []
    for directory in levels.directories:
        if levels.version == 1:
            quota = _number(f"{directory}/cpu.cfs_quota_us")
            period = _number(f"{directory}/cpu.cfs_period_us")
        else:
            fields = (read_file(f"{directory}/cpu.max") or b"").split()
            quota, period = map(_as_number, fields) if len(fields) == 2 else (None, None)
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _memory_v1(levels: Levels, binding: tuple[int, str] | None) -> Memory:
    # Version 1 counts a kill in the victim's own group alone, so add up the way.
    kills = [_field(directory, "memory.oom_control", b"oom_kill ") for directory in levels.directories]
    known = [count for count in kills if count is not None]
    kill_count = sum(known) if known else None
    if binding is None:
        return Memory(oom_kill_count=kill_count)
    limit_bytes, directory = binding
    return Memory(
        limit_bytes=limit_bytes,
        usage_bytes=_number(f"{directory}/memory.usage_in_bytes"),
        anon_bytes=_field(directory, "memory.stat", b"total_rss "),
        file_bytes=_field(directory, "memory.stat", b"total_cache "),
        shmem_bytes=_field(directory, "memory.stat", b"total_shmem "),
        oom_count=_number(f"{directory}/memory.failcnt"),
        oom_kill_count=kill_count,
    )


def _memory_v2(levels: Levels, binding: tuple[int, str] | None) -> Memory:
    if binding is None:  # the innermost group may lack the controller, as a task of SLURM's does
        kills = (_field(directory, "memory.events", b"oom_kill ") for directory in levels.directories)
        return Memory(oom_kill_count=next((count for count in kills if count is not None), None))
    limit_bytes, directory = binding
    return Memory(
        limit_bytes=limit_bytes,
        usage_bytes=_number(f"{directory}/memory.current"),
        anon_bytes=_field(directory, "memory.stat", b"anon "),
        file_bytes=_field(directory, "memory.stat", b"file "),
        shmem_bytes=_field(directory, "memory.stat", b"shmem "),
        slab_reclaimable_bytes=_field(directory, "memory.stat", b"slab_reclaimable "),
        oom_count=_field(directory, "memory.events", b"oom "),
        oom_kill_count=_field(directory, "memory.events", b"oom_kill "),
    )


def _membership(controller: str, text: bytes) -> tuple[int, str] | None:
    """Version and path of a process's group, from /proc/PID/cgroup (`id:controllers:path`)."""
    unified = None
    for line in text.decode(errors="replace").splitlines():
        identifier, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return 1, path
        if identifier == "0" and not controllers:
            unified = 2, path
    return unified


def _mount(controller: str, version: int, path: str, text: bytes) -> tuple[str, str] | None:
    """Root within the hierarchy and mount point, from /proc/self/mountinfo; the one that shows `path`."""
    mounts = []
    for line in text.decode(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(None, 2)
        wanted = kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(",")
        if wanted:
            mounts.append((fields[3], fields[4]))
    showing = [mount for mount in mounts if _is_below(path, mount[0])]
    return next(iter(showing or mounts), None)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _field(directory: str, name: str, key: bytes) -> int | None:
    text = read_file(f"{directory}/{name}")
    return None if text is None else field(b"\n" + text, key)


def _number(path: str) -> int | None:
    return _as_number(read_file(path) or b"")


def _as_number(text: bytes) -> int | None:
    """A number; None for `max`, -1 and anything else that says "no limit"."""
    stripped = text.strip()
    return int(stripped) if stripped.isdigit() else None
