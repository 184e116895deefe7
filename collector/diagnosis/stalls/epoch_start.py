"""Cost of the beginnings of epochs: starting workers, a sampler that draws the epoch, and filling empty queues.

Prefetching never crosses the end of an epoch, so each epoch pays for its own start. Only the starts after the first
one count: the first start of a run can't be saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop, is_made_again, recreated_loaders
from collector.diagnosis.loading.steady_state import Pace, fetch_ns, starved_ns
from collector.diagnosis.run.columns import SECOND_NS, floats, mean, median, whole
from collector.diagnosis.stalls.advice import MAKE_ONCE
from collector.diagnosis.stalls.case import EpochStarts
from collector.diagnosis.stalls.hand_over import HAND_OVER_SECONDS
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Advice, Finding, advise
from collector.units import counted, duration, percent

_HOUR_SECONDS = 3600.0
#: Least share of a refill that the first batch must cause, beyond the time of any other, to be its cause.
_MAIN_CAUSE = 0.5
_LONGER_ITERABLE = "the iterable dataset yield its samples several times"
_LONGER_SAMPLER = (
    "one pass of the sampler cover the dataset several times, as RandomSampler(dataset, replacement=True, "
    "num_samples=k * len(dataset)) does"
)
#: Newest epochs that are measured; earlier ones are assumed to cost the same.
RECENT_EPOCHS = 1000


class _Start(NamedTuple):
    """Times when an epoch's iterator began to be created and was created, and when one of its workers was ready."""

    begun_ns: float
    created_ns: float
    ready_ns: float


def passes(loop: Loop, steady: Pace | None) -> pd.DataFrame:
    """Return the recent epochs of a loop whose first batch is recorded, in order of time.

    Returns:
        first_ns: time of the first batch; the other columns are in seconds.
        startup: wait of the loop for the workers of the epoch before to end and for its own to start, 0 if they
            stayed.
        ready: time until the worker of the first batch was ready, by its own clock; NaN if it stayed.
        sampler: time in which the loop made the first indices while every worker waited for one, beyond what
            sending them may cost.
        warming: the same, for what the first samples of new workers alone cost: files that each worker opens, say.
        refill: starving at the first batches, without `startup`, `warming` and the usual starving.
        first_fetch: time of the worker for the first batch.
        batches: number of batches yielded.
        seconds: time from the first batch to the last.
    """
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
    idle_ns = fetches[~fetches.duplicated(["epoch", "pid"])].groupby("epoch")["idle_ns"].min().to_dict()
    sending_ns = loop.ramp * HAND_OVER_SECONDS * SECOND_NS
    starts, usual_ns = _starts(loop), _usual_ns(loop, steady)
    ended_ns, endings_ns = _endings(loop)
    rows, before_ns = [], math.inf
    epochs = batches["epoch"].iloc[ramps]
    for epoch, places in epochs.groupby(epochs).indices.items():
        ramp = ramps[places]
        if epoch not in first_fetches or index[ramp[0]] != 0:
            continue
        first_ns, (first_fetch_ns, pid) = times[ramp[0]], first_fetches[epoch]
        start = _start_before(starts.get(int(pid), []), first_ns)
        startup_ns, ready_ns, waited_ns = _startup(start, first_ns, waits[ramp[0]])
        drawing_ns = min(idle_ns[epoch], first_ns - waits[ramp[0]] - start.created_ns) if start else 0.0
        between = slice(*np.searchsorted(ended_ns, (before_ns, first_ns)))
        startup_ns += float(endings_ns[between].sum())
        before_ns = ends[epoch]
        refill_ns = max(0.0, float(np.nansum(starved[ramp])) - waited_ns - len(ramp) * usual_ns)
        rows.append(
            {
                "first_ns": float(first_ns),
                "startup": startup_ns / SECOND_NS,
                "ready": ready_ns / SECOND_NS,
                "sampler": max(0.0, np.nan_to_num(drawing_ns) - sending_ns) / SECOND_NS,
                "refill": refill_ns / SECOND_NS,
                "first_fetch": float(first_fetch_ns) / SECOND_NS,
                "batches": counts[epoch],
                "seconds": float(ends[epoch] - first_ns) / SECOND_NS,
            }
        )
    columns = ["first_ns", "startup", "ready", "sampler", "refill", "first_fetch", "batches", "seconds"]
    found = pd.DataFrame(rows, columns=columns).sort_values("first_ns", kind="stable")
    is_warming = found["ready"].notna() & _new_workers_warm_up(loop, found)
    return found.assign(
        warming=found["refill"].where(is_warming, 0.0), refill=found["refill"].mask(is_warming, 0.0)
    )


def _new_workers_warm_up(loop: Loop, found: pd.DataFrame) -> bool:
    """Return whether refills of epochs with new workers are mostly what the first fetch takes beyond a later one.

    The iterator of an iterable dataset begins again in each epoch, in old workers too.
    """
    later = loop.fetches[floats(loop.fetches, "index") >= loop.ramp]
    new = found[found["ready"].notna()]
    longer = median(floats(new, "first_fetch")) - median(fetch_ns(later)) / SECOND_NS
    return not loop.setting.get("iterable") and longer >= _MAIN_CAUSE * mean(floats(new, "refill"))


def _starts(loop: Loop) -> dict[int, list[_Start]]:
    """Return the starts of each worker's epochs, by its pid, in order of time."""
    ready = {
        event["pid"]: float(event["time_ns"])
        for event in loop.tables.events_of("worker-ready")
        if event["host"] == loop.main[0]
    }
    starts: dict[int, list[_Start]] = {}
    for event in loop.tables.events_of("epoch-start", by=loop.main):
        created_ns = float(event["time_ns"])
        begun_ns = float(whole(event.get("begun_ns")) or created_ns)
        for pid in map(whole, event.get("worker_pids") or ()):
            if pid is not None:
                starts.setdefault(pid, []).append(_Start(begun_ns, created_ns, ready.get(pid, math.nan)))
    return starts


def _endings(loop: Loop) -> tuple[Floats, Floats]:
    """Return when the workers of epochs had ended, and the ns for which the training waited for their end."""
    last_loader = recreated_loaders(loop.tables, loop.main)
    events = [
        event
        for event in loop.tables.events_of("workers-ended", by=loop.main)
        if last_loader.get(event["loader"], event["loader"]) == loop.loader
    ]
    ended_ns = np.array([event["time_ns"] for event in events], dtype=float)
    return ended_ns, ended_ns - np.array([event["begun_ns"] for event in events], dtype=float)


def _usual_ns(loop: Loop, steady: Pace | None) -> float:
    """Return the ns that the loop starves per batch in the steady state: as measured, or by the workers' pace."""
    if not loop.num_workers:
        return 0.0 if steady is None else steady.starved * SECOND_NS
    gaps = np.diff(floats(loop.batches, "time_ns"), prepend=np.nan) - floats(loop.batches, "wait_ns")
    gaps[np.diff(floats(loop.batches, "epoch"), prepend=np.nan) != 0] = np.nan
    allowed = mean(fetch_ns(loop.fetches)) / loop.num_workers - np.nan_to_num(median(gaps))
    return float(np.nanmax([0.0, allowed, 0.0 if steady is None else steady.starved * SECOND_NS]))


def _start_before(starts: list[_Start], first_ns: float) -> _Start | None:
    before_count = bisect_right(starts, first_ns, key=lambda start: start.created_ns)
    return starts[before_count - 1] if before_count else None


def _startup(start: _Start | None, first_ns: float, wait_ns: float) -> tuple[float, float, float]:
    """Return the ns that an epoch lost to starting workers, that its first one took, and that the loop waited.

    Workers are started one after the other, and a spawned one blocks the training until it has read the dataset.
    So the first one may be ready long before the training goes on.

    The start is that of the worker of its first batch, which came at `first_ns`.
    """
    if start is None or not start.begun_ns <= start.ready_ns <= first_ns:
        return 0.0, math.nan, 0.0
    ready_ns = start.ready_ns - start.begun_ns
    waited_ns = float(np.clip(start.ready_ns - (first_ns - wait_ns), 0.0, wait_ns))
    return max(0.0, start.created_ns - start.begun_ns) + waited_ns, ready_ns, waited_ns


def worker_startup(starts: EpochStarts) -> Finding:
    """Return a finding for workers that start again in each epoch."""
    startup = duration(starts.mean("startup") + starts.mean("warming"))
    measured = {"worker_ready_seconds": starts.mean("ready"), "startup_wait_seconds": starts.mean("startup")}
    first = ""
    if warming := starts.mean("warming"):
        first = f", {duration(warming)} of it for what the first sample of a new worker takes longer"
        measured["first_fetch_seconds"] = starts.mean("first_fetch")
    again = "Set persistent_workers=True"
    does = f"Ending the workers of loader {starts.loop.loader} and starting them again for each epoch"
    if starts.loop.setting.get("persistent_workers"):  # those of a DataLoader that is kept do not end
        again = "Make the DataLoader once, not in each epoch"
        does = f"Starting new workers of loader {starts.loop.loader} in each epoch"
    elif is_made_again(starts.loop):
        again += MAKE_ONCE
    once = f"the workers start once: about {startup} less per epoch"
    advice: tuple[Advice, ...] = advise(text=again, expected=once, effect="changes memory")
    if _is_left_early(starts):
        advice = (_keep_iterator(f"{once}, and the batches that were made ahead are used"), *advice)
    return Finding(
        kind="worker-startup",
        summary=f"{does} costs {percent(starts.loss.ratio)} of the run: {startup} for each of "
        f"{counted(len(starts.passes), 'epoch')} after the first "
        f"({starts.batches_words} each){first}, {duration(starts.loss.seconds)} in all.",
        evidence=starts.loss.evidence(**measured),
        advice=advice,
        **starts.facts("worker"),
    )


def _is_left_early(starts: EpochStarts) -> bool:
    """Return whether the script leaves its epochs before their end, as far as that is known."""
    samples, size = (whole(starts.loop.setting.get(name)) for name in ("dataset_length", "batch_size"))
    if not samples or not size:
        return starts.usual_batches <= 1
    return starts.usual_batches < samples // size


def _keep_iterator(expected: str) -> Advice:
    return Advice(
        text="Keep one iterator and go on with it, instead of iter(loader) again and again: the loop leaves its "
        "epochs before their end",
        expected=expected,
        effect="changes results",
    )


def startup_of_short_run(starts: EpochStarts, *, workers_stay: bool) -> Finding:
    """Return what starting the workers cost a run too short to show that it recurs, and would cost a longer one."""
    loss, starts_count, epoch_seconds = starts.loss, len(starts.passes), starts.mean("seconds")
    facts = starts.facts("worker")
    facts["severity"] = "info"
    per_start = loss.seconds / starts_count
    advice = Advice(
        text="In runs of many epochs, set persistent_workers=True",
        expected=f"the workers start once: about {duration(per_start)} less in each epoch after the first",
        effect="changes memory",
    )
    if workers_stay:
        longer = "The epochs after it kept their workers, so a longer run pays no more."
    elif starts_count > 1:
        share = per_start / max(per_start + epoch_seconds, 1e-9)
        longer = f"A longer run pays it in each epoch: {percent(share)} of the time at this epoch length."
    else:
        share = per_start / (per_start + _HOUR_SECONDS)
        longer = f"It comes once in an epoch: {percent(share)} of an epoch that lasts an hour."
    return Finding(
        kind="worker-startup",
        summary=f"Starting the workers of loader {starts.loop.loader} took {duration(loss.seconds)} of this short "
        f"run, {percent(loss.ratio)}: {counted(starts_count, 'start')}, "
        f"{duration(per_start)} each. {longer}",
        evidence=loss.evidence(startup_wait_seconds=per_start, epoch_seconds=epoch_seconds),
        advice=() if workers_stay else (advice,),
        **facts,
    )


def sampler_at_epochs(starts: EpochStarts) -> Finding:
    """Return a finding for a sampler that is slow to give its first index, while the workers wait for it."""
    loop, each = starts.loop, duration(starts.mean("sampler"))
    sampler = loop.setting.get("sampler") or "sampler"
    return Finding(
        kind="sampler-bound",
        summary=f"At the start of each epoch the sampler takes {each} until it gives its first index "
        f"({sampler} of loader {loop.loader}), while the workers "
        f"wait for it: {duration(starts.loss.seconds)} in {counted(len(starts.passes), 'epoch')} after the first, "
        f"{percent(starts.loss.ratio)} of the run.",
        evidence=starts.loss.evidence(
            sampler_start_seconds=starts.mean("sampler"), epoch_seconds=starts.mean("seconds")
        ),
        advice=(_cheap_start(each),),
        **starts.facts("main"),
    )


def first_batch_of_epochs(starts: EpochStarts) -> Finding:
    """Return a finding for a training process that takes long to make the first batch of each epoch."""
    loop, longer = starts.loop, duration(starts.mean("refill"))
    begins = "the iterable dataset begins"
    if not loop.setting.get("iterable"):
        sampler = loop.setting.get("sampler") or "or batch sampler"
        begins = f"its sampler ({sampler}) begins, or the first samples are read"
    return Finding(
        kind="inline-loading",
        summary=f"The first batch of each epoch of loader {loop.loader} takes {longer} longer than the others, as "
        f"{begins}: {duration(starts.loss.seconds)} in {counted(len(starts.passes), 'epoch')} after the first, "
        f"{percent(starts.loss.ratio)} of the run. The training process makes its batches itself (num_workers=0).",
        evidence=starts.loss.evidence(
            first_batch_excess_seconds=starts.mean("refill"), epoch_seconds=starts.mean("seconds")
        ),
        advice=(_cheap_start(longer),),
        **starts.facts("main"),
    )


def _cheap_start(each: str) -> Advice:
    return Advice(
        text="Make the start of an epoch cheap: keep lengths, orders and file lists from epoch to epoch instead "
        "of computing them again, permute arrays instead of Python objects, fill a smaller shuffle buffer, or "
        "yield before all are known",
        expected=f"up to {each} less per epoch; more workers do not help",
    )


def epoch_refill(starts: EpochStarts) -> Finding:
    """Return a finding for epochs that begin with empty queues, or with a first batch that takes long to make."""
    refill, batches = duration(starts.mean("refill")), starts.usual_batches
    usual, first = float(np.median(fetch_ns(starts.loop.fetches))) / SECOND_NS, starts.mean("first_fetch")
    is_iterable = starts.loop.setting.get("iterable")
    is_of_dataset = is_iterable and first - usual >= _MAIN_CAUSE * starts.mean("refill")
    saved = f"about {refill} less for each epoch that is saved"
    longer = Advice(
        text=f"Make epochs longer: let {_LONGER_ITERABLE if is_iterable else _LONGER_SAMPLER}",
        expected=saved,
        effect="changes results",
    )
    if _is_left_early(starts):
        longer = _keep_iterator(saved)
    begins = "begins with empty queues"
    if is_of_dataset:
        begins += (
            f", and the iterable dataset takes {duration(first)} to its first batch (usually {duration(usual)})"
        )
    return Finding(
        kind="epoch-refill",
        summary=f"Each epoch of loader {starts.loop.loader} {begins}: that costs {refill} for each "
        f"of {counted(len(starts.passes), 'epoch')} after the first ({starts.batches_words} each), "
        f"{duration(starts.loss.seconds)} or {percent(starts.loss.ratio)} of the run. Prefetching does not cross "
        "the end of an epoch.",
        evidence=starts.loss.evidence(
            refill_seconds=starts.mean("refill"),
            first_fetch_seconds=starts.mean("first_fetch"),
            batches_per_epoch_count=batches,
        ),
        advice=(_cheap_start(refill), longer) if is_of_dataset else (longer,),
        **starts.facts("worker"),
    )
