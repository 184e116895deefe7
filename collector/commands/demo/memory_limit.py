"""A memory limit for one command, set by a control group of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from collector.errors import TidegaugeError

if TYPE_CHECKING:
    from collector.agent.samplers.host import Levels

#: Shell command that joins the group `$0` and becomes the command that follows.
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
#: Version of control groups -> file of the limit, and the file and value that keep the command out of swap.
_FILES = {1: ("memory.limit_in_bytes", "memory.swappiness"), 2: ("memory.max", "memory.swap.max")}
#: Seconds that the processes of a killed command may take to end.
_END_SECONDS = 5.0


class NoLimitError(TidegaugeError):
    """No memory limit can be set here."""


@contextmanager
def memory_limited(command: Sequence[str], limit_bytes: int, root: Path = Path("/")) -> Iterator[list[str]]:
    """Yield the command that runs `command` under a memory limit, without swap.

    Args:
        command: the command and its arguments.
        limit_bytes: memory of all its processes together.
        root: root of the file system that holds proc and the mounts.

    Raises:
        NoLimitError: no limit can be set here.
    """
    group = _make_group(limit_bytes, root)
    try:
        yield ["sh", "-c", _JOIN, str(group), *command]
    finally:
        _remove(group)


def _make_group(limit_bytes: int, root: Path) -> Path:
    """Make a group with the limit below one that this process is in, the nearest that allows it."""
    from collector.agent.samplers.host import find_levels

    try:
        levels = find_levels("memory", (root / "proc" / "self" / "cgroup").read_bytes(), root)
    except OSError:
        levels = None
    if levels is None:
        raise NoLimitError("no memory limit can be set here: no control group of memory is mounted")
    reason = "the memory controller is not delegated to this user's groups"
    for directory in _parents(levels):
        group = directory / f"tidegauge-{os.getpid()}"
        try:
            group.mkdir()
            limit, swap = _FILES[levels.version]
            (group / limit).write_text(str(limit_bytes))
            with suppress(OSError):  # A kernel without swap accounting lacks the file.
                (group / swap).write_text("0")
            subprocess.run(["sh", "-c", _JOIN, str(group), "true"], check=True, capture_output=True)
        except OSError as error:
            reason = f"{group}: {error.strerror}"
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip()
        else:
            return group
        _remove(group)
    raise NoLimitError(f"no memory limit can be set here: {reason}")


def _parents(levels: Levels) -> Iterator[Path]:
    """Yield the groups below which a limit can be set; version 2 must have switched the controller on for them."""
    for directory in map(Path, levels.directories):
        if levels.version == 1:
            yield directory
            continue
        with suppress(OSError):
            if "memory" in (directory / "cgroup.subtree_control").read_text().split():
                yield directory


def _remove(group: Path) -> None:
    """Remove a group; its last process may still be ending."""
    deadline = time.monotonic() + _END_SECONDS
    while group.is_dir() and time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)
