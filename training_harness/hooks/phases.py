"""Where the time of the training loop goes: every moment of a step belongs to one phase.

The thread that trains is followed from mark to mark, and the time between two marks goes to the phase that the
later one ends: a batch is asked for, it comes, the backward pass begins and ends, the optimizer begins and ends.
So *forward* is what lies between a batch and the backward pass, and a loop that never goes backward has none.
These are times of the host: on a GPU the work itself may run later (`DeviceTimes`).

A mark is a tuple that the loop only appends. They are added up here later, those of many short steps in one go:
that is work for a warm cache, where in the middle of a step each line of it would push something of the model out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from training_harness.records import MISSING_INT32, MISSING_INT64

#: The phases, in the order of their columns in the `step` stream. A mark: (phase, time when it ended).
WAIT, COPY, FORWARD, BACKWARD, OPTIMIZE, OTHER = range(6)
#: Other entries: (COPIED, duration in ns), (END, time, step, batches, samples) and (BEGIN, time) of a step that
#: begins then, whatever was counted before.
COPIED, END, BEGIN = range(6, 9)


class Phases:
    """Adds up the marks of one training loop.

    Args:
        now_ns: from when on each moment has its phase. When the first step's work began is not known, so that
            step has no duration.
    """

    def __init__(self, now_ns: int) -> None:
        self._boundary_ns = 0
        self._mark_ns = now_ns
        self._spent_ns = [0] * 6

    def steps(self, entries: Iterable[tuple[int, ...]], *, copies_are_seen: bool) -> Iterator[tuple[int, ...]]:
        """The records of the steps that end among these entries; the rest waits for the next call."""
        for kind, value, *more in entries:
            if kind == COPIED:  # whichever phase it happened in does not count it too
                self._spent_ns[COPY] += value
                self._mark_ns += value
            elif kind == BEGIN:
                self._begin(value)
            else:
                self._spent_ns[OTHER if kind == END else kind] += value - self._mark_ns
                self._mark_ns = value
                if kind == END:
                    yield self._record(value, *more, copies_are_seen=copies_are_seen)
                    self._begin(value)

    def _begin(self, now_ns: int) -> None:
        self._boundary_ns = self._mark_ns = now_ns
        self._spent_ns = [0] * 6

    def _record(
        self, now_ns: int, step: int, batches: int, samples: int, *, copies_are_seen: bool
    ) -> tuple[int, ...]:
        spent_ns = self._spent_ns
        return (
            now_ns,
            step,
            now_ns - self._boundary_ns if self._boundary_ns else MISSING_INT64,
            spent_ns[WAIT],
            spent_ns[COPY] if copies_are_seen else MISSING_INT64,
            spent_ns[FORWARD] or MISSING_INT64,
            spent_ns[BACKWARD] or MISSING_INT64,
            spent_ns[OPTIMIZE] or MISSING_INT64,
            spent_ns[OTHER],
            batches,
            samples if samples > 0 else MISSING_INT32,
        )
