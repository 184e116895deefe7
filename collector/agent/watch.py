"""Follow a process that already runs. It has no hooks, so its run has no steps and no batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from collector.agent.launch import check_interval, default_name
from collector.agent.loop import collect, manifest_process, update_manifest
from collector.agent.samplers import procfs
from collector.agent.samplers.procfs import LocalProcess
from collector.errors import TidegaugeError
from collector.store import Run
from training_harness import layout

if TYPE_CHECKING:
    from collector.agent.live.outlets import Outlets


def watch(
    pid: int,
    *,
    home: Path,
    name: str | None,
    tags: Mapping[str, str],
    interval_seconds: float,
    on_ready: Callable[[Run], None],
    outlets: Outlets | None,
) -> Run:
    """Sample a process of this host and its descendants until it ends, or until Ctrl-C; the process is not touched.

    The other arguments are those of `run_command`; `on_ready` is called before the first sample.

    Raises:
        TidegaugeError: there is no such process, the interval is out of bounds, or the home cannot be written.
    """
    check_interval(interval_seconds)
    # /proc/ID exists for a thread too, but is not listed.
    stat = procfs.read_stat(procfs.PROC, pid) if pid in procfs.pids(procfs.PROC) else None
    if stat is None or stat.has_ended:
        raise TidegaugeError(f"no process {pid} runs here; `pgrep -f train.py` prints the pid of a running script")
    try:
        run = _create_watched_run(LocalProcess(pid, stat.start_ticks), home, name, tags)
    except OSError as error:
        raise TidegaugeError(
            f"cannot write in {home} ({error.strerror}); give --home or {layout.HOME_VARIABLE} a directory that "
            "can be written"
        ) from None
    on_ready(run)
    collect(run, interval_seconds=interval_seconds, outlets=outlets)
    if run.manifest["end_time_ns"] is None:  # Ctrl-C ends the watch, not the process.
        update_manifest(run, end_time_ns=time.monotonic_ns())
    return run


def _create_watched_run(key: LocalProcess, home: Path, name: str | None, tags: Mapping[str, str]) -> Run:
    argv = [word for word in procfs.read_command_line(procfs.PROC, key.pid) if word] or [str(key.pid)]
    run = Run(layout.create_run(home, name=name or default_name(argv), argv=argv, tags=tags))
    # `create_run` has recorded these of this process; those of the watched one are unknown.
    unknown: dict[str, object] = {"cwd": None, "environment": {}, "slurm": {}, "python": None, "git_commit": None}
    update_manifest(run, watched=True, command=manifest_process(key), **unknown)
    return run
