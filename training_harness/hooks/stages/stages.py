"""Stages of the data pipeline, summed up per thread and written once per batch: one `stage` record per stage.

A stage's time excludes the stages called within it. Reading the thread's CPU clock takes a system call of
1 µs, more than all the rest; so it is read for calls of a millisecond or more, and for every 16th shorter one. A
record's CPU time is the one of the calls where it was read, scaled to all of them.
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
from training_harness.records import INLINE_WORKER, MISSING_INT32, MISSING_INT64, NAME_BYTES

_LONG_NS = 1_000_000
_UNREAD_CALLS = 15
_UNREAD = -1

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Tallies with sums that are not yet written; their threads may have ended.
pending_tallies: list[Tally] = []
#: Time of the next write of a loop's stages, CLOCK_MONOTONIC in ns.
due_ns = 0
#: State of the recording: it begins when torch, whose loaders make the batches, is imported.
recording = SimpleNamespace(hook=SimpleNamespace(active=False), is_compiling=lambda: False)


class StageTimer:
    """Name of a stage as it is recorded, and the number of calls left for which the CPU clock is not read."""

    __slots__ = ("skips_left", "stage")

    def __init__(self, name: str) -> None:
        self.stage = name.encode("utf-8", "replace")[:NAME_BYTES].decode("utf-8", "ignore").encode()
        self.skips_left = 0


class Tally:
    """Sums of the stages of one thread.

    Attributes:
        sums: stage -> [calls, own time, own CPU time where read, own time where CPU was read], times in ns.
        outside: sums of the loop, while the thread makes a batch itself.
        is_pending: whether it is among `pending_tallies`.
        has_batches: whether its thread receives or makes batches: then no other thread may write its sums.
        batch: loader, epoch and index of the last batch that the thread received; its stages from then on belong to
            that batch.
        call_stage: stage of the recognised call that the thread is in; empty outside of any.
        blocks: stages that `with` blocks have begun.
    """

    __slots__ = (
        "_inner_cpu_ns",
        "_inner_ns",
        "batch",
        "blocks",
        "call_stage",
        "has_batches",
        "is_pending",
        "outside",
        "sums",
    )

    def __init__(self) -> None:
        self.sums: dict[bytes, list[int]] = {}
        self.outside: dict[bytes, list[int]] = {}
        self.is_pending = self.has_batches = False
        self.call_stage = ""
        self.batch = (MISSING_INT32, MISSING_INT32, MISSING_INT64)
        self.blocks: list[tuple[StageTimer, tuple[int, ...]]] = []
        self._inner_ns = self._inner_cpu_ns = 0

    def enter(self, timer: StageTimer) -> tuple[int, int, int, int]:
        """Begin a stage; return the state that `leave` needs."""
        if timer.skips_left > 0:
            timer.skips_left -= 1
            cpu_ns = _UNREAD
        else:
            cpu_ns = time.thread_time_ns()
        outer_ns, outer_cpu_ns = self._inner_ns, self._inner_cpu_ns
        self._inner_ns = self._inner_cpu_ns = 0
        return outer_ns, outer_cpu_ns, cpu_ns, time.monotonic_ns()

    def leave(self, timer: StageTimer, entered: tuple[int, ...]) -> int:
        """End a stage; return its duration in ns, with the stages called within it."""
        now_ns = time.monotonic_ns()
        outer_ns, outer_cpu_ns, cpu_ns, begun_ns = entered
        wall_ns = now_ns - begun_ns
        own_ns = wall_ns - self._inner_ns
        sums = self.sums.get(timer.stage)
        if sums is None:
            sums = self.sums[timer.stage] = [0, 0, 0, 0]
        sums[0] += 1
        sums[1] += own_ns
        if cpu_ns == _UNREAD:
            cpu_ns = wall_ns  # assumed for the stage around this one: a short call hardly blocks
        else:
            cpu_ns = time.thread_time_ns() - cpu_ns
            sums[2] += min(max(0, cpu_ns - self._inner_cpu_ns), own_ns)
            sums[3] += own_ns
            timer.skips_left = _UNREAD_CALLS
        if wall_ns >= _LONG_NS:
            timer.skips_left = 0
        self._inner_ns, self._inner_cpu_ns = outer_ns + wall_ns, outer_cpu_ns + cpu_ns
        self.await_write()
        return wall_ns

    def await_write(self) -> None:
        """Put the sums among those to be written, unless they are or nothing is recorded."""
        if not self.is_pending and recording.hook.active:
            self.is_pending = True
            pending_tallies.append(self)


class _Here(threading.local):
    def __init__(self) -> None:
        self.tally = Tally()


local = _Here()
_timer = functools.cache(StageTimer)


def _forget() -> None:
    """Drop the sums of the parent in a forked child."""
    pending_tallies.clear()
    local.tally = Tally()


os.register_at_fork(after_in_child=_forget)


def write_loop_stages(now_ns: int) -> None:
    """Write the stages that this thread called for its last batch or step.

    Called once `due_ns` has come, so batches that follow each other closely share a record, under the last of them.
    """
    global due_ns
    due_ns = now_ns + session.HOLD_NS
    _write(now_ns, *local.tally.batch, MISSING_INT32)


def flush() -> None:
    """Write the remaining stages of this thread; it calls no more of them."""
    if pending_tallies:
        _write(time.monotonic_ns(), *local.tally.batch, MISSING_INT32)


def write_fetch_stages(now_ns: int, loader: int, epoch: int, index: int, worker: int) -> None:
    """Write the stages of a batch that was made in this thread, also those of threads that helped."""
    if pending_tallies:
        _write(now_ns, loader, epoch, index, worker)


def begin_fetch(now_ns: int) -> None:
    """Keep the stages of the loop apart from those of the batch that its thread is about to make.

    They wait for `due_ns`: a loop of short steps does not pay for a record in each.
    """
    tally = local.tally
    tally.has_batches = True
    if now_ns < due_ns and pending_tallies == [tally]:
        tally.outside, tally.sums = tally.sums, {}
    else:
        write_loop_stages(now_ns)


def end_fetch(now_ns: int, *batch: int) -> None:
    """Write the stages of a batch (loader, epoch, index) that the loop's own thread made; return to the loop."""
    if local.tally.sums or len(pending_tallies) > 1:
        _write(now_ns, *batch, INLINE_WORKER)
    return_to_loop()


def return_to_loop() -> None:
    """Go on with the sums of the loop, also where the batch could not be made."""
    tally = local.tally
    if tally.outside:
        inside, tally.sums, tally.outside = tally.sums, tally.outside, {}
        _add(tally.sums, inside)
        tally.await_write()


def _write(now_ns: int, *batch_and_worker: int) -> None:
    current = session.active
    if current is None or not recording.hook.active:
        return
    try:
        records = []
        for name, (calls, own_ns, cpu_ns, read_ns) in _take(local.tally).items():
            scaled_ns = cpu_ns * own_ns // read_ns if read_ns else MISSING_INT64
            records.append((now_ns, *batch_and_worker, name, calls, own_ns, scaled_ns))
        if records:
            current.stage(records)
    except Exception as error:
        recording.hook.fail(error)


def _take(own_tally: Tally) -> dict[bytes, list[int]]:
    """Return and clear the sums of this thread and of threads without batches of their own."""
    own_tally.has_batches = True
    total: dict[bytes, list[int]] = {}
    for tally in pending_tallies.copy():
        if tally.has_batches and tally is not own_tally:
            continue
        try:
            pending_tallies.remove(tally)
        except ValueError:  # another thread was faster
            continue
        tally.is_pending = False  # first, so that its thread adds it again whichever sums it adds to
        sums, tally.sums = tally.sums, {}
        _add(total, sums)
    return total


def _add(total: dict[bytes, list[int]], sums: dict[bytes, list[int]]) -> None:
    for name, more in sums.items():
        total[name] = [a + b for a, b in zip(total[name], more, strict=True)] if name in total else more


class stage:  # noqa: N801
    """Name a part of your pipeline or of your loop, as a context manager or as a decorator of a function.

        with training_harness.stage("augment"):
            picture = augment(picture)

    Does nothing where Tidegauge is not attached, and never raises.

    Args:
        name: name of the stage, up to 24 bytes of UTF-8. Use a few names, not one per file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, function: _Function) -> _Function:
        """Wrap a function so that each of its calls is this stage."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    def __enter__(self) -> None:
        if not recording.is_compiling() and recording.hook.active:
            try:
                timer, tally = _timer(self._name), local.tally
                tally.blocks.append((timer, tally.enter(timer)))
            except Exception as error:
                recording.hook.fail(error)

    def __exit__(self, *_: object) -> None:
        if not recording.is_compiling():
            try:
                tally = local.tally
                if tally.blocks:
                    tally.leave(*tally.blocks.pop())
            except Exception as error:
                recording.hook.fail(error)
