"""Find growth in /dev/shm, through which workers hand over their batches, and the risk that it fills up.

A page of shared memory is allocated when it is first written. If none is left, the writer gets no error but SIGBUS.
Newer torch allocates the pages of a batch beforehand, and raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import loader_settings
from collector.diagnosis.memory.exhaustion import Course, exhaustion_finding, full_finding
from collector.diagnosis.memory.leak import (
    CONFIRMED,
    Use,
    leak_finding,
    negligible_bytes,
    share_of,
    witnesses_of,
    young_finding,
    young_growth,
)
from collector.diagnosis.memory.resources import SHARED_MEMORY
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    floats,
    host_samples,
    last,
    peak,
    sampled,
    sampled_on,
    seconds,
    while_training,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import sentence
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.findings import Evidence, Finding, Limit, Locus, fact
from collector.store import ProcessKey
from collector.units import size

_OTHERS_TOO = (
    " It fills faster: other programs fill it too, or processes of the run hold pages that they never read."
)
_UNKNOWN = " Neither the run's processes nor its cgroup nor the kernel's count shows as much: its owner is unknown."
_UNMAPPED = " The kernel's own count confirms it; no process of the run maps it, so it may be another program's."
_FOREIGN = " No process of the run was seen to map it: it is another program's, or files that the run writes there."
#: Process that Python starts with the first named segment or semaphore (multiprocessing/resource_tracker.py).
_TRACKER = "multiprocessing.resource_tracker"
#: Mapped shared memory below this is that of semaphores and of libraries that register themselves.
_NO_SHARED_MEMORY_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The /dev/shm of a host.

    Attributes:
        times: times of the samples, seconds.
        used: bytes in use at these times.
        promised: the same with the pages of segments that were never written. To write them is no growth.
        total: its size in bytes.
        batch: size of the largest batch that a worker handed over, NaN if none is known.
        workers: workers that may write at once: the sum, over training processes, of their largest loader's.
    """

    times: Floats
    used: Floats
    promised: Floats
    total: float
    batch: float
    workers: int

    @classmethod
    def of(cls, tables: RunTables, host: str, samples: pd.DataFrame | None = None) -> SharedMemory:
        """Return that of a host, at the given samples of it or at all."""
        samples = host_samples(tables, host) if samples is None else samples
        batch = tables.stream("batch")
        workers: dict[object, int] = {}
        for (main, _), setting in loader_settings(tables).items():
            if main[0] == host:
                workers[main] = max(workers.get(main, 0), int(setting.get("num_workers") or 0))
        used = floats(samples, "shm_used_bytes")
        return cls(
            times=seconds(samples),
            used=used,
            promised=used + np.nan_to_num(floats(samples, "shm_unwritten_bytes")),
            total=last(floats(samples, "shm_total_bytes")),
            batch=peak(floats(batch[(batch["host"] == host) & (floats(batch, "worker") >= 0)], "payload_bytes")),
            workers=sum(workers.values()),
        )


def find_shared_memory(tables: RunTables) -> list[Finding]:
    """Find `shm-leak` and `shm-exhaustion-risk` on each host."""
    samples = tables.stream("host")
    return [finding for host in pd.unique(samples["host"]) for finding in _on_host(tables, str(host))]


def _on_host(tables: RunTables, host: str) -> list[Finding]:
    samples = while_training(tables, host_samples(tables, host))
    memory = SharedMemory.of(tables, host, samples)
    if not np.isfinite(memory.used).any() or not memory.total > 0:
        return []
    use = Use.of(tables, "shm_used", Locus(host=host), memory.times, memory.promised)
    trend, negligible = use.growth(), negligible_bytes(memory.used)
    young = young_growth(tables, use, trend, negligible)
    if young is not None:
        witnesses, _ = _witnesses(samples, _mapped(tables, host), young)
        small = young_finding(tables, use, young, witnesses, negligible=negligible, grows="/dev/shm grows")
        return [small, *_too_full(memory, host)] if witnesses else _too_full(memory, host)
    if trend is None:
        return _too_full(memory, host)
    mapped = _mapped(tables, host)
    of_run, of_host = _witnesses(samples, mapped, trend)
    witnesses = (*of_run, *of_host)
    part = None if of_run else _run_part(tables, host, memory, mapped)
    is_of_run, has_cgroup = bool(of_run or part), np.isfinite(floats(samples, "cgroup_shmem_bytes")).any()
    makes_none = peak(mapped[1]) < _NO_SHARED_MEMORY_BYTES and not _has_segments(tables, host)
    is_foreign = not is_of_run and makes_none
    not_mapped = _FOREIGN if is_foreign else _UNMAPPED
    remark = "" if of_run else _OTHERS_TOO if part else not_mapped if witnesses else _UNKNOWN
    holder = _holder(tables, host, part[1] if part else trend) if is_of_run else None
    if holder is not None:
        use = replace(use, locus=lifecycle_of(tables).locus(holder))
        part = part and (replace(part[0], locus=use.locus), *part[1:])
        remark += f" {sentence(lifecycle_of(tables).name(holder))} holds it."
    findings = []
    if is_of_run or not (witnesses and has_cgroup):  # growth that the run's cgroup does not show is another job's
        leak = leak_finding(tables, SHARED_MEMORY, *(part or (use, trend, witnesses)), remark=remark)
        findings = [replace(leak, fault="your code") if is_of_run else replace(leak, confidence=0.75)]
    limit = Limit(name="/dev/shm", value=memory.total, unit="bytes")
    course = Course(what="/dev/shm", resource=SHARED_MEMORY, use=use, growth=trend, limit=limit)
    if witnesses and course.is_relevant:
        findings.append(exhaustion_finding(tables, course, witnesses))
    return [replace(finding, severity="info") for finding in findings] if is_foreign else findings


def _witnesses(
    samples: pd.DataFrame, mapped: tuple[Floats, Floats], trend: Growth
) -> tuple[tuple[Evidence, ...], tuple[Evidence, ...]]:
    """Return the evidence that the run fills /dev/shm, and the evidence that it fills at all."""
    times = seconds(samples)
    of_run = {
        "cgroup_shmem_rise_bytes": (times, floats(samples, "cgroup_shmem_bytes")),
        "process_shm_rise_bytes": mapped,
    }
    of_host = {"host_shmem_rise_bytes": (times, floats(samples, "memory_shmem_bytes"))}
    return witnesses_of(trend, of_run), witnesses_of(trend, of_host)


def _mapped(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return times (seconds) and the shared memory that all processes of the run map, in bytes."""
    rows = while_training(tables, sampled_on(tables, host))
    mapped = rows.groupby("time_ns")["shm_bytes"].sum(min_count=1)
    return mapped.index.to_numpy(dtype=float) / SECOND_NS, mapped.to_numpy(dtype=float)


def _has_segments(tables: RunTables, host: str) -> bool:
    """Return whether a process of the run made named segments, even if it maps each for a moment only."""
    return any(_TRACKER in program for key, program in lifecycle_of(tables).programs.items() if key[0] == host)


def _holder(tables: RunTables, host: str, trend: Growth) -> ProcessKey | None:
    """Return the training process that maps most of a growth: it keeps batches from its workers, or segments."""
    for key in lifecycle_of(tables).mains:
        rows = while_training(tables, sampled(tables, key))
        if key[0] == host and share_of(seconds(rows), floats(rows, "shm_bytes"), trend) >= CONFIRMED:
            return key
    return None


def _run_part(
    tables: RunTables, host: str, memory: SharedMemory, mapped: tuple[Floats, Floats]
) -> tuple[Use, Growth, tuple[Evidence, ...]] | None:
    """Return the growth of what the run's processes map, if /dev/shm shows it; other programs may add more."""
    use = Use.of(tables, "process_shm", Locus(host=host), *mapped)
    trend = use.growth()
    witnesses = () if trend is None else witnesses_of(trend, {"shm_used_rise_bytes": (memory.times, memory.used)})
    return (use, trend, witnesses) if trend is not None and witnesses else None


def _too_full(memory: SharedMemory, host: str) -> list[Finding]:
    """Return the finding that the workers' next batches find no room, although nothing grows."""
    highest = peak(memory.used)
    free = memory.total - highest
    if not free < memory.batch * memory.workers:
        return []
    return [
        full_finding(
            SHARED_MEMORY,
            Limit(name="/dev/shm", value=memory.total, unit="bytes"),
            highest,
            Locus(host=host),
            (
                fact("shm_free_low_bytes", free, "run", n=len(memory.used)),
                fact("batch_payload_peak_bytes", memory.batch, "run"),
                fact("workers_count", memory.workers, "of the loaders of each process the most"),
            ),
            severity="critical" if free < memory.batch else "warning",
            free=size(free),
            batch=size(memory.batch),
            workers=memory.workers,
        )
    ]
