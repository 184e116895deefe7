"""How long the phases of a step take on the CUDA device: one `device_time` record per sampled step.

The host only launches kernels, so its clock says nothing about when they ran. CUDA events from a pool are
recorded between the phases, on the stream in use, and read steps later, when they have come to pass: nothing
ever waits for the device (torch/cuda/streams.py; CUDA C++ Programming Guide, "Events").
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from training_harness import session
from training_harness.hooks.numbering import number_in_run
from training_harness.hooks.phases import FORWARD, OTHER

#: Recording five events costs some 20 µs: a step is sampled only if the last one is this long ago.
SAMPLE_EVERY_NS = 20_000_000
#: Steps whose events have not come to pass; a device that is further behind is not sampled.
_PENDING_STEPS = 16
#: A step that goes backward without end is not sampled either.
_MARKS_AT_MOST = 256


#: The phases that the device is asked about, in the order of their columns.
PHASES = range(FORWARD, OTHER + 1)
_START = -1


class _Sampled(NamedTuple):
    step: int
    device: int
    marks: list[tuple[int, Any]]


class DeviceTimes:
    """Samples the steps of the process's current device, if it computes on that one.

    An event on an idle device would tell the host's time, and the first one makes a context there.

    Args:
        has_worked: whether a device, by its number, had a part in the step that ends.

    Attributes:
        sampling: whether the step under way is sampled, so that phases are to be marked.
    """

    def __init__(self, has_worked: Callable[[int], bool]) -> None:
        self.sampling = False
        self._has_worked = has_worked
        self._sampled_at_ns = 0
        self._device = -1
        self._marks: list[tuple[int, Any]] = []
        self._pending: deque[_Sampled] = deque()
        self._pool: list[Any] = []

    def mark(self, phase: int) -> None:
        """A phase of the step, one of `PHASES`, has been launched."""
        cuda = sys.modules["torch"].cuda
        if (
            cuda.is_current_stream_capturing()  # an event would become part of the graph
            or cuda.current_device() != self._device  # two devices share no clock
            or len(self._marks) >= _MARKS_AT_MOST
        ):
            self.sampling = False
            return
        event = self._pool.pop() if self._pool else cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase if phase in PHASES else OTHER, event))

    def step_ended(self, current: session.Session, step: int, now_ns: int) -> None:
        """End the sample of this step, write those that came to pass, and perhaps begin another."""
        if self.sampling:
            self.mark(OTHER)
        if self.sampling and self._has_worked(self._device):
            self._pending.append(_Sampled(step, self._device, self._marks))
        self._marks = []
        self.sampling = False
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():  # asking after an event would spoil the graph
            return
        while self._pending and self._pending[0].marks[-1][1].query():
            self._write(current, self._pending.popleft(), now_ns)
        if now_ns - self._sampled_at_ns < SAMPLE_EVERY_NS or len(self._pending) >= _PENDING_STEPS:
            return
        self._sampled_at_ns = now_ns
        self._device = cuda.current_device()
        self.sampling = self._has_worked(self._device)
        if self.sampling:
            self.mark(_START)

    def _write(self, current: session.Session, sampled: _Sampled, now_ns: int) -> None:
        spent_ns = dict.fromkeys(PHASES, 0)
        before = sampled.marks[0][1]
        for phase, event in sampled.marks[1:]:
            spent_ns[phase] += round(before.elapsed_time(event) * 1e6)
            before = event
        duration_ns = round(sampled.marks[0][1].elapsed_time(before) * 1e6)
        current.device_time(now_ns, sampled.step, number_in_run(sampled.device), duration_ns, *spent_ns.values())
        self._pool += [event for _, event in sampled.marks]
