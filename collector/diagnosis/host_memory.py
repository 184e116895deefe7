"""What a host's memory is asked for, and what limits it."""

from __future__ import annotations

import numpy as np

from collector.diagnosis.frames import SECOND_NS, floats, last
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats


def binding_limit(tables: RunTables, host: str) -> tuple[str, float]:
    """The name and size of the limit that is met first: the cgroup's if it is below the machine's memory."""
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    total = last(floats(samples, "memory_total_bytes"))
    cgroup = last(floats(samples, "cgroup_limit_bytes"))
    return ("cgroup", cgroup) if cgroup < total or np.isnan(total) else ("host memory", total)


def demand_series(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Times (seconds) and the memory that can't be reclaimed: anon and shmem of the cgroup that binds.

    Page cache is left out, since the kernel takes it back. Where no cgroup binds, MemTotal - MemAvailable.
    """
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    times = floats(samples, "time_ns") / SECOND_NS
    if binding_limit(tables, host)[0] == "cgroup":
        anon = floats(samples, "cgroup_anon_bytes")
        if np.isfinite(anon).any():
            return times, anon + np.nan_to_num(floats(samples, "cgroup_shmem_bytes"))
    return times, floats(samples, "memory_total_bytes") - floats(samples, "memory_available_bytes")


def kernel_bytes(tables: RunTables, host: str) -> float:
    """What the kernel itself holds in the cgroup that binds (page tables, stacks, slab); 0 where none does.

    It counts towards the limit, and the caches that it would give back do not. Version 1 does not tell these apart,
    nor do runs of before they were recorded: there all of it counts, and a forecast is rather too early.
    """
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    usage, anon, file, caches = (
        floats(samples, f"cgroup_{name}_bytes") for name in ("usage", "anon", "file", "slab_reclaimable")
    )
    held = last(usage - anon - file - np.nan_to_num(caches))
    return max(held, 0.0) if binding_limit(tables, host)[0] == "cgroup" and np.isfinite(held) else 0.0
