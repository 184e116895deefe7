"""Copy-on-read growth: forked workers that copy their parent's pages by touching reference counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import loader_settings, recreated_loaders, worker_slots
from collector.diagnosis.loading.steady_state import fetch_ns
from collector.diagnosis.memory import resources
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    by_process,
    finite,
    floats,
    last,
    resident_bytes,
    sampled,
    whole,
    window_text,
    worker_samples,
)
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import step_at
from collector.diagnosis.statistics.growth import Floats, spread
from collector.findings import Evidence, Finding, Limit, Locus, Rate, fact
from collector.store import ProcessKey
from collector.units import size

#: Copied bytes per worker below which there is no finding: touching the interpreter's own pages copies less.
_NEGLIGIBLE_BYTES = 24 * MIB
#: Largest rise of resident memory, as a share of the copied memory: more is growth of the worker's own heap.
_MAX_RESIDENT_RATIO = 0.35
#: Batches after which a worker has taken what it needs of the free memory that it inherited.
_WARM_UP_BATCHES = 10
_MIN_BATCHES = 2 * _WARM_UP_BATCHES
#: Least share of the copied memory that was copied after the warm-up.
_MIN_LATE_RATIO = 0.3
_PAGE_BYTES = 4096
#: Faults beyond those that batches take anyway by which chance may raise their sum, in standard deviations.
_NOISE_SPREADS = 2.0
#: Least share of the copied memory that was copied after the first reading, if garbage collections before it may
#: have copied the rest.
_MIN_LASTING_RATIO = 0.05
#: Number of garbage collections that copy pages: the first of the middle generation, and the first full one.
_COLLECTIONS_COUNT = 2
#: Number of newest workers judged in a slot whose workers are restarted in each epoch.
_LIVES_COUNT = 8
#: Least share of the loader's workers that copy.
_MIN_WORKERS_RATIO = 0.5
#: A worker that was read once copies too if it has this share of what one has that is known to copy.
_ALIKE_RATIO = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The memory that one worker copied in its life, in bytes.

    Attributes:
        total_bytes: private memory in pages that it shared with its parent and then wrote to.
        resident_bytes: rise of its resident memory in the same time.
        inherited_bytes: the most that it can copy: its parent's written memory at the fork.
        late_bytes: the part copied after the warm-up, batch by batch. Pages that the worker takes from the parent's
            free memory, or that the parent writes, become private too, but early.
        burst_bytes: the part that garbage collections may have copied: the first of a generation touches all of its
            objects, and these pages stay private.
    """

    total_bytes: float
    resident_bytes: float
    inherited_bytes: float
    late_bytes: float
    burst_bytes: float
    begin_ns: float
    end_ns: float
    n: int

    @property
    def is_growth(self) -> bool:
        """True if the worker goes on copying, and does not merely grow by itself."""
        return (
            self.total_bytes - self.burst_bytes >= _NEGLIGIBLE_BYTES
            and self.resident_bytes <= _MAX_RESIDENT_RATIO * self.total_bytes
            and self.late_bytes >= _MIN_LATE_RATIO * self.total_bytes
        )

    @property
    def is_unknown(self) -> bool:
        """True if it was read once, and garbage collections may have copied what it had by then."""
        return self.n == 1 and not self.is_growth and self.total_bytes >= _NEGLIGIBLE_BYTES


def find_copies(tables: RunTables) -> list[Finding]:
    """Find `copy-on-read-growth`, at most once per loader: forked workers that copy their parent's pages."""
    settings, lives = loader_settings(tables), _forked_lives(tables)
    workers, fetches = worker_samples(tables), tables.stream("fetch")
    workers = workers[workers["process_pid"].isin({pid for _, pid in lives})]
    loaders: dict[tuple[ProcessKey, int], dict[int, list[_Copies]]] = {}
    for (host, pid, _), rows in by_process(workers):
        if (host, pid) not in lives:
            continue
        main, loader, worker = lives[host, pid]
        parent = sampled(tables, main)
        alive = floats(parent, "alive")
        if (alive == 0).any():  # from then on, pages that it shared belong to its workers alone, without a copy
            rows = rows[floats(rows, "time_ns") < floats(parent, "time_ns")[alive == 1].max()]
        if rows.empty:
            continue
        copies = _copies(rows, fetches[(fetches["pid"] == pid) & (fetches["host"] == host)], parent)
        if copies is not None:
            loaders.setdefault((main, loader), {}).setdefault(worker, []).append(copies)
    findings = [
        _judge(tables, main, loader, by_slot, settings.get((main, loader), {}))
        for (main, loader), by_slot in loaders.items()
    ]
    return [finding for finding in findings if finding is not None]


def _forked_lives(tables: RunTables) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
    """Return (host, pid) -> (training process, loader, worker id) of the newest forked workers in each slot."""
    settings = loader_settings(tables)
    merged = {main: recreated_loaders(tables, main) for main, _ in settings}
    newest: dict[tuple[ProcessKey, int, int], list[tuple[str, int]]] = {}
    for address, (main, loader, worker) in worker_slots(tables).items():
        if settings.get((main, loader), {}).get("start_method") in ("fork", None):
            slot = (main, merged.get(main, {}).get(loader, loader), worker)
            newest.setdefault(slot, []).append(address)
    return {address: slot for slot, addresses in newest.items() for address in addresses[-_LIVES_COUNT:]}


def _parent_bytes(samples: pd.DataFrame, time_ns: float) -> float:
    """Return a parent's written memory at a time: its private dirty before, less what it released, or NaN."""
    rows = samples[floats(samples, "time_ns") < time_ns]
    private, resident = floats(rows, "private_dirty_bytes"), resident_bytes(rows)
    finite = np.flatnonzero(np.isfinite(private))
    if not len(finite):
        return float("nan")
    fullest = finite[int(np.argmax(private[finite]))]  # later, workers of another loader share part of it
    released = np.nanmax([0.0, resident[fullest] - last(resident)])
    return float(private[fullest] - released)


def _released_bytes(samples: pd.DataFrame, times: Floats) -> Floats:
    """Return what a parent has given back at each time since the first: its worker has those pages alone."""
    rows = samples[np.isfinite(floats(samples, "rss_bytes"))]
    clock, resident = floats(rows, "time_ns"), resident_bytes(rows)
    begin = max(int(np.searchsorted(clock, times[0], side="right")) - 1, 0)
    if begin >= len(clock):
        return np.zeros(len(times))
    fall = np.maximum.accumulate(resident[begin] - resident[begin:])
    places = np.maximum(np.searchsorted(clock[begin:], times, side="right") - 1, 0)
    released: Floats = np.maximum(fall[places], 0.0)
    return released


def _copies(rows: pd.DataFrame, fetches: pd.DataFrame, parent: pd.DataFrame) -> _Copies | None:
    """Return what a worker copied by its samples and its parent's, None without samples or with too few batches.

    There are two independent estimates: the rise of private memory beyond that of resident memory, and the drop of
    shared memory below the parent's written memory at the fork, all of which was shared then. Both include what the
    parent released or wrote since, which is subtracted. The largest estimate at any time counts, since copies stay.
    """
    private, uss = floats(rows, "private_dirty_bytes"), floats(rows, "uss_bytes")
    resident, times = resident_bytes(rows), floats(rows, "time_ns")
    is_read = np.isfinite(private) & np.isfinite(resident)
    if not is_read.any() or len(fetches) < _MIN_BATCHES:
        return None
    fetches = fetches.sort_values("time_ns")
    inherited, released = _parent_bytes(parent, times[0]), _released_bytes(parent, times)[is_read]
    at_fork = float(finite(resident)[0])
    heap_growth = float(np.nanmax(resident)) - at_fork
    private, uss, times, resident = private[is_read], uss[is_read], times[is_read], resident[is_read]
    unmatched = private - private[0] - np.maximum(0.0, resident - resident[0])
    missing = min(inherited, at_fork) - (resident - uss)
    since_reading, since_fork = (
        float(np.nanmax(one - np.maximum(released, _unfaulted_bytes(one, times, fetches)), initial=0.0))
        for one in (unmatched, missing)
    )
    total = max(since_reading, since_fork)
    if since_reading < _MIN_LASTING_RATIO * since_fork:  # all before the first reading
        burst = _burst_bytes(np.insert(missing, 0, 0.0), np.insert(times, 0, -np.inf), fetches)
    else:
        burst = _burst_bytes(unmatched, times, fetches)
    warm_ns = floats(fetches, "time_ns")[_WARM_UP_BATCHES]
    private_when_warm = private[times >= warm_ns][:1]
    late = float(private[-1] - private_when_warm[0]) if len(private_when_warm) else 0.0
    return _Copies(
        total_bytes=total,
        resident_bytes=float(resident[-1] - (at_fork if since_fork > since_reading else resident[0])),
        inherited_bytes=min(inherited, at_fork) if math.isfinite(inherited) else at_fork,
        late_bytes=max(late, min(total, _late_faults(fetches) * _PAGE_BYTES - heap_growth)),
        burst_bytes=burst,
        begin_ns=float(times[0]),
        end_ns=float(times[-1]),
        n=len(private),
    )


def _unfaulted_bytes(private: Floats, times: Floats, fetches: pd.DataFrame) -> Floats:
    """Return what became private by each time without a fault of the worker.

    A copy takes a fault. Where the parent writes or releases pages that only one worker shares with it, as its
    garbage collection does, the worker has the old ones alone. The faults that a batch takes anyway, those that no
    rise explains, are no copies. Faults are counted up to the end of a later fetch. After its last one a worker
    copies nothing: pages that become private then were shared with a worker that ended, or with the parent. What
    became private before the first reading is not known if that is the reference, 0.
    """
    counts = floats(fetches, "minor_fault_count")
    ends, counts = floats(fetches, "time_ns")[np.isfinite(counts)], finite(counts)
    if not len(counts):
        return np.zeros(len(times))
    first = np.concatenate([[0], np.searchsorted(ends, times[:-1], side="right")])
    last = np.minimum(np.searchsorted(ends, times) + 1, len(ends))
    faults = np.cumsum(np.insert(counts, 0, 0.0))
    rises = np.maximum(0.0, np.nan_to_num(np.diff(private, prepend=0.0)))
    taken, batches = faults[last] - faults[first], last - first
    is_known = batches > 0
    is_known[0] &= rises[0] > 0
    without_copy = finite(np.maximum(0.0, taken - rises / _PAGE_BYTES)[is_known] / batches[is_known])
    anyway = float(np.median(without_copy)) if len(without_copy) else 0.0
    copies = taken - batches * anyway + _NOISE_SPREADS * spread(counts) * np.sqrt(batches)
    without: Floats = np.cumsum(np.maximum(0.0, rises - _PAGE_BYTES * np.maximum(0.0, copies)))
    return without


def _burst_bytes(private: Floats, times: Floats, fetches: pd.DataFrame) -> float:
    """Return the copies that garbage collections after the warm-up may have made: faults beyond any other batch's.

    They show as the largest rise between two samples, or as that over the time of the batches with the most faults,
    since a garbage collection may take longer than the time between two samples.
    """
    warm = _warm(fetches)
    if len(warm) <= _COLLECTIONS_COUNT:
        return 0.0
    is_read = np.isfinite(private)
    times, rises = times[is_read], np.diff(private[is_read])
    faults, ends = floats(warm, "minor_fault_count"), floats(warm, "time_ns")
    *others, usual = np.argsort(faults, kind="stable")[::-1][: _COLLECTIONS_COUNT + 1]
    begins = ends - fetch_ns(warm)
    overlaps = [(times[1:] > begins[batch]) & (times[:-1] < ends[batch]) for batch in others]
    rise = max(float(rises.max(initial=0.0)), float(rises[np.any(overlaps, axis=0)].sum()))
    return min(rise, float((faults[others] - faults[usual]).sum()) * _PAGE_BYTES)


def _late_faults(fetches: pd.DataFrame) -> float:
    """Return the minor faults after the warm-up beyond the steady rate: first touches of pages, which ebb away.

    The pages of the worker's own growth are among them. Three standard errors are subtracted, since a loader that
    allocates has many faults that vary.
    """
    faults = floats(_warm(fetches), "minor_fault_count")
    last_quarter = faults[-(len(faults) // 4) :]
    if len(last_quarter) < 3:
        return 0.0
    excess = (faults - last_quarter.mean()).sum() - 3 * last_quarter.std() * math.sqrt(len(faults))
    return max(0.0, float(excess))


def _warm(fetches: pd.DataFrame) -> pd.DataFrame:
    """Return the batches after the warm-up of those whose minor faults were counted."""
    return fetches[np.isfinite(floats(fetches, "minor_fault_count"))][_WARM_UP_BATCHES:]


def _judge(
    tables: RunTables,
    main: ProcessKey,
    loader: int,
    by_slot: Mapping[int, list[_Copies]],
    setting: Mapping[str, Any],
) -> Finding | None:
    known = ([life for life in lives if not life.is_unknown] or lives for lives in by_slot.values())
    slots = [max(lives, key=lambda life: life.total_bytes) for lives in known]
    copying = [slot for slot in slots if slot.is_growth]
    if sum(slot.n for slot in copying) < 2:  # one reading of one worker is no witness
        return None
    alike_bytes = _ALIKE_RATIO * min(slot.total_bytes for slot in copying)
    copying += [slot for slot in slots if slot.is_unknown and slot.total_bytes >= alike_bytes]
    if len(copying) < _MIN_WORKERS_RATIO * len(slots):
        return None
    n = sum(slot.n for slot in copying)
    workers = whole(setting.get("num_workers")) or len(by_slot)
    plateau = workers * max(slot.inherited_bytes for slot in copying)
    total = sum(slot.total_bytes for slot in copying)
    begin = min(slot.begin_ns for slot in copying)
    window = window_text(tables, begin, max(slot.end_ns for slot in copying))
    measured = {
        "worker_copied_bytes": total,
        "copied_after_warm_up_bytes": sum(slot.late_bytes for slot in copying),
        "worker_rss_rise_bytes": float(np.median([slot.resident_bytes for slot in copying])),
    }
    words = {
        "loader": loader,
        "workers": "One worker" if workers == 1 else f"{workers} workers",
        "per_worker": size(total / len(copying)),
        "copied": size(total),
        "plateau": size(plateau),
        "worker_less": size(plateau / max(workers, 1)),
    }
    return Finding(
        kind=resources.COPIED_PAGES.leak,
        severity="warning",
        confidence=0.95 if len(copying) > 1 else 0.8,
        summary=resources.COPIED_PAGES.grows.format(**words),
        locus=Locus(host=main[0], rank=whole(setting.get("rank")), role="worker", loader=loader),
        since_step=step_at(tables, main, begin),
        evidence=(
            *(fact(name, round(value), window, n=n) for name, value in measured.items()),
            fact("copying_workers_count", len(copying), window, n=len(slots)),
            *_main_evidence(tables, main, begin),
        ),
        rate=_rate(copying),
        limit=Limit(name="plateau: workers x inherited memory", value=round(plateau), unit="bytes"),
        advice=resources.COPIED_PAGES.advice(words),
    )


def _rate(copying: Sequence[_Copies]) -> Rate | None:
    """Return the copied bytes per second of all workers; the slowest and the fastest worker bound it."""
    rates = [
        slot.total_bytes / ((slot.end_ns - slot.begin_ns) / SECOND_NS)
        for slot in copying
        if slot.end_ns > slot.begin_ns
    ]
    if not rates:
        return None
    count = len(rates)
    return Rate(value=sum(rates), low=min(rates) * count, high=max(rates) * count, unit="bytes/s")


def _main_evidence(tables: RunTables, main: ProcessKey, begin_ns: float) -> tuple[Evidence, ...]:
    rows = sampled(tables, main)
    resident = finite(floats(rows[floats(rows, "time_ns") >= begin_ns], "rss_bytes"))
    if len(resident) < 2:
        return ()
    rise = round(float(resident[-1] - resident[0]))
    return (fact("main_rss_rise_bytes", rise, "same window", n=len(resident)),)
