"""Copy-on-read growth: forked workers that copy their parent's pages by touching reference counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus, Rate
from collector.diagnosis.frames import (
    MIB,
    SECOND_NS,
    floats,
    last,
    origin_ns,
    resident_bytes,
    sampled,
    step_at,
    whole,
    window_text,
)
from collector.diagnosis.loops import loader_settings, same_loop, worker_slots
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats
from collector.quantities import size
from collector.store.runs import ProcessKey
from training_harness.records import ROLE_WORKER

_NEGLIGIBLE_BYTES = 24 * MIB  # per worker; touching the interpreter's own pages stays below
_RESIDENT_SHARE = 0.35  # of the private growth: more is growth of the worker's own heap
_WARM_UP_BATCHES = 10  # by then a worker has taken what it needs of the free memory that it inherited
_MIN_BATCHES = 2 * _WARM_UP_BATCHES
_LATE_SHARE = 0.3  # of the copied memory that must have come after the warm-up
_PAGE_BYTES = 4096
_LIVES = 8  # of a slot whose workers are started anew in each epoch
_TOGETHER = 0.5  # of the workers of the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """What one worker copied in its life, bytes.

    Attributes:
        copied: private memory that is none of its own: written pages that were its parent's.
        resident: rise of the resident memory meanwhile.
        inherited: what it could copy at most: its parent's written memory when it was forked.
        late: what of it came after the warm-up, batch by batch. Pages that the worker takes over from the
            parent's free memory, or that the parent writes, become private too, but early.
        at_once: what of it one batch may have copied: garbage collected once touches every object, and stays so.

    """

    copied: float
    resident: float
    inherited: float
    late: float
    at_once: float
    begin_ns: float
    end_ns: float
    n: int


def find_copies(tables: RunTables) -> list[Finding]:
    """One finding per loop whose forked workers turn shared pages into private ones."""
    settings, lives = loader_settings(tables), _forked_lives(tables)
    process, fetches = tables.stream("process"), tables.stream("fetch")
    workers = process[
        process["process_pid"].isin({pid for _, pid in lives}) & (floats(process, "role") == ROLE_WORKER)
    ]
    parents = {main: sampled(tables, main) for main, _, _ in lives.values()}
    groups: dict[tuple[ProcessKey, int], dict[int, list[_Copy]]] = {}
    for (host, pid, _), rows in workers.groupby(["host", "process_pid", "process_start_ticks"]):
        if (str(host), int(pid)) not in lives:
            continue
        main, loader, worker = lives[(str(host), int(pid))]
        rows = rows[floats(rows, "time_ns") < _end_ns(parents[main])]
        if rows.empty:
            continue
        fetched = fetches[(fetches["pid"] == pid) & (fetches["host"] == host)]
        parent, times = parents[main], floats(rows, "time_ns")
        life = _copied(rows, fetched, _parent_bytes(parent, times[0]), _given_back(parent, times))
        if life is not None:
            groups.setdefault((main, loader), {}).setdefault(worker, []).append(life)
    found = [
        _judge(tables, main, loader, by_slot, settings.get((main, loader), {}))
        for (main, loader), by_slot in groups.items()
    ]
    return [finding for finding in found if finding is not None]


def _forked_lives(tables: RunTables) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
    """(host, pid) -> (training process, loop, worker id) of the newest forked workers in each slot."""
    settings = loader_settings(tables)
    merged = {main: same_loop(tables, settings, main) for main, _ in settings if main is not None}
    newest: dict[tuple[ProcessKey, int, int], list[tuple[str, int]]] = {}
    for address, (main, loader, worker) in worker_slots(tables).items():
        if settings.get((main, loader), {}).get("start_method") in ("fork", None):
            slot = (main, merged.get(main, {}).get(loader, loader), worker)
            newest.setdefault(slot, []).append(address)
    return {address: slot for slot, addresses in newest.items() for address in addresses[-_LIVES:]}


def _end_ns(parent: pd.DataFrame) -> float:
    """Where the samples of a parent end, if it was seen to: what it shared is its workers' alone from then on."""
    alive = floats(parent, "alive")
    return float(floats(parent, "time_ns")[alive == 1].max()) if (alive == 0).any() else math.inf


def _parent_bytes(samples: pd.DataFrame, time_ns: float) -> float:
    """The parent's written memory at a time: its private dirty before, less what it gave back since; or NaN."""
    rows = samples[floats(samples, "time_ns") < time_ns]
    private, resident = floats(rows, "private_dirty_bytes"), resident_bytes(rows)
    known = np.flatnonzero(np.isfinite(private))
    if not len(known):
        return float("nan")
    at = known[int(np.argmax(private[known]))]  # workers of another loader share it later
    given_back = np.nanmax([0.0, resident[at] - last(resident)])
    return float(private[at] - given_back)


def _given_back(samples: pd.DataFrame, times: Floats) -> Floats:
    """What a parent has given back since the first of these times: the worker has those pages alone."""
    known = samples[np.isfinite(floats(samples, "rss_bytes"))]
    at, resident = floats(known, "time_ns"), resident_bytes(known)
    begin = max(int(np.searchsorted(at, times[0], side="right")) - 1, 0)
    if begin >= len(at):
        return np.zeros(len(times))
    fallen = np.maximum.accumulate(resident[begin] - resident[begin:])
    here: Floats = np.maximum(fallen[np.maximum(np.searchsorted(at[begin:], times, side="right") - 1, 0)], 0.0)
    return here


def _copied(rows: pd.DataFrame, fetches: pd.DataFrame, parent: float, given_back: Floats) -> _Copy | None:
    """What a worker's samples show, None if it was not sampled or made too few batches to tell.

    Two independent looks: private memory that rose without resident memory, and shared memory that is less than the
    parent's written memory at the fork, all of which was shared then. What the parent gave back since is in both,
    so it is taken off; and the most that was seen at a time counts, for what is copied stays.
    """
    private, uss = floats(rows, "private_dirty_bytes"), floats(rows, "uss_bytes")
    resident, times = resident_bytes(rows), floats(rows, "time_ns")
    known = np.isfinite(private) & np.isfinite(resident)
    if not known.any() or len(fetches) < _MIN_BATCHES:
        return None
    at_fork = float(resident[np.isfinite(resident)][0])
    own = float(np.nanmax(resident)) - at_fork
    private, uss, times, resident = private[known], uss[known], times[known], resident[known]
    unmatched = private - private[0] - np.maximum(0.0, resident - resident[0])
    missing = min(parent, at_fork) - (resident - uss)
    copied = float(np.nanmax([np.zeros(len(times)), *(each - given_back[known] for each in (unmatched, missing))]))
    warm_ns = np.sort(floats(fetches, "time_ns"))[_WARM_UP_BATCHES]
    private_when_warm = private[times >= warm_ns][:1]
    late = float(private[-1] - private_when_warm[0]) if len(private_when_warm) else 0.0
    return _Copy(
        copied=copied,
        resident=float(resident[-1] - at_fork),
        inherited=min(parent, at_fork) if math.isfinite(parent) else at_fork,
        late=max(late, min(copied, _late_faults(fetches) * _PAGE_BYTES - own)),
        at_once=min(float(np.diff(unmatched).max(initial=0.0)), _most_faults(fetches) * _PAGE_BYTES),
        begin_ns=float(times[0]),
        end_ns=float(times[-1]),
        n=len(private),
    )


def _most_faults(fetches: pd.DataFrame) -> float:
    """Minor faults of the batch after the warm-up that has the most, beyond those of any other."""
    faults = np.sort(_warm_faults(fetches))
    return float(faults[-1] - faults[-2]) if len(faults) > 1 else 0.0


def _late_faults(fetches: pd.DataFrame) -> float:
    """Minor faults after the warm-up beyond the steady rate: the first touch of each page, which ebbs away.

    The pages of the worker's own growth are among them.

    Three standard errors are taken off, since a loader that allocates has many faults that vary.
    """
    faults = _warm_faults(fetches)
    last_quarter = faults[-(len(faults) // 4) :]
    if len(last_quarter) < 3:
        return 0.0
    beyond = (faults - last_quarter.mean()).sum() - 3 * last_quarter.std() * math.sqrt(len(faults))
    return max(0.0, float(beyond))


def _warm_faults(fetches: pd.DataFrame) -> Floats:
    """Minor faults of each batch after the warm-up, in order."""
    faults = floats(fetches.sort_values("time_ns"), "minor_fault_count")
    return faults[np.isfinite(faults)][_WARM_UP_BATCHES:]


def _judge(
    tables: RunTables,
    main: ProcessKey,
    loader: int,
    by_slot: Mapping[int, list[_Copy]],
    setting: Mapping[str, Any],
) -> Finding | None:
    lives = [max(lives, key=lambda life: life.copied) for lives in by_slot.values()]
    copying = [
        life
        for life in lives
        if life.copied - life.at_once >= _NEGLIGIBLE_BYTES
        and life.resident <= _RESIDENT_SHARE * life.copied
        and life.late >= _LATE_SHARE * life.copied
    ]
    n = sum(life.n for life in copying)
    if n < 2 or len(copying) < _TOGETHER * len(lives):  # one reading of one worker is no witness
        return None
    workers = whole(setting.get("num_workers")) or len(by_slot)
    plateau = workers * max(life.inherited for life in copying)
    copied = sum(life.copied for life in copying)
    begin = min(life.begin_ns for life in copying)
    window = window_text(begin, max(life.end_ns for life in copying), origin_ns(tables))
    resident = float(np.median([life.resident for life in copying]))
    return Finding(
        kind="copy-on-read-growth",
        severity="warning",
        confidence=0.95 if len(copying) > 1 else 0.8,
        summary=(
            f"The forked workers of loader {loader} copy their parent's Python objects by reading them: "
            f"{size(copied / len(copying))} per worker so far, while their resident size, which is "
            "blind to it, "
            f"stays; {workers} workers can reach {size(plateau)}."
        ),
        locus=Locus(host=main[0], rank=whole(setting.get("rank")), role="worker", loader=loader),
        since_step=step_at(tables, main, begin),
        evidence=(
            Evidence(name="worker_copied_bytes", value=round(copied), unit="bytes", n=n, window=window),
            Evidence(
                name="copied_after_warm_up_bytes",
                value=round(sum(life.late for life in copying)),
                unit="bytes",
                n=n,
                window=window,
            ),
            Evidence(name="worker_rss_rise_bytes", value=round(resident), unit="bytes", n=n, window=window),
            Evidence(name="copying_workers_count", value=len(copying), unit="count", n=len(lives), window=window),
            *_main_evidence(tables, main, begin),
        ),
        rate=_rate(copying),
        limit=Limit(name="plateau: workers x inherited memory", value=round(plateau), unit="bytes"),
        advice=(
            Advice(
                text="Hold the dataset's index in tensors or numpy arrays instead of lists and dicts of "
                "Python objects, "
                "in a memory-mapped file or Arrow, or as one serialised buffer with offsets",
                expected=f"the workers share it: {size(copied)} is saved now, up to {size(plateau)} later",
            ),
            Advice(
                text="Until then: fewer workers",
                expected=f"each one less saves up to {size(plateau / max(workers, 1))}",
            ),
        ),
    )


def _rate(copying: Sequence[_Copy]) -> Rate | None:
    """Bytes per second of all workers together; the slowest and the fastest worker bound it."""
    rates = [
        life.copied / ((life.end_ns - life.begin_ns) / SECOND_NS) for life in copying if life.end_ns > life.begin_ns
    ]
    if not rates:
        return None
    count = len(rates)
    return Rate(value=sum(rates), low=min(rates) * count, high=max(rates) * count, unit="bytes/s")


def _main_evidence(tables: RunTables, main: ProcessKey, begin_ns: float) -> tuple[Evidence, ...]:
    rows = sampled(tables, main)
    rows = rows[floats(rows, "time_ns") >= begin_ns]
    resident = floats(rows, "rss_bytes")
    resident = resident[np.isfinite(resident)]
    if len(resident) < 2:
        return ()
    rise = float(resident[-1] - resident[0])
    return (
        Evidence(
            name="main_rss_rise_bytes", value=round(rise), unit="bytes", n=len(resident), window="same window"
        ),
    )
