"""Find trainings that stand still with work pending, and who holds them up.

The collector takes stacks when a training is silent for longer than its own pace explains. Silence alone is no
hang: the training must wait for a batch that a worker does not deliver, for a collective that another rank has not
entered, or stand in one place itself. Who waits for another process is a victim; the culprit is at the end of the
chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.loading.loaders import worker_slots
from collector.diagnosis.run.columns import ITERATIONS, floats, key_of, whole, written
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of
from collector.diagnosis.run.processes import fact, last_step, rank_of, sentence
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, Locus, Severity
from collector.stacks import SUSPENDED, Frame, Stack, from_fields
from collector.store import ProcessKey
from collector.units import duration

#: Dumps of one series follow each other within this time.
_SERIES_SECONDS = 30.0
#: A process that takes this share of a core is computing, not blocked.
_BUSY_RATIO = 0.5
#: Helpers are at work from this share on: on a machine with too few cores they get little.
_HELPERS_RATIO = 0.05
#: Times the budget that a process is given whose long phase may simply be long: it computes, sleeps, or waits for
#: the disk, the network or another program.
_LONG_PATIENCE = 4.0
_LOCK = "blocked on a"
#: Waits that nothing but another thread or a signal can end; they are no work.
_STUCK_WAITS = (_LOCK, "suspended", "waiting for a child", "waiting in a collective")
_COLLECTIVE = "waiting in a collective"
#: Parts of paths of frames in which a rank waits for other ranks; DDP's backward pass waits for the gradients.
_COLLECTIVE_PATHS = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py")
#: The same for phases that may take any time: a compilation, a debugger.
_PHASE_PATHS = ("torch/_dynamo/", "torch/_inductor/", "/pdb.py", "/bdb.py", "/debugpy/")
#: The same for a notebook; between two cells it runs no code of its user.
_NOTEBOOK_PATHS = ("/ipykernel/kernelapp.py",)
_MAIN_THREAD = "MainThread"


@dataclass(frozen=True, slots=True)
class _Process:
    """One process over the dumps of a series: its stacks in the last one, and what changed between the dumps.

    Attributes:
        key: the process.
        locus: its place.
        name: for the middle of a sentence.
        threads: stacks of its threads; none if they could not be read.
        is_still: True if its main thread stands in the same place in each dump.
        busy_ratio: CPU time over wall time between the dumps; None with a single dump.
    """

    key: ProcessKey
    locus: Locus
    name: str
    threads: tuple[Stack, ...]
    is_still: bool
    busy_ratio: float | None

    @property
    def main(self) -> Stack | None:
        """The stack of the main thread."""
        return next((stack for stack in self.threads if stack.thread == _MAIN_THREAD), None)

    @property
    def activity(self) -> str | None:
        """The part of the main thread in data loading."""
        return self.main.activity if self.main else None

    @property
    def is_in_collective(self) -> bool:
        """True if the main thread stands in a collective of torch.distributed."""
        return self._is_in(_COLLECTIVE_PATHS) and not self.is_busy

    @property
    def is_at_lock(self) -> bool:
        """True if the main thread is blocked on a lock."""
        return self.main is not None and (self.main.waits or "").startswith(_LOCK)

    @property
    def is_in_long_phase(self) -> bool:
        """True if the main thread compiles, is debugged, or waits for the user of a notebook."""
        has_own_code = self.main is not None and any(frame.is_own for frame in self.main.frames)
        return self._is_in(_PHASE_PATHS) or (self._is_in(_NOTEBOOK_PATHS) and not has_own_code)

    def _is_in(self, paths: Sequence[str]) -> bool:
        return self.main is not None and any(path in frame.path for frame in self.main.frames for path in paths)

    @property
    def is_busy(self) -> bool:
        """True if it computes."""
        is_running = self.main is not None and self.main.waits == "computing"
        return is_running or (self.busy_ratio is not None and self.busy_ratio > _BUSY_RATIO)

    @property
    def is_stuck(self) -> bool:
        """True if no progress shows: it is suspended, or stands in one place without computing."""
        return self.is_suspended or (self.is_still and not self.is_busy)

    @property
    def is_suspended(self) -> bool:
        """True if a signal has stopped it."""
        return any(stack.waits == SUSPENDED for stack in self.threads)


def find_hangs(tables: RunTables) -> list[Finding]:
    """Return one finding for each process that holds up a training, by the newest stacks of the run."""
    life = lifecycle_of(tables)
    events = tables.events_of("stacks")
    findings: dict[ProcessKey, Finding] = {}
    for host in sorted({str(event["host"]) for event in events}):
        series = _last_series([event for event in events if event["host"] == host])
        silent = {
            key: entry
            for entry in series[-1]["silent"]
            if (key := key_of({**entry, "host": host})) and not _went_on(tables, life, key, series[-1]["time_ns"])
        }
        if silent:
            processes = _processes(tables, life, series)
            for main in silent:
                culprit = _culprit(tables, processes, main, [key for key in silent if key != main])
                if culprit is not None and culprit.key not in findings:
                    findings[culprit.key] = _finding(
                        tables, life, culprit, main, silent[main], series, len(silent) - 1
                    )
    return list(findings.values())


def _last_series(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = events[-1]
    return [event for event in events if last["time_ns"] - event["time_ns"] <= _SERIES_SECONDS * 1e9][-3:]


def _went_on(tables: RunTables, life: Lifecycle, key: ProcessKey, time_ns: int) -> bool:
    """Return whether a process made progress after that time, ended as it should, or stopped recording."""
    if any(key_of(event) == key for event in tables.events_of("hook-disabled")):
        return True
    if any((floats(written(tables, name, key), "time_ns") > time_ns).any() for name in ITERATIONS):
        return True
    return key in life.recorded_exits and key not in life.exceptions


def _processes(
    tables: RunTables, life: Lifecycle, series: Sequence[Mapping[str, Any]]
) -> dict[ProcessKey, _Process]:
    host = str(series[-1]["host"])
    dumps: dict[ProcessKey, list[Mapping[str, Any]]] = {}
    for event in series:
        for entry in event["processes"]:
            if key := key_of({**entry, "host": host}):
                dumps.setdefault(key, []).append({**entry, "time_ns": event["time_ns"]})
    slots = worker_slots(tables)
    found = {}
    for key, entries in dumps.items():
        # A dump can fail while the interpreter changes what is read.
        readable = [entry for entry in entries if entry["threads"]] or entries[-1:]
        entry, before = readable[-1], readable[:-1]
        where = Locus(host=host, rank=rank_of(tables, key), role="main", pid=key[1])
        if slot := slots.get(key[:2]):
            where = replace(where, rank=rank_of(tables, slot[0]), role="worker", loader=slot[1], worker=slot[2])
        found[key] = _Process(
            key=key,
            locus=where,
            name=f"worker {where.worker} of loader {where.loader}" if where.worker is not None else life.name(key),
            threads=tuple(from_fields(thread, where) for thread in entry["threads"]),
            is_still=bool(before) and all(_place(dump) == _place(entry) for dump in before),
            busy_ratio=_busy_ratio(readable[0], entry),
        )
    return found


def _place(entry: Mapping[str, Any]) -> Any:
    """Return where the main thread of a dump stands: its frames."""
    return next((thread["frames"] for thread in entry["threads"] if thread["thread"] == _MAIN_THREAD), None)


def _busy_ratio(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    wall_seconds = (last["time_ns"] - first["time_ns"]) / 1e9
    if wall_seconds <= 0 or None in (first["cpu_seconds"], last["cpu_seconds"]):
        return None
    return float((last["cpu_seconds"] - first["cpu_seconds"]) / wall_seconds)


def _culprit(
    tables: RunTables, processes: Mapping[ProcessKey, _Process], main: ProcessKey, others: Sequence[ProcessKey]
) -> _Process | None:
    """Follow the waits from a silent training process to the process that all wait for; None if unknown."""
    process = processes.get(main)
    if process is None or (process.main is None and not process.is_suspended):
        return None
    if others and process.is_in_collective:
        late = [processes[key] for key in others if key in processes and not processes[key].is_in_collective]
        return _culprit(tables, processes, late[0].key, ()) if late else process
    if process.activity != "waits for a batch" or process.is_suspended:
        return process
    slots = worker_slots(tables)
    workers = [worker for key, worker in processes.items() if slots.get(key[:2], (None,))[0] == main]
    at_work = [worker for worker in workers if worker.is_suspended or worker.activity == "makes a batch"]
    # A worker at a lock may wait for another worker at work, which holds it.
    at_work.sort(key=lambda worker: (not worker.is_suspended, worker.is_at_lock, not worker.is_stuck))
    return at_work[0] if at_work else next((worker for worker in workers if _feeder(worker) is not None), None)


def _feeder(worker: _Process) -> Stack | None:
    """Return the thread that sends a worker's batches, if it is stuck in sending one."""
    feeding = (stack for stack in worker.threads if stack.activity == "feeds a queue")
    return next((one for one in feeding if one.frames and not one.frames[0].function.endswith("wait")), None)


def _finding(
    tables: RunTables,
    life: Lifecycle,
    culprit: _Process,
    main: ProcessKey,
    silence: Mapping[str, Any],
    series: Sequence[Mapping[str, Any]],
    others_count: int,
) -> Finding:
    dumps_count = len(series)
    stack = culprit.main if culprit.activity != "waits for an index" else _feeder(culprit)
    frame = _telling_frame(stack)
    waits = SUSPENDED if culprit.is_suspended else (stack.waits if stack else None)
    if culprit.is_busy:
        waits = "computing"
    elif others_count and culprit.is_in_collective:
        waits = _COLLECTIVE
    is_worker = culprit.locus.worker is not None
    seconds = silence["silent_seconds"]
    is_plain = _is_plain(tables, culprit, waits, seconds / silence["budget_seconds"], series, others_count)
    severity: Severity = "critical" if is_plain else "info"
    window = f"{dumps_count} dumps of its stacks"
    evidence = [fact("silent_seconds", round(seconds, 1), "since its last step or batch")]
    if silence["longest_seconds"] is not None:
        evidence.append(fact("longest_pause_seconds", round(silence["longest_seconds"], 1), "before"))
    if frame is not None:
        evidence.append(fact("stands_in", f"{frame.function}, {_line(frame)}", window, n=dumps_count))
    if waits is not None:
        evidence.append(fact("state", waits, window, n=dumps_count))
    if culprit.busy_ratio is not None:
        evidence.append(fact("busy_ratio", round(culprit.busy_ratio, 3), window, n=dumps_count))
    death = catalogue.HANG_OF_WORKER if is_worker else catalogue.HANG
    found = death.finding(
        locus=culprit.locus,
        since_step=last_step(tables, main),
        evidence=tuple(evidence),
        severity=severity,
        confidence=0.95 if culprit.is_stuck and dumps_count > 1 else 0.7,
        what=sentence(culprit.name),
        does=waits or "standing still",
        where=f" in {frame.function}, {_line(frame)}" if frame is not None else "",
        training=life.name(main),
        held=_held(others_count, waits),
        hangs="hangs" if is_plain else "may hang",
        silent=duration(seconds),
    )
    return replace(found, advice=(*catalogue.hang_advice(waits, culprit.key[1]), *found.advice))


def _is_plain(
    tables: RunTables,
    culprit: _Process,
    waits: str | None,
    budgets: float,
    series: Sequence[Mapping[str, Any]],
    others_count: int,
) -> bool:
    """Return whether a silence of `budgets` times the budget is a hang, not merely a long phase."""
    is_worker = culprit.locus.worker is not None
    if culprit.is_in_long_phase or budgets < 1 or (culprit.is_busy and not is_worker):
        return False
    is_at_work = culprit.is_busy or _helpers_compute(series)
    if culprit.is_stuck and not is_at_work and (waits or "").startswith(_STUCK_WAITS):
        return True
    if not is_worker and not others_count and not _has_batches_left(tables, culprit.key, series):
        return False
    return budgets >= _LONG_PATIENCE and (is_worker or culprit.is_stuck)


def _helpers_compute(series: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether other processes of the run compute, such as a program that the training waits for.

    On a crowded machine such a process may get little of a core, but it is runnable whenever it is looked at.
    """
    if all(event.get("helpers_runnable_count") for event in series):
        return True
    wall_seconds = (series[-1]["time_ns"] - series[0]["time_ns"]) / 1e9
    used_seconds = series[-1]["helpers_cpu_seconds"] - series[0]["helpers_cpu_seconds"]
    return bool(wall_seconds > 0 and used_seconds / wall_seconds > _HELPERS_RATIO)


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
    if not others_count or waits == _COLLECTIVE:
        return ""
    ranks = "1 other rank waits" if others_count == 1 else f"{others_count} other ranks wait"
    return f"; {ranks} for it"


def _telling_frame(stack: Stack | None) -> Frame | None:
    """Return the innermost frame of the user's own, else the innermost of all."""
    if stack is None or not stack.frames:
        return None
    return next((frame for frame in stack.frames if frame.is_own), stack.frames[0])


def _line(frame: Frame) -> str:
    return f"{PurePath(frame.path).name}:{frame.line}"
