"""The main figures of a run; a figure that was not measured is None."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from collector.diagnosis.deaths.last_minute import earlier_workers, last_states, to_records
from collector.diagnosis.loading.loaders import loops, samples_of
from collector.diagnosis.run.columns import (
    PROCESS,
    SECOND_NS,
    WRITER,
    by_process,
    finite,
    floats,
    last,
    median,
    origin_ns,
    peak,
    written,
)
from collector.diagnosis.run.host_memory import binding_limit
from collector.diagnosis.run.lifecycle import Status, lifecycle_of
from collector.diagnosis.run.tables import RunTables, once, step_units
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.throughput import Slowdown, Start, slowdown, start
from collector.diagnosis.tuning.stage_speedup import WaitSummary, wait_summaries
from collector.store import queries
from collector.units import is_known
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_WORKER, STEP_UNITS, UNIT_OPTIMIZER

#: Share of the steps above which a loader counts as the one that feeds the training.
_MAJORITY_RATIO = 0.5


class Peaks(TypedDict):
    """Highest memory in use, in bytes; docs/report.md says of what."""

    host_used_bytes: float | None
    cgroup_demand_bytes: float | None
    shm_used_bytes: float | None
    run_pss_bytes: float | None
    main_rss_bytes: float | None
    main_private_dirty_bytes: float | None
    worker_rss_bytes: float | None
    worker_private_dirty_bytes: float | None
    device_allocated_bytes: float | None
    device_reserved_bytes: float | None


class Throughput(TypedDict):
    """Rates per second, and the loaders whose samples count; None if all do."""

    steps_per_second: float | None
    batches_per_second: float | None
    samples_per_second: float | None
    training_loaders: list[int] | None
    slowdown: Slowdown | None


class OutsideStep(TypedDict):
    """Host time outside forward, backward and optimizer: share of step time, share computing, seconds per step."""

    ratio: float
    cpu_ratio: float | None
    seconds: float
    steps: float


class Overhead(TypedDict):
    """The cost of the collector; ratios are of one core."""

    collector_cpu_ratio: float | None
    smaps_cpu_ratio: float | None
    collector_rss_bytes: float | None
    collector_private_dirty_bytes: float | None
    interval_seconds: float | None
    ingest_lag_seconds: float | None


class LastState(TypedDict):
    """A process in its last minute, in a run that died: the memory it held, and its progress."""

    host: str
    pid: int
    start_ticks: int
    role: str
    rank: int | None
    loader: int | None
    worker: int | None
    seconds: float | None
    held_bytes: int | None
    held_rise_bytes: int | None
    rss_bytes: int | None
    pss_bytes: int | None
    private_dirty_bytes: int | None
    swap_bytes: int | None
    step: int | None
    batch: int | None
    phase: str | None


class Machine(TypedDict):
    """The hosts of a run: their number, and of the smallest one usable cores, memory and the memory of each GPU."""

    hosts: int
    cores: float | None
    memory_bytes: float | None
    gpus_bytes: list[float]


class Summary(TypedDict):
    """The main figures of a run, as the report has them."""

    peak: Peaks
    start: Start | None
    throughput: Throughput
    data_wait_ratio: float | None
    outside_step: OutsideStep | None
    exposed_stall: list[WaitSummary]
    overhead: Overhead
    last_minute: list[LastState]
    earlier_workers_count: int


def summarise(tables: RunTables, status: Status) -> Summary:
    """Return peaks in bytes, throughput per second, the waits of the loops, and Tidegauge's own cost."""
    last_minute = to_records(last_states(tables)) if status in ("failed", "killed") else []
    # Memory may have grown since the last reading of PSS; the run held at least what each process did.
    last_held = (state["held_bytes"] for state in last_minute if state["pss_bytes"] is not None)
    return {
        "peak": _peaks(tables, last_held),
        "start": start(tables),
        "throughput": _throughput(tables),
        "data_wait_ratio": data_wait_ratio(tables),
        "outside_step": outside_step(tables),
        "exposed_stall": wait_summaries(tables),
        "overhead": _overhead(tables),
        "last_minute": cast("list[LastState]", last_minute),
        "earlier_workers_count": len(earlier_workers(tables)),
    }


def step_unit(tables: RunTables) -> str | None:
    """Return what ends a step in this run, a word of `records.STEP_UNITS`; None without steps."""
    units = step_units(tables.stream("step"))
    return STEP_UNITS[int(units[0])] if len(units) else None


def steps_count(tables: RunTables) -> int:
    """Return how many steps the run took.

    Ranks step together, so the rank with the most steps counts. Trainings without ranks are independent: their
    steps add up.
    """
    steps = lifecycle_of(tables).of_last_attempt(tables.stream("step"))
    if steps.empty:
        return 0
    processes = steps.groupby(WRITER).agg(last_step=("step", "max"), rank=("rank", "first"))
    counts = pd.Series(np.nan_to_num(floats(processes, "last_step") + 1))
    per_rank = counts.groupby(np.nan_to_num(floats(processes, "rank"), nan=-1.0)).sum()
    return int(per_rank.max())


def data_wait_ratio(tables: RunTables) -> float | None:
    """Return the time spent in DataLoaders over the time of the steps, or of the loop in a run without steps.

    None without a DataLoader, since Tidegauge does not see how such a loop gets its data, and where a thread loads
    ahead, since the time that the training waits for that thread is not recorded.
    """
    if tables.stream("batch").empty or any(loop.waits != "recorded" for loop in loops(tables)):
        return None
    step = tables.stream("step")
    duration, wait = floats(step, "duration_ns"), floats(step, "data_wait_ns")
    timed = np.isfinite(duration) & _has_loader(step)  # before its first DataLoader a process waited for none
    if duration[timed].sum() > 0:
        return float(np.nansum(wait[timed]) / duration[timed].sum())
    return _batch_wait_ratio(tables.stream("batch"))


def outside_step(tables: RunTables) -> OutsideStep | None:
    """Return the host's time outside forward, backward and optimizer where the training iterates no DataLoader.

    This time contains the loop's own loading, the wait for a thread that loads ahead, logging and the rest. The
    result has its mean in seconds per step, its share of the steps' time, and the share of it that the training's
    thread spent on the CPU.
    """
    step = tables.stream("step")
    is_timed = np.isfinite(floats(step, "forward_ns")) & np.isfinite(floats(step, "duration_ns"))
    waits = np.isfinite(floats(step, "data_wait_ns"))
    rows = step[is_timed & ~waits & (~_has_loader(step) | (floats(step, "batches_count") == 0))]
    outside, cpu = floats(rows, "other_ns"), floats(rows, "outside_cpu_ns")
    steps_ns = float(floats(rows, "duration_ns").sum())
    if steps_ns <= 0:
        return None
    has_cpu = np.isfinite(cpu)
    cpu_ratio = cpu[has_cpu].sum() / max(outside[has_cpu].sum(), 1.0)
    return {
        "ratio": float(outside.sum()) / steps_ns,
        "cpu_ratio": min(1.0, float(cpu_ratio)) if has_cpu.any() else None,
        "seconds": float(outside.mean()) / SECOND_NS,
        "steps": float(len(rows)),
    }


def _has_loader(step: pd.DataFrame) -> NDArray[np.bool_]:
    """Return of each step whether its process ever waited for a DataLoader in a step."""
    waits = step.assign(waits=np.isfinite(floats(step, "data_wait_ns"))).groupby(WRITER)["waits"]
    return waits.transform("any").to_numpy(dtype=bool)


def _batch_wait_ratio(batch: pd.DataFrame) -> float | None:
    """Return the DataLoader's time over the loop's time, between the first and the last batch of each epoch."""
    rows = batch.assign(wait=floats(batch, "wait_ns"), time=floats(batch, "time_ns"))
    groups = rows.groupby([*WRITER, "loader", "epoch"])
    waits = groups["wait"].sum() - groups["wait"].first()
    spans = groups["time"].max() - groups["time"].min()
    return float(waits.sum() / spans.sum()) if spans.sum() > 0 else None


def _peaks(tables: RunTables, last_held: Iterable[float | None]) -> Peaks:
    host, process = tables.stream("host"), tables.stream("process")
    roles = floats(process, "role")
    mains, workers = process[roles == ROLE_MAIN], process[roles == ROLE_WORKER]
    used = floats(host, "memory_total_bytes") - floats(host, "memory_available_bytes")
    demand = floats(host, "cgroup_anon_bytes") + np.nan_to_num(floats(host, "cgroup_shmem_bytes"))
    return {
        "host_used_bytes": _finite_or_none(peak(used)),
        "cgroup_demand_bytes": _finite_or_none(peak(demand)),
        "shm_used_bytes": _peak(host, "shm_used_bytes"),
        "run_pss_bytes": _finite_or_none(
            peak(np.array([*_memory_over_time(tables), *last_held], dtype=np.float64))
        ),
        "main_rss_bytes": _peak(mains, "rss_bytes"),
        "main_private_dirty_bytes": _peak(mains, "private_dirty_bytes"),
        "worker_rss_bytes": _peak(workers, "rss_bytes"),
        "worker_private_dirty_bytes": _peak(workers, "private_dirty_bytes"),
        "device_allocated_bytes": _device_peak(tables, "allocated"),
        "device_reserved_bytes": _device_peak(tables, "reserved"),
    }


def _device_peak(tables: RunTables, name: str) -> float | None:
    """Return the most of one gauge of PyTorch's allocators; that of a worker is known at its error alone."""
    at_errors = (event.get(f"{name}_bytes") for event in tables.events_of("cuda-oom"))
    recorded = floats(tables.stream("device_memory"), f"{name}_peak_bytes")
    return _finite_or_none(peak(np.array([*recorded, *at_errors], dtype=np.float64)))


def _peak(rows: pd.DataFrame, column: str) -> float | None:
    return _finite_or_none(peak(floats(rows, column)))


def machine_of(tables: RunTables) -> Machine:
    """Return the size of the machine that a run had."""
    host = tables.stream("host")
    names = sorted({str(name) for name in host["host"].dropna()})
    limits = [binding_limit(tables, name)[1] for name in names]
    cores = finite(floats(host, "usable_cores_count"))
    devices = {
        (event["host"], event["device"]): float(event["total_bytes"])
        for event in tables.events
        if event["kind"] == "cuda-device" and is_known(event.get("total_bytes"))
    }
    return {
        "hosts": len(names),
        "cores": float(cores.min()) if len(cores) else None,
        "memory_bytes": min((limit for limit in limits if math.isfinite(limit)), default=None),
        "gpus_bytes": sorted(devices.values()),
    }


def memory_curve(tables: RunTables, points_count: int) -> list[float]:
    """Return the PSS of the training's processes together, in bytes: the peak of each equal stretch of the run."""
    total = _memory_over_time(tables)
    total = total[total > 0]  # at the end, every process is gone
    if len(total) < 2:
        return []
    times = total.index.to_numpy(dtype=float)
    stretch = np.minimum((times - times[0]) / (times[-1] - times[0]) * points_count, points_count - 1).astype(int)
    return [float(value) for value in total.groupby(stretch).max()]


@once
def _memory_over_time(tables: RunTables) -> pd.Series:
    """Return the PSS of the training's processes together (bytes), as pages draw it; empty if not read."""
    process = tables.stream("process")
    samples = pd.DataFrame(
        {
            "process": process.groupby(PROCESS, dropna=False).ngroup(),
            "time_ns": process["time_ns"],
            "role": floats(process, "role"),
            "v": floats(process, "pss_bytes"),
            "alive": floats(process, "alive"),
        }
    )
    samples["role"] = samples.groupby("process")["role"].transform("last")
    samples = samples[samples["role"].notna() & (samples["role"] != ROLE_COLLECTOR)].astype({"role": "int64"})
    if samples["v"].isna().all():
        return pd.Series(dtype=float)
    totals = [total for name in queries.PULSE_STREAMS if (total := tables.totals.get(name)) and total.rows_count]
    firsts = [*(total.first_ns or 0 for total in totals), samples["time_ns"].min()]
    lasts = [*(total.last_ns or 0 for total in totals), samples["time_ns"].max()]
    return queries.sum_processes(samples, int(min(*firsts, origin_ns(tables))), int(max(lasts)))


def _throughput(tables: RunTables) -> Throughput:
    batch, step = (lifecycle_of(tables).of_last_attempt(tables.stream(name)) for name in ("batch", "step"))
    loaders = training_loaders(tables)
    training_batch = _batches_of(batch, loaders)
    samples = samples_of(tables, training_batch)
    return {
        "steps_per_second": _per_second(step, np.ones(len(step)), per_rank=True),
        "batches_per_second": _per_second(batch, np.ones(len(batch))),
        "samples_per_second": _per_second(training_batch, samples) if np.isfinite(samples).any() else None,
        "training_loaders": None if loaders is None else sorted({loader for *_, loader in loaders}),
        "slowdown": slowdown(tables),
    }


def _batches_of(batch: pd.DataFrame, loaders: set[tuple[str, int, int, int]] | None) -> pd.DataFrame:
    """Return the batches of these loaders, or of all loaders for None."""
    if loaders is None or batch.empty:
        return batch
    keys = [*WRITER, "loader"]
    wanted = pd.DataFrame(sorted(loaders), columns=keys).assign(is_wanted=True)
    merged = batch[keys].merge(wanted, how="left", on=keys)
    return batch[merged["is_wanted"].notna().to_numpy()]


def training_loaders(tables: RunTables) -> set[tuple[str, int, int, int]] | None:
    """Return (host, pid, start ticks, loader) of the loaders whose batches an optimizer steps on.

    A validation may run between two steps, but the batch just before a step is a training batch. None where no
    optimizer steps: there every batch counts. A process whose steps mostly have no batch gets its data elsewhere.
    """
    step = tables.stream("step")
    if step.empty or step_units(step)[0] < UNIT_OPTIMIZER:
        return None
    loaders: set[tuple[str, int, int, int]] = set()
    for key, steps in by_process(step, WRITER):
        batches, ends = written(tables, "batch", key), floats(steps, "time_ns")
        places = np.searchsorted(ends, floats(batches, "time_ns"))
        rows = pd.DataFrame({"step": places, "loader": floats(batches, "loader")})[places < len(ends)]
        last_loader = rows.groupby("step")["loader"].last()
        if len(last_loader) < _MAJORITY_RATIO * len(ends):
            continue
        for loader in np.unique(floats(rows, "loader")):
            loader_steps = rows.loc[rows["loader"] == loader, "step"].nunique()
            is_last = (last_loader == loader).sum() >= _MAJORITY_RATIO * loader_steps
            if is_last or loader_steps >= _MAJORITY_RATIO * len(ends):
                loaders.add((*key, int(loader)))
    return loaders


def _per_second(rows: pd.DataFrame, counts: Floats, *, per_rank: bool = False) -> float | None:
    """Return counts per second from the first to the last record: of all processes, or of the fastest rank.

    As in `steps_count`, trainings without ranks are independent, and add up.
    """
    ranks = np.nan_to_num(floats(rows, "rank"), nan=-1.0) if per_rank else np.zeros(len(rows))
    table = rows.assign(count=np.nan_to_num(counts), time=floats(rows, "time_ns"), rank=ranks)
    rates = [rate for _, of_one in table.groupby("rank") if (rate := _rate(of_one)) is not None]
    return max(rates, default=None)


def _rate(rows: pd.DataFrame) -> float | None:
    groups = rows.groupby(WRITER)
    totals = (groups["count"].sum() - groups["count"].first()).to_numpy()
    begins, ends = groups["time"].first().to_numpy(), groups["time"].last().to_numpy()
    union_ns = _union_length(begins, ends)
    return float(totals.sum() / union_ns * SECOND_NS) if union_ns > 0 else None


def _union_length(begins: Floats, ends: Floats) -> float:
    """Return for how long at least one of these spans lasts: trainings may follow each other."""
    order = np.argsort(begins, kind="stable")
    latest_end = np.concatenate([[-np.inf], np.maximum.accumulate(ends[order])[:-1]])
    return float(np.maximum(ends[order] - np.maximum(begins[order], latest_end), 0.0).sum())


def _overhead(tables: RunTables) -> Overhead:
    agent, process = tables.stream("agent"), tables.stream("process")
    own = process[floats(process, "role") == ROLE_COLLECTOR]
    times = floats(agent, "time_ns")
    span_ns = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    return {
        "collector_cpu_ratio": _share(floats(agent, "cpu_ns"), span_ns),
        "smaps_cpu_ratio": _share(floats(agent, "smaps_ns"), span_ns),
        "collector_rss_bytes": _peak(agent, "rss_bytes"),
        "collector_private_dirty_bytes": _peak(own, "private_dirty_bytes"),
        "interval_seconds": _finite_or_none(median(floats(agent, "interval_ns")) / SECOND_NS),
        "ingest_lag_seconds": _finite_or_none(last(floats(agent, "ingest_lag_ns")) / SECOND_NS),
    }


def _share(spent_ns: Floats, span_ns: float) -> float | None:
    readings = finite(spent_ns)
    return float(readings[-1] - readings[0]) / span_ns if len(readings) > 1 and span_ns > 0 else None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
