"""Find what limits the workers: wall time of a fetch = CPU + run queue + blocked, and what it is blocked on.

The kernel function in which a thread waits (/proc/PID/wchan) shows what the thread is blocked on. The collector
records it at each tick for the main thread of each process, which is the one that fetches. The bytes that a worker
reads do not show it: they may come from the page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.child_processes import cpu_spent_ns, living_children
from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import steady_fetches
from collector.diagnosis.run.columns import (
    SECOND_NS,
    between,
    floats,
    host_samples,
    mean,
    median,
    peak,
    sampled,
    sampled_on,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.findings import Evidence, Fault, fact
from collector.units import number, percent

#: Shares of a fetch's wall time above which the cores are contended, the fetch computes, or it is blocked.
_QUEUED, _BUSY, _BLOCKED = 0.3, 0.6, 0.5
#: Fetch time of a slow worker over the others', beyond the error.
SLOW_RATIO = 1.25
#: Share of the usable cores in use, above which the contention is the run's own.
CORES_FILLED = 0.7
_CORES_FULL = 0.9  # share of the usable cores
_LEAST_PART = 0.1  # share of a fetch below which a part of it is left out
#: Latency (seconds) and rate (bytes/s) of slow storage: a rotating disk or a file server.
_REQUEST_SECONDS, _STORAGE_RATE = 0.01, 10e6
_READ_AHEAD_BYTES = 128 * 1024  # bytes of one request (Linux, VM_READAHEAD_PAGES)
_STORAGE_SHARE = 0.5  # share of the blocked time that storage must explain
_MIN_WAITS = 4  # samples of a waiting thread
_MAIN_SHARE = 0.5  # share of the samples that makes a wait the main one
_IN_TURN = 0.8  # share of the ticks with workers at a lock in which one worker reads a pipe
#: Kinds of waits, and how the names of their kernel functions begin; the first match counts.
_CHANNELS = {
    "child": "do_wait kernel_wait wait_consider __do_sys_wait",
    "sleep": "hrtimer_nanosleep do_nanosleep common_nsleep __x64_sys_clock_nano",
    "lock": "futex do_futex fcntl_setlk flock_lock posix_lock locks_ do_semtimedop rwsem down_",
    "pipe": "pipe_ anon_pipe fifo_pipe wait_for_partner",
    "network": "sk_wait inet tcp udp wait_woken skb_ __skb unix_ sock_ vsock rds_",
    "service": "poll_schedule do_poll do_sys_poll ep_poll do_epoll do_select io_cqring",
    "storage": "io_schedule folio_wait wait_on_page filemap bit_wait blk __bio submit_bio blkdev nfs rpc_wait "
    "fuse request_wait_answer p9_ v9fs ceph netfs cifs smb wait_for_response cl_ ll_ ext4 xfs btrfs jbd2 "
    "__lock_page do_swap iomap zfs cv_wait dio_ __iomap",
}
#: Kinds of waits that are for data.
READS = ("storage", "pipe", "network")
#: Each kind of wait in words.
WAITS = {
    "storage": "they read from storage",
    "pipe": "they read from a pipe",
    "network": "they read from the network",
    "lock": "they wait for a lock or another thread",
    "queue": "they wait for their turn to read one pipe (a multiprocessing.Queue, say)",
    "sleep": "they sleep (time.sleep or the like)",
    "child": "they wait for a child process",
    "service": "they wait for another process or a network service",
}
#: Waits whose cause is known to lie in the code of the dataset, or outside this machine's own work.
_FAULTS: dict[str, Fault] = {
    **dict.fromkeys(("lock", "pipe", "queue", "sleep", "child"), "your code"),
    **dict.fromkeys(("storage", "network"), "outside"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimit:
    """The limit of a loop's fetches, and its evidence.

    Attributes:
        by: `limited_by` of the findings, None if it is none of those.
        because: the same in words.
        evidence: the shares of a fetch's time.
        others: whether processes outside the run use the cores.
        waits_for: a key of `WAITS`, where fetches are mostly blocked and the cause is known.
        cpu_ratio, children_ratio, blocked_ratio: shares of a fetch's wall time, NaN if unknown. The share of
            children includes their waits for full cores.
        has_threads: whether other threads of the process that fetches compute in a fetch.
    """

    by: str | None
    because: str
    evidence: tuple[Evidence, ...]
    others: bool = False
    waits_for: str | None = None
    cpu_ratio: float = float("nan")
    children_ratio: float = float("nan")
    blocked_ratio: float = float("nan")
    has_threads: bool = False

    @property
    def fault(self) -> Fault | None:
        """Place of the cause; None if that is not known, as for fetches that compute."""
        if self.by == "oversubscribed":
            return "this machine" if self.others else "your settings"
        return "your settings" if self.by == "affinity" else _FAULTS.get(self.waits_for or "")


def worker_limit(loop: Loop, worker: int | None = None, *, fetches: pd.DataFrame | None = None) -> WorkerLimit:
    """Return what limits the steady fetches of a loop, or of one of its workers, or some of these `fetches`."""
    rows = steady_fetches(loop) if fetches is None else fetches
    if worker is not None:
        rows = rows[rows["worker"] == worker]
    cores = usable_cores(loop.tables, loop.main[0])
    if not np.nansum(floats(rows, "fetch_ns")) or not np.isfinite(floats(rows, "cpu_ns")).any():
        return WorkerLimit(by=None, because="the CPU time of the fetches is not known", evidence=())
    times = floats(rows, "time_ns")
    threads, process = _share(rows, "cpu_ns"), _share(rows, "process_cpu_ns")
    children = on_cpu = float(np.nan_to_num(_share(rows, "children_cpu_ns")))
    helpers = max(0.0, float(np.nan_to_num(process)) - float(np.nan_to_num(threads)))  # other threads of the worker
    helpers_ratio = helpers if helpers >= _LEAST_PART else 0.0
    queued, blocked = _share(rows, "run_queue_ns"), _share(rows, "blocked_ns")
    waiting = float(np.clip(blocked - children - helpers, 0.0, None))  # not for children or helpers, which compute
    shares = (
        ("fetch_cpu_ratio", threads),
        ("fetch_threads_cpu_ratio", helpers_ratio or float("nan")),
        ("fetch_children_cpu_ratio", children or float("nan")),
        ("fetch_run_queue_ratio", queued),
        ("fetch_blocked_ratio", waiting),
    )
    if children >= _LEAST_PART and (_cores_in_use(rows) >= _CORES_FULL * cores or _pressure(loop, rows) >= waiting):
        children, waiting = children + waiting, 0.0  # no counter has the time that a child waits for a core
    by, because, waits_for = _judge(loop, rows, max(threads, process), children, on_cpu, waiting, queued)
    others = False
    # Threads of a worker that compute wait for a core too, and the fetch is blocked until they are done.
    is_larger = queued >= waiting or helpers_ratio > 0
    if (
        queued >= _QUEUED and is_larger and fetches is not None
    ):  # what has the cores is known for the whole loop alone
        by, because, waits_for = None, f"fetches wait {percent(queued)} of their time for a core", None
    elif queued >= _QUEUED and is_larger and (worker is None or _queues_more(loop, worker)):
        in_use = _cores_of_run(loop, rows)
        are_free = cores_are_free(loop.tables, loop.main[0], float(times.min()), float(times.max()))
        allowed = peak(floats(_samples(loop, loop.fetches), "allowed_cores_count"))
        by, because = _limit_by_cores(queued, in_use, cores, allowed, are_free=are_free)
        others = by == "oversubscribed" and in_use < CORES_FILLED * cores
        waits_for = None
    return WorkerLimit(
        by=by,
        because=because,
        others=others,
        waits_for=waits_for,
        cpu_ratio=float(np.nan_to_num(threads)) + helpers_ratio,
        children_ratio=children,
        blocked_ratio=waiting,
        has_threads=helpers_ratio > 0,
        evidence=tuple(
            fact(name, round(value, 3), "steady fetches", n=len(rows))
            for name, value in shares
            if np.isfinite(value)
        ),
    )


def _queues_more(loop: Loop, worker: int) -> bool:
    """Return whether a worker is slower than the others by its waits for a core: all of them may wait.

    A worker that computes more waits more, too: without the waits it would still be slower.
    """
    rows = steady_fetches(loop)
    own, others = rows[rows["worker"] == worker], rows[rows["worker"] != worker]

    def more(column: str) -> float:
        return mean(floats(own, column)) - mean(floats(others, column))

    without_waits = mean(floats(own, "fetch_ns") - floats(own, "run_queue_ns"))
    is_slow_anyway = without_waits > SLOW_RATIO * mean(floats(others, "fetch_ns"))
    return more("run_queue_ns") >= _MAIN_SHARE * more("fetch_ns") and not is_slow_anyway


def usable_cores(tables: RunTables, host: str) -> float:
    """Return the cores that affinity and quota leave, NaN if unknown."""
    return median(floats(host_samples(tables, host), "usable_cores_count"))


def cores_are_free(tables: RunTables, host: str, begin_ns: float, end_ns: float) -> bool:
    """Return whether the usable cores were known to be partly idle in a window, whatever ran on them."""
    busy = floats(between(host_samples(tables, host), begin_ns, end_ns), "busy_cores_count")
    return bool(mean(busy) < CORES_FILLED * usable_cores(tables, host))


def cores_of_other_programs(loop: Loop) -> float:
    """Return the cores that programs outside the run used while a loop ran, NaN if unknown."""
    times, host = floats(loop.batches, "time_ns"), loop.main[0]
    busy = mean(floats(between(host_samples(loop.tables, host), times[0], times[-1]), "busy_cores_count"))
    return float(np.clip(busy - cores_used(loop.tables, host, times[0], times[-1]), 0, None))


def cores_per_rank(tables: RunTables, host: str) -> float:
    """Return the usable cores for each training process of a host."""
    return usable_cores(tables, host) / ranks_count(tables, host)


def ranks_count(tables: RunTables, host: str) -> int:
    """Return the number of training processes on a host, one at least."""
    return max(sum(key[0] == host for key in lifecycle_of(tables).mains), 1)


def _samples(loop: Loop, fetches: pd.DataFrame) -> pd.DataFrame:
    """Return the collector's samples of the processes that made these fetches."""
    process = loop.tables.stream("process")
    pids = fetches["pid"].unique()
    rows: pd.DataFrame = process[process["process_pid"].isin(pids) & (process["host"] == loop.main[0])]
    return rows


def _limit_by_cores(
    queued: float, in_use: float, cores: float, allowed: float, *, are_free: bool
) -> tuple[str | None, str]:
    """Return (`by`, `because`) of fetches that wait for a core: affinity, their own work, or other processes.

    While cores are free, a thread waits for one only until it is woken: that limits what sleeps often and shortly.
    """
    waiting = f"fetches wait {percent(queued)} of their time for a core"
    if allowed < cores:
        allows = f"the workers' affinity allows {number(allowed)} of {number(cores)} usable cores"
        return "affinity", f"{waiting}: {allows}"
    if are_free:
        return None, f"{waiting}, although cores are free: a thread that sleeps often waits each time it is woken"
    if in_use < CORES_FILLED * cores:
        get = f"the run's processes get {number(round(in_use, 2))} of {number(cores)} usable cores"
        return "oversubscribed", f"{waiting} while {get}: other processes use the rest"
    return "oversubscribed", waiting


def _judge(
    loop: Loop, rows: pd.DataFrame, cpu: float, children: float, on_cpu: float, blocked: float, queued: float
) -> tuple[str | None, str, str | None]:
    """Return (`by`, `because`, `waits_for`) of fetches whose waits for a core, a share `queued`, are not the cause.

    Children are on a core for `on_cpu` of a fetch, and wait for one the rest of `children`.
    """
    computing = float(np.nan_to_num(cpu)) + children
    if computing >= _BUSY and children - on_cpu >= _LEAST_PART:
        takes = f"child processes take {percent(min(children, 1.0))} of a fetch"
        return "cpu", f"{takes}: they run for {percent(on_cpu)} of it and wait for a core the rest of it", None
    if computing >= _BUSY:
        in_children = f", {percent(min(children, 1.0))} in child processes" if children >= 0.05 else ""
        return "cpu", f"fetches compute {percent(min(computing, 1.0))} of their time{in_children}", None
    if queued >= _QUEUED and queued > blocked:
        return (
            None,
            f"fetches compute {percent(computing)} of their time and wait {percent(queued)} for a core",
            None,
        )
    if blocked < _BLOCKED:
        return None, f"fetches mix computing ({percent(computing)}) and waiting ({percent(blocked)})", None
    blocked_text = f"fetches are blocked {percent(blocked)} of their time"
    waits_for = _waits_for(loop, rows)
    if waits_for == "service" and np.nansum(floats(rows, "children_cpu_ns")) > 0:
        waits_for = "child"  # subprocess waits for a child's output by poll(2)
    if not waits_for and _storage_explains(rows):
        waits_for = "storage"
    if waits_for:
        return "io" if waits_for in (*READS, "queue") else None, f"{blocked_text}: {WAITS[waits_for]}", waits_for
    if waits_for is None:
        return None, f"{blocked_text}; too few samples show what they wait for", None
    return None, f"{blocked_text}, waiting for several things", None


def _waits_for(loop: Loop, rows: pd.DataFrame) -> str | None:
    """Return the main wait of the fetching threads within their fetches, as `main_wait` does.

    It is `queue` if one worker reads a pipe while others are at a lock: the reader of a multiprocessing.Queue
    holds its lock.
    """
    samples = _samples(loop, rows)
    samples = samples[samples["wait_channel"].notna()]
    within: list[pd.DataFrame] = []
    for pid, of_process in samples.groupby("process_pid"):
        fetches = rows[rows["pid"] == pid].sort_values("time_ns")
        ends, times = floats(fetches, "time_ns"), floats(of_process, "time_ns")
        at = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
        inside = (ends - floats(fetches, "fetch_ns"))[at] <= times
        within.append(of_process[inside & (times <= ends[at])])
    if not within:
        return None
    samples = pd.concat(within)
    wait = main_wait(samples["wait_channel"])
    if wait != "lock":
        return wait
    kinds = samples["wait_channel"].map(_kind)
    at_lock, readers = ((kinds == kind).groupby(samples["time_ns"]).sum() for kind in ("lock", "pipe"))
    return "queue" if (readers[at_lock > 0] == 1).mean() >= _IN_TURN else "lock"


def wait_in_next(loop: Loop) -> str | None:
    """Return the main wait of the thread that trains while it waits for batches, as `main_wait` does."""
    samples = sampled(loop.tables, loop.main)
    samples = samples[samples["wait_channel"].notna()]
    yields, times = floats(loop.batches, "time_ns"), floats(samples, "time_ns")
    at = np.minimum(np.searchsorted(yields, times), len(yields) - 1)
    inside = ((yields - floats(loop.batches, "wait_ns"))[at] <= times) & (times <= yields[at])
    return main_wait(samples.loc[inside, "wait_channel"])


def _storage_explains(rows: pd.DataFrame) -> bool:
    """Return whether slow storage would need half the blocked time for the bytes and pages that were read.

    It explains no more of a fetch than that was blocked: a worker's first one reads libraries too.
    """
    bytes_read, faults, blocked = (
        np.nan_to_num(floats(rows, name)) for name in ("storage_bytes", "major_fault_count", "blocked_ns")
    )
    requests = faults + np.ceil(bytes_read / _READ_AHEAD_BYTES)
    needed = requests * _REQUEST_SECONDS + bytes_read / _STORAGE_RATE
    explained = np.minimum(needed, blocked / SECOND_NS)
    return bool(explained.sum() >= _STORAGE_SHARE * blocked.sum() / SECOND_NS)


def _pressure(loop: Loop, rows: pd.DataFrame) -> float:
    """Return the share of time in which a task of the host waited for a core (PSI, cpu some); 0 if unknown."""
    fetch_ends = floats(rows, "time_ns")
    samples = between(host_samples(loop.tables, loop.main[0]), fetch_ends.min(), fetch_ends.max())
    return float(np.nan_to_num(mean(floats(samples, "cpu_some_avg10_ratio"))))


def _share(rows: pd.DataFrame, column: str) -> float:
    values = floats(rows, column)
    known = np.isfinite(values)
    if not known.any():
        return float("nan")
    return float(np.nansum(values)) / max(float(np.nansum(floats(rows, "fetch_ns")[known])), 1.0)


def cores_used(
    tables: RunTables, host: str, begin_ns: float, end_ns: float, *, without: Collection[int] = ()
) -> float:
    """Return the cores that the processes of the run on a host used in a window, without those of some pids."""
    process = sampled_on(tables, host)
    process = process[~process["process_pid"].isin(without)]
    times = floats(process, "time_ns")
    within = times[np.isfinite(floats(process, "cpu_ns")) & (times >= begin_ns) & (times <= end_ns)]
    return cpu_spent_ns(process, begin_ns, end_ns) / max(float(np.ptp(within)), 1.0) if len(within) else 0.0


def _cores_of_run(loop: Loop, rows: pd.DataFrame) -> float:
    """Return the cores that the run used while these fetches were made: its training computes as its workers do.

    Workers and their children count by the records of the fetches, since a short-lived one is sampled too seldom.
    """
    times, own = floats(rows, "time_ns"), _cores_in_use(rows)
    window = loop.main[0], float(times.min()), float(times.max())
    if not loop.num_workers:
        return float(np.maximum(own, cores_used(loop.tables, *window)))
    pids = {int(pid) for pid in rows["pid"].unique()}
    children = set[int]().union(*(living_children(loop.tables, loop.main[0], pid) for pid in pids))
    return own + cores_used(loop.tables, *window, without=pids | children)


def _cores_in_use(rows: pd.DataFrame) -> float:
    """Return the cores that the workers of the loop and their children used within the epochs."""
    times = floats(rows, "time_ns")
    epochs = rows.groupby("epoch")["time_ns"].agg(lambda values: float(values.max() - values.min()))
    span = float(epochs.sum())
    worker_ns = np.fmax(floats(rows, "cpu_ns"), floats(rows, "process_cpu_ns"))
    used = float(np.nansum(worker_ns) + np.nansum(floats(rows, "children_cpu_ns")))
    return used / span if span > SECOND_NS / 10 and len(times) else float("nan")


def main_wait(channels: Iterable[object]) -> str | None:
    """Return a key of `WAITS`, from the kernel functions in which the sampled threads waited.

    It is empty where the waits are for several things, None where too few were sampled.
    """
    kinds = Counter(_kind(str(channel)) for channel in channels if channel)
    count = kinds.total()
    if count < _MIN_WAITS:
        return None
    reads = {kind: kinds[kind] for kind in READS}
    if sum(reads.values()) >= _MAIN_SHARE * count:
        return max(reads, key=reads.__getitem__)
    largest, times = kinds.most_common(1)[0]
    return largest if largest in WAITS and times >= _MAIN_SHARE * count else ""


def _kind(channel: str) -> str:
    return next((kind for kind, begins in _CHANNELS.items() if channel.startswith(tuple(begins.split()))), "other")
