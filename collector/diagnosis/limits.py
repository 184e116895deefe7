"""What limits the workers: wall time of a fetch = CPU + run queue + blocked."""

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
from collector.quantities import number, percent

_QUEUED = 0.3  # of the wall time: the cores are contended
_BUSY = 0.6
_BLOCKED = 0.5
_READ_BYTES = 4096  # per fetch; the meter's own reads of /proc stay far below
#: Of the usable cores in use: the contention is the run's own.
FILLED = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimit:
    """What limits the fetches of a loop (`by` as in the findings, None if it can't be told), and why.

    `others` tells that the cores are in use by what is no part of the run.
    """

    by: str | None
    because: str
    usable_cores: float
    evidence: tuple[Evidence, ...]
    others: bool = False


def worker_limit(tables: RunTables, loop: Loop, worker: int | None = None) -> WorkerLimit:
    """What limits the steady fetches of a loop, or of one of its workers."""
    rows = steady_fetches(loop)
    if worker is not None:
        rows = rows[rows["worker"] == worker]
    wall = float(np.nansum(floats(rows, "fetch_ns")))
    cores = usable_cores(tables, loop.main[0])
    if not wall or not np.isfinite(floats(rows, "cpu_ns")).any():
        return WorkerLimit(
            by=None, because="the CPU time of the fetches is not known", usable_cores=cores, evidence=()
        )
    children = float(np.nan_to_num(_share(rows, "children_cpu_ns", wall)))  # computing, not waiting for them
    threads = _share(rows, "cpu_ns", wall) + children
    process = _share(rows, "process_cpu_ns", wall) + children
    queued, blocked = _share(rows, "run_queue_ns", wall), _share(rows, "blocked_ns", wall)
    blocked = max(0.0, blocked - children)
    by, because = _judge(rows, max(threads, process), blocked)
    others = False
    if queued >= _QUEUED:
        in_use = _cores_in_use(rows)
        by, because = _crowded(queued, in_use, cores, _allowed_cores(tables, loop))
        others = by == "oversubscribed" and in_use < FILLED * cores
    return WorkerLimit(
        by=by,
        because=because,
        usable_cores=cores,
        others=others,
        evidence=tuple(
            Evidence(name=name, value=round(value, 3), unit="ratio", n=len(rows), window="steady fetches")
            for name, value in (
                ("fetch_cpu_ratio", threads),
                ("fetch_run_queue_ratio", queued),
                ("fetch_blocked_ratio", blocked),
            )
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
    """The training processes of that host, one at least."""
    return max(sum(key[0] == host for key in Lifecycle(tables).mains), 1)


def _allowed_cores(tables: RunTables, loop: Loop) -> float:
    """The most cores that the affinity of a worker of the loop allows, NaN if unknown."""
    process = tables.stream("process")
    pids = loop.fetches["pid"].unique()
    mine = process[process["process_pid"].isin(pids) & (process["host"] == loop.main[0])]
    allowed = floats(mine, "allowed_cores_count")
    return float(np.nanmax(allowed)) if np.isfinite(allowed).any() else float("nan")


def _crowded(queued: float, in_use: float, cores: float, allowed: float) -> tuple[str, str]:
    """Runnable fetches wait for a core: because theirs are few, full of their own work, or of others'."""
    waiting = f"fetches wait {percent(queued)} of their time for a core"
    if allowed < cores:
        allows = f"the workers' affinity allows {number(allowed)} of {number(cores)} usable cores"
        return "affinity", f"{waiting}: {allows}"
    if in_use < FILLED * cores:
        get = f"the workers get {number(in_use)} of {number(cores)}"
        return "oversubscribed", f"{waiting} while {get}: others use the rest"
    return "oversubscribed", waiting


def _judge(rows: pd.DataFrame, cpu: float, blocked: float) -> tuple[str | None, str]:
    if np.nanmax([cpu, 0.0]) >= _BUSY:
        return "cpu", f"fetches compute {percent(min(cpu, 1.0))} of their time"
    if blocked >= _BLOCKED:
        reads = mean(floats(rows, "read_bytes")) >= _READ_BYTES or mean(floats(rows, "major_fault_count")) >= 1
        if reads:
            return "io", f"fetches are blocked {percent(blocked)} of their time while they read"
        return None, f"fetches are blocked {percent(blocked)} of their time, on no file: network, a lock or sleep"
    return None, "fetches mix computing and waiting"


def _share(rows: pd.DataFrame, column: str, wall: float) -> float:
    values = floats(rows, column)
    known = np.isfinite(values)
    if not known.any():
        return float("nan")
    return float(np.nansum(values)) / max(float(np.nansum(floats(rows, "fetch_ns")[known])), 1.0)


def _cores_in_use(rows: pd.DataFrame) -> float:
    """CPU time of all workers of the loop per second, within the epochs."""
    times = floats(rows, "time_ns")
    epochs = rows.groupby("epoch")["time_ns"].agg(lambda values: float(values.max() - values.min()))
    span = float(epochs.sum())
    used = float(np.nansum(np.fmax(floats(rows, "cpu_ns"), floats(rows, "process_cpu_ns"))))
    used += float(np.nansum(floats(rows, "children_cpu_ns")))
    return used / span if span > SECOND_NS / 10 and len(times) else float("nan")
