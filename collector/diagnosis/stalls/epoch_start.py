"""Cost of the beginnings of epochs: starting workers, and filling empty queues.

Prefetching never crosses the end of an epoch, so each epoch pays for its own start. Only the starts after the first
one count: the first start of a run can't be saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import Pace, fetch_ns, starved_ns
from collector.diagnosis.run.columns import (
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
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, confidence, lost_ratio, measurement
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Advice, Finding, Locus
from collector.units import count, duration, percent

_MIN_PASSES = 3  # epochs that the error of a mean refill needs
_MIN_STARTS = 2  # epochs that show that starts recur; each start is measured, a refill only inferred
_HOUR_SECONDS = 3600.0
#: Newest epochs that are measured; earlier ones are assumed to cost the same.
RECENT_EPOCHS = 1000


class _Start(NamedTuple):
    """Times when an epoch's iterator began to be created and was created, and when one of its workers was ready."""

    begun_ns: float
    created_ns: float
    ready_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One epoch of a loop; times in seconds.

    Attributes:
        first_ns: time of the first batch.
        startup: wait of the loop for its workers to start, 0 if they stayed from the epoch before.
        ready: time until the worker of the first batch was ready, by its own clock; NaN if it stayed.
        refill: starving at the first batches, without `startup` and the usual starving.
        first_fetch: time of the worker for the first batch.
        batches: number of batches yielded.
        seconds: time from the first batch to the last.

    """

    first_ns: float
    startup: float
    ready: float
    refill: float
    first_fetch: float
    batches: int
    seconds: float


def find_epoch_costs(tables: RunTables, loop: Loop, steady: Pace | None) -> list[Finding]:
    """Find time that this loop loses at the starts of epochs, the most expensive first."""
    all_passes = _passes(tables, loop, steady) if loop.num_workers else []
    passes = all_passes[1:]
    epochs_count = len(np.unique(floats(loop.batches, "epoch"))) - 1
    with_start = [epoch for epoch in passes if math.isfinite(epoch.ready)]
    findings = []
    for make, least, rows, seconds in (
        (_startup, _MIN_STARTS, with_start, np.array([epoch.startup for epoch in with_start])),
        (_refill, _MIN_PASSES, passes, np.array([epoch.refill for epoch in passes])),
    ):
        if len(rows) >= least and _is_certain(seconds):
            total = float(seconds.sum()) * epochs_count / len(passes)
            ratio = lost_ratio(tables, total)
            if ratio >= LEAST_LOST_RATIO:
                findings.append((ratio, make(tables, loop, rows, total, ratio)))
    if not any(finding.kind == "worker-startup" for _, finding in findings):
        findings += _short_run(tables, loop, all_passes)
    return [finding for _, finding in sorted(findings, key=lambda ranked: -ranked[0])]


def _is_certain(seconds: np.ndarray[Any, Any]) -> bool:
    """Return whether the mean is more than twice its standard error."""
    return float(seconds.mean()) > 2 * float(seconds.std(ddof=1)) / math.sqrt(len(seconds))


def _passes(tables: RunTables, loop: Loop, steady: Pace | None) -> list[Pass]:
    """Return the recent epochs whose first batch is recorded, in order of time."""
    recent = np.unique(floats(loop.batches, "epoch"))[-RECENT_EPOCHS:]
    batches, fetches = (rows[rows["epoch"].isin(recent)] for rows in (loop.batches, loop.fetches))
    counts = batches["epoch"].value_counts().to_dict()
    ends = batches.groupby("epoch")["time_ns"].max().to_dict()
    waits = floats(batches, "wait_ns")
    starved = starved_ns(loop, batches, floats(batches, "time_ns"), waits)
    index, times = floats(batches, "index"), floats(batches, "time_ns")
    ramps = np.flatnonzero(index < loop.ramp)
    first = fetches[floats(fetches, "index") == 0]
    first_fetches = dict(zip(first["epoch"], zip(fetch_ns(first), first["pid"], strict=True), strict=True))
    starts, usual_ns = _starts(tables, loop), _usual_ns(loop, steady)
    passes = []
    epochs = batches["epoch"].iloc[ramps]
    for epoch, places in epochs.groupby(epochs).indices.items():
        ramp = ramps[places]
        if epoch in first_fetches and index[ramp[0]] == 0:
            first_fetch_ns, pid = first_fetches[epoch]
            passes.append(
                _pass(
                    times[ramp],
                    waits[ramp],
                    starved[ramp],
                    batches_count=counts[epoch],
                    duration_ns=float(ends[epoch] - times[ramp[0]]),
                    first_fetch_ns=float(first_fetch_ns),
                    starts=starts.get(int(pid), []),
                    usual_ns=usual_ns,
                )
            )
    return sorted(passes, key=lambda epoch: epoch.first_ns)


def _starts(tables: RunTables, loop: Loop) -> dict[int, list[_Start]]:
    """Return the starts of each worker's epochs, by its pid, in order of time."""
    ready = {
        key[1]: float(event["time_ns"])
        for event in tables.events_of("worker-ready")
        if (key := key_of(event)) is not None and key[0] == loop.main[0]
    }
    starts: dict[int, list[_Start]] = {}
    for event in tables.events_of("epoch-start"):
        if key_of(event) == loop.main:
            created_ns = float(event["time_ns"])
            begun_ns = float(whole(event.get("begun_ns")) or created_ns)
            for pid in map(whole, event.get("worker_pids") or ()):
                if pid is not None:
                    starts.setdefault(pid, []).append(_Start(begun_ns, created_ns, ready.get(pid, math.nan)))
    return starts


def _usual_ns(loop: Loop, steady: Pace | None) -> float:
    """Return the ns that the loop starves per batch in the steady state: as measured, or by the workers' pace."""
    gaps = np.diff(floats(loop.batches, "time_ns"), prepend=np.nan) - floats(loop.batches, "wait_ns")
    gaps[np.diff(floats(loop.batches, "epoch"), prepend=np.nan) != 0] = np.nan
    allowed = mean(fetch_ns(loop.fetches)) / loop.num_workers - np.nan_to_num(median(gaps))
    return float(np.nanmax([0.0, allowed, 0.0 if steady is None else steady.starved * SECOND_NS]))


def _pass(
    times: Floats,
    waits: Floats,
    starved: Floats,
    *,
    batches_count: int,
    duration_ns: float,
    first_fetch_ns: float,
    starts: list[_Start],
    usual_ns: float,
) -> Pass:
    """Split the waits for the first batches of an epoch, up to the steady state, into start-up and refill."""
    startup_ns, ready_ns, waited_ns = 0.0, float("nan"), 0.0
    before_count = bisect_right(starts, times[0], key=lambda start: start.created_ns)
    start = starts[before_count - 1] if before_count else None
    if start and start.begun_ns <= start.ready_ns <= times[0]:
        ready_ns = start.ready_ns - start.begun_ns
        waited_ns = float(np.clip(start.ready_ns - (times[0] - waits[0]), 0.0, waits[0]))
        startup_ns = min(ready_ns, max(0.0, start.created_ns - start.begun_ns) + waited_ns)
    refill_ns = max(0.0, float(np.nansum(starved)) - waited_ns - len(times) * usual_ns)
    return Pass(
        first_ns=float(times[0]),
        startup=startup_ns / SECOND_NS,
        ready=ready_ns / SECOND_NS,
        refill=refill_ns / SECOND_NS,
        first_fetch=first_fetch_ns / SECOND_NS,
        batches=batches_count,
        seconds=duration_ns / SECOND_NS,
    )


def _short_run(tables: RunTables, loop: Loop, all_passes: list[Pass]) -> list[tuple[float, Finding]]:
    """Find what starting the workers cost a run too short to show that it recurs, and would cost a longer one."""
    passes = [epoch for epoch in all_passes if math.isfinite(epoch.ready)]
    total = sum(epoch.startup for epoch in passes)
    ratio = lost_ratio(tables, total)
    if ratio < LEAST_LOST_RATIO:
        return []
    per_start, window = total / len(passes), _window(tables, passes)
    epoch_seconds = mean(np.array([epoch.seconds for epoch in passes]))
    advice: tuple[Advice, ...] = ()
    if len(all_passes) > len(passes) == 1:
        longer = "The epochs after it kept their workers, so a longer run pays no more."
    else:
        advice = (
            Advice(
                text="In runs of many epochs, set persistent_workers=True",
                expected=f"the workers start once: about {duration(per_start)} less in each epoch after the first",
            ),
        )
        share = per_start / max(per_start + epoch_seconds, 1e-9)
        share_of_hour = per_start / (per_start + _HOUR_SECONDS)
        longer = (
            f"A longer run pays it in each epoch: {percent(share)} of the time at this epoch length."
            if len(passes) > 1
            else f"It comes once in an epoch: {percent(share_of_hour)} of an epoch that lasts an hour."
        )
    finding = Finding(
        kind="worker-startup",
        severity="info",
        confidence=confidence(len(passes), _MIN_PASSES),
        summary=(
            f"Starting the workers of loader {loop.loader} took {duration(total)} of this short run, "
            f"{percent(ratio)}: {count(len(passes))} {'start' if len(passes) == 1 else 'starts'}, "
            f"{duration(per_start)} each. {longer}"
        ),
        locus=_locus(loop),
        since_step=step_at(tables, loop.main, passes[0].first_ns),
        evidence=(
            *Loss(ratio=ratio, seconds=total, n=len(passes), window=window).evidence,
            measurement("startup_wait_seconds", per_start, "seconds", len(passes), window),
            measurement("epoch_seconds", epoch_seconds, "seconds", len(passes), window),
        ),
        advice=advice,
    )
    return [(ratio, finding)]


def _startup(tables: RunTables, loop: Loop, passes: list[Pass], seconds: float, ratio: float) -> Finding:
    startup = mean(np.array([epoch.startup for epoch in passes]))
    ready = mean(np.array([epoch.ready for epoch in passes]))
    batches = float(np.median([epoch.batches for epoch in passes]))
    window = _window(tables, passes)
    loss = Loss(ratio=ratio, seconds=seconds, n=len(passes), window=window)
    return Finding(
        kind="worker-startup",
        severity=loss.severity,
        confidence=confidence(len(passes), _MIN_PASSES),
        summary=(
            f"Starting the workers of loader {loop.loader} anew for each epoch costs {percent(ratio)} of the run: "
            f"{duration(startup)} for each of {len(passes)} epochs after the first ({count(batches)} batches "
            f"each), {duration(seconds)} in all."
        ),
        locus=_locus(loop),
        since_step=step_at(tables, loop.main, passes[0].first_ns),
        evidence=(
            *loss.evidence,
            measurement("worker_ready_seconds", ready, "seconds", len(passes), window),
            measurement("startup_wait_seconds", startup, "seconds", len(passes), window),
        ),
        advice=(
            Advice(
                text="Make the iterator once and keep it, instead of next(iter(loader)) for each batch"
                if batches <= 1
                else "Set persistent_workers=True, and make the DataLoader once, not in each epoch",
                expected=f"the workers start once: about {duration(startup)} less per epoch",
            ),
        ),
    )


def _refill(tables: RunTables, loop: Loop, passes: list[Pass], seconds: float, ratio: float) -> Finding:
    refill = mean(np.array([epoch.refill for epoch in passes]))
    batches = float(np.median([epoch.batches for epoch in passes]))
    first_fetch = mean(np.array([epoch.first_fetch for epoch in passes]))
    window = _window(tables, passes)
    loss = Loss(ratio=ratio, seconds=seconds, n=len(passes), window=window)
    return Finding(
        kind="epoch-refill",
        severity=loss.severity,
        confidence=confidence(len(passes), _MIN_PASSES),
        summary=(
            f"Each epoch of loader {loop.loader} begins with empty queues: that costs {duration(refill)} for each "
            f"of {len(passes)} epochs after the first ({count(batches)} batches each), {duration(seconds)} or "
            f"{percent(ratio)} of the run. Prefetching does not cross the end of an epoch."
        ),
        locus=_locus(loop),
        since_step=step_at(tables, loop.main, passes[0].first_ns),
        evidence=(
            *loss.evidence,
            measurement("refill_seconds", refill, "seconds", len(passes), window),
            measurement("first_fetch_seconds", first_fetch, "seconds", len(passes), window),
            measurement("batches_per_epoch_count", batches, "count", len(passes), window),
        ),
        advice=(
            Advice(
                text="Make epochs longer: let one pass of the sampler cover the dataset several times, as "
                "RandomSampler(dataset, replacement=True, num_samples=k * len(dataset)) does",
                expected=f"about {duration(refill)} less for each epoch that is saved",
            ),
        ),
    )


def _locus(loop: Loop) -> Locus:
    return Locus(host=loop.main[0], rank=loop.rank, role="worker", loader=loop.loader)


def _window(tables: RunTables, passes: list[Pass]) -> str:
    return window_text(passes[0].first_ns, passes[-1].first_ns, origin_ns(tables))
