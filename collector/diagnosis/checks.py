"""The checks of a run: which were made and found nothing, and which could not be made, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.loading.steady_state import MIN_BATCHES
from collector.diagnosis.memory.file_descriptors import lacked_files
from collector.diagnosis.run.allocators import allocators
from collector.diagnosis.run.columns import by_process, floats, worker_samples
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.main_thread_pause import LEAST_STEPS
from collector.diagnosis.statistics.growth import MIN_POINTS
from collector.findings import KINDS, Check, Finding
from training_harness.records import ROLE_COLLECTOR, ROLE_WORKER

#: (kind, role of its process) of a finding -> a check that fails by it, besides those of its kind.
_OF_PROCESS: dict[tuple[str, str | None], str] = {
    ("hang", "worker"): "data loading",
    ("host-oom-kill", "main"): "training process's memory",
    ("host-oom-kill", "worker"): "workers' memory",
}
#: Evidence of a crash for lack of a resource -> the check that fails by it.
_OF_CRASH = {
    "shm_used_peak_bytes": "/dev/shm",
    "longest_fetch_seconds": "data loading",  # DataLoader timed out
}
#: Check -> the rules (`verdict.diagnose`) without which it cannot be made.
_RULES = {
    "how the run ended": ("deaths", "hangs", "hangs without hooks"),
    "host memory": ("risk",),
    "training process's memory": ("leaks", "processes"),
    "workers' memory": ("leaks",),
    "open files": ("descriptors",),
    "/dev/shm": ("shared memory",),
    "GPU memory": ("device growth", "device risk"),
    "data loading": ("stalls", "caught errors"),
    "pauses of the training": ("pauses",),
    "ranks": ("ranks",),
    "records": ("trust",),
}
#: Checks that read what the hooks record.
_OF_HOOKS = ("workers' memory", "data loading", "pauses of the training")
#: Evidence that a rule failed: its error, and its name.
RULE_ERROR = "rule_error"
FAILED_RULE = "failed_rule"
_LEAST_READINGS = 2
_UNCLEAR = "it grows, and whether that is a leak is not known yet"


def checks_of(tables: RunTables, findings: Sequence[Finding]) -> tuple[Check, ...]:
    """Return every check on a run, with its result."""
    if lifecycle_of(tables).mains:  # growth of a helper leaves the training's own memory fine
        findings = [f for f in findings if (f.severity, f.locus.role) != ("info", "other")]
    return tuple(_check(tables, name, findings) for name in _CHECKS)


def _check(tables: RunTables, name: str, findings: Sequence[Finding]) -> Check:
    life = lifecycle_of(tables)
    obstacle = _CHECKS[name](tables)
    if obstacle and name in _OF_HOOKS and life.watched and not life.mains:
        obstacle = "watched from outside"
    failed = {item.value for finding in findings for item in finding.evidence if item.name == FAILED_RULE}
    if not failed.isdisjoint(_RULES[name]):
        obstacle = "its rule failed"
    found = [finding for finding in findings if name in _failed_by(finding)]
    growths = [finding for finding in found if finding.group == "memory leak" and finding.severity == "info"]
    troubles = [finding for finding in found if not finding.is_healthy and finding not in growths]
    if troubles or any(finding.consequence_of for finding in growths) or (obstacle and found):
        return Check(name=name, status="finding")
    suspects = [finding for finding in findings if name in KINDS[finding.suspected].checks and finding not in found]
    if any(finding.rate for finding in (*growths, *suspects)):
        obstacle = _UNCLEAR
    elif suspects:
        obstacle = obstacle or "not known for each loader"
    if obstacle:
        return Check(name=name, status="not judged", reason=obstacle)
    return Check(name=name, status="fine", reason=_PARTS[name](tables) if name in _PARTS else "")


def _failed_by(finding: Finding) -> set[str | None]:
    """Return the checks that fail by a finding."""
    lacks = (_OF_CRASH.get(item.name) for item in finding.evidence if finding.kind == "crashed")
    files = "open files" if lacked_files(finding) else None
    return {*KINDS[finding.kind].checks, _OF_PROCESS.get((finding.kind, finding.locus.role)), *lacks, files}


def _end(tables: RunTables) -> str:
    life = lifecycle_of(tables)
    status = life.status()
    if status == "running":
        return "it goes on"
    if life.watched:
        return "watched from outside"
    return "" if status == "finished" else "its records do not show why"


def _too_few(count: int, needed: int, what: str) -> str:
    return "" if count >= needed else f"{count} of the {needed} {what} needed"


def _too_few_samples(rows: pd.DataFrame, what: str) -> str:
    return _too_few(max((len(of_one) for _, of_one in by_process(rows)), default=0), MIN_POINTS, what)


def _host(column: str) -> Callable[[RunTables], str]:
    def obstacle(tables: RunTables) -> str:
        return _too_few(int(np.isfinite(floats(tables.stream("host"), column)).sum()), MIN_POINTS, "samples")

    return obstacle


def _processes(tables: RunTables) -> str:
    process = tables.stream("process")
    return _too_few_samples(process[~np.isin(floats(process, "role"), (ROLE_COLLECTOR, ROLE_WORKER))], "samples")


def _workers(tables: RunTables) -> str:
    rows = worker_samples(tables)
    if rows.empty and not tables.events_of("worker-start"):
        return "no workers"
    return _too_few_samples(rows, "samples of a worker")


def _part_of_workers(tables: RunTables) -> str:
    """Copies of inherited pages show in private memory alone, as its rise between two readings."""
    workers = worker_samples(tables)
    read = by_process(workers[np.isfinite(floats(workers, "private_dirty_bytes"))])
    often = max((len(of_one) for _, of_one in read), default=0) >= _LEAST_READINGS
    return "" if often else "by resident size alone: private memory was read too seldom"


def _devices(tables: RunTables) -> str:
    records, samples = tables.stream("device_memory"), tables.stream("device")
    if records.empty and samples.empty:
        return "no GPU in use"
    if records.empty:
        return _too_few(int(samples.groupby("device").size().max()), MIN_POINTS, "samples")
    return _too_few(max((len(one.rows) for one in allocators(records)), default=0), MIN_POINTS, "steps")


def _part_of_devices(tables: RunTables) -> str:
    has_driver = np.isfinite(floats(tables.stream("device"), "used_bytes")).any()
    return "" if has_driver else "of PyTorch alone: NVML reports nothing"


def _loading(tables: RunTables) -> str:
    found = loops(tables)
    if not found:
        if not tables.events_of("loader"):
            return "no DataLoader seen"
        return "no batch yet" if tables.goes_on else "no batch came"
    return _too_few(max(len(loop.batches) for loop in found), MIN_BATCHES, "batches")


#: Name of a check -> what keeps it from being made. `tidegauge.kinds` has the findings that it leads to.
_CHECKS: dict[str, Callable[[RunTables], str]] = {
    "how the run ended": _end,
    "host memory": _host("memory_available_bytes"),
    "training process's memory": _processes,
    "workers' memory": _workers,
    "open files": _processes,
    "/dev/shm": _host("shm_used_bytes"),
    "GPU memory": _devices,
    "data loading": _loading,
    "pauses of the training": lambda tables: _too_few(len(tables.stream("step")), LEAST_STEPS, "steps"),
    "ranks": lambda tables: "" if len(lifecycle_of(tables).mains) > 1 else "one training process",
    "records": lambda _: "",
}
#: Name of a check -> the part of its subject that it saw, if not all of it.
_PARTS: dict[str, Callable[[RunTables], str]] = {
    "workers' memory": _part_of_workers,
    "GPU memory": _part_of_devices,
}
