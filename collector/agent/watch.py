"""`tidegauge watch`: a process that already runs, from outside; without hooks there are no steps and no batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from collector.agent import procfs
from collector.agent.launch import check_interval, default_name
from collector.agent.loop import DEFAULT_INTERVAL_SECONDS, collect, manifest_process, update_manifest
from collector.agent.procfs import ProcessKey
from collector.errors import TidegaugeError
from collector.store.runs import Run
from training_harness.layout import HOME_VARIABLE, create_run

if TYPE_CHECKING:
    from collector.agent.outlets import Outlets

_PROC = "/proc"


def watch(
    pid: int,
    *,
    home: Path,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    on_ready: Callable[[Run], None] | None = None,
    outlets: Outlets | None = None,
) -> Run:
    """Sample a process of this host and its descendants until it has ended, or until Ctrl-C; nothing is done to it.

    Args:
        pid: of the process.
        home: Tidegauge home; created if need be.
        name: of the run; by default that of the script or program.
        tags: kept in the manifest.
        interval_seconds: between two samples.
        on_ready: called with the run before the first sample.
        outlets: what is told of the run while it goes on.

    Raises:
        TidegaugeError: there is no such process, the interval is out of bounds, or the home cannot be written.

    """
    check_interval(interval_seconds)
    stat = procfs.read_stat(_PROC, pid) if pid in procfs.pids(_PROC) else None  # the id of a thread is not listed
    if stat is None or stat.ended:
        raise TidegaugeError(f"no process {pid} runs here; give the pid of one, such as `pgrep -f train.py` prints")
    try:
        run = _begin(ProcessKey(pid, stat.start_ticks), home, name, tags)
    except OSError as error:
        raise TidegaugeError(
            f"cannot write in {home} ({error.strerror}); give --home or {HOME_VARIABLE} a directory that can be "
            "written"
        ) from None
    if on_ready is not None:
        on_ready(run)
    collect(run, interval_seconds=interval_seconds, outlets=outlets)
    if run.manifest["end_time_ns"] is None:  # Ctrl-C: the process goes on, the watch is over
        update_manifest(run, end_time_ns=time.monotonic_ns())
    return run


def _begin(key: ProcessKey, home: Path, name: str | None, tags: Mapping[str, str] | None) -> Run:
    words = procfs.read_file(f"{_PROC}/{key.pid}/cmdline") or str(key.pid).encode()
    argv = [os.fsdecode(word) for word in words.split(b"\0") if word]
    run = Run(create_run(home, name=name or default_name(argv), argv=argv, tags=tags))
    # Of what else the manifest tells, `create_run` has put down this process's own.
    not_ours: dict[str, object] = {"cwd": None, "environment": {}, "python": None, "git_commit": None}
    update_manifest(run, watched=True, command=manifest_process(key), **not_ours)
    return run
