"""Find hangs of runs without hooks, from stacks and CPU time alone: of a watched process, say.

Nothing says how fast such a run goes, and a server that waits for requests uses no CPU time either. So the stacks
must show that work is pending: a process waits for a batch that a worker does not deliver, for ranks that have not
entered its collective, or for a lock in the middle of an epoch. Or a signal has suspended it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collector.diagnosis.hangs import catalogue
from collector.diagnosis.hangs.recorded_ranks import recorded_standstill, with_standstill
from collector.diagnosis.hangs.stuck_process import (
    COLLECTIVE,
    STUCK_WAITS,
    Process,
    Series,
    last_series,
    processes_of,
    sampled_seconds_after,
    who_holds_up,
)
from collector.diagnosis.run.columns import SECOND_NS, by_process, floats, sampled_on
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of
from collector.diagnosis.run.processes import sentence
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, fact
from collector.stacks import WAITS_FOR_BATCH
from collector.store import ProcessKey
from collector.units import duration

#: Seconds without CPU time after which a finding is a warning.
_PLAIN_SECONDS = 480.0
#: Seconds after the last moved bytes in which a process counts as slow.
_QUIET_SECONDS = 120.0
#: Share of one core, and seconds of CPU time besides, that a process of an idle run uses between two samples.
_NOISE_RATIO, _NOISE_SECONDS = 0.02, 0.05
#: Waits for storage: a rank that others wait for does not wait there by design, as it may for a request.
_STORAGE_WAITS = ("waiting for a disk", "waiting for NFS", "waiting for a FUSE")


class _Hang(NamedTuple):
    """A process that holds others up, its wait, what waits for it, and whether that is more than a guess."""

    culprit: Process
    waits: str | None
    held: str
    is_sure: bool


def find_idle_hangs(tables: RunTables) -> list[Finding]:
    """Return the hangs of runs without hooks, by the newest stacks of each host."""
    life = lifecycle_of(tables)
    events = [event for event in tables.events_of("stacks") if event.get("idle_seconds") is not None]
    findings = []
    for host in sorted({str(event["host"]) for event in events}):
        series = last_series([event for event in events if event["host"] == host])
        if not _went_on(life, host, series[-1]["time_ns"]):
            processes = processes_of(life, series)
            found = [_finding(life, hang, series) for hang in _hangs(life, processes)]
            began_ns = series[-1]["time_ns"] - series[-1]["idle_seconds"] * SECOND_NS
            standstill = recorded_standstill(tables, began_ns)
            findings += [with_standstill(one, standstill) for one in found] if standstill else found
    return findings


def _went_on(life: Lifecycle, host: str, time_ns: int) -> bool:
    """Return whether the run ended well, or its processes have computed since."""
    if life.exit_status == 0:
        return True
    for _, samples in by_process(sampled_on(life.tables, host)):
        times, cpu = floats(samples, "time_ns"), floats(samples, "cpu_ns")
        is_later = times >= time_ns
        used_ns, elapsed_ns = np.diff(cpu[is_later]), np.diff(times[is_later])
        if (used_ns > _NOISE_RATIO * elapsed_ns + _NOISE_SECONDS * 1e9).any():
            return True
    return False


def _hangs(life: Lifecycle, processes: Mapping[ProcessKey, Process]) -> list[_Hang]:
    alive = [process for process in processes.values() if process.main is not None or process.is_suspended]
    workers = [process for process in alive if process.locus.role == "worker"]
    others = [process for process in alive if process.locus.role != "worker" and not process.is_in_long_phase]
    waiting = [process for process in others if process.activity == WAITS_FOR_BATCH]
    found = _of_workers(life, workers, waiting)
    return found or _suspended(others) or _of_ranks(others) or _at_locks(workers, others)


def _of_workers(life: Lifecycle, workers: Sequence[Process], waiting: Sequence[Process]) -> list[_Hang]:
    """Return the worker behind each process that waits for a batch; under forkserver its parent is another one."""
    parents = {process.key[1] for process in waiting}
    found = {}
    for process in waiting:
        own = [worker for worker in workers if worker.parent_pid == process.key[1]]
        foreign = [worker for worker in workers if worker.parent_pid not in parents]
        culprit = who_holds_up(own or foreign)
        if culprit is not None and culprit.is_stuck and culprit.key not in found:
            held = f"; {life.name(process.key)} waits for its batch"
            found[culprit.key] = _Hang(culprit, culprit.waits, held, is_sure=True)
    return list(found.values())


def _of_ranks(others: Sequence[Process]) -> list[_Hang]:
    """Return the rank that has not entered a collective; if all have, one of those that wait."""
    inside = [process for process in others if process.is_in_collective and process.is_stuck]
    if not inside:
        return []
    count = f"{len(inside)} other rank{' waits' if len(inside) == 1 else 's wait'} for it"
    for process in others:
        if not process.is_in_collective and process.is_stuck and _is_no_service(process, others):
            return [_Hang(process, process.waits, f"; {count}", is_sure=True)]
    return [_Hang(inside[0], COLLECTIVE, "", is_sure=False)]


def _is_no_service(process: Process, others: Sequence[Process]) -> bool:
    """Return whether a process does not wait by design: for a request, or as a launcher for its ranks."""
    if any(other.parent_pid == process.key[1] for other in others):
        return False
    is_pending = process.main is not None and process.main.shows_pending_work
    return is_pending or (process.waits or "").startswith((*STUCK_WAITS[1:], *_STORAGE_WAITS))


def _suspended(others: Sequence[Process]) -> list[_Hang]:
    """Return processes that a signal has stopped; no process does so to itself by design."""
    return [_Hang(process, process.waits, "", is_sure=True) for process in others if process.is_suspended]


def _at_locks(workers: Sequence[Process], others: Sequence[Process]) -> list[_Hang]:
    """Return processes that are blocked on a lock; it is sure only in an epoch, which has workers."""
    return [
        _Hang(process, process.waits, "", is_sure=any(worker.parent_pid == process.key[1] for worker in workers))
        for process in others
        if process.is_at_lock and process.is_stuck and process.main is not None and process.main.shows_pending_work
    ]


def _finding(life: Lifecycle, hang: _Hang, series: Series) -> Finding:
    culprit, waits = hang.culprit, hang.waits
    last, seconds = series[-1], series[-1]["idle_seconds"]
    lasted_seconds = seconds + sampled_seconds_after(last["time_ns"], sampled_on(life.tables, last["host"]))
    transfer = culprit.transfer(_QUIET_SECONDS)
    is_plain = hang.is_sure and seconds >= _PLAIN_SECONDS and not transfer
    found = catalogue.HANG_WITHOUT_HOOKS.finding(
        locus=culprit.locus,
        evidence=(
            fact("idle_seconds", round(lasted_seconds, 1), "all processes of the run"),
            *culprit.evidence(len(series), waits),
        ),
        severity="warning" if is_plain else "info",
        confidence=0.9 if hang.is_sure and len(series) > 1 else 0.5,
        what=sentence(culprit.name),
        hangs="is slow" if transfer else "hangs" if is_plain else "may hang",
        does=waits or "standing still",
        where=culprit.where,
        held=hang.held,
        silent=duration(lasted_seconds),
    )
    found = catalogue.with_remedy(found, waits, life, culprit)
    return catalogue.of_slow(found, transfer) if transfer else found
