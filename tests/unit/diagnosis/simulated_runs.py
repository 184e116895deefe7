"""Runs made by a discrete-event simulation of DataLoader: ground truth for the rules.

`simulate` plays the queueing of a DataLoader: P·N batches are in flight, worker k mod N makes batch k,
and batches are yielded in order. Times are in seconds of a clock that starts at 1000 s.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from collector.diagnosis.run.tables import RunTables
from training_harness.records import IDENTITY, STREAMS

HOST = "node"
MAIN = (HOST, 100, 5000)
START_SECONDS = 1000.0
MIB = 2**20


_EMPTY_STREAMS = {
    name: pd.DataFrame(
        {c.name: pd.Series(dtype="object" if c.code == "s" else "float64") for c in (*stream.columns, *IDENTITY)}
    )
    for name, stream in STREAMS.items()
}


def frame(name, rows, key=MAIN, rank=None):
    """Return a stream's table from dicts; columns that are not given are missing."""
    columns = [column.name for column in STREAMS[name].columns]
    table = pd.DataFrame(rows, columns=columns)
    host, pid, ticks = key
    return table.assign(host=host, pid=pid, start_ticks=ticks, rank=np.nan if rank is None else rank)


def ns(seconds):
    return round(seconds * 1e9)


@dataclass
class Script:
    """A run under construction: events and stream rows are added, `tables()` is what the rules see."""

    events: list = field(default_factory=list)
    parts: dict = field(default_factory=dict)
    living: object = frozenset()
    manifest: dict = field(
        default_factory=lambda: {
            "anchors": {HOST: {"time_ns": ns(START_SECONDS)}},
            "command": {"host": HOST, "pid": MAIN[1], "start_ticks": MAIN[2]},
            "collector": {"host": HOST, "pid": 90, "start_ticks": 4900},
            "exit_status": None,
            "end_time_ns": None,
        }
    )
    now_seconds: float = START_SECONDS + 100
    lost_count: int = 0

    def event(self, seconds, kind, key=MAIN, rank=None, **fields):
        host, pid, ticks = key
        self.events.append(
            {
                "time_ns": ns(seconds),
                "kind": kind,
                "host": host,
                "pid": pid,
                "start_ticks": ticks,
                "rank": rank,
                **fields,
            }
        )
        return self

    def add(self, name, rows, key=MAIN, rank=None):
        if rows:
            self.parts.setdefault(name, []).append(frame(name, rows, key, rank))
        return self

    def tables(self):
        streams = dict(_EMPTY_STREAMS)
        for name, parts in self.parts.items():
            streams[name] = pd.concat(parts, ignore_index=True).sort_values("time_ns", kind="stable")
        return RunTables(
            manifest=self.manifest,
            events=sorted(self.events, key=lambda event: event["time_ns"]),
            streams=streams,
            living=self.living,
            now_ns=ns(self.now_seconds),
            lost_count=self.lost_count,
        )


def start_training(script=None, *, key=MAIN, rank=None, begin=START_SECONDS):
    """Add the start of a training process to a run."""
    script = script or Script()
    return script.event(begin, "process-start", key, rank)


def finish(script, *, exit_status=0):
    """Add an orderly end to a run."""
    end = script.now_seconds
    script.event(end - 0.2, "process-exit", lost_count=0)
    return script.event(end - 0.1, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=exit_status)


def simulate(
    *,
    workers,
    prefetch,
    service,
    consumer,
    batches,
    epochs=1,
    in_order=True,
    persistent=True,
    seed=0,
    script=None,
    key=MAIN,
    rank=None,
    loader=0,
    split=(0.0, 0.0, 1.0),
    read_bytes=0,
    cores=64.0,
    start_method="fork",
    begin=START_SECONDS,
    startup=0.0,
    drawing=0.0,
    gap=0.05,
    collate_share=0.1,
    shards=None,
    in_turn=False,
    children=0.0,
    **settings,
):
    """One training process with one loader.

    Args:
        service: (generator, worker, index) -> seconds of a fetch.
        consumer: (generator, k) -> seconds of the loop after batch k.
        begin: when the loader is first used, seconds.
        startup: seconds from the start of new workers until they wait for work.
        drawing: seconds of the sampler until its first index, in each epoch.
        gap: between epochs, seconds.
        collate_share: of a fetch.
        shards: of an iterable dataset: batches by worker.
        in_turn: one thing serves the fetches of all workers, one after the other.
        settings: further fields of its `loader` event.
        split: CPU, run queue and blocked share of a fetch.
        children: share of a fetch that a child process computes, while the worker is blocked.
    """
    generator = np.random.default_rng(seed)
    if script is None:
        script = start_training(key=key, rank=rank)
        script.now_seconds = begin
    script.event(
        begin,
        "loader",
        key,
        rank,
        loader=loader,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        in_order=in_order,
        start_method=start_method,
        persistent_workers=persistent,
        **settings,
    )
    now, step = begin + 1.0, 0
    for epoch in range(epochs):
        pids = [
            1000 + (0 if persistent else 100 * epoch) + 10 * loader + w + (rank or 0) * 5000 for w in range(workers)
        ]
        script.event(now, "epoch-start", key, rank, loader=loader, epoch=epoch, worker_pids=pids, begun_ns=ns(now))
        begins = epoch == 0 or not persistent
        if begins:
            for worker, pid in enumerate(pids):
                who = (key[0], pid, 6000 + pid)
                script.event(now, "worker-start", who, rank, loader=loader, epoch=epoch, worker=worker)
                script.event(now + startup, "worker-ready", who, rank, loader=loader, epoch=epoch, worker=worker)
        if workers:
            ready = now + (startup if begins else 0.0)
            turns = _turns(shards or [batches] * workers)
            asked = now + drawing
            yields, fetches = _parallel(
                generator, asked, ready, workers, prefetch, service, consumer, batches, in_order, turns, in_turn
            )
        else:
            yields, fetches = _inline(generator, now, service, consumer, batches, drawing)
        rows, steps = [], []
        for time, wait, index, worker, work in yields:
            rows.append(
                {
                    "time_ns": ns(time),
                    "loader": loader,
                    "epoch": epoch,
                    "index": index,
                    "worker": worker,
                    "wait_ns": ns(wait),
                    "blocked_ns": ns(wait),
                    "samples_count": 8,
                }
            )
            steps.append(
                {
                    "time_ns": ns(time + work),
                    "step": step,
                    "duration_ns": ns(wait + work),
                    "data_wait_ns": ns(wait),
                    "other_ns": ns(work),
                }
            )
            step += 1
        script.add("batch", rows, key, rank).add("step", steps, key, rank)
        for worker in sorted({fetch[3] for fetch in fetches}):
            made = [
                {
                    "time_ns": ns(done),
                    "loader": loader,
                    "epoch": epoch,
                    "index": index,
                    "worker": worker,
                    "idle_ns": np.nan if idle is None else ns(idle),
                    "getitem_ns": ns(cost * (1 - collate_share)),
                    "collate_ns": ns(cost * collate_share),
                    "cpu_ns": ns(cost * split[0]),
                    "process_cpu_ns": ns(cost * split[0]),
                    "children_cpu_ns": ns(cost * children),
                    "run_queue_ns": ns(cost * split[1]),
                    "blocked_ns": ns(cost * split[2]),
                    "major_fault_count": 0,
                    "minor_fault_count": 0,
                    "read_bytes": read_bytes,
                    "samples_count": 8,
                }
                for done, index, idle, by, cost in fetches
                if by == worker
            ]
            who = key if worker < 0 else (key[0], pids[worker], 6000 + pids[worker])
            script.add("fetch", made, who, rank)
        now = yields[-1][0] + yields[-1][4] + gap
    script.add("host", [{"time_ns": ns(START_SECONDS), "usable_cores_count": cores}], ("node", 90, 4900))
    script.now_seconds = max(script.now_seconds, now)
    return script


def _turns(left):
    """The workers by turns, as long as each has batches left."""
    left = list(left)
    while any(left):
        for worker, count in enumerate(left):
            if count:
                left[worker] -= 1
                yield worker


def _parallel(generator, begin, ready, workers, prefetch, service, consumer, batches, in_order, turns, in_turn):
    dispatched, done, makers, fetches = {}, {}, {}, []
    free, served = [ready] * workers, 0.0
    arrivals = []

    def dispatch(index, worker, time):
        nonlocal served
        cost = service(generator, worker, index)
        start = max(time, free[worker])
        if in_turn:
            served = max(start, served) + cost
            cost = served - start
        fetches.append((start + cost, index, max(0.0, time - free[worker]), worker, cost))
        free[worker] = start + cost
        makers[index], done[index] = worker, start + cost
        heapq.heappush(arrivals, (start + cost, index))
        dispatched[index] = time

    sent = 0
    for sent_now in range(min(workers * prefetch, batches)):
        dispatch(sent_now, next(turns), begin)
        sent += 1
    at, yields = begin, []
    for k in range(batches):
        index = k if in_order else heapq.heappop(arrivals)[1]
        time = max(at, done[index])
        work = consumer(generator, k)
        yields.append((time, time - at, index, makers[index], work))
        if sent < batches:
            dispatch(sent, next(turns) if in_order else makers[index], time)
            sent += 1
        at = time + work
    return yields, fetches


def _inline(generator, begin, service, consumer, batches, drawing):
    at, yields, fetches = begin, [], []
    for k in range(batches):
        cost, work = service(generator, -1, k) + (0.0 if k else drawing), consumer(generator, k)
        fetches.append((at + cost, k, None, -1, cost))
        yields.append((at + cost, cost, k, -1, work))
        at += cost + work
    return yields, fetches


def add_series(script, times, samples):
    """Add a series of stacks: pid -> the stack of its main thread at each time, in seconds."""
    frames, stacks = [], []

    def place(table, entry):
        if entry not in table:
            table.append(entry)
        return table.index(entry)

    processes = [
        {
            "pid": pid,
            "samples": [
                None if stack is None else place(stacks, [place(frames, one) for one in stack]) for stack in own
            ],
        }
        for pid, own in samples.items()
    ]
    return script.event(
        times[-1] + 0.5,
        "stack-series",
        ("node", 90, 4900),
        of_pid=MAIN[1],
        of_start_ticks=MAIN[2],
        times_ns=[ns(time) for time in times],
        frames=frames,
        stacks=stacks,
        processes=processes,
        cpu_seconds=0.2,
    )


def jittered(seconds, cv=0.05):
    """A service or consumer time with lognormal jitter: (generator, …) -> seconds."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda generator, *_: seconds * float(np.exp(generator.normal(-(sigma**2) / 2, sigma)))


def per_worker(seconds, cv=0.05):
    """Service times by worker."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda generator, worker, _: seconds[worker] * float(np.exp(generator.normal(-(sigma**2) / 2, sigma)))


def sample_process(
    script, seconds, key, role, *, private, rss, uss=None, worker=np.nan, loader=np.nan, rank=None, **more
):
    """The collector's samples of one process: arrays over `seconds`, bytes."""
    rows = [
        {
            "time_ns": ns(second),
            "process_pid": key[1],
            "process_start_ticks": key[2],
            "process_rank": np.nan if rank is None else rank,
            "role": role,
            "loader": loader,
            "worker": worker,
            "rss_bytes": rss[i],
            "pss_bytes": private[i],
            "private_dirty_bytes": private[i],
            "uss_bytes": private[i] if uss is None else uss[i],
            "swap_bytes": 0,
            "shm_bytes": 0,
            "alive": 1,
            **{name: values[i] for name, values in more.items()},
        }
        for i, second in enumerate(seconds)
    ]
    return script.add("process", rows, ("node", 90, 4900))


def sample_host(script, seconds, *, demand, total=24 * 2**30, limit=None, **more):
    """The collector's samples of the host: demand in bytes over `seconds`; with a limit, a cgroup's."""
    rows = [
        {
            "time_ns": ns(second),
            "memory_total_bytes": total,
            "memory_available_bytes": total - demand[i],
            "cgroup_limit_bytes": np.nan if limit is None else limit,
            "cgroup_anon_bytes": np.nan if limit is None else demand[i],
            "usable_cores_count": 8.0,
            **{name: values[i] for name, values in more.items()},
        }
        for i, second in enumerate(seconds)
    ]
    return script.add("host", rows, ("node", 90, 4900))
