"""The figures of a run at a glance; what was not measured is None."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS, floats, last, peak, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.speed_ups import exposed_summary
from collector.diagnosis.tables import RunTables, step_units
from collector.diagnosis.trends import Floats
from training_harness.records import ROLE_MAIN, ROLE_WORKER, STEP_UNITS, UNIT_OPTIMIZER

_WHO = ["host", "pid", "start_ticks"]
_MOSTLY = 0.5


def summarise(tables: RunTables) -> dict[str, Any]:
    """Peaks in bytes, throughput per second, what the loops waited for, Tidegauge's own cost."""
    return {
        "peak": _peaks(tables),
        "throughput": _throughput(tables),
        "data_wait_ratio": data_wait_ratio(tables),
        "outside_step": outside_step(tables),
        "exposed_stall": exposed_summary(tables),
        "overhead": _overhead(tables.stream("agent")),
    }


def step_unit(tables: RunTables) -> str | None:
    """Return what ends a step in this run, a word of `records.STEP_UNITS`; None without steps."""
    units = step_units(tables.stream("step"))
    return STEP_UNITS[int(units[0])] if len(units) else None


def steps_count(tables: RunTables) -> int:
    """Return how many steps the run took.

    Ranks step together, so the rank with the most counts; trainings without ranks are independent and add up.
    """
    steps = Lifecycle(tables).of_last_attempt(tables.stream("step"))
    if steps.empty:
        return 0
    made = steps.groupby(_WHO).agg(count=("step", "max"), rank=("rank", "first"))
    counts = pd.Series(np.nan_to_num(floats(made, "count") + 1))
    per_rank = counts.groupby(np.nan_to_num(floats(made, "rank"), nan=-1.0)).sum()
    return int(per_rank.max())


def data_wait_ratio(tables: RunTables) -> float | None:
    """Return the time in DataLoaders over the time of the steps; in a run without steps, over the loop's time.

    None without a DataLoader: how such a loop gets its data is not seen.
    """
    if tables.stream("batch").empty:
        return None
    step = tables.stream("step")
    duration, wait = floats(step, "duration_ns"), floats(step, "data_wait_ns")
    loads = step.assign(known=np.isfinite(wait)).groupby(_WHO)["known"].transform("any").to_numpy(dtype=bool)
    timed = np.isfinite(duration) & loads  # before its first DataLoader a process waited for none
    if duration[timed].sum() > 0:
        return float(np.nansum(wait[timed]) / duration[timed].sum())
    return _batch_wait_ratio(tables.stream("batch"))


def outside_step(tables: RunTables) -> dict[str, float | None] | None:
    """Return the host's time outside forward, backward and optimizer in loops without a DataLoader, if any.

    This time holds the loop's own loading, its logging and all else. It is given per step, with its share of the
    steps' time and how much of it the thread computed.
    """
    step = tables.stream("step")
    alone = floats(step, "batches_count") == 0
    alone &= np.isfinite(floats(step, "forward_ns")) & np.isfinite(floats(step, "duration_ns"))
    rows = step[alone & ~np.isfinite(floats(step, "data_wait_ns"))]
    outside, cpu = floats(rows, "other_ns"), floats(rows, "outside_cpu_ns")
    spent = float(floats(rows, "duration_ns").sum())
    if spent <= 0:
        return None
    read = np.isfinite(cpu)
    return {
        "ratio": float(outside.sum()) / spent,
        "cpu_ratio": min(1.0, float(cpu[read].sum() / max(outside[read].sum(), 1.0))) if read.any() else None,
        "seconds": float(outside.mean()) / SECOND_NS,
        "steps": float(len(rows)),
    }


def _batch_wait_ratio(batch: pd.DataFrame) -> float | None:
    """Time in the DataLoader over the loop's time, between the first and the last batch of each epoch."""
    if batch.empty:
        return None
    rows = batch.assign(wait=floats(batch, "wait_ns"), time=floats(batch, "time_ns"))
    groups = rows.groupby([*_WHO, "loader", "epoch"])
    waits = groups["wait"].sum() - groups["wait"].first()
    spans = groups["time"].max() - groups["time"].min()
    return float(waits.sum() / spans.sum()) if spans.sum() > 0 else None


def _peaks(tables: RunTables) -> dict[str, float | None]:
    host, process = tables.stream("host"), tables.stream("process")
    roles = floats(process, "role")
    mains, workers = process[roles == ROLE_MAIN], process[roles == ROLE_WORKER]
    device = tables.stream("device_memory")
    return {
        "host_used_bytes": _known(
            peak(floats(host, "memory_total_bytes") - floats(host, "memory_available_bytes"))
        ),
        "cgroup_demand_bytes": _known(
            peak(floats(host, "cgroup_anon_bytes") + np.nan_to_num(floats(host, "cgroup_shmem_bytes")))
        ),
        "shm_used_bytes": _known(peak(floats(host, "shm_used_bytes"))),
        "run_pss_bytes": _peak_sum(process, "pss_bytes"),
        "main_rss_bytes": _known(peak(floats(mains, "rss_bytes"))),
        "main_private_dirty_bytes": _known(peak(floats(mains, "private_dirty_bytes"))),
        "worker_rss_bytes": _known(peak(floats(workers, "rss_bytes"))),
        "worker_private_dirty_bytes": _known(peak(floats(workers, "private_dirty_bytes"))),
        "device_allocated_bytes": _known(peak(floats(device, "allocated_peak_bytes"))),
        "device_reserved_bytes": _known(peak(floats(device, "reserved_peak_bytes"))),
    }


def _peak_sum(process: pd.DataFrame, column: str) -> float | None:
    """The highest sum over the processes; each holds its last reading until the next one or its end.

    Readings are rationed, so those of one tick alone do not add up to the run.
    """
    ended = floats(process, "alive") == 0
    rows = process.assign(value=np.where(ended, 0.0, floats(process, column)))
    rows = rows[np.isfinite(rows["value"])]
    if not (rows["value"] > 0).any():
        return None
    held = rows.groupby(["host", "process_pid", "process_start_ticks"], dropna=False)["value"]
    changes = rows["value"] - held.shift().fillna(0.0)
    return float(changes.groupby(rows["time_ns"]).sum().cumsum().max())


def _throughput(tables: RunTables) -> dict[str, Any]:
    batch, step = (Lifecycle(tables).of_last_attempt(tables.stream(name)) for name in ("batch", "step"))
    chosen = training_loaders(tables)
    trained = _of_loaders(batch, chosen)
    samples = floats(trained, "samples_count")
    return {
        "steps_per_second": _per_second(step, np.ones(len(step)), per_rank=True),
        "batches_per_second": _per_second(batch, np.ones(len(batch))),
        "samples_per_second": _per_second(trained, samples) if np.isfinite(samples).any() else None,
        "training_loaders": None if chosen is None else sorted({loader for *_, loader in chosen}),
    }


def _of_loaders(batch: pd.DataFrame, chosen: set[tuple[str, int, int, int]] | None) -> pd.DataFrame:
    """Return the batches of these loaders, of all where none are chosen."""
    if chosen is None or batch.empty:
        return batch
    keys = [*_WHO, "loader"]
    wanted = pd.DataFrame(sorted(chosen), columns=keys).assign(is_wanted=True)
    marked = batch[keys].merge(wanted, how="left", on=keys)
    return batch[marked["is_wanted"].notna().to_numpy()]


def training_loaders(tables: RunTables) -> set[tuple[str, int, int, int]] | None:
    """Return (host, pid, start ticks, loader) of the loaders whose batches an optimizer steps on.

    Between two steps there may be a validation, but the batch before a step is one of training. None where no
    optimizer steps: there each batch counts. Where most steps have no batch at all, their data come from elsewhere.
    """
    step = tables.stream("step")
    if step.empty or step_units(step)[0] < UNIT_OPTIMIZER:
        return None
    found: set[tuple[str, int, int, int]] = set()
    for _, steps in step.groupby(_WHO):
        host, pid, ticks = steps[_WHO].iloc[0]
        key = (str(host), int(pid), int(ticks))
        batches, ends = written(tables, "batch", key), floats(steps, "time_ns")
        within = np.searchsorted(ends, floats(batches, "time_ns"))
        rows = pd.DataFrame({"step": within, "loader": floats(batches, "loader")})[within < len(ends)]
        latest = rows.groupby("step")["loader"].last()
        if len(latest) < _MOSTLY * len(ends):
            continue
        for loader in np.unique(floats(rows, "loader")):
            steps_with = rows.loc[rows["loader"] == loader, "step"].nunique()
            if (latest == loader).sum() >= _MOSTLY * steps_with or steps_with >= _MOSTLY * len(ends):
                found.add((*key, int(loader)))
    return found


def _per_second(rows: pd.DataFrame, counts: np.ndarray[Any, Any], *, per_rank: bool = False) -> float | None:
    """Counts per second from the first to the last record, over all processes, or of the fastest (`per_rank`)."""
    if len(rows) < 2:
        return None
    table = rows.assign(count=np.nan_to_num(counts), time=floats(rows, "time_ns"))
    groups = table.groupby(_WHO)
    made = (groups["count"].sum() - groups["count"].first()).to_numpy()
    begins, ends = groups["time"].first().to_numpy(), groups["time"].last().to_numpy()
    lasting = ends > begins
    if not lasting.any():
        return None
    if per_rank:
        return float((made[lasting] / (ends - begins)[lasting]).max() * SECOND_NS)
    return float(made.sum() / _covered(begins, ends) * SECOND_NS)


def _covered(begins: Floats, ends: Floats) -> float:
    """Return how long at least one of these spans lasts: trainings may follow each other."""
    order = np.argsort(begins)
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends[order])[:-1]])
    return float(np.maximum(ends[order] - np.maximum(begins[order], reached), 0.0).sum())


def _overhead(agent: pd.DataFrame) -> dict[str, float | None]:
    times = floats(agent, "time_ns")
    span = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    return {
        "collector_cpu_ratio": _share(floats(agent, "cpu_ns"), span),
        "smaps_cpu_ratio": _share(floats(agent, "smaps_ns"), span),
        "collector_rss_bytes": _known(peak(floats(agent, "rss_bytes"))),
        "interval_seconds": _known(float(np.nanmedian(floats(agent, "interval_ns"))) / SECOND_NS)
        if np.isfinite(floats(agent, "interval_ns")).any()
        else None,
        "ingest_lag_seconds": _known(last(floats(agent, "ingest_lag_ns")) / SECOND_NS),
    }


def _share(spent: np.ndarray[Any, Any], span: float) -> float | None:
    known = spent[np.isfinite(spent)]
    return float(known[-1] - known[0]) / span if len(known) > 1 and span > 0 else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
