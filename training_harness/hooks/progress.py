"""The step that the training loop is in: what the hooks of loaders, optimizers and copies tell it.

What runs in each step costs little by being few functions: in a real step, where the model has pushed the hooks out
of the caches, calling one more costs some 0.7 µs whatever it does. So the hooks append their marks themselves, and
what they mean is worked out now and then, for many short steps at once (`Phases`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque

from training_harness import session
from training_harness.hooks import stages
from training_harness.hooks.announce import announce
from training_harness.hooks.device_times import DeviceTimes
from training_harness.hooks.memory import DeviceGauges
from training_harness.hooks.patching import Hook
from training_harness.hooks.phases import BEGIN, COPIED, END, Phases
from training_harness.hooks.requests import Requests

#: Who ends a step.
NOBODY, BATCH, OPTIMIZER, USER = range(4)
#: Marks that may wait: a forked child that only iterates its parent's loader never adds them up.
_MARKS_AT_MOST = 65_536


class Progress:
    """The step that the training loop is in.

    Attributes:
        step: its number, from 0.
        ended_by: who ends it; batches do in a process without an optimizer, the user if `step()` was called.
        batches: batches yielded within it.
        samples: samples in them; below 0 if that of any is missing.
        log: takes the mark `(phase, now_ns)`: what lies behind was that phase.
        due_ns: when what was logged is to be written next, by `write`.
        thread: that steps the optimizer, 0 before it has.
        uses_cuda: CUDA is initialised, so there are gauges to read; looked for now and then.
        copies_are_seen: whether host to device copies are reported to `copied`.
        requests: what waits for the end of a step.
        capabilities: name of a hook or a hook point -> whether it was found in this torch.
    """

    def __init__(self) -> None:
        self.copies_are_seen = self.uses_cuda = False
        self.capabilities: dict[str, bool] = {}
        self.requests = Requests()
        self._marks: deque[tuple[int, ...]] = deque(maxlen=_MARKS_AT_MOST)
        self._adding_up = threading.Lock()
        self._gauges = DeviceGauges()
        self._gauges_hook = Hook("device_memory")
        self._device_times = DeviceTimes()
        self._device_times_hook = Hook("device_time")
        self._forget()

    def _forget(self) -> None:
        self.step = self.batches = self.samples = 0
        self.ended_by = NOBODY
        self.thread = self.due_ns = 0
        self.log = self._marks.append
        self._marks.clear()
        self._phases = Phases(time.monotonic_ns())

    def restart(self, now_ns: int) -> None:
        """A step begins now, whatever was counted before."""
        self._marks.append((BEGIN, now_ns))
        self.batches = self.samples = 0

    def announce(self, current: session.Session) -> None:
        """Say once that this process trains; called wherever training may begin."""
        self._look_for_cuda()
        if current.process_started:
            return
        self._forget()  # what was counted in another run, or before a fork, is not of this one
        current.add_up = self._add_up
        announce(current, self.capabilities)

    def write(self, current: session.Session, now_ns: int) -> None:
        """Write what was logged and held, once `due_ns` has come."""
        self.due_ns = now_ns + session.HOLD_NS
        current.flush()

    def _add_up(self, current: session.Session) -> None:
        if self._adding_up.acquire(blocking=False):  # else another thread is at it
            try:
                marks = [self._marks.popleft() for _ in range(len(self._marks))]
                for record in self._phases.steps(marks, copies_are_seen=self.copies_are_seen):
                    current.step(record)
            finally:
                self._adding_up.release()

    def _log_on_device(self, mark: tuple[int, ...]) -> None:
        self._marks.append(mark)
        try:
            if self._device_times.sampling:
                self._device_times.mark(mark[0])
        except Exception as error:
            self._fail_device_times(error)

    def copied(self, duration_ns: int) -> None:
        """The loop's thread copied something to a device."""
        if self.thread in (0, threading.get_ident()):
            self._marks.append((COPIED, duration_ns))

    def gauge(self, current: session.Session) -> None:
        """Read the allocator of every device in use, once per step and always in the same phase."""
        if self.uses_cuda and self._gauges_hook.active:
            try:
                self._gauges.record(current, self.step)
            except Exception as error:
                self._gauges_hook.fail(error)

    def end(self, current: session.Session, now_ns: int) -> None:
        """The step is over; the next one begins."""
        self._marks.append((END, now_ns, self.step, self.batches, self.samples))
        self.batches = self.samples = 0
        if now_ns >= self.due_ns:
            self.write(current, now_ns)
        if stages.waiting and now_ns >= stages.due_ns:
            stages.used(now_ns)
        if self.uses_cuda and self._device_times_hook.active:
            try:
                self._device_times.step_ended(current, self.step, now_ns)
                self.log = self._log_on_device if self._device_times.sampling else self._marks.append
            except Exception as error:
                self._fail_device_times(error)
        if now_ns >= self.requests.due_ns:
            self._serve(current)
        self.step += 1

    def _serve(self, current: session.Session) -> None:
        self._look_for_cuda()
        if self.uses_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return  # what was asked for can wait until the graph is there
        self.restart(self.requests.serve(current, self.step))

    def _look_for_cuda(self) -> None:
        torch = sys.modules.get("torch")
        self.uses_cuda = torch is not None and torch.cuda.is_initialized()

    def _fail_device_times(self, error: Exception) -> None:
        self.log = self._marks.append
        self._device_times_hook.fail(error)
