"""Find trainings that stand still with work pending, and who holds them up.

The collector takes stacks when a training is silent for longer than its own pace explains. Silence alone is no
hang: the training must wait for a batch that a worker does not deliver, for a collective that another rank has not
entered, or stand in one place itself. Who waits for another process is a victim; the culprit is at the end of the
chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.deaths.stuck_process import (
    COLLECTIVE,
    STUCK_WAITS,
    Process,
    helpers_compute,
    last_series,
    processes_of,
    who_holds_up,
)
from collector.diagnosis.loading.loaders import worker_slots
from collector.diagnosis.run.columns import ITERATIONS, floats, key_of, whole, written
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of
from collector.diagnosis.run.processes import fact, last_step, sentence
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, Severity
from collector.stacks import WAITS_FOR_BATCH
from collector.store import ProcessKey
from collector.units import duration

#: Times the budget that a process is given whose long phase may simply be long: it computes, sleeps, or waits for
#: the disk, the network or another program.
_LONG_PATIENCE = 4.0


def find_hangs(tables: RunTables) -> list[Finding]:
    """Return one finding for each process that holds up a training, by the newest stacks of the run."""
    life = lifecycle_of(tables)
    events = [event for event in tables.events_of("stacks") if event["silent"]]
    findings: dict[ProcessKey, Finding] = {}
    for host in sorted({str(event["host"]) for event in events}):
        series = last_series([event for event in events if event["host"] == host])
        silent = {
            key: entry
            for entry in series[-1]["silent"]
            if (key := key_of({**entry, "host": host})) and not _went_on(tables, life, key, series[-1]["time_ns"])
        }
        if silent:
            processes = processes_of(tables, life, series)
            for main in silent:
                culprit = _culprit(tables, processes, main, [key for key in silent if key != main])
                if culprit is not None and culprit.key not in findings:
                    findings[culprit.key] = _finding(
                        tables, life, culprit, main, silent[main], series, len(silent) - 1
                    )
    return list(findings.values())


def _went_on(tables: RunTables, life: Lifecycle, key: ProcessKey, time_ns: int) -> bool:
    """Return whether a process made progress after that time, ended as it should, or stopped recording."""
    if any(key_of(event) == key for event in tables.events_of("hook-disabled")):
        return True
    if any((floats(written(tables, name, key), "time_ns") > time_ns).any() for name in ITERATIONS):
        return True
    return key in life.recorded_exits and key not in life.exceptions


def _culprit(
    tables: RunTables, processes: Mapping[ProcessKey, Process], main: ProcessKey, others: Sequence[ProcessKey]
) -> Process | None:
    """Follow the waits from a silent training process to the process that all wait for; None if unknown."""
    process = processes.get(main)
    if process is None or (process.main is None and not process.is_suspended):
        return None
    if others and process.is_in_collective:
        late = [processes[key] for key in others if key in processes and not processes[key].is_in_collective]
        return _culprit(tables, processes, late[0].key, ()) if late else process
    if process.activity != WAITS_FOR_BATCH or process.is_suspended:
        return process
    slots = worker_slots(tables)
    workers = [worker for key, worker in processes.items() if slots.get(key[:2], (None,))[0] == main]
    return who_holds_up(workers)


def _finding(
    tables: RunTables,
    life: Lifecycle,
    culprit: Process,
    main: ProcessKey,
    silence: Mapping[str, Any],
    series: Sequence[Mapping[str, Any]],
    others_count: int,
) -> Finding:
    waits = COLLECTIVE if others_count and culprit.is_in_collective and not culprit.is_busy else culprit.waits
    is_worker = culprit.locus.role == "worker"
    seconds = silence["silent_seconds"]
    is_plain = _is_plain(tables, culprit, waits, seconds / silence["budget_seconds"], series, others_count)
    severity: Severity = "critical" if is_plain else "info"
    evidence = [fact("silent_seconds", round(seconds, 1), "since its last step or batch")]
    if silence["longest_seconds"] is not None:
        evidence.append(fact("longest_pause_seconds", round(silence["longest_seconds"], 1), "before"))
    death = catalogue.HANG_OF_WORKER if is_worker else catalogue.HANG
    found = death.finding(
        locus=culprit.locus,
        since_step=last_step(tables, main),
        evidence=(*evidence, *culprit.evidence(len(series), waits)),
        severity=severity,
        confidence=0.95 if culprit.is_stuck and len(series) > 1 else 0.7,
        what=sentence(culprit.name),
        does=waits or "standing still",
        where=culprit.where,
        training=life.name(main),
        held=_held(others_count, waits),
        hangs="hangs" if is_plain else "may hang",
        silent=duration(seconds),
    )
    return catalogue.with_remedy(found, waits, goes_on=life.status() == "running")


def _is_plain(
    tables: RunTables,
    culprit: Process,
    waits: str | None,
    budgets: float,
    series: Sequence[Mapping[str, Any]],
    others_count: int,
) -> bool:
    """Return whether a silence of `budgets` times the budget is a hang, not merely a long phase."""
    is_worker = culprit.locus.role == "worker"
    if culprit.is_in_long_phase or budgets < 1 or (culprit.is_busy and not is_worker):
        return False
    is_at_work = culprit.is_busy or helpers_compute(series)
    if culprit.is_stuck and not is_at_work and (waits or "").startswith(STUCK_WAITS):
        return True
    if not is_worker and not others_count and not _has_batches_left(tables, culprit.key, series):
        return False
    return budgets >= _LONG_PATIENCE and (is_worker or culprit.is_stuck)


def _has_batches_left(tables: RunTables, key: ProcessKey, series: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a training process is in an epoch whose last batch it has not had.

    A loop that is left early ends its workers, so without them the epoch is over.
    """
    batches = written(tables, "batch", key)
    if batches.empty:
        return False
    loader, index = whole(batches["loader"].iloc[-1]), whole(batches["index"].iloc[-1])
    for event in tables.events_of("loader"):
        if key_of(event) == key and whole(event.get("loader")) == loader:
            if event.get("num_workers") and not _has_workers(tables, key, series):
                return False
            length, size = whole(event.get("dataset_length")), whole(event.get("batch_size"))
            return length is None or size is None or index is None or (index + 2) * size <= length
    return True


def _has_workers(tables: RunTables, key: ProcessKey, series: Sequence[Mapping[str, Any]]) -> bool:
    slots = worker_slots(tables)
    alive = [(key[0], process["pid"]) for process in series[-1]["processes"]]
    return any(slots[address][0] == key for address in alive if address in slots)


def _held(others_count: int, waits: str | None) -> str:
    if not others_count or waits == COLLECTIVE:
        return ""
    ranks = "1 other rank waits" if others_count == 1 else f"{others_count} other ranks wait"
    return f"; {ranks} for it"
