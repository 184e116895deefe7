"""Find growing numbers of open files, and the risk of reaching their limit.

Counts are whole and small: a growth of less than one descriptor per block of the trend is a few single events (a
log, a checkpoint, a shard that was opened), and no trend. Each living worker has pipes and a sentinel in the
training process, so more workers mean more open files. A leak is growth at times with the same number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.loading.loaders import epochs_of, recreated_loaders, worker_slots
from collector.diagnosis.memory import resources
from collector.diagnosis.memory.exhaustion import (
    FULL_RATIO,
    Course,
    current_level,
    exhaustion_finding,
    full_finding,
)
from collector.diagnosis.memory.leak import CONFIRMED, GrowingUse, Use, leak_finding, rise_since, young_finding
from collector.diagnosis.run.columns import (
    PROCESS,
    SECOND_NS,
    by_process,
    floats,
    last,
    sampled_on,
    seconds,
    whole,
    with_early_samples,
    worker_samples,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import sentence, worker_locus
from collector.diagnosis.run.tables import RunTables, once
from collector.diagnosis.run.training import iterates, steps_within, while_running, while_training
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, MIN_POINTS, Floats, Growth
from collector.findings import Finding, Limit, Locus, extended, fact
from collector.store import ProcessKey
from collector.units import listed

#: A rise below one descriptor per block of a trend is a few single events.
_NEGLIGIBLE_COUNT = BLOCK_COUNTS[0]
#: Descriptors of a worker in its training process, at least: both ends of its queue of indices, and its sentinel.
_FILES_OF_WORKER = 3
#: Lives of workers differ by less than this factor from epoch to epoch.
_LONGER = 2.0
#: Shared memory per descriptor of a tensor that a worker handed over: at least one page.
_SHARED_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process with its samples while it trained, or while it ran if it did not train.

    `name` is for the middle of a sentence.
    """

    key: ProcessKey
    name: str
    locus: Locus
    rows: pd.DataFrame

    @property
    def is_worker(self) -> bool:
        """True for a worker of a loader."""
        return self.locus.role == "worker"

    @property
    def counts(self) -> Floats:
        """Number of its open files at each sample."""
        return floats(self.rows, "fd_count")

    @property
    def limit(self) -> Limit:
        """Number of files that it may open."""
        return Limit(name="RLIMIT_NOFILE", value=last(floats(self.rows, "fd_limit_count")), unit="count")

    @property
    def used_ratio(self) -> float:
        """Used share of its limit, 0 if the limit is not known."""
        return current_level(self.counts) / self.limit.value if self.limit.value > 0 else 0.0


def find_descriptors(tables: RunTables) -> list[Finding]:
    """Find `fd-leak` and `fd-exhaustion-risk`, once per loader: for the worker that is nearest to its limit."""
    groups: dict[tuple[str, Locus], list[tuple[float, Finding]]] = {}
    for process in _processes(tables):
        place = replace(process.locus, pid=None, worker=None) if process.is_worker else process.locus
        for finding in _judge(tables, process):
            groups.setdefault((finding.kind, place), []).append((process.used_ratio, finding))
    findings = []
    for group in groups.values():
        _, nearest = max(group, key=lambda member: member[0])
        numbers = {finding.locus.worker for _, finding in group} - {nearest.locus.worker}
        others = sorted(number for number in numbers if number is not None)
        verb = "Workers {} leak files, too." if len(others) > 1 else "Worker {} leaks files, too."
        alike = verb.format(listed(others)) if others else ""
        findings.append(extended(nearest, alike if nearest.kind == "fd-leak" else ""))
    return findings


def lacked_files(death: Finding) -> bool:
    """Return whether a process ended since it could open no more files. Their number may not be known."""
    return death.kind == "crashed" and resources.OPEN_FILES.leak_advice[0] in death.advice


def _processes(tables: RunTables) -> Iterator[_Process]:
    life = lifecycle_of(tables)
    for key in (*life.mains, *life.watched, *life.others):
        rows = while_running(tables, key)
        if len(rows) >= MIN_POINTS:
            locus = replace(life.locus(key), rank=whole(rows["process_rank"].iloc[-1]))
            yield _Process(key=key, name=life.name(key), locus=locus, rows=with_early_samples(tables, rows))
    for key, rows in by_process(while_training(tables, worker_samples(tables))):
        if len(rows) >= MIN_POINTS:
            locus = worker_locus(rows)
            name = f"worker {locus.worker} of loader {locus.loader} (pid {locus.pid})"
            yield _Process(key=key, name=name, locus=locus, rows=with_early_samples(tables, rows))


def _judge(tables: RunTables, process: _Process) -> list[Finding]:
    """Return the findings on one process."""
    times, counts = seconds(process.rows), process.counts
    if np.isfinite(counts).sum() < MIN_POINTS:
        return []
    key = None if process.is_worker else process.key  # the steps of the run count for a worker
    use = Use.of(tables, "fd", process.locus, times, counts, key=key, unit="count")
    is_usual = _has_usual_processes(tables, process)
    usual = use.where(is_usual)
    trend = usual.growth(_NEGLIGIBLE_COUNT)
    if trend is None or _rests_since(trend, use, is_usual):
        return _full(process) if process.used_ratio >= FULL_RATIO else []
    growing, is_batches = _with_witnesses(process, GrowingUse(usual, trend))
    if growing.is_brief:
        grows = f"The number of open files of {process.name} grows"
        return [young_finding(growing, negligible=_NEGLIGIBLE_COUNT, grows=grows)]
    resource = resources.OPEN_BATCHES if is_batches else resources.OPEN_FILES
    words: dict[str, object] = {"process": sentence(process.name)}
    if kept := _kept_workers(tables, process, trend):
        resource, words = resources.OPEN_WORKERS, words | {"workers": kept}
        witness = fact("kept_workers_count", kept, "last samples")
        of_files = (item for item in growing.witnesses if item.name != "process_shm_rise_bytes")
        growing = replace(growing, witnesses=(*of_files, witness))
    iterating = process.is_worker or iterates(tables, process.key) or bool(lifecycle_of(tables).watched)
    leak = leak_finding(resource, growing, iterates=iterating, **words)
    what = f"Room for open files in {process.name}"
    course = Course(what=what, resource=resource, growing=replace(growing, use=use), limit=process.limit)
    is_risk = process.used_ratio and course.is_relevant
    if is_risk and process.is_worker:  # a worker that ends with its epoch closes its files
        is_risk = course.headroom < trend.slope * _longest_life_seconds(tables, process)
    return [leak, exhaustion_finding(course)] if is_risk else [leak]


def _full(process: _Process) -> list[Finding]:
    used, limit = current_level(process.counts), process.limit
    n = int(np.isfinite(process.counts).sum())
    evidence = fact("fd_count", used, "last samples", n=n), fact("fd_limit_count", limit.value, "last sample")
    name = sentence(process.name)
    return [full_finding(resources.OPEN_FILES, limit, used, process.locus, evidence, process=name)]


def _rests_since(trend: Growth, use: Use, is_usual: npt.NDArray[np.bool_]) -> bool:
    """Return whether the growth stopped with the processes of its time, as of a cache that one epoch filled."""
    times, counts = use.times, use.values
    clock = times if np.isnan(use.steps).any() else use.steps
    growing = is_usual & (times >= trend.since_seconds)
    since = np.isfinite(counts) & (times > times[is_usual][-1])
    if not since.any():
        return False
    expected = trend.rise / float(np.ptp(clock[growing])) * float(np.ptp(clock[since]))
    return expected >= _NEGLIGIBLE_COUNT and counts[since][-1] - counts[since][0] < CONFIRMED * expected


def _has_usual_processes(tables: RunTables, process: _Process) -> npt.NDArray[np.bool_]:
    """Return which of its samples were taken while the usual number of the run's processes lived on its host."""
    host = process.key[0]
    begins, ends = _lives(tables, host)
    times = floats(process.rows, "time_ns")
    living = np.searchsorted(begins, times, side="right") - np.searchsorted(ends, times, side="left")
    usual: npt.NDArray[np.bool_] = living == np.bincount(living).argmax()
    return usual


@once
def _lives(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return the times at which processes of the run were first, and last, seen alive; each sorted, in ns.

    The life of a worker ends as a later iterator of its loader has workers.
    """
    lives = _seen_alive(tables, host)
    replaced = (
        lives.index.get_level_values("process_pid").map(_replaced_ns(tables, host)).to_numpy(dtype=np.float64)
    )
    begins = floats(lives, "min")
    ends = np.fmin(floats(lives, "max"), replaced)
    return np.sort(begins), np.sort(np.maximum(begins, ends))  # one may be seen first after it was replaced


def _seen_alive(tables: RunTables, host: str) -> pd.DataFrame:
    rows = sampled_on(tables, host)
    rows = rows.assign(alive_ns=floats(rows, "time_ns") - (floats(rows, "alive") == 0))
    lives: pd.DataFrame = rows.groupby(PROCESS[1:])["alive_ns"].agg(["min", "max"])
    return lives


def _replaced_ns(tables: RunTables, host: str, main: ProcessKey | None = None) -> dict[int, float]:
    """Return the time at which a later iterator of its loader had workers, by pid of the worker.

    The workers are those of a host, or of one of its training processes.
    """
    replaced: dict[int, float] = {}
    newest: dict[tuple[ProcessKey, int], list[int]] = {}
    one_loop: dict[ProcessKey, dict[int, int]] = {}
    for event, key, loader, workers in epochs_of(tables):
        if key[0] != host or main not in (None, key):
            continue
        if key not in one_loop:
            one_loop[key] = recreated_loaders(tables, key)
        place, pids = (key, one_loop[key].get(loader, loader)), [*workers.values()]
        replaced |= {pid: float(event["time_ns"]) for pid in newest.get(place, ()) if pid not in pids}
        newest[place] = pids
    return replaced


def _longest_life_seconds(tables: RunTables, worker: _Process) -> float:
    """Return how long the workers of a worker's loader lived until others took their places; inf if none did.

    It is inf as well if this worker has lived twice as long already, as after a first `next(iter(loader))`.
    """
    host, pid, _ = worker.key
    slot = worker_slots(tables).get((host, pid))
    if slot is None:
        return math.inf
    main, own_loader, _ = slot
    one_loop, replaced = recreated_loaders(tables, main), _replaced_ns(tables, host, main)
    begins: dict[int, float] = {}
    for event, key, loader, workers in epochs_of(tables):
        if key == main and one_loop.get(loader, loader) == one_loop.get(own_loader, own_loader):
            begins |= {one: float(event["time_ns"]) for one in workers.values() if one not in begins}
    lives = (replaced[one] - begin for one, begin in begins.items() if one in replaced)
    longest_ns = max(lives, default=math.inf)
    own_ns = 0.0 if pid in replaced else floats(worker.rows, "time_ns")[-1] - begins[pid]
    return math.inf if own_ns > _LONGER * longest_ns else longest_ns / SECOND_NS


def _kept_workers(tables: RunTables, process: _Process, trend: Growth) -> int:
    """Return how many workers of kept iterators live, 0 if they do not explain the growth of a training process."""
    host = process.key[0]
    lives, replaced = _seen_alive(tables, host), _replaced_ns(tables, host, process.key)
    end_ns = floats(process.rows, "time_ns")[-1]
    kept = sum(
        bool(replaced.get(int(pid), end_ns) < end_ns <= last_ns)
        for pid, _, _, last_ns in lives.reset_index().itertuples(index=False)
    )
    return kept if _FILES_OF_WORKER * kept >= CONFIRMED * trend.rise else 0


def _with_witnesses(process: _Process, growing: GrowingUse) -> tuple[GrowingUse, bool]:
    """Return a growth with what confirms it, and whether it consists of batches from workers that are held."""
    trend = growing.trend
    shared_rise = rise_since(seconds(process.rows), floats(process.rows, "shm_bytes"), trend)
    is_batches = shared_rise >= CONFIRMED * _SHARED_BYTES * trend.rise
    steps = steps_within(growing.use.tables, growing.use.key, *growing.span_ns)
    values = {
        "fd_limit_count": process.limit.value,
        "fd_per_step": trend.rise / steps,
        "process_shm_rise_bytes": shared_rise if is_batches else math.nan,
    }
    witnesses = (
        fact(name, round(value, 3), "same window", n=trend.n)
        for name, value in values.items()
        if math.isfinite(value)
    )
    return replace(growing, witnesses=tuple(witnesses)), is_batches
