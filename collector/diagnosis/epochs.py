"""What the beginnings of epochs cost: starting workers, and filling empty queues.

Prefetching never crosses the end of an epoch, so each epoch pays for its own start. Only what recurs counts: the
first start of a run can't be saved.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collector.diagnosis.costs import TELL, confidence, costly, lost_ratio, measured
from collector.diagnosis.findings import Advice, Finding, Locus
from collector.diagnosis.frames import (
    SECOND_NS,
    floats,
    key_of,
    mean,
    median,
    origin_ns,
    step_at,
    whole,
    window_text,
)
from collector.diagnosis.loops import Loop
from collector.diagnosis.pace import Pace, fetch_ns, starved_ns
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats
from collector.quantities import count, duration, percent

_MIN_PASSES = 3  # before a mean of them has an error
_HOUR_SECONDS = 3600.0
_MIN_STARTS = 2  # are measured one by one, where a refill is what is left: seen twice, they recur
#: So many are looked at one by one; earlier ones are taken to be like them.
RECENT_EPOCHS = 1000


class _Start(NamedTuple):
    """When an epoch's iterator was begun, when it was there, and when a worker of it was first ready."""

    begun_ns: float
    created_ns: float
    ready_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One epoch of a loop; seconds.

    Attributes:
        startup: that the loop waited for its workers to start, 0 if they were there.
        ready: until the worker of the first batch looked for work, by its own clock; NaN if it was there.
        refill: that it starved at the first batches beyond that, and beyond what it starves later on.
        first_fetch: what making the first batch took the worker.
        batches: yielded.
        seconds: from its first batch to its last.

    """

    first_ns: float
    startup: float
    ready: float
    refill: float
    first_fetch: float
    batches: int
    seconds: float


def find_epoch_costs(tables: RunTables, loop: Loop, steady: Pace | None) -> list[Finding]:
    """What the starts of epochs cost this loop, dearest first."""
    every = _passes(tables, loop, steady) if loop.num_workers else []
    passes = every[1:]
    all_count = len(np.unique(floats(loop.batches, "epoch"))) - 1
    started = [each for each in passes if math.isfinite(each.ready)]
    found = []
    for make, least, rows, seconds in (
        (_startup, _MIN_STARTS, started, np.array([each.startup for each in started])),
        (_refill, _MIN_PASSES, passes, np.array([each.refill for each in passes])),
    ):
        if len(rows) >= least and _certain(seconds):
            total = float(seconds.sum()) * all_count / len(passes)
            ratio = lost_ratio(tables, total)
            if ratio >= TELL:
                found.append((ratio, make(tables, loop, rows, total, ratio)))
    if not any(finding.kind == "worker-startup" for _, finding in found):
        found += _short_run(tables, loop, every)
    return [finding for _, finding in sorted(found, key=lambda each: -each[0])]


def _certain(seconds: np.ndarray[Any, Any]) -> bool:
    """Whether the mean is beyond twice its own error."""
    return float(seconds.mean()) > 2 * float(seconds.std(ddof=1)) / math.sqrt(len(seconds))


def _passes(tables: RunTables, loop: Loop, steady: Pace | None) -> list[Pass]:
    """The recent epochs that were seen from their first batch on."""
    recent = np.unique(floats(loop.batches, "epoch"))[-RECENT_EPOCHS:]
    batches, fetches = (rows[rows["epoch"].isin(recent)] for rows in (loop.batches, loop.fetches))
    counts = batches["epoch"].value_counts().to_dict()
    ends = batches.groupby("epoch")["time_ns"].max().to_dict()
    waits = floats(batches, "wait_ns")
    starved = starved_ns(loop, batches, floats(batches, "time_ns"), waits)
    index, times = floats(batches, "index"), floats(batches, "time_ns")
    ramps = np.flatnonzero(index < loop.ramp)
    first = fetches[floats(fetches, "index") == 0]
    makers = dict(zip(first["epoch"], zip(fetch_ns(first), first["pid"], strict=True), strict=True))
    starts, usual_ns = _starts(tables, loop), _usual_ns(loop, steady)
    passes = []
    epochs = batches["epoch"].iloc[ramps]
    for epoch, places in epochs.groupby(epochs).indices.items():
        ramp = ramps[places]
        if epoch in makers and index[ramp[0]] == 0:
            taken_ns, pid = makers[epoch]
            of_maker = starts.get(int(pid), [])
            seen = times[ramp], waits[ramp], starved[ramp]
            whole_ns = float(ends[epoch] - times[ramp[0]])
            passes.append(_pass(*seen, counts[epoch], whole_ns, float(taken_ns), of_maker, usual_ns))
    return sorted(passes, key=lambda each: each.first_ns)


def _starts(tables: RunTables, loop: Loop) -> dict[int, list[_Start]]:
    """Worker pid -> the starts of epochs that it worked in, in order of time."""
    ready = {
        key[1]: float(event["time_ns"])
        for event in tables.events_of("worker-ready")
        if (key := key_of(event)) is not None and key[0] == loop.main[0]
    }
    found: dict[int, list[_Start]] = {}
    for event in tables.events_of("epoch-start"):
        if key_of(event) == loop.main:
            created_ns = float(event["time_ns"])
            begun_ns = float(whole(event.get("begun_ns")) or created_ns)
            for pid in map(whole, event.get("worker_pids") or ()):
                if pid is not None:
                    found.setdefault(pid, []).append(_Start(begun_ns, created_ns, ready.get(pid, math.nan)))
    return found


def _usual_ns(loop: Loop, steady: Pace | None) -> float:
    """How long the loop starves per batch when its queues are full: as measured, or as the workers' pace allows."""
    gaps = np.diff(floats(loop.batches, "time_ns"), prepend=np.nan) - floats(loop.batches, "wait_ns")
    gaps[np.diff(floats(loop.batches, "epoch"), prepend=np.nan) != 0] = np.nan
    allowed = mean(fetch_ns(loop.fetches)) / loop.num_workers - np.nan_to_num(median(gaps))
    return float(np.nanmax([0.0, allowed, 0.0 if steady is None else steady.starved * SECOND_NS]))


def _pass(
    times: Floats,
    waits: Floats,
    starved: Floats,
    batches_count: int,
    whole_ns: float,
    taken_ns: float,
    starts: list[_Start],
    usual_ns: float,
) -> Pass:
    """Of an epoch: what its first batches, up to the steady state, say of its start."""
    startup_ns, ready_ns, waited_ns = 0.0, float("nan"), 0.0
    known = bisect_right(starts, times[0], key=lambda start: start.created_ns)
    if known and starts[known - 1].begun_ns <= starts[known - 1].ready_ns <= times[0]:
        start = starts[known - 1]
        ready_ns = start.ready_ns - start.begun_ns
        waited_ns = float(np.clip(start.ready_ns - (times[0] - waits[0]), 0.0, waits[0]))
        startup_ns = min(ready_ns, max(0.0, start.created_ns - start.begun_ns) + waited_ns)
    refill_ns = max(0.0, float(np.nansum(starved)) - waited_ns - len(times) * usual_ns)
    return Pass(
        first_ns=float(times[0]),
        startup=startup_ns / SECOND_NS,
        ready=ready_ns / SECOND_NS,
        refill=refill_ns / SECOND_NS,
        first_fetch=taken_ns / SECOND_NS,
        batches=batches_count,
        seconds=whole_ns / SECOND_NS,
    )


def _short_run(tables: RunTables, loop: Loop, every: list[Pass]) -> list[tuple[float, Finding]]:
    """Tell what starting the workers cost a run that is too short to say that it recurs, and a longer one."""
    started = [each for each in every if math.isfinite(each.ready)]
    total = sum(each.startup for each in started)
    ratio = lost_ratio(tables, total)
    if ratio < TELL:
        return []
    each, window = total / len(started), _window(tables, started)
    epoch = mean(np.array([one.seconds for one in started]))
    advice: tuple[Advice, ...] = ()
    if len(every) > len(started) == 1:
        longer = "The epochs after it kept their workers, so a longer run pays no more."
    else:
        advice = (
            Advice(
                text="In runs of many epochs, set persistent_workers=True",
                expected=f"the workers start once: about {duration(each)} less in each epoch after the first",
            ),
        )
        again, hour = each / max(each + epoch, 1e-9), each / (each + _HOUR_SECONDS)
        longer = (
            f"A longer run pays it in each epoch: {percent(again)} of the time at this epoch length."
            if len(started) > 1
            else f"It comes once in an epoch: {percent(hour)} of an epoch that lasts an hour."
        )
    return [
        (
            ratio,
            dataclasses.replace(
                costly(
                    "worker-startup",
                    ratio,
                    total,
                    n=len(started),
                    window=window,
                    certainty=confidence(len(started), _MIN_PASSES),
                    summary=(
                        f"Starting the workers of loader {loop.loader} took {duration(total)} of this short run, "
                        f"{percent(ratio)}: {count(len(started))} {'start' if len(started) == 1 else 'starts'}, "
                        f"{duration(each)} each. {longer}"
                    ),
                    locus=_locus(loop),
                    since_step=step_at(tables, loop.main, started[0].first_ns),
                    evidence=(
                        measured("startup_wait_seconds", each, "seconds", len(started), window),
                        measured("epoch_seconds", epoch, "seconds", len(started), window),
                    ),
                    advice=advice,
                ),
                severity="info",
            ),
        )
    ]


def _startup(tables: RunTables, loop: Loop, passes: list[Pass], seconds: float, ratio: float) -> Finding:
    each, window = mean(np.array([one.startup for one in passes])), _window(tables, passes)
    ready = mean(np.array([one.ready for one in passes]))
    batches = float(np.median([one.batches for one in passes]))
    return costly(
        "worker-startup",
        ratio,
        seconds,
        n=len(passes),
        window=window,
        certainty=confidence(len(passes), _MIN_PASSES),
        summary=(
            f"Starting the workers of loader {loop.loader} anew for each epoch costs {percent(ratio)} of the run: "
            f"{duration(each)} for each of {len(passes)} epochs after the first ({count(batches)} batches each), "
            f"{duration(seconds)} in all."
        ),
        locus=_locus(loop),
        since_step=step_at(tables, loop.main, passes[0].first_ns),
        evidence=(
            measured("worker_ready_seconds", ready, "seconds", len(passes), window),
            measured("startup_wait_seconds", each, "seconds", len(passes), window),
        ),
        advice=(
            Advice(
                text="Make the iterator once and keep it, instead of next(iter(loader)) for each batch"
                if batches <= 1
                else "Set persistent_workers=True, and make the DataLoader once, not in each epoch",
                expected=f"the workers start once: about {duration(each)} less per epoch",
            ),
        ),
    )


def _refill(tables: RunTables, loop: Loop, passes: list[Pass], seconds: float, ratio: float) -> Finding:
    each, window = mean(np.array([one.refill for one in passes])), _window(tables, passes)
    batches = float(np.median([one.batches for one in passes]))
    first_fetch = mean(np.array([one.first_fetch for one in passes]))
    return costly(
        "epoch-refill",
        ratio,
        seconds,
        n=len(passes),
        window=window,
        certainty=confidence(len(passes), _MIN_PASSES),
        summary=(
            f"Each epoch of loader {loop.loader} begins with empty queues: that costs {duration(each)} for each of "
            f"{len(passes)} epochs after the first ({count(batches)} batches each), {duration(seconds)} or "
            f"{percent(ratio)} of the run. Prefetching does not cross the end of an epoch."
        ),
        locus=_locus(loop),
        since_step=step_at(tables, loop.main, passes[0].first_ns),
        evidence=(
            measured("refill_seconds", each, "seconds", len(passes), window),
            measured("first_fetch_seconds", first_fetch, "seconds", len(passes), window),
            measured("batches_per_epoch_count", batches, "count", len(passes), window),
        ),
        advice=(
            Advice(
                text="Make epochs longer: let one pass of the sampler cover the dataset several times, as "
                "RandomSampler(dataset, replacement=True, num_samples=k * len(dataset)) does",
                expected=f"about {duration(each)} less for each epoch that is saved",
            ),
        ),
    )


def _locus(loop: Loop) -> Locus:
    return Locus(host=loop.main[0], rank=loop.rank, role="worker", loader=loop.loader)


def _window(tables: RunTables, passes: list[Pass]) -> str:
    return window_text(passes[0].first_ns, passes[-1].first_ns, origin_ns(tables))
