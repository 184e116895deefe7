"""Which lines allocate what stays: `tracemalloc` over a few steps, because somebody asked for it.

Two marks are compared, one after half of the steps and one after all, each with what was allocated since the begin
and is still alive. What a loop makes anew in each step is there at both and cancels out; what it keeps does not.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from typing import Any

from training_harness.hooks.kept import Mark, grown, look
from training_harness.hooks.snapshots import save
from training_harness.session import Session

#: So deep a line is looked for: a model of some nested modules has about three frames for each of them.
FRAMES = 25
#: It ends after so long, or when the traces take so much memory, even if the steps asked for have not.
LIMIT_NS = 20_000_000_000
LIMIT_BYTES = 64 * 2**20

_tracing = _frozen = False


class Growth:
    """Traces the allocations of the next steps of this process; it begins at once.

    Args:
        torch: the module.
        steps: to trace, two at least.
        unit: what is counted, `steps` or `batches`.

    Raises:
        RuntimeError: the training uses `tracemalloc` itself.
    """

    def __init__(self, torch: Any, steps: int, unit: str = "steps") -> None:
        if tracemalloc.is_tracing():
            raise RuntimeError("the training uses tracemalloc itself; ask again when it has stopped that")
        self._torch = torch
        self._steps = steps
        self._unit = unit
        self._done = 0
        self._first: Mark | None = None
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._begun_ns = time.monotonic_ns()
        _trace(on=True)

    def step_ended(self) -> bool:
        """Count a step; True when it was the last one: `save` comes next."""
        self._done += 1
        if self._first is not None:
            return self._used() >= 1
        if self._used() >= 0.5:
            self._first = self._mark()
        return False

    def expired(self) -> bool:
        """Whether it has taken all that it may, after the first mark."""
        return self._first is not None and self._used() >= 1

    def stop(self) -> None:
        """End it; nothing is kept."""
        _trace(on=False)

    def save(self, current: Session) -> dict[str, Any]:
        """End it; write the lines whose live memory grew between the marks.

        Raises:
            OSError: it cannot be written.
        """
        assert self._first is not None
        try:
            first, last = self._first, self._mark()
        finally:
            self.stop()
        return save(current, "growth", grown(first, last, self._unit))

    def _used(self) -> float:
        """The share of the steps, the time or the memory that is used up, whichever is largest."""
        return max(
            self._done / self._steps,
            (time.monotonic_ns() - self._begun_ns) / LIMIT_NS,
            tracemalloc.get_tracemalloc_memory() / LIMIT_BYTES,
        )

    def _mark(self) -> Mark:
        collecting = gc.isenabled()
        gc.disable()  # what is made here must not set off a collection
        try:
            return look(self._torch, self._done, self._first_node)
        finally:
            if collecting:
                gc.enable()


def _trace(*, on: bool) -> None:
    """Trace or stop.

    What is older is out of the garbage collector's lists meanwhile: to look at it would write to all of it, and so
    copy the memory that is shared with workers.
    """
    global _tracing, _frozen
    _tracing = on
    if on:
        _frozen = gc.get_freeze_count() == 0  # else the training does so itself
        if _frozen:
            gc.freeze()
        tracemalloc.start(FRAMES)
    else:
        tracemalloc.stop()
        if _frozen:
            gc.unfreeze()


def _stop_in_child() -> None:
    """A worker that is forked meanwhile must not trace for ever."""
    if _tracing:
        _trace(on=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
