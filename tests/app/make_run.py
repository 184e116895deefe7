"""Writes realistic runs with the real journal writer: what a training of a few minutes leaves behind.

The processes are made up. Only the command is a real process, this one, so that a live run is alive.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from make_records import (
    GIB,
    MS,
    NO_SUCH_PID,
    Script,
    Writers,
    wait_ns,
    worker_id,
    write_fetch,
    write_sample,
    write_step,
)

from training_harness import layout
from training_harness.journal import EventLog, Identity, start_ticks
from training_harness.records import INLINE_WORKER


def make_run(home: Path, script: Script) -> Path:
    """Write a whole run whose last record is about now, or as long ago as it is silent; return its directory."""
    run_dir = layout.create_run(home, name=script.name, argv=["python", "train.py"])
    length_ns = int(script.steps * script.step_ms * MS)
    now = time.monotonic_ns() - int(script.silent_seconds * 1e9)
    begin = now - length_ns
    host = socket.gethostname()
    manifest = layout.read_manifest(run_dir)
    anchor = manifest["anchors"][host]
    manifest["anchors"][host] = {
        **anchor,
        "time_ns": begin - 2000 * MS,
        "wall_ns": anchor["wall_ns"] - length_ns - 2000 * MS,
    }
    main = _this_process() if script.living else Identity(host, NO_SUCH_PID, 1000)
    manifest["command"] = {"host": host, "pid": main.pid, "start_ticks": main.start_ticks}
    agent = _agent(script)
    manifest["collector"] = {"host": host, "pid": agent.pid, "start_ticks": agent.start_ticks}
    if not script.living:
        manifest["end_time_ns"] = now
        manifest["exit_status"] = script.exit_status
    layout.write_manifest(run_dir, manifest)
    if script.steps:
        _write(run_dir, script, main, begin)
    return run_dir


def _agent(script: Script) -> Identity:
    return _this_process() if script.living else Identity(socket.gethostname(), NO_SUCH_PID + 1, 900)


def _this_process() -> Identity:
    return Identity(socket.gethostname(), os.getpid(), start_ticks("self"))


def _write(run_dir: Path, script: Script, main_id: Identity, begin: int) -> None:
    host = main_id.host
    main = Writers(run_dir / "journal", main_id)
    agent = Writers(run_dir / "journal", _agent(script))
    workers = [Writers(run_dir / "journal", worker_id(host, worker, 0)) for worker in range(script.workers)]
    events = _Events(run_dir / "events")
    _begin(events, script, main_id, begin)
    random = np.random.default_rng(7)
    step_ns = int(script.step_ms * MS)
    for step in range(script.steps):
        end = begin + (step + 1) * step_ns
        write_step(main, script, step, end)
        maker = step % script.workers if script.workers else INLINE_WORKER
        round_ms = script.step_ms * max(script.workers, 1)
        fetch_ms = round_ms * random.uniform(0.3, 0.35)
        ready = end - step_ns
        if maker == script.slow_worker:  # the loop waits until it is there
            fetch_ms = round_ms * random.uniform(0.95, 0.99)
            ready += wait_ns(script, step) - MS
        write_fetch(workers[maker] if script.workers else main, maker, step, ready, fetch_ms, script)
        if step * script.step_ms % 500 < script.step_ms:
            write_sample(agent, main_id, script, step, end)
    for writers in (main, agent, *workers):
        writers.close()
    last = begin + script.steps * step_ns
    if script.killed_worker is not None:
        events.append(
            main_id,
            last,
            "worker-died",
            loader=0,
            epoch=0,
            worker=script.killed_worker,
            worker_pid=worker_id(host, script.killed_worker, 0).pid,
            exit_code=-9,
            last_index=script.steps - 1,
        )
    if script.living:
        return
    agent_id = _agent(script)
    if script.exit_status == 0:
        for worker in range(script.workers):
            who = worker_id(host, worker, 0)
            events.append(who, last, "worker-exit", loader=0, worker=worker, reason="done", lost_count=0)
        events.append(main_id, last, "process-exit", lost_count=0)
    events.append(agent_id, last, "command-exit", command_pid=main_id.pid, exit_status=script.exit_status)
    events.append(agent_id, last, "collector-stop", records_count=1000)


def _begin(events: _Events, script: Script, main: Identity, begin: int) -> None:
    events.append(_agent(script), begin, "collector-start", resumed=False, command_pid=main.pid)
    events.append(
        main,
        begin,
        "process-start",
        argv=["python", "train.py"],
        python="3.11.7",
        torch="2.13.0",
        local_rank=None,
        world_size=None,
        parent_pid=1,
        capabilities={},
    )
    events.append(
        main,
        begin,
        "loader",
        loader=0,
        num_workers=script.workers,
        prefetch_factor=2 if script.workers else None,
        batch_size=64,
        pin_memory=False,
        persistent_workers=False,
        in_order=True,
        start_method="fork",
        dataset=script.dataset,
        iterable=False,
    )
    if script.workers:
        pids = [worker_id(main.host, worker, 0).pid for worker in range(script.workers)]
        events.append(main, begin, "epoch-start", loader=0, epoch=0, worker_pids=pids, begun_ns=begin)
    for worker in range(script.workers):
        who = worker_id(main.host, worker, 0)
        events.append(who, begin, "worker-start", loader=0, epoch=0, worker=worker, parent_pid=main.pid)


def begin_epochs(run_dir: Path, who: Identity, begun_seconds: Mapping[int, float], *, loader: int = 0) -> None:
    """Add epochs: number -> seconds after the run was made. Making an iterator took 0.5 s."""
    origin_ns = layout.read_manifest(run_dir)["anchors"][socket.gethostname()]["time_ns"]
    for epoch, seconds in begun_seconds.items():
        begun_ns = origin_ns + int(seconds * 1e9)
        fields = {"loader": loader, "epoch": epoch, "worker_pids": [], "begun_ns": begun_ns}
        _Events(run_dir / "events").append(who, begun_ns + 500 * MS, "epoch-start", **fields)


def begin_attempts(run_dir: Path, who: Identity, begun_seconds: Mapping[int, float]) -> None:
    """Add processes that a launcher started: number of the attempt -> seconds after the run was made."""
    origin_ns = layout.read_manifest(run_dir)["anchors"][socket.gethostname()]["time_ns"]
    for attempt, seconds in begun_seconds.items():
        time_ns = origin_ns + int(seconds * 1e9)
        fields = {"argv": ["train.py"], "torch": "2.13.0", "attempt": attempt, "parent_pid": 1, "capabilities": {}}
        _Events(run_dir / "events").append(who, time_ns, "process-start", **fields)


class _Events:
    """Events with a given time: `EventLog` stamps the present."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def append(self, who: Identity, time_ns: int, kind: str, **fields: object) -> None:
        EventLog(self._directory, who).append(kind, **{"time_ns": time_ns, **fields})


HEALTHY = Script()
CPU_ONLY = replace(HEALTHY, name="cpu-only")
SLOW_WORKER = replace(HEALTHY, name="slow-worker", workers=4, slow_worker=1)
COPY_ON_READ = replace(
    HEALTHY,
    name="copy-on-read",
    steps=1200,
    workers=2,
    copied_bytes=GIB,
    killed_worker=1,
    exit_status=1,
)
INLINE = replace(HEALTHY, name="inline", workers=0)
NO_DATA = replace(HEALTHY, name="no-data", steps=0)
LIVE = replace(HEALTHY, name="live", living=True)
STARTING = replace(LIVE, name="starting", steps=0)
STALE = replace(LIVE, name="stale", silent_seconds=60)
KILLED = replace(COPY_ON_READ, name="killed", exit_status=-9, killed_worker=None)
#: A name with markup and escape codes, none of which may become a link, a picture or a colour.
HOSTILE = replace(
    SLOW_WORKER,
    name="hostile",
    dataset="<img src=http://e.st/d>[x](http://e.st/l)",
    stages=(("![x](http://e.st/p)", 0.25), ("www.e.st :red[x]", 0.75)),
)
RESTARTS = replace(HEALTHY, name="restarts", restart_every=100)
NO_SMAPS = replace(HEALTHY, name="no-smaps", smaps=False)
