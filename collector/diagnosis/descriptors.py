"""Open files that keep getting more, and the limit that they run into.

Counts are whole and small: a growth of less than one descriptor per block of the trend is a few single events (a
log, a checkpoint, a shard that was opened), and no trend. A living worker has pipes and a sentinel in the training
process, so with more workers more files are open: a leak is what grows while as many processes live.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus
from collector.diagnosis.forecast import Course, exhaustion, present
from collector.diagnosis.frames import (
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
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.risk import FULL_RATIO
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import BLOCK_COUNTS, MIN_POINTS, Floats, Growth, growth
from collector.diagnosis.witnesses import CONFIRMED, Leak, leak_finding, rise_since
from collector.quantities import count, number
from collector.store.runs import ProcessKey
from training_harness.records import ROLE_WORKER

_SHARED_BYTES = 4096  # a tensor handed over by a worker has a descriptor, and a page of shared memory at least
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
_KEPT_ADVICE = Advice(
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
    def steps(self) -> ProcessKey | None:
        """Whose steps it goes by: its own, or any of the run's."""
        return None if self.locus.role == "worker" else self.key

    @property
    def what(self) -> str:
        """Its name in a sentence."""
        if self.locus.role != "worker":
            return self.name
        return f"worker {self.locus.worker} of loader {self.locus.loader} (pid {self.key[1]})"


def find_descriptors(tables: RunTables) -> list[Finding]:
    """`fd-leak` and `fd-exhaustion-risk`, of each loader's workers the one that comes first to its limit."""
    found: dict[tuple[str, Locus | tuple[object, ...]], list[tuple[float, Finding]]] = {}
    for process in _processes(tables):
        group = process.locus
        place = (group.host, group.rank, group.loader) if group.role == "worker" else group
        for share, finding in _judge(tables, process):
            found.setdefault((finding.kind, place), []).append((share, finding))
    return [_first_of(each) for each in found.values()]


def _first_of(alike: list[tuple[float, Finding]]) -> Finding:
    """The finding of the process that has the least room left, which tells how many others there are."""
    _, first = max(alike, key=lambda each: each[0])
    if first.kind == "fd-leak" and len(alike) > 1:
        return dataclasses.replace(first, summary=f"{first.summary} Of this loader's workers {len(alike)} do.")
    return first


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
    """What is wrong with one process, and how much of its limit is used."""
    times, counts = floats(process.rows, "time_ns") / SECOND_NS, floats(process.rows, "fd_count")
    known = counts[np.isfinite(counts)]
    if len(known) < MIN_POINTS:
        return
    used, limit = present(counts), last(floats(process.rows, "fd_limit_count"))
    share = used / limit if limit > 0 else 0.0
    bound = Limit(name="RLIMIT_NOFILE", value=limit, unit="count")
    steps = step_numbers(tables, process.steps or process.key[0], times)
    alike = _as_many_live(tables, process)
    grown = growth(times[alike], counts[alike], negligible=BLOCK_COUNTS[0], steps=steps[alike])
    if grown is None:
        if share >= FULL_RATIO:
            yield share, _by_level(process, used, len(known), bound)
        return
    leak, kept = _leak(tables, process, grown, bound, float(times[alike][-1]))
    advice = (_KEPT_ADVICE, *_ADVICE) if kept else _ADVICE
    yield share, _leak_finding(tables, process, leak, advice)
    course = Course(
        what=f"Room for open files in {process.what}",
        grown=grown,
        times=times,
        values=counts,
        limit=bound,
    )
    if share and course.is_relevant:
        risk = exhaustion(
            tables,
            "fd-exhaustion-risk",
            course,
            locus=process.locus,
            witnesses=leak.witnesses,
            advice=advice,
            key=process.steps,
        )
        yield share, risk


def _as_many_live(tables: RunTables, process: _Process) -> npt.NDArray[np.bool_]:
    """Of its samples, those at which as many of the run's processes lived on its host as at most of them."""
    host = process.key[0]
    begins, ends = tables.once(("lives", host), lambda: _lives(tables, host))
    times = floats(process.rows, "time_ns")
    living = np.searchsorted(begins, times, side="right") - np.searchsorted(ends, times, side="left")
    alike: npt.NDArray[np.bool_] = living == np.bincount(living).argmax()
    return alike


def _lives(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """When each process of the run was first and last seen alive, each in order of time; ns."""
    rows = sampled_on(tables, host)
    seen = rows.assign(alive_ns=floats(rows, "time_ns") - (floats(rows, "alive") == 0))
    lives = seen.groupby(["process_pid", "process_start_ticks"])["alive_ns"].agg(["min", "max"])
    return np.sort(floats(lives, "min")), np.sort(floats(lives, "max"))


def _leak(
    tables: RunTables, process: _Process, grown: Growth, bound: Limit, end_seconds: float
) -> tuple[Leak, bool]:
    """The growth with what confirms it, and whether it is batches from workers that are kept."""
    times, mapped = floats(process.rows, "time_ns") / SECOND_NS, floats(process.rows, "shm_bytes")
    shared = rise_since(times, mapped, grown)
    kept = shared >= CONFIRMED * _SHARED_BYTES * grown.rise
    steps = steps_within(tables, process.steps, grown.since_seconds * SECOND_NS, end_seconds * SECOND_NS)
    witnesses = (
        ("fd_limit_count", bound.value, "count"),
        ("fd_per_step", grown.rise / steps, "count"),
        ("process_shm_rise_bytes", shared if kept else math.nan, "bytes"),
    )
    evidence = tuple(
        Evidence(name=name, value=round(value, 3), unit=unit, n=grown.n, window="same window")
        for name, value, unit in witnesses
        if math.isfinite(value)
    )
    return Leak.of(grown, "fd", evidence, end_seconds, "count"), kept


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _leak_finding(tables: RunTables, process: _Process, leak: Leak, advice: tuple[Advice, ...]) -> Finding:
    grown = leak.growth
    pace = f"{count(grown.rise)} more so far, {number(grown.slope)}/s"
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
        key=process.steps,
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
