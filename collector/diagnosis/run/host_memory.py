"""The demand for a host's memory, and its limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import by_process, floats, host_samples, last, median, seconds
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats


def binding_limit(tables: RunTables, host: str) -> tuple[str, float]:
    """Return the name and size of the limit that is met first: the cgroup's if it is below the machine's memory."""
    samples = host_samples(tables, host)
    total = last(floats(samples, "memory_total_bytes"))
    cgroup = last(floats(samples, "cgroup_limit_bytes"))
    return ("cgroup", cgroup) if cgroup < total or np.isnan(total) else ("host memory", total)


def demand_series(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return times (seconds) and the memory that can't be reclaimed: anon and shmem of the cgroup that binds.

    Page cache is left out, since the kernel takes it back. Where no cgroup binds, it is MemTotal - MemAvailable.
    The collector's own verdicts are left out too: they are short-lived, and the kernel kills them first.
    """
    samples = host_samples(tables, host)
    times = seconds(samples)
    demand = floats(samples, "memory_total_bytes") - floats(samples, "memory_available_bytes")
    if binding_limit(tables, host)[0] == "cgroup":
        anon = floats(samples, "cgroup_anon_bytes")
        if np.isfinite(anon).any():
            demand = anon + np.nan_to_num(floats(samples, "cgroup_shmem_bytes"))
    # The collector records the memory of a verdict in the tick of the host's sample.
    agent = tables.stream("agent")[["host", "time_ns", "verdict_anon_bytes"]]
    joined = samples[["host", "time_ns"]].merge(agent.drop_duplicates(["host", "time_ns"]), "left")
    return times, demand - np.nan_to_num(floats(joined, "verdict_anon_bytes"))


def sum_of_processes(
    samples: pd.DataFrame, times: Floats, of_one: Callable[[pd.DataFrame], Floats]
) -> tuple[Floats, Floats]:
    """Return the memory of processes together at each time (seconds), and how many of them live then.

    `of_one` returns that of one process at each of its samples, NaN where it was not read. The sum is NaN where no
    process lives that was ever read.
    """
    total, counts = np.full(len(times), np.nan), np.zeros(len(times))
    margin = median(np.diff(times)) / 2  # the samples of a tick are not of one moment
    for _, rows in by_process(samples):
        at, values = seconds(rows), of_one(rows)
        lives, is_read = (times >= at[0] - margin) & (times <= at[-1] + margin), np.isfinite(values)
        counts[lives] += 1
        if is_read.any():
            total[lives] = np.nan_to_num(total[lives]) + np.interp(times[lives], at[is_read], values[is_read])
    return total, counts


def kernel_bytes(tables: RunTables, host: str) -> float:
    """Return the kernel's own memory in the cgroup that binds (page tables, stacks, slab); 0 where none does.

    It counts towards the limit, except caches that the kernel would give back. Cgroup version 1 and older runs do
    not separate the two: there all of it counts, and a forecast may come too early.
    """
    samples = host_samples(tables, host)
    usage, anon, file, caches = (
        floats(samples, f"cgroup_{name}_bytes") for name in ("usage", "anon", "file", "slab_reclaimable")
    )
    kernel = last(usage - anon - file - np.nan_to_num(caches))
    return max(kernel, 0.0) if binding_limit(tables, host)[0] == "cgroup" and np.isfinite(kernel) else 0.0
