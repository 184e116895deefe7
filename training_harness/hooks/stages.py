"""Stages of the data pipeline, summed up per thread and written once per batch: one `stage` record per stage.

A stage's time is without that of the stages called within it. Reading the thread's CPU clock takes a system call of
1 µs, more than all the rest; so it is read for calls of a millisecond or more, and for every 16th shorter one. A
record's CPU time is that of the calls where it was read, scaled to all of them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from training_harness import session
from training_harness.records import MISSING_INT32, MISSING_INT64, NAME_BYTES

_LONG_NS = 1_000_000
_UNREAD_CALLS = 15
_UNREAD = -1

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Pace:
    """A stage's name as it is recorded, and how many more calls go without a look at the CPU clock."""

    __slots__ = ("skip", "stage")

    def __init__(self, name: str) -> None:
        self.stage = name.encode("utf-8", "replace")[:NAME_BYTES].decode("utf-8", "ignore").encode()
        self.skip = 0


class Tally:
    """What the stages of one thread add up to.

    Attributes:
        sums: stage -> [calls, own time, own CPU time where read, own time where CPU was read], times in ns.
        waits: it is among those in which something was summed up.
        fetches: its thread is given batches, or makes them: nobody else may take what it summed up.
        batch: loader, epoch and index of the batch that the thread was given last: the stages that it calls from
            then on are for that one.
        within: the stage of the recognised call that the thread is in; empty outside.
        open: the stages that `with` blocks have begun.
    """

    __slots__ = ("_inner_cpu_ns", "_inner_ns", "batch", "fetches", "open", "sums", "waits", "within")

    def __init__(self) -> None:
        self.sums: dict[bytes, list[int]] = {}
        self.waits = self.fetches = False
        self.within = ""
        self.batch = (MISSING_INT32, MISSING_INT32, MISSING_INT64)
        self.open: list[tuple[Pace, tuple[int, ...]]] = []
        self._inner_ns = self._inner_cpu_ns = 0

    def enter(self, pace: Pace) -> tuple[int, int, int, int]:
        """A stage begins; `leave` wants what this returns."""
        if pace.skip > 0:
            pace.skip -= 1
            cpu_ns = _UNREAD
        else:
            cpu_ns = time.thread_time_ns()
        outer_ns, outer_cpu_ns = self._inner_ns, self._inner_cpu_ns
        self._inner_ns = self._inner_cpu_ns = 0
        return outer_ns, outer_cpu_ns, cpu_ns, time.monotonic_ns()

    def leave(self, pace: Pace, entered: tuple[int, ...]) -> int:
        """The stage has ended; returns how long it took (ns), with the stages called within."""
        now_ns = time.monotonic_ns()
        outer_ns, outer_cpu_ns, cpu_ns, begun_ns = entered
        wall_ns = now_ns - begun_ns
        own_ns = wall_ns - self._inner_ns
        sums = self.sums.get(pace.stage)
        if sums is None:
            sums = self.sums[pace.stage] = [0, 0, 0, 0]
        sums[0] += 1
        sums[1] += own_ns
        if cpu_ns == _UNREAD:
            cpu_ns = wall_ns  # for the stage around this one: a short call hardly blocks
        else:
            cpu_ns = time.thread_time_ns() - cpu_ns
            sums[2] += min(max(0, cpu_ns - self._inner_cpu_ns), own_ns)
            sums[3] += own_ns
            pace.skip = _UNREAD_CALLS
        if wall_ns >= _LONG_NS:
            pace.skip = 0
        self._inner_ns, self._inner_cpu_ns = outer_ns + wall_ns, outer_cpu_ns + cpu_ns
        if not self.waits and recording.hook.active:
            self.waits = True
            waiting.append(self)
        return wall_ns


class _Here(threading.local):
    def __init__(self) -> None:
        self.tally = Tally()


here = _Here()
#: The tallies in which something was summed up since they were last taken; their threads may be gone by then.
waiting: list[Tally] = []
#: When the stages of a loop are to be written next.
due_ns = 0
_pace = functools.cache(Pace)


def _forget() -> None:
    """A forked child goes on without what its parent has summed up."""
    waiting.clear()
    here.tally = Tally()


os.register_at_fork(after_in_child=_forget)


#: Whether stages are recorded: not before torch is there, whose loaders make the batches.
recording = SimpleNamespace(hook=SimpleNamespace(active=False), is_compiling=lambda: False)


def used(now_ns: int) -> None:
    """This thread is done with the batch that it was given, or with a step: write the stages called since.

    Called once `due_ns` has come, so batches that follow each other closely make one record, that of the last.
    """
    global due_ns
    due_ns = now_ns + session.HOLD_NS
    _write(now_ns, *here.tally.batch, MISSING_INT32)


def flush() -> None:
    """This thread calls no more stages: write those called since."""
    if waiting:
        _write(time.monotonic_ns(), *here.tally.batch, MISSING_INT32)


def fetched(now_ns: int, loader: int, epoch: int, index: int, worker: int) -> None:
    """A batch was made in this thread: write the stages called for it, also by threads that helped."""
    if waiting:
        _write(now_ns, loader, epoch, index, worker)


def _write(now_ns: int, *batch_and_worker: int) -> None:
    current = session.active
    if current is None or not recording.hook.active:
        return
    try:
        records = []
        for name, (calls, own_ns, cpu_ns, read_ns) in _take(here.tally).items():
            scaled_ns = cpu_ns * own_ns // read_ns if read_ns else MISSING_INT64
            records.append((now_ns, *batch_and_worker, name, calls, own_ns, scaled_ns))
        if records:
            current.stage(records)
    except Exception as error:
        recording.hook.fail(error)


def _take(mine: Tally) -> dict[bytes, list[int]]:
    """What was summed up in this thread, and in those that fetch nothing themselves; they begin anew."""
    mine.fetches = True
    taken: dict[bytes, list[int]] = {}
    for tally in waiting.copy():
        if tally.fetches and tally is not mine:
            continue
        try:
            waiting.remove(tally)
        except ValueError:  # another thread was faster
            continue
        tally.waits = False  # first, so that its thread lines up again whichever sums it adds to
        sums, tally.sums = tally.sums, {}
        for name, added in sums.items():
            taken[name] = [a + b for a, b in zip(taken[name], added, strict=True)] if name in taken else added
    return taken


class stage:  # noqa: N801
    """Name a part of your pipeline or of your loop, as a context manager or as a decorator of a function.

        with training_harness.stage("augment"):
            picture = augment(picture)

    Does nothing where Tidegauge is not attached, and never raises.

    Args:
        name: of the stage, up to 24 bytes of UTF-8; one of a few, not one per file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, function: _Function) -> _Function:
        """The function with each of its calls as this stage."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    def __enter__(self) -> None:
        if not recording.is_compiling() and recording.hook.active:
            try:
                pace, tally = _pace(self._name), here.tally
                tally.open.append((pace, tally.enter(pace)))
            except Exception as error:
                recording.hook.fail(error)

    def __exit__(self, *_: object) -> None:
        if not recording.is_compiling():
            try:
                tally = here.tally
                if tally.open:
                    tally.leave(*tally.open.pop())
            except Exception as error:
                recording.hook.fail(error)
