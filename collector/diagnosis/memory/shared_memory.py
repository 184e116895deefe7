"""Find growth in /dev/shm, through which workers hand over their batches, and the risk that it fills up.

A page of shared memory is allocated when it is first written. If none is left, the writer gets no error but SIGBUS.
Newer torch allocates the pages of a batch beforehand, and raises an error.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import loader_settings
from collector.diagnosis.memory.exhaustion import Course, exhaustion_finding
from collector.diagnosis.memory.leak import Leak, leak_finding, negligible_bytes, witness_of
from collector.diagnosis.run.columns import SECOND_NS, floats, last, peak, sampled_on, step_numbers, while_training
from collector.diagnosis.run.processes import fact
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth, growth
from collector.findings import Advice, Evidence, Finding, Limit, Locus
from collector.units import size

_UNKNOWN = " No process of the run, its cgroup nor the kernel's own count shows as much: what it is is not known."
_UNMAPPED = " The kernel's own count confirms it; no process of the run maps it, so it may be another program's."
ROOM_ADVICE = (
    Advice(
        text="Give /dev/shm more room (docker: --shm-size=8g, Kubernetes: an emptyDir of medium Memory there)",
        expected="room for the batches that are under way",
    ),
    Advice(
        text="Lower num_workers, prefetch_factor or the size of a batch",
        expected="num_workers * prefetch_factor batches are there at a time",
    ),
)
_LEAK_ADVICE = (
    Advice(
        text="See with `ls -l /dev/shm` and `lsof +L1 /dev/shm` what lies there and who holds it: segments want "
        "close() and unlink(), batches from workers are to be kept as .clone()",
        expected="what is in use stays where it is",
    ),
)


def find_shared_memory(tables: RunTables) -> list[Finding]:
    """Find `shm-leak` and `shm-exhaustion-risk` on each host."""
    samples = tables.stream("host")
    return [finding for host in pd.unique(samples["host"]) for finding in _on_host(tables, str(host))]


def _on_host(tables: RunTables, host: str) -> list[Finding]:
    samples = while_training(tables, shared_memory_samples(tables, host))
    times, used, total = shared_memory_usage(samples)
    if not np.isfinite(used).any() or not total > 0:
        return []
    trend = growth(times, used, negligible=negligible_bytes(used), steps=step_numbers(tables, host, times))
    if trend is None:
        return _by_level(tables, host, peak(used), total, len(used))
    mapped = _mapped(tables, host)
    run_witnesses, host_witnesses = _witnesses(samples, mapped, trend)
    witnesses, remark = (*run_witnesses, *host_witnesses), ""
    leak = Leak.of(trend, "shm_used", witnesses, float(times[-1]), "bytes")
    part = None if run_witnesses else _run_part(tables, samples, mapped)
    if part is not None:
        leak, remark = part, " Other programs fill it too."
    elif not run_witnesses:
        remark = _UNMAPPED if witnesses else _UNKNOWN
    limit = Limit(name="/dev/shm", value=total, unit="bytes")
    has_cgroup = np.isfinite(floats(samples, "cgroup_shmem_bytes")).any()
    is_of_run, findings = bool(run_witnesses or part), []
    if is_of_run or not (witnesses and has_cgroup):  # growth that the run's cgroup does not show is another job's
        findings = [_leak(tables, host, leak, 0.9 if is_of_run else 0.75, remark)]
    course = Course(what="/dev/shm", growth=trend, times=times, values=used, limit=limit)
    if witnesses and course.is_relevant:
        advice = (*_LEAK_ADVICE, *ROOM_ADVICE[:1])
        locus = Locus(host=host)
        findings.append(
            exhaustion_finding(
                tables, "shm-exhaustion-risk", course, locus=locus, witnesses=witnesses, advice=advice
            )
        )
    return findings


def _leak(tables: RunTables, host: str, leak: Leak, confidence: float, remark: str) -> Finding:
    rise, slope = leak.growth.rise, leak.growth.slope
    summary = f"/dev/shm keeps filling: {size(rise)} so far, {size(slope * 60)} per minute.{remark}"
    locus = Locus(host=host)
    return leak_finding(
        tables, "shm-leak", leak, summary=summary, locus=locus, advice=_LEAK_ADVICE, confidence=confidence
    )


def _witnesses(
    samples: pd.DataFrame, mapped: tuple[Floats, Floats], trend: Growth
) -> tuple[list[Evidence], list[Evidence]]:
    """Return the evidence that the run fills /dev/shm, and the evidence that it fills at all."""
    times = floats(samples, "time_ns") / SECOND_NS
    of_run = (
        witness_of("cgroup_shmem_rise_bytes", times, floats(samples, "cgroup_shmem_bytes"), trend),
        witness_of("process_shm_rise_bytes", *mapped, trend),
    )
    of_host = witness_of("host_shmem_rise_bytes", times, floats(samples, "memory_shmem_bytes"), trend)
    return [witness for witness in of_run if witness is not None], [of_host] if of_host is not None else []


def _mapped(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return times (seconds) and the shared memory that all processes of the run map, in bytes."""
    rows = while_training(tables, sampled_on(tables, host))
    mapped = rows.groupby("time_ns")["shm_bytes"].sum(min_count=1)
    return mapped.index.to_numpy(dtype=float) / SECOND_NS, mapped.to_numpy(dtype=float)


def _run_part(tables: RunTables, samples: pd.DataFrame, mapped: tuple[Floats, Floats]) -> Leak | None:
    """Return the growth of what the run's processes map, if /dev/shm shows it; other programs may add more."""
    times, values = mapped
    steps = step_numbers(tables, str(samples["host"].iloc[0]), times)
    trend = growth(times, values, negligible=negligible_bytes(values), steps=steps)
    if trend is None:
        return None
    used_times, used, _ = shared_memory_usage(samples)
    witness = witness_of("shm_used_rise_bytes", used_times, used, trend)
    return Leak.of(trend, "process_shm", (witness,), float(times[-1]), "bytes") if witness is not None else None


def _by_level(tables: RunTables, host: str, highest: float, total: float, n: int) -> list[Finding]:
    """Return the finding that the workers' next batches find no room, although nothing grows."""
    batch, workers = largest_batch_bytes(tables, host), workers_count(tables, host)
    free = total - highest
    if not free < batch * workers:
        return []
    return [
        Finding(
            kind="shm-exhaustion-risk",
            severity="critical" if free < batch else "warning",
            confidence=0.9,
            summary=(
                f"/dev/shm had {size(free)} left of {size(total)} at the peak, and each of {workers} "
                f"workers hands over batches of {size(batch)}: who finds no room fails, or dies of SIGBUS."
            ),
            locus=Locus(host=host),
            evidence=(
                Evidence(name="shm_free_low_bytes", value=free, unit="bytes", n=n, window="run"),
                fact("batch_payload_peak_bytes", batch, "run", unit="bytes"),
                fact("workers_count", workers, "of the loaders of each process the most"),
            ),
            limit=Limit(name="/dev/shm", value=total, unit="bytes"),
            advice=ROOM_ADVICE,
        )
    ]


def largest_batch_bytes(tables: RunTables, host: str) -> float:
    """Return the size of the largest batch that a worker handed over, NaN if none is known."""
    batch = tables.stream("batch")
    return peak(floats(batch[(batch["host"] == host) & (floats(batch, "worker") >= 0)], "payload_bytes"))


def workers_count(tables: RunTables, host: str) -> int:
    """Return how many workers may write at once: the sum, over training processes, of their largest loader's."""
    counts: dict[object, int] = {}
    for (main, _), setting in loader_settings(tables).items():
        if main is not None and main[0] == host:
            counts[main] = max(counts.get(main, 0), int(setting.get("num_workers") or 0))
    return sum(counts.values())


def shared_memory_samples(tables: RunTables, host: str) -> pd.DataFrame:
    """Return the records of the `host` stream of a host, which contain the use of its /dev/shm."""
    samples = tables.stream("host")
    return samples[samples["host"] == host]


def shared_memory_usage(samples: pd.DataFrame) -> tuple[Floats, Floats, float]:
    """Return times (seconds), the used bytes of /dev/shm, and its size."""
    times, used = floats(samples, "time_ns") / SECOND_NS, floats(samples, "shm_used_bytes")
    return times, used, last(floats(samples, "shm_total_bytes"))
