"""Records as a training of a few minutes leaves them behind, one step and one sample at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from training_harness.journal import Identity, JournalWriter
from training_harness.records import INLINE_WORKER, MISSING, MISSING_INT32, MISSING_INT64, STREAMS, Stream

MS = 1_000_000
MIB = 2**20
GIB = 2**30
#: Pids that no process of this machine can have (the kernel's highest is 2^22).
NO_SUCH_PID = 2**22 + 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A made-up run."""

    name: str = "healthy"
    steps: int = 400
    step_ms: float = 100.0
    workers: int = 2
    slow_worker: int | None = None
    copied_bytes: int = 0
    smaps: bool = True
    restart_every: int | None = None
    exit_status: int | None = 0
    living: bool = False
    silent_seconds: float = 0.0
    killed_worker: int | None = None
    dataset: str = "Photographs"
    stages: tuple[tuple[str, float], ...] = (("read", 0.25), ("decode", 0.75))


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


def wait_ns(script: Script, step: int) -> int:
    slow = script.slow_worker is not None and step % script.workers == script.slow_worker
    return int(script.step_ms * MS * (0.9 if slow else 0.005))


def write_step(main: Writers, script: Script, step: int, end: int) -> None:
    duration = int(script.step_ms * MS)
    wait = wait_ns(script, step)
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


def write_fetch(worker: Writers, number: int, step: int, end: int, fetch_ms: float, script: Script) -> None:
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
        minor_fault_count=max(0, copied_bytes(script, step) - copied_bytes(script, step - script.workers)) // 4096,
        read_bytes=24 * MIB,
        samples_count=64,
    )
    for stage, share in script.stages:
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


def copied_bytes(script: Script, step: int) -> int:
    """Return the bytes that a worker has copied of its parent by this step."""
    age = step % script.restart_every if script.restart_every else max(0, step)
    return int(script.copied_bytes * (1 - math.exp(-age / 200)))


def write_sample(agent: Writers, main: Identity, script: Script, step: int, now: int) -> None:
    # numbers that wander a little, as real ones do
    noise = (step * 2654435761 % 1000 - 500) * 4096
    own = 900 * MIB + noise
    role = 0 if step else 2  # what it is shows only once it trains
    _process(agent, now, main, script, role=role, dirty=own, pss=own + 200 * MIB, rss=own + 600 * MIB)
    total = own + 200 * MIB
    for worker in range(script.workers):
        generation = step // script.restart_every if script.restart_every else 0
        age = step % script.restart_every if script.restart_every else step
        dirty = 120 * MIB + noise // 4 + worker * 8 * MIB + copied_bytes(script, step)
        who = worker_id(main.host, worker, generation)
        if generation and age * script.step_ms < 500:
            write_process_end(agent, now, worker_id(main.host, worker, generation - 1), worker)
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


def write_process_end(agent: Writers, now: int, who: Identity, worker: int) -> None:
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


def _record(stream: Stream, values: dict[str, float]) -> list[float]:
    unknown = set(values) - {column.name for column in stream.columns}
    assert not unknown, unknown
    return [values.get(column.name, MISSING[column.code]) for column in stream.columns]


def worker_id(host: str, worker: int, generation: int) -> Identity:
    return Identity(host, NO_SUCH_PID + 100 + 100 * generation + worker, 1100 + generation)
