"""Find growing numbers of open files, and the risk of reaching their limit.

Counts are whole and small: a growth of less than one descriptor per block of the trend is a few single events (a
log, a checkpoint, a shard that was opened), and no trend. Each living worker has pipes and a sentinel in the
training process, so more workers mean more open files. A leak is growth at times with the same number of processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.memory.exhaustion import Course, current_level, exhaustion_finding
from collector.diagnosis.memory.host_oom_risk import FULL_RATIO
from collector.diagnosis.memory.leak import CONFIRMED, Leak, leak_finding, rise_since
from collector.diagnosis.run.columns import (
    SECOND_NS,
    floats,
    iterates,
    last,
    sampled_on,
    step_numbers,
    steps_within,
    while_running,
    while_training,
    whole,
)
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, MIN_POINTS, Floats, Growth, growth
from collector.findings import Advice, Evidence, Finding, Limit, Locus
from collector.store import ProcessKey
from collector.units import count, number
from training_harness.records import ROLE_WORKER

#: Shared memory per descriptor of a tensor that a worker handed over: at least one page.
_SHARED_BYTES = 4096
_ADVICE = (
    Advice(
        text="Look into /proc/PID/fd for what is open: what is opened per step or per item wants `with`",
        expected="the count stays where it is",
    ),
    Advice(
        text="Until then: raise the limit with `ulimit -n` before the training",
        expected="more time, in proportion to the limit",
    ),
)
_BATCHES_ADVICE = Advice(
    text="Do not keep batches that came from workers: keep .clone() or numbers, or share them by "
    'torch.multiprocessing.set_sharing_strategy("file_system")',
    expected="each tensor's descriptor is closed with it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process with its samples while it trained, or while it ran if it did not train."""

    key: ProcessKey
    name: str
    locus: Locus
    rows: pd.DataFrame

    @property
    def stepping(self) -> ProcessKey | None:
        """The process whose steps it is judged by: itself, or None (the whole run) for a worker."""
        return None if self.locus.role == "worker" else self.key

    @property
    def what(self) -> str:
        """Its name, for the middle of a sentence."""
        if self.locus.role != "worker":
            return self.name
        return f"worker {self.locus.worker} of loader {self.locus.loader} (pid {self.key[1]})"


def find_descriptors(tables: RunTables) -> list[Finding]:
    """Find `fd-leak` and `fd-exhaustion-risk`, once per loader: for the worker that is nearest to its limit."""
    groups: dict[tuple[str, Locus | tuple[object, ...]], list[tuple[float, Finding]]] = {}
    for process in _processes(tables):
        locus = process.locus
        place = (locus.host, locus.rank, locus.loader) if locus.role == "worker" else locus
        for used_ratio, finding in _judge(tables, process):
            groups.setdefault((finding.kind, place), []).append((used_ratio, finding))
    return [_nearest_to_limit(group) for group in groups.values()]


def _nearest_to_limit(group: list[tuple[float, Finding]]) -> Finding:
    """Return the finding of the process with the highest use, with the number of workers like it."""
    _, nearest = max(group, key=lambda member: member[0])
    if nearest.kind == "fd-leak" and len(group) > 1:
        return dataclasses.replace(nearest, summary=f"{nearest.summary} Of this loader's workers {len(group)} do.")
    return nearest


def _processes(tables: RunTables) -> Iterator[_Process]:
    life = Lifecycle(tables)
    for key in (*life.mains, *life.watched, *life.others):
        rows = while_running(tables, key)
        if len(rows) >= MIN_POINTS:
            rank = whole(rows["process_rank"].iloc[-1])
            locus = Locus(host=key[0], rank=rank, role=life.role(key), pid=key[1])
            yield _Process(key=key, name=life.name(key), locus=locus, rows=rows)
    process = while_training(tables, tables.stream("process"))
    workers = process[floats(process, "role") == ROLE_WORKER]
    for (host, pid, ticks), rows in workers.groupby(["host", "process_pid", "process_start_ticks"]):
        last_row = rows.iloc[-1]
        if len(rows) >= MIN_POINTS:
            locus = Locus(
                host=str(host),
                rank=whole(last_row["process_rank"]),
                role="worker",
                pid=int(pid),
                worker=whole(last_row["worker"]),
                loader=whole(last_row["loader"]),
            )
            yield _Process(key=(str(host), int(pid), int(ticks)), name="", locus=locus, rows=rows)


def _judge(tables: RunTables, process: _Process) -> Iterator[tuple[float, Finding]]:
    """Yield the findings on one process, each with the used share of its limit."""
    times, counts = floats(process.rows, "time_ns") / SECOND_NS, floats(process.rows, "fd_count")
    n = int(np.isfinite(counts).sum())
    if n < MIN_POINTS:
        return
    used, limit = current_level(counts), last(floats(process.rows, "fd_limit_count"))
    used_ratio = used / limit if limit > 0 else 0.0
    bound = Limit(name="RLIMIT_NOFILE", value=limit, unit="count")
    steps = step_numbers(tables, process.stepping or process.key[0], times)
    usual = _has_usual_processes(tables, process)
    trend = growth(times[usual], counts[usual], negligible=BLOCK_COUNTS[0], steps=steps[usual])
    if trend is None or _rests_since(trend, times if np.isnan(steps).any() else steps, times, counts, usual):
        if used_ratio >= FULL_RATIO:
            yield used_ratio, _by_level(process, used, n, bound)
        return
    leak, is_batches = _leak(tables, process, trend, bound, float(times[usual][-1]))
    advice = (_BATCHES_ADVICE, *_ADVICE) if is_batches else _ADVICE
    yield used_ratio, _leak_finding(tables, process, leak, advice)
    course = Course(
        what=f"Room for open files in {process.what}",
        growth=trend,
        times=times,
        values=counts,
        limit=bound,
    )
    if used_ratio and course.is_relevant:
        risk = exhaustion_finding(
            tables,
            "fd-exhaustion-risk",
            course,
            locus=process.locus,
            witnesses=leak.witnesses,
            advice=advice,
            key=process.stepping,
        )
        yield used_ratio, risk


def _rests_since(trend: Growth, clock: Floats, times: Floats, counts: Floats, usual: npt.NDArray[np.bool_]) -> bool:
    """Return whether what grew rests since other processes live, as a cache does that the first epoch filled."""
    growing = usual & (times >= trend.since_seconds)
    since = np.isfinite(counts) & (times > times[usual][-1])
    if not since.any():
        return False
    expected = trend.rise / float(np.ptp(clock[growing])) * float(np.ptp(clock[since]))
    return expected >= BLOCK_COUNTS[0] and counts[since][-1] - counts[since][0] < CONFIRMED * expected


def _has_usual_processes(tables: RunTables, process: _Process) -> npt.NDArray[np.bool_]:
    """Return which of its samples were taken while the usual number of the run's processes lived on its host."""
    host = process.key[0]
    begins, ends = tables.once(("lives", host), lambda: _lives(tables, host))
    times = floats(process.rows, "time_ns")
    living = np.searchsorted(begins, times, side="right") - np.searchsorted(ends, times, side="left")
    usual: npt.NDArray[np.bool_] = living == np.bincount(living).argmax()
    return usual


def _lives(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return the times at which processes of the run were first, and last, seen alive; each sorted, in ns."""
    rows = sampled_on(tables, host)
    rows = rows.assign(alive_ns=floats(rows, "time_ns") - (floats(rows, "alive") == 0))
    lives = rows.groupby(["process_pid", "process_start_ticks"])["alive_ns"].agg(["min", "max"])
    return np.sort(floats(lives, "min")), np.sort(floats(lives, "max"))


def _leak(
    tables: RunTables, process: _Process, trend: Growth, bound: Limit, end_seconds: float
) -> tuple[Leak, bool]:
    """Return the leak, and whether it consists of batches from workers that are held."""
    times, mapped = floats(process.rows, "time_ns") / SECOND_NS, floats(process.rows, "shm_bytes")
    shared_rise = rise_since(times, mapped, trend)
    is_batches = shared_rise >= CONFIRMED * _SHARED_BYTES * trend.rise
    steps = steps_within(tables, process.stepping, trend.since_seconds * SECOND_NS, end_seconds * SECOND_NS)
    witnesses = (
        ("fd_limit_count", bound.value, "count"),
        ("fd_per_step", trend.rise / steps, "count"),
        ("process_shm_rise_bytes", shared_rise if is_batches else math.nan, "bytes"),
    )
    evidence = tuple(
        Evidence(name=name, value=round(value, 3), unit=unit, n=trend.n, window="same window")
        for name, value, unit in witnesses
        if math.isfinite(value)
    )
    return Leak.of(trend, "fd", evidence, end_seconds, "count"), is_batches


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _leak_finding(tables: RunTables, process: _Process, leak: Leak, advice: tuple[Advice, ...]) -> Finding:
    trend = leak.growth
    pace = f"{count(trend.rise)} more so far, {number(trend.slope)}/s"
    summary = f"{_sentence(process.what)} keeps opening files: {pace}."
    if not leak.witnesses:
        summary += " Neither the limit nor the steps are known, so nothing confirms it."
    return leak_finding(
        tables,
        "fd-leak",
        leak,
        summary=summary,
        locus=process.locus,
        advice=advice,
        key=process.stepping,
        iterates=process.locus.role == "worker" or iterates(tables, process.key) or bool(Lifecycle(tables).watched),
    )


def _by_level(process: _Process, used: float, n: int, bound: Limit) -> Finding:
    return Finding(
        kind="fd-exhaustion-risk",
        severity="warning",
        confidence=0.9,
        summary=f"{_sentence(process.what)} has {count(used)} of at most {count(bound.value)} files open.",
        locus=process.locus,
        evidence=(
            Evidence(name="fd_count", value=used, unit="count", n=n, window="last samples"),
            Evidence(name="fd_limit_count", value=bound.value, unit="count", n=1, window="last sample"),
        ),
        limit=bound,
        advice=_ADVICE,
    )
