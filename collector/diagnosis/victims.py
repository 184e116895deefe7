"""A process that was ended from outside: what is known of it and of its end."""

from __future__ import annotations

import dataclasses
import math
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.dead_workers import DeadWorker
from collector.diagnosis.findings import Evidence, Locus
from collector.diagnosis.frames import floats, held_bytes, key_of, last, sampled, step_at, whole, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey

_TOLD_APART = 3  # victims of one kind in one loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A training process or worker (or several of one loader) that was ended from outside.

    `last_seen_ns` and `gone_ns` are its last sign of life and when it was first known to be gone.
    """

    what: str
    locus: Locus
    main: ProcessKey
    key: ProcessKey | None
    signal: int | None
    exit_code: int | None = None
    last_seen_ns: float
    gone_ns: float
    evidence: tuple[Evidence, ...]


def worker_victim(tables: RunTables, life: Lifecycle, worker: DeadWorker) -> Victim:
    """A worker that died, with what its training process and the collector saw of it."""
    evidence = [fact("worker_farewell_count", _said(tables, "worker-exit", worker.key), "worker-exit events")]
    if worker.exit_code is not None:
        evidence.append(fact("worker_exit_code", worker.exit_code, "seen by the training process", unit="status"))
    if worker.message is not None:
        evidence.append(fact("exception", worker.message[:200], "raised in the training process", unit="text"))
    if worker.key is not None and life.is_dead(worker.key):
        evidence.append(fact("worker_alive", 0, "at the time of reading", unit="bool"))
    last_seen_ns, gone_ns = _end_of(tables, worker.key, worker.main, worker.pid)
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
        evidence=(*evidence, *last_memory(tables, worker.key)),
    )


def main_victim(tables: RunTables, life: Lifecycle, key: ProcessKey, how: int | None) -> Victim:
    """A training process (or the command) that was ended by signal `how`, None if unknown."""
    evidence = [fact("farewell_count", _said(tables, "process-exit", key), "process-exit events")]
    if life.exit_status is not None:
        evidence.append(fact("exit_status", life.exit_status, "of the command", unit="status"))
    if key in life.exceptions:
        evidence.append(fact("exception", str(life.exceptions[key].get("type")), "uncaught", unit="text"))
    if life.is_dead(key):
        evidence.append(fact("alive", 0, "at the time of reading", unit="bool"))
    rank = rank_of(tables, key)
    last_seen_ns, gone_ns = _end_of(tables, key, key, key[1])
    return Victim(
        what=life.name(key) if rank is None else f"{life.name(key).removesuffix(')')}, rank {rank})",
        locus=Locus(host=key[0], rank=rank, role=life.role(key), pid=key[1]),
        main=key,
        key=key,
        signal=how,
        last_seen_ns=last_seen_ns,
        gone_ns=gone_ns,
        evidence=(*evidence, *last_memory(tables, key)),
    )


def gathered(victims: Sequence[Victim]) -> list[Victim]:
    """The victims, where more than three workers of one loader are told as one."""
    loaders: dict[tuple[ProcessKey, int | None], list[Victim]] = {}
    for victim in victims:
        if victim.locus.role == "worker":
            loaders.setdefault((victim.main, victim.locus.loader), []).append(victim)
    many = [group for group in loaders.values() if len(group) > _TOLD_APART]
    told = {id(victim) for group in many for victim in group}
    return [*(_as_one(group) for group in many), *(victim for victim in victims if id(victim) not in told)]


def _as_one(group: Sequence[Victim]) -> Victim:
    known = next((victim for victim in group if victim.signal is not None), group[0])
    pids = ", ".join(str(victim.locus.pid) for victim in group)
    return dataclasses.replace(
        known,
        what=f"{len(group)} workers of loader {known.locus.loader} (pids {pids})",
        locus=dataclasses.replace(known.locus, pid=None, worker=None),
        key=None,
        last_seen_ns=min(victim.last_seen_ns for victim in group),
        gone_ns=max(victim.gone_ns for victim in group),
        evidence=(fact("victims_count", len(group), "workers of this loader"), *known.evidence),
    )


def _said(tables: RunTables, kind: str, key: ProcessKey | None) -> int:
    return sum(key is not None and key_of(event) == key for event in tables.events_of(kind))


def _end_of(tables: RunTables, key: ProcessKey | None, main: ProcessKey, pid: int) -> tuple[float, float]:
    """Its last sign of life and when it was first known to be gone, ns; the same if nobody saw it go."""
    gone = [
        float(event["time_ns"])
        for event in tables.events_of("worker-died", "command-exit")
        if (key_of(event) == main and whole(event.get("worker_pid")) == pid)
        or (key == main and whole(event.get("command_pid")) == pid)
    ]
    seen = []
    if key is not None:
        rows = sampled(tables, key)
        times, alive = floats(rows, "time_ns"), floats(rows, "alive")
        gone += list(times[alive == 0][:1])
        seen += list(times[alive == 1][-1:])
        seen += [float(event["time_ns"]) for event in tables.events if key_of(event) == key]
        for name in ("step", "batch", "fetch"):
            seen += list(floats(written(tables, name, key), "time_ns")[-1:])
    last_seen = max(seen, default=min(gone, default=float(tables.now_ns)))
    return last_seen, max(min(gone, default=last_seen), last_seen)


def last_memory(tables: RunTables, key: ProcessKey | None) -> tuple[Evidence, ...]:
    """What a process held at its last samples."""
    if key is None:
        return ()
    rows = sampled(tables, key)
    values = (("last_rss_bytes", floats(rows, "rss_bytes")), ("last_held_bytes", held_bytes(rows)))
    return tuple(
        Evidence(name=name, value=round(value), unit="bytes", n=len(rows), window="last sample")
        for name, series in values
        if math.isfinite(value := last(series))
    )


def last_bytes(tables: RunTables, key: ProcessKey | None) -> float:
    """What it held at last (`held_bytes`), 0 if that is not known."""
    return 0.0 if key is None else float(np.nan_to_num(last(held_bytes(sampled(tables, key)))))


def rank_of(tables: RunTables, key: ProcessKey) -> int | None:
    """The rank of a process, from any of its events."""
    for event in tables.events:
        if (event.get("host"), event.get("pid"), event.get("start_ticks")) == key:
            return whole(event.get("rank"))
    return None


def last_step(tables: RunTables, key: ProcessKey) -> int | None:
    """The last optimizer step that a process recorded."""
    return step_at(tables, key, float(tables.now_ns))


def signal_name(number: int | None) -> str | None:
    """`SIGKILL` for 9; None for None."""
    if number is None:
        return None
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fact(name: str, value: float | str, window: str, *, unit: str = "count") -> Evidence:
    """A single observation as evidence."""
    return Evidence(name=name, value=value, unit=unit, n=1, window=window)
