"""The lines of code that a training waits for, from series of stacks (`stack-series` events).

A series has the stacks of the training process and its workers at the same moments. Only the moments at which the
training lost time count: a worker's stack counts while the training process waits for a batch and the worker makes
one. If the records say which worker's batch it was, only that worker's stack counts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from collector.diagnosis.loading.loaders import Loop, loops, recreated_loaders, worker_slots
from collector.diagnosis.run.columns import SECOND_NS, floats, key_of, window_text, written
from collector.diagnosis.run.tables import RunTables, once, writer_of
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Finding, Locus, WaitingLine
from collector.stacks import FETCH, SAMPLER, WAIT, Frame, Place, is_in
from collector.store import ProcessKey

#: Series of a process that count, the newest ones.
_MOST_SERIES = 20
#: Samples that a line needs for its share to mean something.
LEAST_SAMPLES = 20
_MOST_LINES = 3
_LEAST_RATIO = 0.05
_MOST_CALLERS = 2
#: Share of a pause by which a step must exceed the usual one to be a pause.
_PAUSE_RATIO = 0.5
#: Files between a fetch and the user's own code, and hooks around it.
_BETWEEN = ("/torch/utils/data/_utils/fetch.py", "/training_harness/hooks/")
#: Parts of paths in which a training process computes or loads, and does not pause.
_WORK_PATHS = ("/torch/utils/data/", "/torch/nn/", "/torch/autograd/", "/torch/_tensor.py", "/torch/optim/")


class SourceFrame(NamedTuple):
    """A frame of a series: function, path and line; its source and its stage, where known."""

    function: str
    path: str
    line: int
    source: str | None
    stage: str | None

    @property
    def place(self) -> Frame:
        """The frame without its source."""
        return Frame(*self[:3])

    @property
    def is_own(self) -> bool:
        """True for the user's own file."""
        return self.place.is_own


Frames = tuple[SourceFrame, ...]


@dataclass(frozen=True, kw_only=True)
class AwaitedTime:
    """Stacks at the moments at which a training lost time.

    Attributes:
        kind: kind of the finding that they explain.
        stacks: stack -> number of moments; frames are outermost first, and begin where the time is lost.
        window: the time of the series, in words.
    """

    kind: str
    locus: Locus
    stacks: Mapping[Frames, int]
    window: str

    @cached_property
    def n(self) -> int:
        """Number of samples."""
        return sum(self.stacks.values())


@dataclass(frozen=True, slots=True)
class _Series:
    times: Floats
    main: list[Frames | None]
    others: dict[int, list[Frames | None]]


def awaited_time(finding: Finding, tables: RunTables) -> AwaitedTime | None:
    """Return the stacks behind a finding; None without enough samples."""
    main = _main_of(finding.locus, tables) if finding.has_line else None
    if main is None:
        return None
    series = _series_of(tables, main)
    choose = _choice(finding, tables, main)
    stacks = Counter(stack for one in series for stack in choose(one) if stack)
    if sum(stacks.values()) < LEAST_SAMPLES:
        return None
    times = [time for one in series for time in one.times]
    window = window_text(tables, min(times), max(times))
    return AwaitedTime(kind=finding.kind, locus=finding.locus, stacks=stacks, window=window)


def add_waiting_lines(finding: Finding, awaited: AwaitedTime | None, cwd: str | None) -> Finding:
    """Return the finding with the lines behind it; paths below `cwd`, the directory of the run, are relative."""
    return finding if awaited is None else replace(finding, waits_in=_heaviest_lines(awaited, cwd))


def _heaviest_lines(awaited: AwaitedTime, cwd: str | None) -> tuple[WaitingLine, ...]:
    """Return the lines with the largest shares of the awaited time, the largest first."""
    by_line: dict[SourceFrame, Counter[Frames]] = {}
    for stack, count in awaited.stacks.items():
        if frame := _telling_frame(stack):
            by_line.setdefault(frame, Counter())[stack] += count
    lines = []
    for frame, stacks in sorted(by_line.items(), key=lambda item: -item[1].total()):
        usual = stacks.most_common(1)[0][0]
        depth = len(usual) - 1 - usual[::-1].index(frame)
        callers = [_site(caller, cwd) for caller in usual[:depth][::-1] if caller.is_own]
        lines.append(
            WaitingLine(
                site=_site(frame, cwd),
                source=frame.source,
                calls=_callee(stacks, frame),
                callers=tuple(dict.fromkeys(callers))[:_MOST_CALLERS],
                ratio=round(stacks.total() / awaited.n, 4),
                n=awaited.n,
                window=awaited.window,
            )
        )
    return tuple(line for line in lines[:_MOST_LINES] if line.ratio >= _LEAST_RATIO)


def stage_of(stack: Frames) -> str | None:
    """Return the stage that a stack is in: the innermost one with a name; None if none is known."""
    return next((frame.stage for frame in reversed(stack) if frame.stage), None)


def _telling_frame(stack: Frames) -> SourceFrame | None:
    """Return the innermost frame of the user's own; without any, the first one of a library beyond the fetch."""
    own = next((frame for frame in reversed(stack) if frame.is_own), None)
    return own or next((frame for frame in stack if not _is_between(frame)), None)


def _callee(stacks: Mapping[Frames, int], frame: SourceFrame) -> str | None:
    """Return the library function that a line calls most; None if it mostly calls none that Python shows."""
    called: Counter[str | None] = Counter()
    for stack, count in stacks.items():
        inner = stack[len(stack) - stack[::-1].index(frame) :]
        beyond = next((callee for callee in inner if not _is_between(callee)), None)
        called[None if beyond is None else beyond.place.full_name] += count
    return called.most_common(1)[0][0]


def _is_between(frame: SourceFrame) -> bool:
    return any(path in frame.path for path in _BETWEEN)


def _site(frame: SourceFrame, cwd: str | None) -> str:
    path = frame.path
    if cwd and path.startswith(f"{cwd.rstrip('/')}/"):
        path = os.path.relpath(path, cwd)
    return f"{path}:{frame.line}, in {frame.function}"


def _main_of(where: Locus, tables: RunTables) -> ProcessKey | None:
    """Return the training process of a finding, if stacks of it were taken."""
    mains = dict.fromkeys(key for event in tables.events_of("stack-series") if (key := key_of(event, "of_")))
    pid = where.pid if where.role == "main" and where.pid is not None else where.main_pid
    ranks = {writer_of(event): event.get("rank") for event in tables.events_of("process-start")}
    fitting = [
        key
        for key in mains
        if where.host in (None, key[0]) and pid in (None, key[1]) and where.rank in (None, ranks.get(key))
    ]
    return fitting[-1] if fitting else None


@once
def _series_of(tables: RunTables, main: ProcessKey) -> list[_Series]:
    events = [event for event in tables.events_of("stack-series") if key_of(event, "of_") == main]
    return [_read(event) for event in events[-_MOST_SERIES:]]


def _read(event: Mapping[str, Any]) -> _Series:
    frames = [SourceFrame(*frame) for frame in event["frames"]]
    stacks = [tuple(frames[place] for place in reversed(stack)) for stack in event["stacks"]]
    samples = {
        process["pid"]: [None if place is None else stacks[place] for place in process["samples"]]
        for process in event["processes"]
    }
    times = np.array(event["times_ns"], dtype=np.float64)
    main = samples.pop(event["of_pid"], [None] * len(times))
    return _Series(times=times, main=main, others=samples)


def _choice(finding: Finding, tables: RunTables, main: ProcessKey) -> Callable[[_Series], Iterable[Frames | None]]:
    """Return the function that picks, from a series, the stacks at the moments that a finding is about."""
    if finding.kind == "inline-loading":
        return lambda series: [_inside(stack, FETCH) for stack in series.main]
    if finding.kind == "sampler-bound":
        return lambda series: [_inside(stack, SAMPLER) for stack in series.main]
    if finding.kind == "main-thread-pause":
        begins, ends = _pauses(finding, tables, main)
        return lambda series: _within(series, begins, ends)
    if finding.value_of("training_run_queue_ratio") is not None:  # the run's own processes compete for the cores
        return _at_work
    last_loader = recreated_loaders(tables, main)
    of_loader = {
        pid: worker
        for (host, pid), (owner, loader, worker) in worker_slots(tables).items()
        if owner == main and host == main[0] and last_loader.get(loader, loader) == finding.locus.loader
    }
    wanted = {pid for pid, worker in of_loader.items() if finding.locus.worker in (None, worker)}
    loop = next((loop for loop in loops(tables) if (loop.main, loop.loader) == (main, finding.locus.loader)), None)
    return lambda series: _awaited(series, of_loader, wanted, loop)


def _awaited(
    series: _Series, workers: Mapping[int, int], wanted: set[int], loop: Loop | None
) -> Iterator[Frames | None]:
    by_record = _awaited_workers(series.times, loop)
    for moment, stack in enumerate(series.main):
        if not _inside(stack, WAIT):
            continue
        for pid, samples in series.others.items():
            if pid in wanted and by_record[moment] in (None, workers[pid]):
                yield _inside(samples[moment], FETCH)


def _awaited_workers(times: Floats, loop: Loop | None) -> list[int | None]:
    """Return the worker that made the batch which the loop waited for at each time; None where no record says."""
    if loop is None or loop.batches.empty:
        return [None] * len(times)
    ends, waits = floats(loop.batches, "time_ns"), floats(loop.batches, "wait_ns")
    workers = floats(loop.batches, "worker")
    found: list[int | None] = []
    for time, place in zip(times, np.searchsorted(ends, times), strict=True):
        is_known = place < len(ends) and ends[place] - waits[place] <= time and np.isfinite(workers[place])
        found.append(int(workers[place]) if is_known else None)
    return found


def _pauses(finding: Finding, tables: RunTables, main: ProcessKey) -> tuple[Floats, Floats]:
    """Return begins and ends, in ns, of the steps with a pause."""
    steps = written(tables, "step", main)
    ends, durations = floats(steps, "time_ns"), floats(steps, "duration_ns")
    work = durations - np.nan_to_num(floats(steps, "data_wait_ns"))
    usual, pause = finding.value_of("usual_step_seconds") or 0.0, finding.value_of("pause_seconds") or 0.0
    long = work >= (usual + _PAUSE_RATIO * pause) * SECOND_NS
    return (ends - durations)[long], ends[long]


def _within(series: _Series, begins: Floats, ends: Floats) -> Iterator[Frames | None]:
    """Yield the training process's stacks within the pauses, where it neither computes nor loads."""
    for time, stack in zip(series.times, series.main, strict=True):
        place = int(np.searchsorted(ends, time))
        if not stack or place == len(ends) or time < begins[place]:
            continue
        inner = stack[-1 - next((depth for depth, frame in enumerate(reversed(stack)) if frame.is_own), 0) :]
        if not any(path in frame.path for frame in inner for path in _WORK_PATHS):
            yield stack


def _at_work(series: _Series) -> Iterator[Frames | None]:
    """Yield the stacks of all processes that neither wait for a batch nor for an index."""
    yield from (stack for stack in series.main if stack and not _inside(stack, WAIT))
    for samples in series.others.values():
        yield from (_inside(stack, FETCH) for stack in samples)


def _inside(stack: Frames | None, place: Place) -> Frames | None:
    """Return the part of a stack from a function inwards; None if the stack is not in it."""
    for depth, frame in enumerate(stack or ()):
        if is_in(frame.place, *place):
            return (stack or ())[depth:]
    return None
