"""Processes that were ended from outside, with what is known about their ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2

from collector.diagnosis.deaths.dead_workers import DeadWorker
from collector.diagnosis.run.columns import floats, sampled, whole, written
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.processes import last_memory, last_step, rank_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.run.training import step_at, training_start_ns
from collector.findings import Evidence, Locus, fact
from collector.store import ProcessKey
from collector.units import listed

#: Killed workers of one loader above which they share one finding.
_MAX_SEPARATE = 3
#: Processes whose pids a sentence lists.
_MOST_PIDS = 8
#: Exit status of the command `timeout` (coreutils) once the time is over.
_TIMEOUT_STATUS = 124
#: Signals that ask a training to end, and may be the one of `timeout -s`.
REQUESTS_TO_END = (SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A training process or worker (or several of one loader) that was ended from outside.

    `last_seen_ns` is its last sign of life, `gone_ns` the time at which it was first known to be gone. `went_on` is
    a sentence on what went on without it, empty if that was nothing.
    """

    what: str
    locus: Locus
    main: ProcessKey
    key: ProcessKey | None
    signal: int | None
    exit_code: int | None = None
    last_seen_ns: float
    gone_ns: float
    since_step: int | None
    went_on: str
    evidence: tuple[Evidence, ...]


def worker_victim(life: Lifecycle, worker: DeadWorker) -> Victim:
    """Return a worker that died, with the records of its training process and of the collector."""
    tables = life.tables
    exits = 0 if worker.key is None else len(tables.events_of("worker-exit", by=worker.key))
    evidence = [fact("worker_farewell_count", exits, "worker-exit events")]
    if worker.exit_code is not None:
        evidence.append(fact("worker_exit_code", worker.exit_code, "seen by the training process", unit="status"))
    if worker.message is not None:
        evidence.append(fact("exception", worker.message[:200], "raised in the training process"))
    if worker.key is not None and life.is_dead(worker.key):
        evidence.append(fact("worker_alive", 0, "at the time of reading", unit="bool"))
    last_seen_ns, gone_ns = end_of(tables, worker.host, worker.pid, worker.key)
    went_on = any(event["time_ns"] > gone_ns for event in tables.events_of("epoch-start", by=worker.main))
    return Victim(
        what=f"worker {worker.worker} of loader {worker.loader} (pid {worker.pid})",
        locus=Locus(
            host=worker.host,
            rank=rank_of(tables, worker.main),
            role="worker",
            pid=worker.pid,
            worker=worker.worker,
            loader=worker.loader,
        ),
        main=worker.main,
        key=worker.key,
        signal=worker.signal,
        exit_code=worker.exit_code,
        last_seen_ns=last_seen_ns,
        gone_ns=gone_ns,
        since_step=step_at(tables, worker.main, gone_ns),
        went_on=" The training caught the error and went on." if worker.message is None and went_on else "",
        evidence=(*evidence, *last_memory(tables, worker.key)),
    )


def main_victim(life: Lifecycle, key: ProcessKey, signal: int | None) -> Victim:
    """Return a training process (or the command) that was ended by a signal, None if that is unknown."""
    evidence = [fact("farewell_count", len(life.tables.events_of("process-exit", by=key)), "process-exit events")]
    if life.exit_status is not None:
        evidence.append(fact("exit_status", life.exit_status, "of the command"))
    if key in life.exceptions:
        evidence.append(fact("exception", str(life.exceptions[key].get("type")), "uncaught"))
    if life.is_dead(key):
        evidence.append(fact("alive", 0, "at the time of reading", unit="bool"))
    rank, name = rank_of(life.tables, key), life.name(key)
    went_on = " The command went on, and ended with exit status 0." if life.exit_status == 0 else ""
    if key not in life.mains and life.trained_to_the_end:
        went_on = " The training ended by itself."
    last_seen_ns, gone_ns = end_of(life.tables, key[0], key[1], key)
    return Victim(
        what=name if rank is None or len(life.mains) > 1 else f"{name.removesuffix(')')}, rank {rank})",
        locus=Locus(host=key[0], rank=rank, role=life.role(key), pid=key[1]),
        main=key,
        key=key,
        signal=signal,
        last_seen_ns=last_seen_ns,
        gone_ns=gone_ns,
        since_step=last_step(life.tables, key),
        went_on=went_on,
        evidence=(*evidence, *last_memory(life.tables, key)),
    )


def merge_workers(victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims, with more than `_MAX_SEPARATE` workers of one loader merged into one."""
    loaders: dict[tuple[ProcessKey, int | None], list[Victim]] = {}
    for victim in victims:
        if victim.locus.role == "worker":
            loaders.setdefault((victim.main, victim.locus.loader), []).append(victim)
    groups = [group for group in loaders.values() if len(group) > _MAX_SEPARATE]
    members = {id(victim) for group in groups for victim in group}
    return [*(_merge(group) for group in groups), *(victim for victim in victims if id(victim) not in members)]


def is_timed_out(life: Lifecycle) -> bool:
    """Return whether the command `timeout` ended the run, since its time was over."""
    programs = life.programs.values()
    return life.exit_status == _TIMEOUT_STATUS and any(line.split()[0] == "timeout" for line in programs)


def merge_mains(life: Lifecycle, victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims, with the training processes that Ctrl-C or `timeout` ended merged into one.

    `timeout` sends its signal to its whole process group: a worker that ended by it counts as its training process.
    """
    is_over = is_timed_out(life)
    signals = REQUESTS_TO_END if is_over else (SIGINT,)
    if is_over:
        victims = [
            main_victim(life, one.main, one.signal) if _ended_with_main(life, one) else one for one in victims
        ]
    mains: dict[int | None, dict[ProcessKey, Victim]] = {}
    merged = []
    for victim in victims:
        if victim.signal in signals and victim.locus.role == "main":
            mains.setdefault(victim.signal, {})[victim.main] = victim
        else:
            merged.append(victim)
    for group in mains.values():
        first = next(iter(group.values()))
        count = fact("victims_count", len(group), "training processes that ended so")
        pids = f" (pids {listed(victim.locus.pid for victim in group.values())})"
        what = f"{len(group)} training processes{pids if len(group) <= _MOST_PIDS else ''}"
        is_one = len(group) == 1
        merged.append(first if is_one else dataclasses.replace(first, what=what, evidence=(count, *first.evidence)))
    return merged


def _ended_with_main(life: Lifecycle, victim: Victim) -> bool:
    """Return whether a signal ended a worker whose training did not go on, and no training began after it."""
    if victim.signal not in REQUESTS_TO_END or victim.locus.role != "worker" or victim.went_on:
        return False
    return not any(training_start_ns(life.tables, key) > victim.gone_ns for key in life.mains)


def _merge(group: Sequence[Victim]) -> Victim:
    example = next((victim for victim in group if victim.signal is not None), group[0])
    pids = listed(victim.locus.pid for victim in group)
    return dataclasses.replace(
        example,
        what=f"{len(group)} workers of loader {example.locus.loader} (pids {pids})",
        locus=dataclasses.replace(example.locus, pid=None, worker=None),
        key=None,
        last_seen_ns=min(victim.last_seen_ns for victim in group),
        gone_ns=max(victim.gone_ns for victim in group),
        went_on=example.went_on if all(victim.went_on for victim in group) else "",
        evidence=(fact("victims_count", len(group), "workers of this loader"), *example.evidence),
    )


def end_of(tables: RunTables, host: str, pid: int, key: ProcessKey | None) -> tuple[float, float]:
    """Return its last sign of life and when it was known to be gone, in ns; equal if its end was not seen.

    Other processes report an end by pid; the collector and the process itself, by its key.
    """
    gone = [
        float(event["time_ns"])
        for event in tables.events_of("worker-died", "command-exit")
        if event.get("host") == host and pid in (whole(event.get("worker_pid")), whole(event.get("command_pid")))
    ]
    signs_ns = []
    if key is not None:
        rows = sampled(tables, key)
        times, alive = floats(rows, "time_ns"), floats(rows, "alive")
        gone += list(times[alive == 0][:1])
        signs_ns += list(times[alive == 1][-1:])
        signs_ns += [float(event["time_ns"]) for event in tables.events if writer_of(event) == key]
        for name in ("step", "batch", "fetch"):
            signs_ns += list(floats(written(tables, name, key), "time_ns")[-1:])
    last_seen = max(signs_ns, default=min(gone, default=float(tables.now_ns)))
    return last_seen, max(min(gone, default=last_seen), last_seen)
