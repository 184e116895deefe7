"""Find processes whose memory keeps growing: the main heap, a worker's heap, or pages copied by reading.

The three differ in mechanism. A heap that leaks grows in private dirty *and* resident memory. Copy-on-read turns
pages that a forked worker shared with its parent into private ones: private dirty grows, resident memory does not,
and it ends when everything is copied.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import inline_batch_growth, living_workers, loader_settings, worker_slots
from collector.diagnosis.memory import resources
from collector.diagnosis.memory.copy_on_read import find_copies
from collector.diagnosis.memory.leak import (
    CONFIRMED,
    LOADING_SECONDS,
    GrowingUse,
    Use,
    bounded_finding,
    filling_of,
    freed_bytes,
    growth_of,
    leak_finding,
    loading_finding,
    negligible_bytes,
    optimizer_bytes,
    optimizer_finding,
    rise_since,
    share_of,
    witnesses_of,
    young_finding,
    young_growth,
)
from collector.diagnosis.run.columns import (
    SECOND_NS,
    anonymous_bytes,
    by_process,
    finite,
    floats,
    private_bytes,
    seconds,
    whole,
    with_early_samples,
    worker_samples,
    written,
)
from collector.diagnosis.run.compilations import recompilations_of
from collector.diagnosis.run.host_memory import demand_series
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import sentence, worker_locus
from collector.diagnosis.run.tables import RunTables, step_units, writer_of
from collector.diagnosis.run.training import (
    after_training,
    iterates,
    may_be_loading,
    since_ready,
    training_end_ns,
    while_running,
    while_training,
)
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, MIN_POINTS, Floats, Growth
from collector.findings import Evidence, Finding, Locus, Rate, extended, fact
from collector.store import ProcessKey
from collector.units import listed, size
from training_harness.records import UNIT_OPTIMIZER

#: Times (seconds) and values of a measurement that is read seldom.
_Readings = tuple[Floats, Floats]
#: Least rise of each worker, as a share of the largest, for the workers of a loader to grow alike.
_ALIKE_RATIO = 0.5
#: Epochs whose worker in one place must have grown alike, for the epoch to bound the growth.
_MIN_EPOCHS = 3
_NO_ITERATIONS = (
    " No batch, optimizer step or forward pass of it was seen: whether each iteration keeps something is not known."
)
_AFTER_TRAINING = " It did so after the training's last step or batch."


@dataclass(frozen=True, slots=True)
class _Workers:
    """The workers of a loader by their number: several had each, in turn, if they end with the epoch.

    Attributes:
        leaks: those that grow; `young` are those whose growth is too small, or too brief, to call a leak.
        threads: number of threads of those that grow, at the times of their use.
        lasting: those that were sampled to the end, with the readings of their private memory.
        rises: how far the levels of each worker of a number lie apart, in bytes.
    """

    leaks: dict[int, GrowingUse] = field(default_factory=dict)
    young: dict[int, GrowingUse] = field(default_factory=dict)
    threads: dict[int, Floats] = field(default_factory=dict)
    lasting: dict[int, tuple[Use, _Readings]] = field(default_factory=dict)
    rises: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


def find_leaks(tables: RunTables) -> list[Finding]:
    """Find `main-heap-leak`, `copy-on-read-growth` and `worker-heap-leak`."""
    copies = find_copies(tables)
    life = lifecycle_of(tables)
    keys = (*life.mains, *life.watched, *life.others)
    findings = [finding for key in keys if (finding := _main_leak(tables, key)) is not None]
    loaders = {(finding.locus.rank, finding.locus.loader) for finding in copies}
    return findings + copies + [f for f in _worker_leaks(tables) if (f.locus.rank, f.locus.loader) not in loaders]


def _main_leak(tables: RunTables, key: ProcessKey) -> Finding | None:
    """Return the finding that the memory of a process grows while it trains, else that it grows afterwards."""
    life, trains = lifecycle_of(tables), iterates(tables, key)
    rows = while_running(tables, key)  # the fall at the end would hide growth before it
    is_fork = key in life.forks and iterates(tables, None)
    if is_fork:  # it imports nothing, and the training does not wait until it has loaded something
        rows = while_training(tables, rows)
    finding = _growth_in(tables, key, rows, is_iterating=trains or is_fork or bool(life.watched))
    if finding is None and trains:
        finding = _growth_in(tables, key, after_training(tables, key), is_iterating=False)
        # Growth that ended by itself has a bound.
        if finding is not None and life.status() == "finished":
            return replace(finding, severity="info")
    return finding


def _growth_in(tables: RunTables, key: ProcessKey, rows: pd.DataFrame, *, is_iterating: bool) -> Finding | None:
    """Return the finding that memory in use grows, if another measurement confirms that the process wrote it.

    Args:
        tables: the run.
        key: the process.
        rows: its samples in the time that is judged.
        is_iterating: whether it has batches, steps or forward passes in that time.
    """
    ticks_count, rows = len(rows), with_early_samples(tables, rows)
    if len(rows) < MIN_POINTS:
        return None
    life, times = lifecycle_of(tables), seconds(rows)
    kept, freed = optimizer_bytes(tables, key, times), freed_bytes(tables, key, rows)
    free = freed + kept + inline_batch_growth(tables, key, times)
    use = _use_of(tables, life.locus(key), rows, free, key)
    negligible = negligible_bytes(anonymous_bytes(rows))
    trend = use.growth(negligible) if ticks_count >= MIN_POINTS else None
    filling = filling_of(use, trend, negligible) if is_iterating else None
    # Too few stairs for the rule, unless they come at an occasion that is known.
    stairs = use.at_occasions(negligible) if trend is None and filling is None else None
    may_be_young = is_iterating and filling is None and stairs is None
    young = young_growth(use, trend, negligible) if may_be_young else None
    thread_counts = floats(rows, "thread_count") - living_workers(tables, key, times)  # each has one here
    if young is not None and trend is None and _thread_growth(use, thread_counts) is not None:
        trend, young = young, None  # small, but threads that never end confirm it
    trend = growth_of(filling) if filling else stairs.growth() if stairs else young or trend
    witnesses = _main_witnesses(key, use, trend, rows, free) if trend is not None else None
    process = sentence(life.name(key))
    if trend is None or witnesses is None:
        return optimizer_finding(use, kept, negligible, grows=f"{process} grows")
    if filling is not None:
        return bounded_finding(use, filling, witnesses, fills=f"{process} fills")
    growing = GrowingUse(use, trend, witnesses)
    may_be_starting = not (is_iterating or iterates(tables, key)) and growing.lasted_seconds < LOADING_SECONDS
    if may_be_starting and (tables.goes_on or life.has_raised(key)):
        return None  # its first iteration, or more time, would tell
    # A fork has no hooks of its own, and may hold the data that the training loads.
    if may_be_loading(tables, None if key in life.forks else key):
        return loading_finding(growing, grows=f"{process} grows")
    if young is not None:
        return young_finding(growing, negligible=negligible, grows=f"{process} grows")
    leak = _with_threads(_leak_of_main(key, growing, is_iterating=is_iterating), use, thread_counts)
    leak = _with_freed(_with_recompilations(leak, growing, key), growing, freed)
    return leak if stairs is None else replace(leak, severity="info")


def _leak_of_main(key: ProcessKey, growing: GrowingUse, *, is_iterating: bool) -> Finding:
    tables, witnesses = growing.use.tables, growing.witnesses
    life, trains = lifecycle_of(tables), iterates(tables, key)
    resource = resources.HEAP if trains and is_iterating else resources.HEAP_WITHOUT_ITERATIONS
    units = step_units(written(tables, "step", key))
    words = {"per_step": ""} if growing.is_after_last_step else {}
    if resource is resources.HEAP and (words or (len(units) and (units < UNIT_OPTIMIZER).all())):
        resource = resources.HEAP_OF_OUTPUTS
    gauges = written(tables, "device_memory", key)
    in_use = {"pinned_active_rise_bytes": (seconds(gauges), floats(gauges, "pinned_active_bytes"))}
    if witnesses and (pinned := witnesses_of(growing.trend, in_use)):
        resource, witnesses = resources.HEAP_OF_PINNED, (*witnesses, *pinned)
    finding = leak_finding(
        resource,
        replace(growing, witnesses=(*witnesses, *growing.half_slopes) if witnesses else ()),
        iterates=is_iterating,
        process=sentence(life.name(key)),
        **words,
    )
    certainty = 0.95 if len(witnesses) > 1 else 0.85
    return extended(
        finding,
        "" if is_iterating else _AFTER_TRAINING if trains else _NO_ITERATIONS,
        severity=finding.severity if life.may_train(key) else "info",
        confidence=certainty if trains and is_iterating else certainty - 0.15,
    )


def _with_threads(leak: Finding, use: Use, thread_counts: Floats) -> Finding:
    """Return a leak with the threads that its process started and never ended, if they get more like a leak."""
    trend = _thread_growth(use, thread_counts)
    if trend is None:
        return leak
    started = fact("thread_rise_count", round(trend.rise), "same window", n=trend.n)
    advice = replace(resources.END_THREADS, text=resources.END_THREADS.text.format(count=round(trend.rise)))
    return extended(leak, "", started, advice=(advice,))


def _thread_growth(use: Use, thread_counts: Floats) -> Growth | None:
    # A rise below one thread per block of a trend is a few single events.
    return replace(use, values=thread_counts).growth(BLOCK_COUNTS[0])


def _with_freed(leak: Finding, growing: GrowingUse, freed: Floats) -> Finding:
    """Return a leak with the freed memory between what stays, if that grew by more than the leak itself."""
    ratio, trend = share_of(growing.use.times, freed, growing.trend), growing.trend
    if not ratio >= 1:
        return leak
    return extended(
        leak,
        f"Between what stays lies {size(ratio * trend.rise)} more of freed memory that cannot be given back: "
        f"{size((1 + ratio) * trend.rise)} in all.",
        fact("freed_rise_bytes", round(ratio * trend.rise), "same window", n=trend.n),
    )


def _with_recompilations(leak: Finding, growing: GrowingUse, key: ProcessKey) -> Finding:
    """Return a leak with the compilations of functions compiled before, whose code stays, in its time."""
    again = recompilations_of(growing.use.tables, key, *growing.span_ns)
    # A few more sizes, or an evaluation, are no cause: as with threads, one for each block of the trend at least.
    if again is None or again.count < BLOCK_COUNTS[0] or again.last_ns < np.mean(growing.span_ns):
        return leak
    compiled = fact("compilation_count", again.count, growing.window)
    return extended(leak, "", compiled, advice=(resources.COMPILE_ONCE,))


def _main_witnesses(
    key: ProcessKey, use: Use, trend: Growth, rows: pd.DataFrame, free: Floats
) -> tuple[Evidence, ...] | None:
    """Return what confirms a growth: nothing if private memory was read too seldom, None if something denies it."""
    tables, times = use.tables, use.times
    asked_for = floats(rows, "data_bytes") - free
    if share_of(times, asked_for, trend) < CONFIRMED:
        return None  # it only fills memory that it had allocated before
    forks = _forks(tables, key, times)
    private = cumulative_rise(private_bytes(rows) - free, forks)
    written_ratio = share_of(times, private, trend)
    has_no_forks = np.ptp(forks[times >= trend.since_seconds]) == 0
    if has_no_forks and written_ratio < CONFIRMED:
        return None  # resident, but not written: mapped files, on a kernel that does not count them apart
    at, demand = demand_series(tables, str(use.locus.host))
    lasts = at <= times[-1]  # the fall at the end of the process would hide growth before it
    # Where the kernel counts files apart, the rest was written, and address space is the second measurement.
    is_unread = math.isnan(written_ratio) and np.isfinite(floats(rows, "file_bytes")).any()
    series = {
        "private_dirty_rise_bytes": (times, private),
        **({"address_space_rise_bytes": (times, asked_for)} if is_unread else {}),
        "inherited_by_workers_rise_bytes": _inherited(tables, key),
        "host_demand_rise_bytes": (at[lasts], demand[lasts]),
    }
    witnesses = witnesses_of(trend, series)
    # A host that grows far more does so by other processes: that counts only where private memory was not read.
    of_process = tuple(
        w for w in witnesses if w.name != "host_demand_rise_bytes" or float(w.value) <= trend.rise / CONFIRMED
    )
    return of_process or (witnesses if math.isnan(written_ratio) else None)


def cumulative_rise(values: Floats, restarts: Floats) -> Floats:
    """Join the segments of a series between restarts: a fork shares pages, so private dirty drops there."""
    known = np.flatnonzero(np.isfinite(values))
    result = np.full(len(values), np.nan)
    if not len(known):
        return result
    changes = np.diff(values[known])
    changes[np.diff(restarts[known]) != 0] = 0.0
    result[known] = values[known[0]] + np.concatenate([[0.0], np.cumsum(changes)])
    return result


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
    return seconds(rows), floats(rows, "rss_bytes")


def _worker_leaks(tables: RunTables) -> list[Finding]:
    """Find workers whose resident and private memory grow together; one finding per loader."""
    loaders: defaultdict[Locus, _Workers] = defaultdict(_Workers)
    for key, rows in by_process(worker_samples(tables)):
        _note_worker(tables, loaders, key, rows)
    findings = (_loader_finding(tables, place, workers) for place, workers in loaders.items())
    return [finding for finding in findings if finding is not None]


def _note_worker(
    tables: RunTables, loaders: defaultdict[Locus, _Workers], key: ProcessKey, rows: pd.DataFrame
) -> None:
    """Add a worker to those of its loader. Of the workers that had one number, the largest growth counts."""
    locus = worker_locus(rows)
    number = locus.worker
    if locus.loader is None or number is None:
        return
    rows = since_ready(tables, key, rows)
    # Private memory is read seldom, so readings after the training count too.
    private = seconds(rows), private_bytes(rows) - freed_bytes(tables, key, rows)
    rows = rows[floats(rows, "time_ns") <= training_end_ns(tables)]
    ticks_count, rows = len(rows), with_early_samples(tables, rows)
    if len(rows) < MIN_POINTS:
        return
    use = _use_of(tables, locus, rows, freed_bytes(tables, key, rows))
    workers, levels = loaders[replace(locus, pid=None, worker=None)], finite(use.values)
    workers.rises[number].append(float(np.ptp(levels)) if len(levels) else 0.0)
    if use.lasts_to_end:
        workers.lasting[number] = use, private
    trend = use.growth() if ticks_count >= MIN_POINTS else None
    young = young_growth(use, trend, negligible_bytes(use.values))
    trend = young or trend
    # Memory that was not written, such as mapped files, is no leak; too few readings leave that open.
    if trend is None or share_of(*private, trend) < CONFIRMED:
        return
    grown = workers.young if young else workers.leaks
    if number not in grown or grown[number].trend.rise < trend.rise:
        grown[number] = GrowingUse(use, trend, witnesses_of(trend, {"private_dirty_rise_bytes": private}))
        workers.threads[number] = floats(rows, "thread_count")


def _loader_finding(tables: RunTables, place: Locus, workers: _Workers) -> Finding | None:
    # Workers that end with their epoch free what they took: with enough epochs, nothing is to be said.
    if not workers.leaks and all(len(rises) >= _MIN_EPOCHS for rises in workers.rises.values()):
        return None
    mean = _mean_of(place, workers.lasting)
    trend = mean.growth() if mean is not None else None
    if mean is not None and (filling := _loader_filling(mean, trend, workers.lasting)) is not None:
        return filling
    if workers.leaks:
        if mean is not None and trend is None and _is_of_all(workers):
            return None  # by its noise, one of them passed for a leak
        return _loader_leak(tables, place, workers)
    if not workers.young:
        return None
    most = max(workers.young.values(), key=_rise)
    grows = _subject(workers.young, most.use, "grow")
    return young_finding(most, negligible=negligible_bytes(most.use.values), grows=grows)


def _mean_of(place: Locus, of_workers: Mapping[int, tuple[Use, _Readings]]) -> Use | None:
    """Return the mean use of a loader's workers, at the times that they share; None if these are too few.

    Workers run the same code. If they grow alike, their mean shows the same growth, with less noise.
    """
    uses = [use for use, _ in of_workers.values()]
    times = functools.reduce(np.intersect1d, [use.times for use in uses]) if uses else np.empty(0)
    if len(times) < MIN_POINTS:
        return None
    use = uses[0].where(np.isin(uses[0].times, times))
    levels = np.mean([one.values[np.isin(one.times, times)] for one in uses], axis=0)
    return replace(use, values=levels, locus=use.locus if len(uses) == 1 else place)


def _grow_alike(of_workers: Mapping[int, tuple[Use, _Readings]], growth: Growth) -> bool:
    rises = [rise_since(use.times, use.values, growth) for use, _ in of_workers.values()]
    return min(rises) >= _ALIKE_RATIO * max(rises)


def _is_of_all(workers: _Workers) -> bool:
    """Return whether the growth of workers is that of all workers of their loader that last."""
    uses = {number: use for number, (use, _) in workers.lasting.items()}
    are_lasting = all(uses.get(number) is leak.use for number, leak in workers.leaks.items())
    return are_lasting and all(_grow_alike(workers.lasting, leak.trend) for leak in workers.leaks.values())


def _loader_filling(
    mean: Use, trend: Growth | None, of_workers: Mapping[int, tuple[Use, _Readings]]
) -> Finding | None:
    """Return the finding that each of a loader's workers fills a cache, by their mean and its growth, if any.

    A worker that grows alone is no cache.
    """
    filling = filling_of(mean, trend, negligible_bytes(mean.values))
    if filling is None:
        return None
    growth = growth_of(filling)
    private_bytes = float(np.mean([rise_since(*readings, growth) for _, readings in of_workers.values()]))
    if not (_grow_alike(of_workers, growth) and private_bytes >= CONFIRMED * growth.rise):
        return None
    fills = _subject(of_workers, mean, "fill")
    witness = fact("private_dirty_rise_bytes", round(private_bytes), "same window", n=len(of_workers))
    return bounded_finding(mean, filling, (witness,), fills=fills)


def _subject(of_workers: Collection[int], use: Use, verb: str) -> str:
    """Return subject and verb of a sentence on some workers of a loader."""
    workers = f"{listed(sorted(of_workers))} of loader {use.locus.loader}"
    return f"Worker {workers} {verb}s" if len(of_workers) == 1 else f"Workers {workers} each {verb}"


def _loader_leak(tables: RunTables, place: Locus, of_loader: _Workers) -> Finding:
    """Return the finding on a loader's workers. The evidence is that of the confirmed worker that grew most.

    Workers run the same code, so private memory that confirms one speaks for the others.
    It is information if an epoch bounds the growth: other workers had each place in other epochs and rose as much.
    """
    unbounded = [
        leak
        for number, leak in of_loader.leaks.items()
        if sum(rise >= leak.trend.rise / 2 for rise in of_loader.rises[number]) < _MIN_EPOCHS
    ]
    leaks = [*of_loader.leaks.values()]
    if any(leak.witnesses for leak in leaks) and not any(leak.witnesses for leak in unbounded):
        unbounded = []  # what is confirmed is bounded
    leaks = unbounded or leaks
    rates = [leak.rate for leak in leaks]
    value, low, high = (sum(getattr(rate, name) for rate in rates) for name in ("value", "low", "high"))
    total = Rate(value=value, low=low, high=high, unit=rates[0].unit)
    workers = sorted({leak.use.locus.worker for leak in leaks if leak.use.locus.worker is not None})
    shown = max(leaks, key=lambda leak: (bool(leak.witnesses), _rise(leak)))
    most, names, are_several = max(leaks, key=_rise), listed(workers), len(workers) > 1
    finding = leak_finding(
        resources.WORKER_HEAP if unbounded else resources.WORKER_HEAP_OF_AN_EPOCH,
        shown,
        subject=f"Workers {names}" if are_several else f"Worker {names}",
        keep="keep" if are_several else "keeps",
        rise=size(sum(map(_rise, leaks))),
        most=f" Worker {most.use.locus.worker} grew most: {size(most.trend.rise)}." if are_several else "",
        slope=size(total.value),
    )
    if shown.use.locus.worker is not None:
        finding = _with_threads(finding, shown.use, of_loader.threads[shown.use.locus.worker])
    settings = (event for event in tables.events_of("loader") if event["host"] == place.host)
    outlive_epochs = any(one.get("persistent_workers") for one in settings if one.get("loader") == place.loader)
    until_then = (resources.END_WORKERS,) if shown.witnesses and unbounded and outlive_epochs else ()
    return replace(
        finding,
        advice=(*finding.advice, *until_then),
        severity=finding.severity if unbounded else "info",
        locus=replace(place, worker=most.use.locus.worker if len(leaks) == 1 else None),
        evidence=(*finding.evidence, fact("growing_workers_count", len(leaks), "run", n=len(of_loader.rises))),
        rate=total,
    )


def _rise(leak: GrowingUse) -> float:
    return leak.trend.rise


def _use_of(
    tables: RunTables, locus: Locus, rows: pd.DataFrame, free: Floats, key: ProcessKey | None = None
) -> Use:
    """Return the memory of a process without a part that is free at each of its samples."""
    series = "in_use" if free.any() else "resident"
    return Use.of(tables, series, locus, seconds(rows), anonymous_bytes(rows) - free, key=key)


def _forks(tables: RunTables, key: ProcessKey, times_seconds: Floats) -> Floats:
    """Return how often the process has started or ended workers by each time: segments of its private memory."""
    changes: list[float] = []
    pids: dict[int | None, tuple[int, ...]] = {}
    for event in tables.events:
        if event["kind"] == "epoch-start" and writer_of(event) == key:
            loader, workers = whole(event.get("loader")), tuple(event.get("worker_pids") or ())
            if pids.get(loader) != workers:
                changes.append(event["time_ns"] / SECOND_NS)
            pids[loader] = workers
        elif event["kind"] == "worker-exit":
            changes.append(event["time_ns"] / SECOND_NS)
    counts: Floats = np.searchsorted(np.sort(np.array(changes)), times_seconds).astype(np.float64)
    return counts
