"""Where the time of the training loop goes: every moment of a step belongs to one phase.

The thread that trains is followed from mark to mark, and the time between two marks goes to the phase that the
later one ends: a batch is asked for, it comes, the backward pass begins and ends, the optimizer begins and ends.
So *forward* is what lies between a batch and the backward pass, and a loop that never goes backward has none.
These are times of the host: on a GPU the work itself may run later (`DeviceTimes`).

What runs in each step costs little by being few functions: in a real step, where the model has pushed the hooks out
of the caches, calling one more costs some 0.7 µs whatever it does.
"""

from __future__ import annotations

import sys
import threading
import time

from training_harness import session
from training_harness.hooks import stages
from training_harness.hooks.announce import announce
from training_harness.hooks.device_times import DeviceTimes
from training_harness.hooks.memory import DeviceGauges
from training_harness.hooks.patching import Hook
from training_harness.hooks.requests import Requests
from training_harness.records import MISSING_INT32, MISSING_INT64

#: The phases, in the order of their columns in the `step` stream.
WAIT, COPY, FORWARD, BACKWARD, OPTIMIZE, OTHER = range(6)

#: Who ends a step.
NOBODY, BATCH, OPTIMIZER, USER = range(4)


class Progress:
    """The step that the training loop is in.

    Attributes:
        step: its number, from 0.
        ended_by: who ends it; batches do in a process without an optimizer, the user if `step()` was called.
        batches: batches yielded within it.
        samples: samples in them; below 0 if that of any is missing.
        spent_ns: time of each phase so far, by the constants above.
        mark_ns: the time up to which each moment has its phase.
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
        self._gauges = DeviceGauges()
        self._gauges_hook = Hook("device_memory")
        self._device_times = DeviceTimes()
        self._device_times_hook = Hook("device_time")
        self._forget()

    def _forget(self) -> None:
        self.step = 0
        self.ended_by = NOBODY
        self.thread = 0
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """A step begins now, whatever was counted before."""
        self._boundary_ns = self.mark_ns = now_ns
        self.batches = self.samples = 0
        self.spent_ns = [0] * 6

    def announce(self, current: session.Session) -> None:
        """Say once that this process trains; called wherever training may begin."""
        self._look_for_cuda()
        if current.process_started:
            return
        self._forget()  # what was counted in another run, or before a fork, is not of this one
        self.mark_ns = time.monotonic_ns()
        announce(current, self.capabilities)

    def mark(self, phase: int, now_ns: int) -> None:
        """What lies behind was that phase."""
        self.spent_ns[phase] += now_ns - self.mark_ns
        self.mark_ns = now_ns
        if self._device_times.sampling:
            try:
                self._device_times.mark(phase)
            except Exception as error:
                self._fail_device_times(error)

    def copied(self, duration_ns: int) -> None:
        """The loop's thread copied something to a device."""
        if self.thread in (0, threading.get_ident()):
            self.spent_ns[COPY] += duration_ns
            self.mark_ns += duration_ns  # whichever phase it happened in does not count it too

    def gauge(self, current: session.Session) -> None:
        """Read the allocator of every device in use, once per step and always in the same phase."""
        if self.uses_cuda and self._gauges_hook.active:
            try:
                self._gauges.record(current, self.step)
            except Exception as error:
                self._gauges_hook.fail(error)

    def end(self, current: session.Session, now_ns: int) -> None:
        """The step is over: write its record; the next one begins.

        The first step has no duration: when its work began is not known.
        """
        spent_ns = self.spent_ns
        spent_ns[OTHER] += now_ns - self.mark_ns
        current.step(
            now_ns,
            self.step,
            now_ns - self._boundary_ns if self._boundary_ns else MISSING_INT64,
            spent_ns[WAIT],
            spent_ns[COPY] if self.copies_are_seen else MISSING_INT64,
            spent_ns[FORWARD] or MISSING_INT64,
            spent_ns[BACKWARD] or MISSING_INT64,
            spent_ns[OPTIMIZE] or MISSING_INT64,
            spent_ns[OTHER],
            self.batches,
            self.samples if self.samples > 0 else MISSING_INT32,
        )
        if stages.waiting and now_ns >= stages.due_ns:
            stages.used(now_ns)
        if self.uses_cuda and self._device_times_hook.active:
            try:
                self._device_times.step_ended(current, self.step, now_ns)
            except Exception as error:
                self._fail_device_times(error)
        if now_ns >= self.requests.due_ns:
            now_ns = self._serve(current, now_ns)
        self.step += 1
        self.restart(now_ns)

    def _serve(self, current: session.Session, now_ns: int) -> int:
        self._look_for_cuda()
        if self.uses_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return now_ns  # what was asked for can wait until the graph is there
        return self.requests.serve(current, self.step)

    def _look_for_cuda(self) -> None:
        torch = sys.modules.get("torch")
        self.uses_cuda = torch is not None and torch.cuda.is_initialized()

    def _fail_device_times(self, error: Exception) -> None:
        self._device_times.sampling = False
        self._device_times_hook.fail(error)
