"""Writes realistic runs with the real journal writer: what a training of a few minutes leaves behind.

The processes are invented, but for the command itself, which is this process: so a live run really lives.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from training_harness import layout
from training_harness.journal import EventLog, Identity, JournalWriter, start_ticks
from training_harness.records import INLINE_WORKER, MISSING, MISSING_INT32, MISSING_INT64, STREAMS, Stream

MS = 1_000_000
MIB = 2**20
GIB = 2**30
#: Pids that no process of this machine can have (the kernel's highest is 2^22).
NO_SUCH_PID = 2**22 + 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens in a run."""

    name: str = "healthy"
    steps: int = 400
    step_ms: float = 100.0
    workers: int = 2
    slow_worker: int | None = None
    copied_bytes: int = 0
    cuda: bool = False
    gpu_leak_bytes_per_step: int = 0
    smaps: bool = True
    restart_every: int | None = None
    exit_status: int | None = 0
    living: bool = False
    killed_worker: int | None = None


@dataclass
class Writers:
    """The journals of one process."""

    directory: Path
    identity: Identity
    open_writers: dict[str, JournalWriter] = field(default_factory=dict)

    def append(self, stream: str, **values: float) -> None:
        """Write a record; columns that are not given are missing."""
        declared = STREAMS[stream]
        if stream not in self.open_writers:
            self.open_writers[stream] = JournalWriter(self.directory, declared, self.identity)
        self.open_writers[stream].append(*_record(declared, values))

    def close(self) -> None:
        """Close every segment."""
        for writer in self.open_writers.values():
            assert writer.lost_count == 0
            writer.close()


def make_run(home: Path, script: Script) -> Path:
    """Write a whole run whose last record is about now, and return its directory."""
    run_dir = layout.create_run(home, name=script.name, argv=["python", "train.py"])
    length_ns = int(script.steps * script.step_ms * MS)
    now = time.monotonic_ns()
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
    if script.cuda:
        _write_snapshot(run_dir, main)
    return run_dir


def _agent(script: Script) -> Identity:
    return _this_process() if script.living else Identity(socket.gethostname(), NO_SUCH_PID + 1, 900)


def _this_process() -> Identity:
    return Identity(socket.gethostname(), os.getpid(), start_ticks("self"))


def _write(run_dir: Path, script: Script, main_id: Identity, begin: int) -> None:
    host = main_id.host
    main = Writers(run_dir / "journal", main_id)
    agent = Writers(run_dir / "journal", _agent(script))
    workers = [Writers(run_dir / "journal", _worker_id(host, worker, 0)) for worker in range(script.workers)]
    events = _Events(run_dir / "events")
    _begin(events, script, main_id, begin)
    random = np.random.default_rng(7)
    step_ns = int(script.step_ms * MS)
    for step in range(script.steps):
        end = begin + (step + 1) * step_ns
        _step(main, script, step, end)
        maker = step % script.workers if script.workers else INLINE_WORKER
        round_ms = script.step_ms * max(script.workers, 1)
        fetch_ms = round_ms * random.uniform(0.3, 0.35)
        ready = end - step_ns
        if maker == script.slow_worker:  # the loop waits until it is there
            fetch_ms = round_ms * random.uniform(0.95, 0.99)
            ready += _wait_ns(script, step) - MS
        _fetch(workers[maker] if script.workers else main, maker, step, ready, fetch_ms, script)
        if step * script.step_ms % 500 < script.step_ms:
            _sample(agent, main_id, script, step, end)
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
            worker_pid=_worker_id(host, script.killed_worker, 0).pid,
            exit_code=-9,
            last_index=script.steps - 1,
        )
    if script.living:
        return
    agent_id = _agent(script)
    if script.exit_status == 0:
        for worker in range(script.workers):
            who = _worker_id(host, worker, 0)
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
        dataset="Photographs",
        iterable=False,
    )
    pids = [_worker_id(main.host, worker, 0).pid for worker in range(script.workers)]
    events.append(main, begin, "epoch-start", loader=0, epoch=0, worker_pids=pids)
    for worker in range(script.workers):
        who = _worker_id(main.host, worker, 0)
        events.append(who, begin, "worker-start", loader=0, epoch=0, worker=worker, parent_pid=main.pid)


class _Events:
    """Events with a time of our choosing: `EventLog` stamps now."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def append(self, who: Identity, time_ns: int, kind: str, **fields: object) -> None:
        EventLog(self._directory, who).append(kind, **{"time_ns": time_ns, **fields})


def _wait_ns(script: Script, step: int) -> int:
    slow = script.slow_worker is not None and step % script.workers == script.slow_worker
    return int(script.step_ms * MS * (0.9 if slow else 0.005))


def _step(main: Writers, script: Script, step: int, end: int) -> None:
    duration = int(script.step_ms * MS)
    wait = _wait_ns(script, step)
    main.append(
        "batch",
        time_ns=end - duration + wait,
        loader=0,
        epoch=0,
        index=step,
        worker=step % script.workers if script.workers else INLINE_WORKER,
        wait_ns=wait,
        blocked_ns=wait if script.workers else MISSING_INT64,
        outstanding_count=2 * script.workers if script.workers else MISSING_INT32,
        parked_count=(2 if script.slow_worker is not None else 0) if script.workers else MISSING_INT32,
        ready_count=step % 3 if script.workers else MISSING_INT32,
        payload_bytes=64 * 3 * 224 * 224 * 4,
        samples_count=64,
    )
    main.append(
        "step",
        time_ns=end,
        step=step,
        duration_ns=duration + step % 7 * MS if step else MISSING_INT64,  # there is no step before the first
        data_wait_ns=wait,
        optimizer_ns=duration // 10,
        batches_count=1,
        samples_count=64,
    )
    if script.cuda:
        allocated = 6 * GIB + step * script.gpu_leak_bytes_per_step
        main.append(
            "device_memory",
            time_ns=end,
            step=step,
            device=0,
            allocated_bytes=allocated,
            requested_bytes=allocated,
            active_bytes=allocated,
            reserved_bytes=allocated + 2 * GIB,
            inactive_split_bytes=100 * MIB,
            allocated_peak_bytes=allocated + GIB,
            reserved_peak_bytes=allocated + 2 * GIB,
            allocation_count=900,
            segment_count=40,
            alloc_retry_count=step // 150,
            oom_count=0,
            device_alloc_count=40,
            device_free_count=0,
        )


def _fetch(worker: Writers, number: int, step: int, end: int, fetch_ms: float, script: Script) -> None:
    getitem = int(fetch_ms * 0.85 * MS)
    collate = int(fetch_ms * 0.15 * MS)
    worker.append(
        "fetch",
        time_ns=end,
        loader=0,
        epoch=0,
        index=step,
        worker=number,
        idle_ns=max(0, int(script.step_ms * script.workers * MS) - getitem - collate),
        getitem_ns=getitem,
        collate_ns=collate,
        cpu_ns=int(getitem * 0.7),
        process_cpu_ns=int(getitem * 0.7),
        run_queue_ns=int(getitem * 0.1),
        blocked_ns=int(getitem * 0.2) + collate,
        major_fault_count=0,
        minor_fault_count=0,
        read_bytes=24 * MIB,
        samples_count=64,
    )
    for stage, share in (("read", 0.25), ("decode", 0.75)):
        worker.append(
            "stage",
            time_ns=end,
            loader=0,
            epoch=0,
            index=step,
            worker=number,
            stage=stage.encode(),
            calls_count=64,
            duration_ns=int(getitem * share),
            cpu_ns=int(getitem * share * 0.7),
        )


def _sample(agent: Writers, main: Identity, script: Script, step: int, now: int) -> None:
    # numbers that wander a little, as real ones do
    noise = (step * 2654435761 % 1000 - 500) * 4096
    own = 900 * MIB + noise
    role = 0 if step else 2  # what it is shows only once it trains
    _process(agent, now, main, script, role=role, dirty=own, pss=own + 200 * MIB, rss=own + 600 * MIB)
    total = own + 200 * MIB
    for worker in range(script.workers):
        generation = step // script.restart_every if script.restart_every else 0
        age = step % script.restart_every if script.restart_every else step
        copied = int(script.copied_bytes * (1 - math.exp(-age / 200)))
        dirty = 120 * MIB + noise // 4 + worker * 8 * MIB + copied
        who = _worker_id(main.host, worker, generation)
        if generation and age * script.step_ms < 500:
            _process_end(agent, now, _worker_id(main.host, worker, generation - 1), worker)
        _process(agent, now, who, script, role=1, worker=worker, dirty=dirty, pss=dirty + 80 * MIB, rss=1600 * MIB)
        total += dirty + 80 * MIB
    agent.append(
        "host",
        time_ns=now,
        memory_total_bytes=16 * GIB,
        memory_available_bytes=14 * GIB - total,
        cgroup_limit_bytes=8 * GIB,
        cgroup_usage_bytes=total + 400 * MIB,
        cgroup_anon_bytes=total,
        cgroup_file_bytes=400 * MIB,
        cgroup_shmem_bytes=64 * MIB,
        cgroup_oom_count=0,
        cgroup_oom_kill_count=0,
        host_oom_kill_count=0,
        shm_used_bytes=64 * MIB,
        shm_total_bytes=2 * GIB,
        memory_some_avg10_ratio=0.0,
        memory_full_avg10_ratio=0.0,
        cpu_some_avg10_ratio=0.1,
        io_some_avg10_ratio=0.0,
        usable_cores_count=8.0,
    )
    agent.append(
        "agent",
        time_ns=now,
        cpu_ns=now // 200,
        smaps_ns=now // 400,
        rss_bytes=90 * MIB,
        interval_ns=500 * MS + step % 3 * MS,
        ingest_lag_ns=step % 50 * 100 * MS,
        records_ingested_count=10 * step,
        records_lost_count=0,
    )
    if script.cuda:
        agent.append(
            "device",
            time_ns=now,
            device=0,
            used_bytes=9 * GIB + step * script.gpu_leak_bytes_per_step,
            total_bytes=24 * GIB,
            process_used_bytes=8 * GIB + 600 * MIB + step * script.gpu_leak_bytes_per_step,
            other_used_bytes=300 * MIB,
            utilisation_ratio=0.9,
        )


def _process(
    agent: Writers,
    now: int,
    who: Identity,
    script: Script,
    *,
    role: int,
    dirty: int,
    pss: int,
    rss: int,
    worker: int | None = None,
) -> None:
    smaps = {"pss_bytes": pss, "private_dirty_bytes": dirty, "uss_bytes": dirty} if script.smaps else {}
    place = {} if worker is None else {"loader": 0, "worker": worker}
    agent.append(
        "process",
        time_ns=now,
        process_pid=who.pid,
        process_start_ticks=who.start_ticks,
        role=role,
        rss_bytes=rss,
        fd_count=40,
        fd_limit_count=100,
        thread_count=8,
        cpu_ns=now // 2,
        alive=1,
        **smaps,
        **place,
    )


def _process_end(agent: Writers, now: int, who: Identity, worker: int) -> None:
    agent.append(
        "process",
        time_ns=now,
        process_pid=who.pid,
        process_start_ticks=who.start_ticks,
        role=1,
        loader=0,
        worker=worker,
        alive=0,
    )


def _worker_id(host: str, worker: int, generation: int) -> Identity:
    return Identity(host, NO_SUCH_PID + 100 + 100 * generation + worker, 1100 + generation)


def _write_snapshot(run_dir: Path, main: Identity) -> None:
    """One segment with a hole, held by one line of the user's through a line of torch's."""
    held = {"size": 600 * MIB, "state": "active_allocated", "stack": 0}
    blocks = [held, {"size": 24 * MIB, "state": "inactive"}, {**held, "size": 400 * MIB}]
    segment = {"device": 0, "address": 4096, "total_size": GIB, "allocated_size": 1000 * MIB, "blocks": blocks}
    frames = [["/opt/torch/nn/linear.py", 12, "forward"], ["/work/train.py", 30, "step"]]
    document = {"pid": main.pid, "rank": None, "segments": [segment], "stacks": [[0, 1]], "frames": frames}
    path = run_dir / "snapshots" / f"{main.host}.{main.pid}.1.allocator.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


def _record(stream: Stream, values: dict[str, float]) -> list[float]:
    unknown = set(values) - {column.name for column in stream.columns}
    assert not unknown, unknown
    return [values.get(column.name, MISSING[column.code]) for column in stream.columns]


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
CUDA = replace(HEALTHY, name="cuda", cuda=True, gpu_leak_bytes_per_step=4 * MIB)
INLINE = replace(HEALTHY, name="inline", workers=0)
NO_DATA = replace(HEALTHY, name="no-data", steps=0)
LIVE = replace(HEALTHY, name="live", living=True)
KILLED = replace(COPY_ON_READ, name="killed", exit_status=-9, killed_worker=None)
RESTARTS = replace(HEALTHY, name="restarts", restart_every=100)
NO_SMAPS = replace(HEALTHY, name="no-smaps", smaps=False)
