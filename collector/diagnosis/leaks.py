"""Which process keeps taking memory: main heap, worker heap, or pages copied by reading.

The three differ in mechanism. A heap that leaks grows in private dirty *and* resident memory. Copy-on-read moves
pages that a forked worker shared with its parent to private ones: private dirty grows, resident memory does not,
and it ends when everything is copied.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from collector.diagnosis.copies import find_copies
from collector.diagnosis.findings import Advice, Evidence, Finding, Locus, Rate
from collector.diagnosis.forecast import rate
from collector.diagnosis.frames import (
    SECOND_NS,
    floats,
    iterates,
    key_of,
    resident_bytes,
    step_at,
    step_numbers,
    steps_within,
    training_end_ns,
    while_running,
    whole,
)
from collector.diagnosis.host_memory import demand_series
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.loops import loader_settings, worker_slots
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import MIN_POINTS, Floats, growth
from collector.diagnosis.victims import rank_of
from collector.diagnosis.witnesses import (
    CONFIRMED,
    Leak,
    cumulative_rise,
    half_slopes,
    negligible_bytes,
    rise_evidence,
    severity,
    share_of,
    witness_of,
)
from collector.quantities import size
from collector.store.runs import ProcessKey
from training_harness.records import ROLE_WORKER

_LOOK_FOR = (
    "Look for what keeps a reference per step: losses or outputs kept with their graph (use .item() or .detach()), "
    "growing lists of metrics, caches without bound, create_graph=True"
)
_LOOK_FOR_ANY = (
    "Look for what keeps references: lists and dicts that grow, caches without bound, buffers never freed"
)
_NO_ITERATIONS = (
    " It has no batches, optimizer steps or forward passes, so whether each iteration keeps something is not known."
)


def find_leaks(tables: RunTables) -> list[Finding]:
    """Main-heap leaks, copy-on-read growth and worker-heap leaks."""
    copies = find_copies(tables)
    life = Lifecycle(tables)
    found = [
        _main_leak(tables, life, key, leak)
        for key in (*life.mains, *life.watched, *life.others)
        if (leak := _main_growth(tables, key)) is not None
    ]
    copied = {(finding.locus.rank, finding.locus.loader) for finding in copies}
    return found + copies + [f for f in _worker_leaks(tables) if (f.locus.rank, f.locus.loader) not in copied]


def _main_growth(tables: RunTables, key: ProcessKey) -> Leak | None:
    """Resident memory that grows and that another measurement confirms to be written memory of its own."""
    rows = while_running(tables, key)  # what goes at the end would hide what came before
    if len(rows) < MIN_POINTS:
        return None
    times = floats(rows, "time_ns") / SECOND_NS
    resident = _resident(rows)
    steps = step_numbers(tables, key, times)
    grown = growth(times, resident, negligible=negligible_bytes(resident), steps=steps)
    if grown is None:
        return None
    if share_of(times, floats(rows, "data_bytes"), grown) < CONFIRMED:
        return None  # it fills memory that it had asked for before, and no more
    forks = _forks(tables, key, times)
    private = cumulative_rise(_written(rows), forks)
    undisturbed = np.ptp(forks[times >= grown.since_seconds]) == 0
    if undisturbed and share_of(times, private, grown) < CONFIRMED:
        return None  # resident, but not written: mapped files, where the kernel does not tell them apart
    witnesses = [
        witness
        for name, at, values in (
            ("private_dirty_rise_bytes", times, private),
            ("inherited_by_workers_rise_bytes", *_inherited(tables, key)),
            ("host_demand_rise_bytes", *demand_series(tables, key[0])),
        )
        if (witness := witness_of(name, at, values, grown)) is not None
    ]
    if not witnesses:
        return None
    halves = half_slopes(times, resident, grown)
    witnesses += [
        Evidence(
            name=f"slope_{half}_half", value=round(slope), unit="bytes/s", n=grown.n // 2, window=f"{half} half"
        )
        for half, slope in zip(("first", "second"), halves, strict=True)
    ]
    return Leak(
        growth=grown,
        series="resident",
        witnesses=tuple(witnesses),
        begin_ns=grown.since_seconds * SECOND_NS,
        end_ns=float(times[-1]) * SECOND_NS,
    )


def _inherited(tables: RunTables, key: ProcessKey) -> tuple[Floats, Floats]:
    """Times (seconds) and resident bytes of forked workers when first seen.

    Fork maps only the parent's written memory into the child, no files: a view of it that no other sample gives.
    """
    slots, settings = worker_slots(tables), loader_settings(tables)
    mine = {
        pid
        for (host, pid), (main, loader, _) in slots.items()
        if main == key and host == key[0] and settings.get((main, loader), {}).get("start_method") == "fork"
    }
    process = tables.stream("process")
    rows = process[
        process["process_pid"].isin(mine) & (process["host"] == key[0]) & (floats(process, "rss_bytes") > 0)
    ]
    rows = rows[~rows.duplicated(["process_pid", "process_start_ticks"])]
    return floats(rows, "time_ns") / SECOND_NS, floats(rows, "rss_bytes")


def _main_leak(tables: RunTables, life: Lifecycle, key: ProcessKey, leak: Leak) -> Finding:
    grown, is_iterating, name = leak.growth, iterates(tables, key), life.name(key)
    # Both counted over the same time: steps may take longer now than before.
    steps = steps_within(tables, key, leak.begin_ns, leak.end_ns)
    per_step = f", {size(grown.rise / steps)} per step" if math.isfinite(steps) else ""
    certainty = 0.95 if len(leak.witnesses) > 3 else 0.85
    return Finding(
        kind="main-heap-leak",
        severity=severity(tables, leak, iterates=is_iterating or bool(life.watched))
        if life.may_train(key)
        else "info",
        confidence=certainty if is_iterating else certainty - 0.15,
        summary=(
            f"{name[0].upper()}{name[1:]} keeps taking host memory: {size(grown.rise)} so far, "
            f"{size(grown.slope)}/s{per_step}." + ("" if is_iterating or life.watched else _NO_ITERATIONS)
        ),
        locus=Locus(host=key[0], rank=rank_of(tables, key), role=life.role(key), pid=key[1]),
        since_step=step_at(tables, key, leak.begin_ns),
        evidence=(rise_evidence(tables, leak), *leak.witnesses),
        rate=rate(grown),
        advice=(
            Advice(
                text=_LOOK_FOR if is_iterating else _LOOK_FOR_ANY,
                expected=f"the growth of {size(grown.slope)}/s stops",
            ),
        ),
    )


def _worker_leaks(tables: RunTables) -> list[Finding]:
    """Workers whose resident and private memory grow together; one finding per loader."""
    process = tables.stream("process")
    workers = process[floats(process, "role") == ROLE_WORKER]
    who = ["host", "process_pid", "process_start_ticks"]
    workers = workers[workers.groupby(who)["time_ns"].transform("size") >= MIN_POINTS]
    leaks: dict[tuple[str, int | None, int], list[tuple[int, Leak]]] = {}
    for (host, _, _), rows in workers.groupby(who):
        loader, worker = whole(rows["loader"].iloc[-1]), whole(rows["worker"].iloc[-1])
        if loader is None or worker is None or (leak := _worker_growth(tables, rows)) is None:
            continue
        place = (str(host), whole(rows["process_rank"].iloc[-1]), loader)
        leaks.setdefault(place, []).append((worker, leak))
    return [_worker_leak(tables, place, found) for place, found in leaks.items()]


def _worker_growth(tables: RunTables, rows: pd.DataFrame) -> Leak | None:
    """As of a training process: resident memory grows, read at each tick, and private memory confirms it."""
    read, private = floats(rows, "time_ns") / SECOND_NS, _written(rows)
    rows = rows[floats(rows, "time_ns") <= training_end_ns(tables)]
    times, resident = floats(rows, "time_ns") / SECOND_NS, _resident(rows)
    steps = step_numbers(tables, str(rows["host"].iloc[0]), times) if len(rows) else times
    grown = growth(times, resident, negligible=negligible_bytes(resident), steps=steps)
    witness = None if grown is None else witness_of("private_dirty_rise_bytes", read, private, grown)
    if grown is None or witness is None:
        return None
    return Leak.of(grown, "resident", (witness,), float(times[-1]), "bytes")


def _resident(rows: pd.DataFrame) -> Floats:
    """Anonymous memory (proc(5), RssAnon) with what is swapped out, which would hide a leak.

    The kernel takes mapped files back, and shared memory is judged by itself.
    """
    files, shared = (np.nan_to_num(floats(rows, name)) for name in ("file_bytes", "shm_bytes"))
    return resident_bytes(rows) - files - shared


def _written(rows: pd.DataFrame) -> Floats:
    """Private dirty memory with what is swapped out, which would hide a leak."""
    return floats(rows, "private_dirty_bytes") + np.nan_to_num(floats(rows, "swap_bytes"))


def _worker_leak(tables: RunTables, place: tuple[str, int | None, int], found: list[tuple[int, Leak]]) -> Finding:
    host, rank, loader = place
    total = sum(leak.growth.slope for _, leak in found)
    rise = sum(leak.growth.rise for _, leak in found)
    leak = max((leak for _, leak in found), key=lambda one: one.growth.rise)
    names = ", ".join(str(worker) for worker in sorted({worker for worker, _ in found}))
    return Finding(
        kind="worker-heap-leak",
        severity=severity(tables, leak),
        confidence=0.9,
        summary=f"Workers {names} of loader {loader} keep taking memory: {size(rise)} so far, {size(total)}/s.",
        locus=Locus(
            host=host, rank=rank, role="worker", loader=loader, worker=found[0][0] if len(found) == 1 else None
        ),
        since_step=step_at(tables, None, leak.begin_ns),
        evidence=(
            rise_evidence(tables, leak),
            *leak.witnesses,
            Evidence(name="growing_workers_count", value=len(found), unit="count", n=len(found), window="run"),
        ),
        rate=Rate(
            value=total,
            low=sum(leak.growth.low for _, leak in found),
            high=sum(leak.growth.high for _, leak in found),
            unit="bytes/s",
        ),
        advice=(
            Advice(
                text="Look for a cache in the dataset (`__getitem__` that stores what it read, lru_cache "
                "without bound)",
                expected=f"the growth of {size(total)}/s stops",
            ),
            Advice(
                text="Until then: persistent_workers=False ends the workers at each epoch",
                expected="their memory is given back at each epoch, for the price of starting them again",
            ),
        ),
    )


def _forks(tables: RunTables, key: ProcessKey, times_seconds: Floats) -> Floats:
    """For each time, how many times the process has started or ended workers: segments of its private memory."""
    begun: list[float] = []
    pids: dict[int | None, tuple[int, ...]] = {}
    for event in tables.events:
        if event["kind"] == "epoch-start" and key_of(event) == key:
            loader, workers = whole(event.get("loader")), tuple(event.get("worker_pids") or ())
            if pids.get(loader) != workers:
                begun.append(event["time_ns"] / SECOND_NS)
            pids[loader] = workers
        elif event["kind"] == "worker-exit":
            begun.append(event["time_ns"] / SECOND_NS)
    changes: Floats = np.searchsorted(np.sort(np.array(begun)), times_seconds).astype(np.float64)
    return changes
