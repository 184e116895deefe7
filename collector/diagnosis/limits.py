"""Find what limits the workers: wall time of a fetch = CPU + run queue + blocked, and what it is blocked on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.findings import Evidence
from collector.diagnosis.frames import SECOND_NS, floats, mean, median
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.loops import Loop
from collector.diagnosis.pace import steady_fetches
from collector.diagnosis.tables import RunTables
from collector.diagnosis.wait_channels import READS, WAITS, mostly
from collector.quantities import number, percent

_QUEUED = 0.3  # of the wall time: the cores are contended
_BUSY = 0.6
_BLOCKED = 0.5
#: Of the usable cores in use: the contention is the run's own.
FILLED = 0.7
_FULL = 0.9  # of the usable cores
_PART = 0.1  # of a fetch
#: Latency of one request to slow storage, and its rate: a rotating disk, or a file server (seconds, bytes/s).
_REQUEST_SECONDS, _STORAGE_RATE = 0.01, 10e6
_READ_AHEAD_BYTES = 128 * 1024  # of one request (Linux, VM_READAHEAD_PAGES)
_EXPLAINED = 0.5  # of the blocked time


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimit:
    """The limit of a loop's fetches, and its evidence.

    Attributes:
        by: as in the findings, None if it is none of these.
        because: the same in words.
        usable_cores: NaN if unknown.
        evidence: the shares of a fetch's time.
        others: the cores are in use by what is no part of the run.
        waits_for: a key of `WAITS`, where fetches are mostly blocked and it is known on what.
        cpu_ratio, children_ratio, blocked_ratio: shares of a fetch's wall time, NaN if unknown; what children take
            includes their waiting for cores that are full.
    """

    by: str | None
    because: str
    usable_cores: float
    evidence: tuple[Evidence, ...]
    others: bool = False
    waits_for: str | None = None
    cpu_ratio: float = float("nan")
    children_ratio: float = float("nan")
    blocked_ratio: float = float("nan")


def worker_limit(tables: RunTables, loop: Loop, worker: int | None = None) -> WorkerLimit:
    """Return what limits the steady fetches of a loop, or of one of its workers."""
    rows = steady_fetches(loop)
    if worker is not None:
        rows = rows[rows["worker"] == worker]
    wall = float(np.nansum(floats(rows, "fetch_ns")))
    cores = usable_cores(tables, loop.main[0])
    if not wall or not np.isfinite(floats(rows, "cpu_ns")).any():
        return WorkerLimit(
            by=None, because="the CPU time of the fetches is not known", usable_cores=cores, evidence=()
        )
    threads, process = _share(rows, "cpu_ns", wall), _share(rows, "process_cpu_ns", wall)
    children = float(np.nan_to_num(_share(rows, "children_cpu_ns", wall)))
    helpers = max(0.0, float(np.nan_to_num(process)) - float(np.nan_to_num(threads)))  # other threads of the worker
    told_helpers = helpers if helpers >= _PART else 0.0
    queued = _share(rows, "run_queue_ns", wall)
    blocked = _share(rows, "blocked_ns", wall)
    waiting = float(np.clip(blocked - children - helpers, 0.0, None))  # for none of these, which compute
    shares = (
        ("fetch_cpu_ratio", threads),
        ("fetch_threads_cpu_ratio", told_helpers or float("nan")),
        ("fetch_children_cpu_ratio", children or float("nan")),
        ("fetch_run_queue_ratio", queued),
        ("fetch_blocked_ratio", waiting),
    )
    if children >= _PART and (_cores_in_use(rows) >= _FULL * cores or _pressure(tables, loop, rows) >= waiting):
        children, waiting = children + waiting, 0.0  # a child waits for a core too, which nothing counts
    by, because, waits_for = _judge(tables, loop, rows, max(threads, process), children, waiting)
    others = False
    if queued >= _QUEUED:
        in_use = _cores_in_use(rows)
        by, because = _crowded(queued, in_use, cores, _allowed_cores(tables, loop))
        others = by == "oversubscribed" and in_use < FILLED * cores
        waits_for = None
    return WorkerLimit(
        by=by,
        because=because,
        usable_cores=cores,
        others=others,
        waits_for=waits_for,
        cpu_ratio=float(np.nan_to_num(threads)) + told_helpers,
        children_ratio=children,
        blocked_ratio=waiting,
        evidence=tuple(
            Evidence(name=name, value=round(value, 3), unit="ratio", n=len(rows), window="steady fetches")
            for name, value in shares
            if np.isfinite(value)
        ),
    )


def usable_cores(tables: RunTables, host: str) -> float:
    """Cores that affinity and quota leave, NaN if unknown."""
    samples = tables.stream("host")
    return median(floats(samples[samples["host"] == host], "usable_cores_count"))


def cores_per_rank(tables: RunTables, host: str) -> float:
    """Usable cores for one training process of that host."""
    return usable_cores(tables, host) / ranks_count(tables, host)


def ranks_count(tables: RunTables, host: str) -> int:
    """Number of training processes on that host, one at least."""
    return max(sum(key[0] == host for key in Lifecycle(tables).mains), 1)


def _allowed_cores(tables: RunTables, loop: Loop) -> float:
    """Return the most cores that the affinity of a worker of the loop allows, NaN if unknown."""
    mine = _samples(tables, loop, loop.fetches)
    allowed = floats(mine, "allowed_cores_count")
    return float(np.nanmax(allowed)) if np.isfinite(allowed).any() else float("nan")


def _samples(tables: RunTables, loop: Loop, fetches: pd.DataFrame) -> pd.DataFrame:
    """Return the collector's samples of the processes that made these fetches."""
    process = tables.stream("process")
    pids = fetches["pid"].unique()
    rows: pd.DataFrame = process[process["process_pid"].isin(pids) & (process["host"] == loop.main[0])]
    return rows


def _crowded(queued: float, in_use: float, cores: float, allowed: float) -> tuple[str, str]:
    """Tell why runnable fetches wait for a core: theirs are few, full of their own work, or of others'."""
    waiting = f"fetches wait {percent(queued)} of their time for a core"
    if allowed < cores:
        allows = f"the workers' affinity allows {number(allowed)} of {number(cores)} usable cores"
        return "affinity", f"{waiting}: {allows}"
    if in_use < FILLED * cores:
        get = f"the workers get {number(in_use)} of {number(cores)}"
        return "oversubscribed", f"{waiting} while {get}: others use the rest"
    return "oversubscribed", waiting


def _judge(
    tables: RunTables, loop: Loop, rows: pd.DataFrame, cpu: float, children: float, blocked: float
) -> tuple[str | None, str, str | None]:
    """Return (`by`, `because`, `waits_for`) of fetches that do not queue for cores."""
    computing = float(np.nan_to_num(cpu)) + children
    if computing >= _BUSY:
        in_children = f", {percent(min(children, 1.0))} in child processes" if children >= 0.05 else ""
        return "cpu", f"fetches compute {percent(min(computing, 1.0))} of their time{in_children}", None
    if blocked < _BLOCKED:
        return None, f"fetches mix computing ({percent(computing)}) and waiting ({percent(blocked)})", None
    told = f"fetches are blocked {percent(blocked)} of their time"
    waits_for = _waits_for(tables, loop, rows)
    if waits_for == "service" and np.nansum(floats(rows, "children_cpu_ns")) > 0:
        waits_for = "child"  # its output is waited for by poll(2)
    if not waits_for and _storage_explains(rows):
        waits_for = "storage"
    if waits_for:
        return "io" if waits_for in READS else None, f"{told}: {WAITS[waits_for]}", waits_for
    if waits_for is None:
        return None, f"{told}; where they wait was not sampled often enough to say for what", None
    return None, f"{told}, waiting for several things", None


def _waits_for(tables: RunTables, loop: Loop, rows: pd.DataFrame) -> str | None:
    """Return what the fetching threads mostly wait for within their fetches, as `mostly` does."""
    samples = _samples(tables, loop, rows)
    samples = samples[samples["wait_channel"].notna()]
    within: list[object] = []
    for pid, mine in samples.groupby("process_pid"):
        made = rows[rows["pid"] == pid].sort_values("time_ns")
        ends, times = floats(made, "time_ns"), floats(mine, "time_ns")
        at = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
        inside = (ends - floats(made, "fetch_ns"))[at] <= times
        within.extend(mine.loc[inside & (times <= ends[at]), "wait_channel"])
    return mostly(within)


def _storage_explains(rows: pd.DataFrame) -> bool:
    """Return whether slow storage needs half the blocked time for the bytes and pages that it gave."""
    bytes_read = np.nan_to_num(mean(floats(rows, "storage_bytes")))
    faults = np.nan_to_num(mean(floats(rows, "major_fault_count")))
    requests = faults + np.ceil(bytes_read / _READ_AHEAD_BYTES)
    needed = requests * _REQUEST_SECONDS + bytes_read / _STORAGE_RATE
    return bool(needed >= _EXPLAINED * mean(floats(rows, "blocked_ns")) / SECOND_NS)


def _pressure(tables: RunTables, loop: Loop, rows: pd.DataFrame) -> float:
    """Share of the time in which a task of the host waited for a core (PSI, cpu some); 0 if unknown."""
    samples, made = tables.stream("host"), floats(rows, "time_ns")
    times = floats(samples, "time_ns")
    inside = (samples["host"] == loop.main[0]) & (times >= made.min()) & (times <= made.max())
    return float(np.nan_to_num(mean(floats(samples[inside], "cpu_some_avg10_ratio"))))


def _share(rows: pd.DataFrame, column: str, wall: float) -> float:
    values = floats(rows, column)
    known = np.isfinite(values)
    if not known.any():
        return float("nan")
    return float(np.nansum(values)) / max(float(np.nansum(floats(rows, "fetch_ns")[known])), 1.0)


def _cores_in_use(rows: pd.DataFrame) -> float:
    """CPU time of all workers of the loop and of their children per second, within the epochs."""
    times = floats(rows, "time_ns")
    epochs = rows.groupby("epoch")["time_ns"].agg(lambda values: float(values.max() - values.min()))
    span = float(epochs.sum())
    own = np.fmax(floats(rows, "cpu_ns"), floats(rows, "process_cpu_ns"))
    used = float(np.nansum(own) + np.nansum(floats(rows, "children_cpu_ns")))
    return used / span if span > SECOND_NS / 10 and len(times) else float("nan")
