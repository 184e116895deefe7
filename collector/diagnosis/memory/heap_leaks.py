"""Find processes whose memory keeps growing: the main heap, a worker's heap, or pages copied by reading.

The three differ in mechanism. A heap that leaks grows in private dirty *and* resident memory. Copy-on-read turns
pages that a forked worker shared with its parent into private ones: private dirty grows, resident memory does not,
and it ends when everything is copied.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import loader_settings, worker_slots
from collector.diagnosis.memory.copy_on_read import find_copies
from collector.diagnosis.memory.exhaustion import rate
from collector.diagnosis.memory.leak import (
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
from collector.diagnosis.run.columns import (
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
    written,
)
from collector.diagnosis.run.host_memory import demand_series
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import MIN_POINTS, Floats, growth
from collector.findings import Advice, Evidence, Finding, Locus, Rate
from collector.store import ProcessKey
from collector.units import size
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
    """Find `main-heap-leak`, `copy-on-read-growth` and `worker-heap-leak`."""
    copies = find_copies(tables)
    life = Lifecycle(tables)
    findings = [
        _main_leak(tables, life, key, leak)
        for key in (*life.mains, *life.watched, *life.others)
        if (leak := _main_growth(tables, key)) is not None
    ]
    loaders = {(finding.locus.rank, finding.locus.loader) for finding in copies}
    return findings + copies + [f for f in _worker_leaks(tables) if (f.locus.rank, f.locus.loader) not in loaders]


def _main_growth(tables: RunTables, key: ProcessKey) -> Leak | None:
    """Return the growth of memory in use, if another measurement confirms that the process wrote that memory."""
    rows = while_running(tables, key)  # the fall at the end would hide growth before it
    if len(rows) < MIN_POINTS:
        return None
    times = floats(rows, "time_ns") / SECOND_NS
    resident, free = _resident(rows), _free(tables, key, times)
    in_use = resident - free
    steps = step_numbers(tables, key, times)
    trend = growth(times, in_use, negligible=negligible_bytes(resident), steps=steps)
    if trend is None:
        return None
    if share_of(times, floats(rows, "data_bytes") - free, trend) < CONFIRMED:
        return None  # it only fills memory that it had allocated before
    forks = _forks(tables, key, times)
    private = cumulative_rise(_written(rows) - free, forks)
    has_no_forks = np.ptp(forks[times >= trend.since_seconds]) == 0
    if has_no_forks and share_of(times, private, trend) < CONFIRMED:
        return None  # resident, but not written: mapped files, on a kernel that does not count them apart
    witnesses = [
        witness
        for name, clock, values in (
            ("private_dirty_rise_bytes", times, private),
            ("inherited_by_workers_rise_bytes", *_inherited(tables, key)),
            ("host_demand_rise_bytes", *demand_series(tables, key[0])),
        )
        if (witness := witness_of(name, clock, values, trend)) is not None
    ]
    if not witnesses:
        return None
    halves = half_slopes(times, in_use, trend)
    witnesses += [
        Evidence(
            name=f"slope_{half}_half", value=round(slope), unit="bytes/s", n=trend.n // 2, window=f"{half} half"
        )
        for half, slope in zip(("first", "second"), halves, strict=True)
    ]
    return Leak(
        growth=trend,
        series="in_use" if free.any() else "resident",
        witnesses=tuple(witnesses),
        begin_ns=trend.since_seconds * SECOND_NS,
        end_ns=float(times[-1]) * SECOND_NS,
    )


def _free(tables: RunTables, key: ProcessKey, times_seconds: Floats) -> Floats:
    """Return the freed memory that the process's allocator keeps at each time; 0 where it was not recorded.

    Holes in the heap get more for a long time after a buffer of varying sizes is full. They are no leak.
    """
    heap = written(tables, "heap", key)
    if heap.empty:
        return np.zeros(len(times_seconds))
    return np.interp(times_seconds, floats(heap, "time_ns") / SECOND_NS, floats(heap, "free_bytes"))


def _inherited(tables: RunTables, key: ProcessKey) -> tuple[Floats, Floats]:
    """Return times (seconds) and resident bytes of forked workers when first seen.

    Fork maps only the parent's written memory into the child, and no files. So it measures that memory
    independently of the parent's own samples.
    """
    slots, settings = worker_slots(tables), loader_settings(tables)
    pids = {
        pid
        for (host, pid), (main, loader, _) in slots.items()
        if main == key and host == key[0] and settings.get((main, loader), {}).get("start_method") == "fork"
    }
    process = tables.stream("process")
    rows = process[
        process["process_pid"].isin(pids) & (process["host"] == key[0]) & (floats(process, "rss_bytes") > 0)
    ]
    rows = rows[~rows.duplicated(["process_pid", "process_start_ticks"])]
    return floats(rows, "time_ns") / SECOND_NS, floats(rows, "rss_bytes")


def _main_leak(tables: RunTables, life: Lifecycle, key: ProcessKey, leak: Leak) -> Finding:
    trend, is_iterating, name = leak.growth, iterates(tables, key), life.name(key)
    # The rise and the steps cover the same time: steps may take longer now than before.
    steps = steps_within(tables, key, leak.begin_ns, leak.end_ns)
    per_step = f", {size(trend.rise / steps)} per step" if math.isfinite(steps) else ""
    certainty = 0.95 if len(leak.witnesses) > 3 else 0.85
    return Finding(
        kind="main-heap-leak",
        severity=severity(tables, leak, iterates=is_iterating or bool(life.watched))
        if life.may_train(key)
        else "info",
        confidence=certainty if is_iterating else certainty - 0.15,
        summary=(
            f"{name[0].upper()}{name[1:]} keeps taking host memory: {size(trend.rise)} so far, "
            f"{size(trend.slope)}/s{per_step}." + ("" if is_iterating or life.watched else _NO_ITERATIONS)
        ),
        locus=Locus(host=key[0], rank=rank_of(tables, key), role=life.role(key), pid=key[1]),
        since_step=step_at(tables, key, leak.begin_ns),
        evidence=(rise_evidence(tables, leak), *leak.witnesses),
        rate=rate(trend),
        advice=(
            Advice(
                text=_LOOK_FOR if is_iterating else _LOOK_FOR_ANY,
                expected=f"the growth of {size(trend.slope)}/s stops",
            ),
        ),
    )


def _worker_leaks(tables: RunTables) -> list[Finding]:
    """Find workers whose resident and private memory grow together; one finding per loader."""
    process = tables.stream("process")
    workers = process[floats(process, "role") == ROLE_WORKER]
    key = ["host", "process_pid", "process_start_ticks"]
    workers = workers[workers.groupby(key)["time_ns"].transform("size") >= MIN_POINTS]
    leaks: dict[tuple[str, int | None, int], list[tuple[int, Leak]]] = {}
    for (host, _, _), rows in workers.groupby(key):
        loader, worker = whole(rows["loader"].iloc[-1]), whole(rows["worker"].iloc[-1])
        if loader is None or worker is None or (leak := _worker_growth(tables, rows)) is None:
            continue
        place = (str(host), whole(rows["process_rank"].iloc[-1]), loader)
        leaks.setdefault(place, []).append((worker, leak))
    return [_worker_leak(tables, place, workers_leaks) for place, workers_leaks in leaks.items()]


def _worker_growth(tables: RunTables, rows: pd.DataFrame) -> Leak | None:
    """Return the growth of resident memory, which is read at each tick, if private memory confirms it."""
    private_times, private = floats(rows, "time_ns") / SECOND_NS, _written(rows)
    rows = rows[floats(rows, "time_ns") <= training_end_ns(tables)]
    times, resident = floats(rows, "time_ns") / SECOND_NS, _resident(rows)
    steps = step_numbers(tables, str(rows["host"].iloc[0]), times) if len(rows) else times
    trend = growth(times, resident, negligible=negligible_bytes(resident), steps=steps)
    witness = None if trend is None else witness_of("private_dirty_rise_bytes", private_times, private, trend)
    if trend is None or witness is None:
        return None
    return Leak.of(trend, "resident", (witness,), float(times[-1]), "bytes")


def _resident(rows: pd.DataFrame) -> Floats:
    """Return anonymous memory (proc(5), RssAnon) plus what is swapped out, since swapping would hide a leak.

    The kernel takes mapped files back, and shared memory has its own rules.
    """
    files, shared = (np.nan_to_num(floats(rows, name)) for name in ("file_bytes", "shm_bytes"))
    return resident_bytes(rows) - files - shared


def _written(rows: pd.DataFrame) -> Floats:
    """Return private dirty memory plus what is swapped out, since swapping would hide a leak."""
    return floats(rows, "private_dirty_bytes") + np.nan_to_num(floats(rows, "swap_bytes"))


def _worker_leak(tables: RunTables, place: tuple[str, int | None, int], leaks: list[tuple[int, Leak]]) -> Finding:
    host, rank, loader = place
    total = sum(leak.growth.slope for _, leak in leaks)
    rise = sum(leak.growth.rise for _, leak in leaks)
    largest = max((leak for _, leak in leaks), key=lambda leak: leak.growth.rise)
    names = ", ".join(str(worker) for worker in sorted({worker for worker, _ in leaks}))
    return Finding(
        kind="worker-heap-leak",
        severity=severity(tables, largest),
        confidence=0.9,
        summary=f"Workers {names} of loader {loader} keep taking memory: {size(rise)} so far, {size(total)}/s.",
        locus=Locus(
            host=host, rank=rank, role="worker", loader=loader, worker=leaks[0][0] if len(leaks) == 1 else None
        ),
        since_step=step_at(tables, None, largest.begin_ns),
        evidence=(
            rise_evidence(tables, largest),
            *largest.witnesses,
            Evidence(name="growing_workers_count", value=len(leaks), unit="count", n=len(leaks), window="run"),
        ),
        rate=Rate(
            value=total,
            low=sum(leak.growth.low for _, leak in leaks),
            high=sum(leak.growth.high for _, leak in leaks),
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
    """Return how often the process has started or ended workers by each time: segments of its private memory."""
    changes: list[float] = []
    pids: dict[int | None, tuple[int, ...]] = {}
    for event in tables.events:
        if event["kind"] == "epoch-start" and key_of(event) == key:
            loader, workers = whole(event.get("loader")), tuple(event.get("worker_pids") or ())
            if pids.get(loader) != workers:
                changes.append(event["time_ns"] / SECOND_NS)
            pids[loader] = workers
        elif event["kind"] == "worker-exit":
            changes.append(event["time_ns"] / SECOND_NS)
    counts: Floats = np.searchsorted(np.sort(np.array(changes)), times_seconds).astype(np.float64)
    return counts
