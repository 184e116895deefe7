"""The checks of a run: which were made and found nothing, and which could not be made, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.run.columns import by_process, floats, worker_samples
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.main_thread_pause import LEAST_STEPS
from collector.diagnosis.stalls.verdict import MIN_BATCHES
from collector.diagnosis.statistics.growth import MIN_POINTS
from collector.findings import KINDS, Check, Finding
from training_harness.records import ROLE_COLLECTOR, ROLE_WORKER

_UNCLEAR = "it grows, and whether that is a leak is not known yet"


def checks_of(tables: RunTables, findings: Sequence[Finding]) -> tuple[Check, ...]:
    """Return every check on a run, with its result."""
    if lifecycle_of(tables).mains:  # growth of a helper leaves the training's own memory fine
        findings = [f for f in findings if (f.severity, f.locus.role) != ("info", "other")]
    return tuple(_check(name, kinds.split(), obstacle(tables), findings) for name, kinds, obstacle in _CHECKS)


def _check(name: str, kinds: Sequence[str], obstacle: str, findings: Sequence[Finding]) -> Check:
    found = [finding for finding in findings if finding.kind in kinds]
    if any(finding.severity != "info" for finding in found) or (obstacle and found):
        return Check(name=name, status="finding")
    suspects = [finding for finding in findings if finding.suspected in kinds and finding not in found]
    growths = [finding for finding in found if KINDS[finding.kind] == "memory leak"]
    if any(finding.rate for finding in (*growths, *suspects)):
        obstacle = _UNCLEAR
    elif suspects:
        obstacle = obstacle or "not known for each loader"
    return Check(name=name, status="not judged" if obstacle else "fine", reason=obstacle)


def _end(tables: RunTables) -> str:
    status = lifecycle_of(tables).status()
    if status == "running":
        return "it goes on"
    return "" if status == "finished" else "its records do not show why"


def _too_few(count: int, needed: int, what: str) -> str:
    return "" if count >= needed else f"{count} of the {needed} {what} needed"


def _host(column: str) -> Callable[[RunTables], str]:
    def obstacle(tables: RunTables) -> str:
        return _too_few(int(np.isfinite(floats(tables.stream("host"), column)).sum()), MIN_POINTS, "samples")

    return obstacle


def _processes(tables: RunTables) -> str:
    process = tables.stream("process")
    rows = process[~np.isin(floats(process, "role"), (ROLE_COLLECTOR, ROLE_WORKER))]
    return _too_few(max((len(of_one) for _, of_one in by_process(rows)), default=0), MIN_POINTS, "samples")


def _workers(tables: RunTables) -> str:
    rows = worker_samples(tables)
    if rows.empty:
        return "no workers"
    return _too_few(max(len(of_one) for _, of_one in by_process(rows)), MIN_POINTS, "samples of a worker")


def _devices(tables: RunTables) -> str:
    return "no GPU in use" if tables.stream("device_memory").empty and tables.stream("device").empty else ""


def _loading(tables: RunTables) -> str:
    found = loops(tables)
    if not found:
        return "no DataLoader seen"
    return _too_few(max(len(loop.batches) for loop in found), MIN_BATCHES, "batches")


def _ranks(tables: RunTables) -> str:
    return "" if len(lifecycle_of(tables).mains) > 1 else "one training process"


#: Name of a check, the kinds of findings that it leads to, and what keeps it from being made.
_CHECKS: tuple[tuple[str, str, Callable[[RunTables], str]], ...] = (
    ("how the run ended", "cuda-oom host-oom-kill worker-killed shm-bus-error crashed killed hang", _end),
    ("host memory", "host-oom-risk host-oom-kill", _host("memory_available_bytes")),
    ("training process's memory", "main-heap-leak pinned-cache-growth", _processes),
    ("workers' memory", "worker-heap-leak copy-on-read-growth", _workers),
    ("open files", "fd-leak fd-exhaustion-risk", _processes),
    ("/dev/shm", "shm-leak shm-exhaustion-risk shm-bus-error", _host("shm_used_bytes")),
    ("GPU memory", "gpu-oom-risk gpu-tensor-leak gpu-non-pytorch-growth gpu-fragmentation cuda-oom", _devices),
    (
        "data loading",
        "workers-too-slow slow-worker straggler-samples collate-bound copy-bound pin-bound sampler-bound "
        "worker-startup epoch-refill inline-loading shard-skew idle-workers caught-errors",
        _loading,
    ),
    (
        "pauses of the training",
        "main-thread-pause",
        lambda tables: _too_few(len(tables.stream("step")), LEAST_STEPS, "steps"),
    ),
    ("ranks", "rank-straggler", _ranks),
    ("records", "workers-not-reporting samples-lost", lambda _: ""),
)
