"""Where the time of the training loop goes: every moment of a step belongs to one phase.

The thread that trains is followed from mark to mark, and the time between two marks goes to the phase that the
later one ends: a batch is asked for, it comes, the backward pass begins and ends, the optimizer begins and ends.
So *forward* is what lies between a batch and the backward pass, and a loop that never goes backward has none.
In a process without a DataLoader the top-level module's own call is the forward pass, and *other* is the host's
time outside forward, backward and optimizer: the loop's own loading, logging and the like.
These are times of the host: on a GPU the work itself may run later (`DeviceTimes`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from training_harness import session
from training_harness.hooks import stages
from training_harness.hooks.announce import announce
from training_harness.hooks.device_times import DeviceTimes
from training_harness.hooks.memory import DeviceGauges
from training_harness.hooks.patching import Hook
from training_harness.hooks.phases import BACKWARD, COPY, FORWARD, OPTIMIZE, OTHER, WAIT
from training_harness.hooks.requests import Requests
from training_harness.hooks.tape import Tape
from training_harness.records import MISSING_INT32, MISSING_INT64

#: What ends a step; less one, the `unit` of the step's record. A later one takes over from an earlier one.
NOBODY, PASS, BATCH, OPTIMIZER, USER = range(5)
#: Stands for the thread's CPU clock where it was not read.
UNREAD = -1


class Progress:
    """The step that the training loop is in. What hooks tell of it in every step, they tell through the tape.

    Attributes:
        tape: what is logged in the loop.
        step: the number of the step, from 0.
        ended_by: what ends it; without an optimizer batches do, without a DataLoader the top-level module's calls,
            and the script alone once it called `step()`.
        sees_batches: a DataLoader of this process was iterated.
        on_batches: called when the first one is.
        sees_passes: the top-level module's calls are counted.
        thread: that steps the optimizer, 0 before it has.
        uses_cuda: CUDA is initialised, so there are gauges to read; looked for now and then.
        copies_are_seen: whether host to device copies are reported to `copied`.
        requests: what waits for the end of a step.
        capabilities: name of a hook or a hook point -> whether it was found in this torch.
    """

    def __init__(self) -> None:
        self.copies_are_seen = self.uses_cuda = False
        self.on_batches: Callable[[], None] = _nothing
        self.capabilities: dict[str, bool] = {}
        self.requests = Requests()
        self.tape = Tape()
        self._hook = Hook("copy")
        self._gauges = DeviceGauges()
        self._gauges_hook = Hook("device_memory")
        self._device_times = DeviceTimes(self._gauges.has_worked)
        self._device_times_hook = Hook("device_time")
        self.forget()

    def forget(self) -> None:
        """Begin as in a new run: what was counted in another one, or before a fork, is not of this one."""
        self.tape.clear()
        self.step = 0
        self.sees_batches = self.sees_passes = self._reads_cpu = False
        self._pass_thread = 0
        self.ended_by = NOBODY
        self.thread = 0
        self.begin(0)
        self._mark_ns = time.monotonic_ns()

    def begin(self, now_ns: int) -> None:
        """A step begins now, whatever was counted before; when the first one's work began is not known."""
        self._boundary_ns = self._mark_ns = now_ns
        self._batches = self._samples = self._passes = 0
        self._spent_ns = [0] * 6
        self._mark_cpu_ns = UNREAD
        self._outside_cpu_ns = self._outside_read_ns = 0
        self._at_boundary = True

    def announce(self, current: session.Session) -> None:
        """Say once that this process trains; called wherever training may begin."""
        if not current.process_started:
            self.forget()
            current.before_flush = self.tape.play
            announce(current, self.capabilities)
        self._look_for_cuda()

    def asked(self, now_ns: int, thread: int) -> None:
        """A thread asks for a batch, and so is done with the one before; not one that makes a batch itself.

        Told again, it changes nothing.
        """
        current = session.active
        if current is None:
            return
        if self.requests.due_ns == 0:
            now_ns = self.requests.expire(current, self.step)
        if self.thread in (0, thread):  # no thread that loads ahead
            self.mark(OTHER, now_ns)
        if self.ended_by == BATCH and self._batches:
            self.gauge(current)
            self.end(current, now_ns)

    def yielded(self, now_ns: int, thread: int, samples: int) -> None:
        """The batch came."""
        self._batches += 1
        self._samples += samples
        if self.thread in (0, thread):
            self.mark(WAIT, now_ns)

    def follow_batches(self, *, has_optimizer: bool) -> None:
        """Let batches end the steps of a process in which no optimizer was ever made."""
        self.tape.play()
        if not self.sees_batches:
            self.sees_batches, self.sees_passes = True, False
            self.on_batches()
        if self.ended_by <= BATCH:
            self.end_steps_by(NOBODY if has_optimizer else BATCH)

    def follow_passes(self, current: session.Session, *, has_optimizer: bool, passes: int) -> None:
        """Note the top-level module's calls; they end the steps where no optimizer was ever made.

        Args:
            current: this process's session.
            has_optimizer: an optimizer was made.
            passes: calls so far, the last of which is running.
        """
        self.tape.play()
        if passes and self.ended_by == NOBODY and not self.sees_passes and not has_optimizer:
            self.step, self._passes = passes - 1, 1
        self.sees_passes = True
        current.before_farewell = self._end_last_pass
        if self.ended_by <= PASS:
            self.end_steps_by(NOBODY if has_optimizer else PASS)

    def _end_last_pass(self) -> None:
        """End the step of the last forward pass, after which no other one begins."""
        self.tape.play()
        current = session.active
        if current is not None and self.ended_by == PASS and self._passes:
            self.end(current, self._mark_ns)

    def end_steps_by(self, what: int) -> None:
        """Let steps end so from now on; numbered from 0 where those before were of another kind.

        A script that calls `step()` goes on counting: its first step may have been ended by the optimizer.
        """
        if self.ended_by not in (NOBODY, what) and what != USER:
            self.step = 0
        self.ended_by = what

    def cpu_clock(self) -> int:
        """Read the thread's CPU time (ns) in every other stretch, since reading it takes 0.6 µs."""
        return time.thread_time_ns() if self._reads_cpu else UNREAD

    def boundary_cpu_clock(self, now_ns: int) -> int:
        """Read the same at the end of a step, where one stretch ends and the next one begins."""
        read_before = self._reads_cpu
        if now_ns >= self.tape.due_ns:
            self._reads_cpu = self.sees_passes and not read_before
        return time.thread_time_ns() if read_before or self._reads_cpu else UNREAD

    def entered(self, now_ns: int, thread: int, cpu_ns: int) -> None:
        """Begin a forward pass of the top-level module."""
        current = session.active
        if current is None:
            return
        if self.requests.due_ns == 0:
            now_ns = self.requests.expire(current, self.step)
        if self.thread in (0, thread):
            self.mark(OTHER, now_ns, cpu_ns if thread == self._pass_thread else UNREAD)
            self._mark_cpu_ns, self._pass_thread = cpu_ns, thread
        if self.ended_by == PASS and self._passes:
            self.gauge(current)
            self.end(current, now_ns, cpu_ns)

    def passed(self, now_ns: int, thread: int, cpu_ns: int) -> None:
        """End a forward pass of the top-level module."""
        if self.thread in (0, thread):
            self.mark(FORWARD, now_ns, cpu_ns if thread == self._pass_thread else UNREAD)
        self._passes += 1

    def backward_began(self, now_ns: int, cpu_ns: int) -> None:
        """End the forward pass, or the time after it where the module's own call was seen."""
        self.mark(OTHER if self.sees_passes and self._passes else FORWARD, now_ns, cpu_ns)

    def mark(self, phase: int, now_ns: int, cpu_ns: int = UNREAD) -> None:
        """Count the time since the last mark to a phase.

        Args:
            phase: what lies behind.
            now_ns: the moment that ends it.
            cpu_ns: the thread's CPU clock then, if it was read.
        """
        self._at_boundary = False
        if phase == OTHER and UNREAD not in (cpu_ns, self._mark_cpu_ns):
            self._outside_cpu_ns += cpu_ns - self._mark_cpu_ns
            self._outside_read_ns += now_ns - self._mark_ns
        self._spent_ns[phase] += now_ns - self._mark_ns
        self._mark_ns, self._mark_cpu_ns = now_ns, cpu_ns
        if self._device_times.sampling:
            try:
                self._device_times.mark(phase)
            except Exception as error:
                self._fail_device_times(error)

    def copied(self, duration_ns: int) -> None:
        """The thread that calls this copied something to a device."""
        self.tape.log((self._hook, self._copied, duration_ns, threading.get_ident()))

    def _copied(self, duration_ns: int, thread: int) -> None:
        if self.thread in (0, thread):
            self._spent_ns[COPY] += duration_ns
            self._mark_ns += duration_ns  # whichever phase it happened in does not count it too

    def gauge(self, current: session.Session) -> None:
        """Read the allocator of every device in use, once per step and always in the same phase."""
        if self.uses_cuda and self._gauges_hook.active:
            try:
                self._gauges.record(current, self.step)
            except Exception as error:
                self._gauges_hook.fail(error)

    def end(self, current: session.Session, now_ns: int, cpu_ns: int = UNREAD) -> None:
        """The step is over: hold its record; the next one begins."""
        spent_ns, outside_cpu_ns = self._spent_ns, MISSING_INT64
        spent_ns[OTHER] += now_ns - self._mark_ns
        duration_ns = now_ns - self._boundary_ns if self._boundary_ns else MISSING_INT64
        phases_ns = (
            spent_ns[WAIT] if self.sees_batches else MISSING_INT64,
            spent_ns[COPY] if self.copies_are_seen else MISSING_INT64,
            spent_ns[FORWARD] or MISSING_INT64,
            spent_ns[BACKWARD] or MISSING_INT64,
            spent_ns[OPTIMIZE] or MISSING_INT64,
            spent_ns[OTHER],
        )
        if self._outside_read_ns and not self.sees_batches:
            outside_cpu_ns = max(0, self._outside_cpu_ns) * spent_ns[OTHER] // self._outside_read_ns
        samples = self._samples if self._samples > 0 else MISSING_INT32
        passes = self._passes if self.sees_passes else MISSING_INT32
        unit = self.ended_by - 1
        current.step(
            (now_ns, self.step, duration_ns, *phases_ns, outside_cpu_ns, self._batches, passes, samples, unit)
        )
        if self.uses_cuda and self._device_times_hook.active:
            try:
                self._device_times.step_ended(current, self.step, now_ns)
            except Exception as error:
                self._fail_device_times(error)
        self.step += 1
        self.begin(now_ns)
        self._mark_cpu_ns = cpu_ns

    def catch_up(self, now_ns: int) -> None:
        """Between two steps or batches, once the tape is due: write, and do what waits for the end of a step."""
        current = session.active
        if current is None:
            return
        self.tape.play()
        if stages.waiting and now_ns >= stages.due_ns:
            stages.used(now_ns)
        if self._at_boundary and now_ns >= self.requests.due_ns:
            self._serve(current)
        self.tape.write(current, now_ns)

    def _serve(self, current: session.Session) -> None:
        self._look_for_cuda()
        if self.uses_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return  # what was asked for can wait until the graph is there
        now_ns = self.requests.serve(current, self.step - 1)
        self.begin(now_ns)
        self._look_for_cuda()

    def _look_for_cuda(self) -> None:
        """Find out whether there is something to read at its moment."""
        torch = sys.modules.get("torch")
        self.uses_cuda = torch is not None and torch.cuda.is_initialized()
        self.tape.wait(yes=not self.uses_cuda and self.requests.due_ns > 0)

    def _fail_device_times(self, error: Exception) -> None:
        self._device_times.sampling = False
        self._device_times_hook.fail(error)


def _nothing() -> None:
    """Do nothing."""
