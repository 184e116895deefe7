"""Find growth in /dev/shm, through which workers hand over their batches, and the risk that it fills up.

A page of shared memory is allocated when it is first written. If none is left, the writer gets no error but SIGBUS.
Newer torch allocates the pages of a batch beforehand, and raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import living_workers, loader_settings
from collector.diagnosis.memory.exhaustion import Course, exhaustion_finding, full_finding
from collector.diagnosis.memory.leak import (
    CONFIRMED,
    GrowingUse,
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
    written,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import sentence
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import while_training
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.findings import Advice, Evidence, Finding, Limit, Locus, fact
from collector.store import ProcessKey
from collector.units import size

_OTHERS_TOO = (
    " It fills faster: other programs fill it too, or processes of the run hold pages that they never read."
)
_UNKNOWN = " Neither the run's processes nor its cgroup nor the kernel's count shows as much: its owner is unknown."
_UNMAPPED = (
    " The kernel's own count confirms it. No process of the run reads it: these are segments that were not "
    "unlinked, batches that are kept and not read, or another program's files."
)
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
        in_flight: the batches that these may have under way.
    """

    times: Floats
    used: Floats
    promised: Floats
    total: float
    batch: float
    workers: int
    in_flight: int

    @classmethod
    def of(cls, tables: RunTables, host: str, samples: pd.DataFrame | None = None) -> SharedMemory:
        """Return that of a host, at the given samples of it or at all."""
        samples = host_samples(tables, host) if samples is None else samples
        batch = tables.stream("batch")
        loaders: dict[object, tuple[int, int]] = {}
        for (main, _), setting in loader_settings(tables).items():
            if main[0] == host:
                count = int(setting.get("num_workers") or 0)
                loader = count, count * int(setting.get("prefetch_factor") or 0)
                loaders[main] = max(loaders.get(main, (0, 0)), loader)
        used = floats(samples, "shm_used_bytes")
        return cls(
            times=seconds(samples),
            used=used,
            promised=used + np.nan_to_num(floats(samples, "shm_unwritten_bytes")),
            total=last(floats(samples, "shm_total_bytes")),
            batch=peak(floats(batch[(batch["host"] == host) & (floats(batch, "worker") >= 0)], "payload_bytes")),
            workers=sum(workers for workers, _ in loaders.values()),
            in_flight=sum(in_flight for _, in_flight in loaders.values()),
        )

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Return what to do where it was full: about the batches under way, unless other things filled it."""
        others_fill_it = peak(self.used) > 2 * self.in_flight * self.batch
        return SHARED_MEMORY.risk_advice if others_fill_it else SHARED_MEMORY.full_advice


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
    young = young_growth(use, trend, negligible)
    if young is not None:
        growing = GrowingUse(use, young, _witnesses_of_run(tables, host, samples, young))
        small = young_finding(growing, negligible=negligible, grows="/dev/shm grows")
        return [small, *_too_full(memory, host)] if growing.witnesses else _too_full(memory, host)
    if trend is None:
        return _too_full(memory, host)
    mapped = _mapped(tables, host)
    of_run = _witnesses_of_run(tables, host, samples, trend)
    of_host = {"host_shmem_rise_bytes": (memory.times, floats(samples, "memory_shmem_bytes"))}
    growing = GrowingUse(use, trend, (*of_run, *witnesses_of(trend, of_host)))
    part = growing if of_run else _run_part(tables, host, memory, mapped)
    if part is not None:
        return _growth_of_run(growing, part, memory)
    has_cgroup = bool(np.isfinite(floats(samples, "cgroup_shmem_bytes")).any())
    return _growth_of_others(growing, memory, mapped, has_cgroup=has_cgroup)


def _growth_of_run(growing: GrowingUse, part: GrowingUse, memory: SharedMemory) -> list[Finding]:
    """Return the findings on a growth that the run causes, or a part of it."""
    remark, life = "" if part is growing else _OTHERS_TOO, lifecycle_of(growing.use.tables)
    holder = _holder(part)
    if holder is not None:
        growing, part = (replace(one, use=replace(one.use, locus=life.locus(holder))) for one in (growing, part))
        remark += f" {sentence(life.name(holder))} holds it."
    leak = leak_finding(SHARED_MEMORY, part, remark=remark)
    return [replace(leak, fault="your code"), *_exhaustion(growing, memory)]


def _growth_of_others(
    growing: GrowingUse, memory: SharedMemory, mapped: tuple[Floats, Floats], *, has_cgroup: bool
) -> list[Finding]:
    """Return the findings on a growth that the run does not show; information if the run makes no shared memory."""
    tables, host = growing.use.tables, str(growing.use.locus.host)
    # A process that makes named segments may map each for a moment only.
    programs = [program for key, program in lifecycle_of(tables).programs.items() if key[0] == host]
    has_segments = any(_TRACKER in program for program in programs)
    is_foreign = peak(mapped[1]) < _NO_SHARED_MEMORY_BYTES and not has_segments
    findings = _exhaustion(growing, memory)
    if is_foreign:  # nothing to do as long as it is far from full
        findings = [finding for finding in findings if finding.severity != "info"]
    if not (growing.witnesses and has_cgroup):  # else it is another job's: the run's cgroup does not show it
        remark = _UNKNOWN if not growing.witnesses else _FOREIGN if is_foreign else _UNMAPPED
        findings = [replace(leak_finding(SHARED_MEMORY, growing, remark=remark), confidence=0.75), *findings]
    return [replace(finding, severity="info") for finding in findings] if is_foreign else findings


def _exhaustion(growing: GrowingUse, memory: SharedMemory) -> list[Finding]:
    """Return the forecast for a growth that is confirmed and meets the limit soon."""
    limit = Limit(name="/dev/shm", value=memory.total, unit="bytes")
    course = Course(what="/dev/shm", resource=SHARED_MEMORY, growing=growing, limit=limit)
    return [exhaustion_finding(course)] if growing.witnesses and course.is_relevant else []


def _witnesses_of_run(tables: RunTables, host: str, samples: pd.DataFrame, trend: Growth) -> tuple[Evidence, ...]:
    """Return the evidence that the run fills /dev/shm."""
    series = {
        "cgroup_shmem_rise_bytes": (seconds(samples), floats(samples, "cgroup_shmem_bytes")),
        "process_shm_rise_bytes": _mapped(tables, host),
    }
    if found := witnesses_of(trend, series):
        return found
    mains = (key for key in lifecycle_of(tables).mains if key[0] == host)
    kept = (witnesses_of(trend, {"kept_tensors_rise_bytes": _kept(tables, key)}) for key in mains)
    return next(filter(None, kept), ())


def _kept(tables: RunTables, key: ProcessKey) -> tuple[Floats, Floats]:
    """Return times (seconds) and the bytes of tensors from workers that the open files of a process may hold.

    It maps only the pages that it reads. A descriptor holds a batch at most. Workers have descriptors too, so only
    samples with the usual number of workers count.
    """
    rows = while_training(tables, sampled(tables, key))
    workers = living_workers(tables, key, seconds(rows)).astype(int)
    rows = rows[workers == np.bincount(workers).argmax()] if len(rows) else rows
    batches = written(tables, "batch", key)
    batch = peak(floats(batches[floats(batches, "worker") >= 0], "payload_bytes"))
    return seconds(rows), floats(rows, "fd_count") * batch


def _mapped(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return times (seconds) and the shared memory that all processes of the run map, in bytes."""
    rows = while_training(tables, sampled_on(tables, host))
    mapped = rows.groupby("time_ns")["shm_bytes"].sum(min_count=1)
    return mapped.index.to_numpy(dtype=float) / SECOND_NS, mapped.to_numpy(dtype=float)


def _holder(growing: GrowingUse) -> ProcessKey | None:
    """Return the process that maps or keeps most of a growth, a training process first: batches, or segments."""
    tables, life = growing.use.tables, lifecycle_of(growing.use.tables)
    is_kept = any(witness.name == "kept_tensors_rise_bytes" for witness in growing.witnesses)
    for key in (*life.mains, *life.watched, *life.others):
        rows = while_training(tables, sampled(tables, key))
        maps = share_of(seconds(rows), floats(rows, "shm_bytes"), growing.trend) >= CONFIRMED
        keeps = is_kept and share_of(*_kept(tables, key), growing.trend) >= CONFIRMED
        if key[0] == growing.use.locus.host and (maps or keeps):
            return key
    return None


def _run_part(
    tables: RunTables, host: str, memory: SharedMemory, mapped: tuple[Floats, Floats]
) -> GrowingUse | None:
    """Return the growth of what the run's processes map, if /dev/shm shows it; other programs may add more."""
    use = Use.of(tables, "process_shm", Locus(host=host), *mapped)
    trend = use.growth()
    witnesses = () if trend is None else witnesses_of(trend, {"shm_used_rise_bytes": (memory.times, memory.used)})
    return GrowingUse(use, trend, witnesses) if trend is not None and witnesses else None


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
