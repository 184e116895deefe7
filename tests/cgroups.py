"""Real memory cgroups, version 1."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup/memory")


def lacking() -> str | None:
    """Return the things this machine lacks for memory cgroups and mounts of a run's own, None if it has all."""
    if os.geteuid() != 0 or not (_ROOT / "memory.limit_in_bytes").exists():
        return f"a cgroup v1 below {_ROOT} and a mount namespace are needed: run it as root where there are"
    return None


@contextlib.contextmanager
def memory_cgroup(name: str, limit_mib: int) -> Iterator[Path]:
    """Make a memory cgroup without swap for the block.

    Raises:
        OSError: it cannot be made here.
    """
    group = _ROOT / name
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
        (group / "memory.swappiness").write_text("0")
        yield group
    finally:
        for _ in range(50):  # the last of a killed job's processes may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.1)


def cgroup_or_skip(limit_mib: int) -> Iterator[Path]:
    """Yield a memory cgroup for a fixture; skip its tests where none can be made."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_cgroup(f"tidegauge-test-{os.getpid()}", limit_mib))
        except OSError as error:
            pytest.skip(f"a cgroup v1 can't be made here: {error}")
        yield group
