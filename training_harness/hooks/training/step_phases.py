"""Phases of the training loop: every moment of a step belongs to one phase.

The hooks follow the thread that trains from mark to mark: an epoch or a batch is requested, it arrives, the
backward pass begins and ends, the optimizer begins and ends. The time between two marks belongs to the phase that
the later one ends.
So *forward* is the time between a batch and the backward pass, and a loop that never goes backward has none.
Where the thread that trains iterates no DataLoader, the top-level module's own call is the forward pass, and
*other* is the host's time outside forward, backward and optimizer: the loop's own loading, the wait for a thread
that loads ahead, logging and the like.
These are times of the host: on a GPU the work itself may run later (`DeviceTimes`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from training_harness import session
from training_harness.hooks.accelerators import in_use, is_capturing
from training_harness.hooks.heap import HeapGauge
from training_harness.hooks.on_request.requests import Requests
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import announce
from training_harness.hooks.stages import stages
from training_harness.hooks.training.deferred_calls import DeferredCalls
from training_harness.hooks.training.devices import (
    BACKWARD,
    COPY,
    FORWARD,
    OPTIMIZE,
    OTHER,
    WAIT,
    DeviceGauges,
    DeviceTimes,
    Reading,
)
from training_harness.records import (
    MISSING_INT32,
    MISSING_INT64,
    UNIT_BATCH,
    UNIT_OPTIMIZER,
    UNIT_PASS,
    UNIT_SCRIPT,
)

#: No unit ends the steps yet. Later one of `records.STEP_UNITS` does, and a higher one takes over from a lower one.
NOTHING = -1
#: Stand-in for the thread's CPU clock where it was not read.
UNREAD = -1


class Progress:
    """The step that the training loop is in. In each step, hooks report to it through deferred calls.

    Attributes:
        calls: calls that hooks log in the loop.
        step: number of the step, from 0.
        ended_by: what ends the step. Without an optimizer batches do, without a DataLoader the top-level module's
            calls, and the script alone once it has called `step()`.
        sees_batches: whether the thread that trains iterated a DataLoader.
        on_first_loader: callback for its first iteration of one.
        read_optimizers: records the memory of the optimizers; does nothing before one steps.
        sees_passes: whether the top-level module's calls are counted.
        thread: id of the thread that steps the optimizer, 0 before it has.
        uses_device: whether an accelerator is initialised, so that there are gauges to read; checked now and then.
        sees_copies: whether host to device copies are reported to `on_copy`.
        reads_cpu: whether the thread's CPU clock is read in this stretch: in every other one, since a reading takes
            0.6 µs.
        requests: work that waits for the end of a step.
        capabilities: name of a hook or a hook point -> whether this torch has it.
    """

    def __init__(self) -> None:
        self.sees_copies = self.uses_device = False
        self.on_first_loader: Callable[[], None] = lambda: None
        self.read_optimizers: Callable[[], None] = lambda: None
        self.capabilities: dict[str, bool] = {}
        self.requests = Requests()
        self.calls = DeferredCalls()
        self._hook = Hook("copy")
        self._gauges = DeviceGauges()
        self._gauges_hook = Hook("device_memory")
        self._heap = HeapGauge()
        self._heap_hook = Hook("heap")
        self._device_times = DeviceTimes(self._gauges.has_worked)
        self._device_times_hook = Hook("device_time")
        self.forget()

    def forget(self) -> None:
        """Begin as in a new run: counts from another run, or from before a fork, do not belong to this one."""
        self.calls.clear()
        self.step = 0
        self.sees_batches = self.sees_passes = self.reads_cpu = False
        self._loading_threads: set[int] = set()
        self._training_threads: set[int] = set()
        self._pass_thread = 0
        self.ended_by = NOTHING
        self.thread = 0
        self.begin(0)
        self._mark_ns = time.monotonic_ns()

    def begin(self, now_ns: int) -> None:
        """Begin a step now, with all counts at zero. The start of the first step's work is not known."""
        self._boundary_ns = self._mark_ns = now_ns
        self._batches = self._samples = self._passes = 0
        self._phase_ns = [0] * 6
        self._mark_cpu_ns = UNREAD
        self._outside_cpu_ns = self._outside_measured_ns = 0
        self._at_boundary = True

    def announce(self, current: session.Session) -> None:
        """Record once that this process trains; called wherever training may begin."""
        if not current.process_started:
            self.forget()
            current.before_flush = self.calls.run
            announce(current, self.capabilities)
        self._detect_device()

    def on_batch_request(self, now_ns: int, thread: int) -> None:
        """End the use of the last batch, and a request whose time is up: a thread requests the next batch."""
        current = session.active
        if current is not None and self.requests.due_ns == 0:
            now_ns = self.requests.expire(current, self.step)
        self.begin_wait(now_ns, thread)

    def begin_wait(self, now_ns: int, thread: int) -> None:
        """End the use of the last batch: a thread requested the next one. A repeated report changes nothing."""
        current, now_ns = session.active, max(now_ns, self._mark_ns)
        if current is None:
            return
        if self.thread in (0, thread):  # not a thread that loads ahead
            self.mark(OTHER, now_ns)
        if self.ended_by == UNIT_BATCH and self._batches:
            self.gauge(current)
            self.end(current, now_ns)

    def on_batch(self, now_ns: int, thread: int, samples: int) -> None:
        """Count a batch that arrived."""
        self._batches += 1
        self._samples += samples
        if self.thread not in (0, thread):
            self._loading_threads.add(thread)
            return
        if not self.sees_batches and thread == self.thread:
            self._see_batches()
        self.mark(WAIT if self.sees_batches else OTHER, now_ns)

    def count_wait(self, begun_ns: int, now_ns: int, thread: int) -> None:
        """Count the making of an epoch's iterator by a thread, or the end of its workers, as a wait for data."""
        self.calls.run()
        self.on_batch_request(max(begun_ns, self._mark_ns), thread)
        if self.thread in (0, thread):
            self.mark(WAIT if self.sees_batches else OTHER, max(now_ns, self._mark_ns))

    def is_ahead(self, thread: int) -> bool:
        """Return whether a thread that takes a batch only loads: others have stepped the optimizers so far."""
        return bool(self.thread) and thread not in self._training_threads

    def is_training_thread(self) -> bool:
        """Return whether this thread trains; before the first step the main thread is taken for that one."""
        return threading.get_ident() == (self.thread or threading.main_thread().ident)

    def follow_batches(self, *, has_optimizer: bool) -> None:
        """Let batches end the steps of a process in which no optimizer was ever made.

        Another thread may load ahead for the one that trains.
        """
        self.calls.run()
        if self.is_training_thread() or not has_optimizer:
            self._see_batches()
        if self.ended_by <= UNIT_BATCH:
            self.end_steps_by(NOTHING if has_optimizer else UNIT_BATCH)

    def _see_batches(self) -> None:
        """Follow the batches of the training from now on, unless it takes them from a thread that only loads."""
        if not self.sees_batches and self._loading_threads <= self._training_threads:
            self.sees_batches, self.sees_passes = True, False
            self.on_first_loader()

    def follow_passes(self, current: session.Session, *, has_optimizer: bool, passes: int) -> None:
        """Note the top-level module's calls (`passes` so far); they end the steps if no optimizer was made."""
        self.calls.run()
        if passes and self.ended_by == NOTHING and not self.sees_passes and not has_optimizer:
            self.step, self._passes = passes - 1, 1
        self.sees_passes = True
        current.before_farewell = self._end_last_pass
        if self.ended_by <= UNIT_PASS:
            self.end_steps_by(NOTHING if has_optimizer else UNIT_PASS)

    def _end_last_pass(self) -> None:
        self.calls.run()
        current = session.active
        if current is not None and self.ended_by == UNIT_PASS and self._passes:
            self.end(current, self._mark_ns)

    def end_steps_by(self, what: int) -> None:
        """Change what ends a step. Steps are numbered from 0 again where another kind of end came before.

        A script that calls `step()` goes on counting: its first step may have been ended by the optimizer.
        """
        if self.ended_by not in (NOTHING, what) and what != UNIT_SCRIPT:
            self.step = 0
        if self.ended_by != what:
            self.ended_by = what
            self._defer_calls()

    def boundary_cpu_clock(self, now_ns: int) -> int:
        """Read the thread's CPU time (ns) at the end of a step, where one stretch ends and the next one begins."""
        read_before = self.reads_cpu
        if now_ns >= self.calls.due_ns:
            self.reads_cpu = self.sees_passes and not read_before
        return time.thread_time_ns() if read_before or self.reads_cpu else UNREAD

    def on_pass_begin(self, now_ns: int, thread: int, cpu_ns: int) -> None:
        """Begin a forward pass of the top-level module."""
        current = session.active
        if current is None:
            return
        if self.requests.due_ns == 0:
            now_ns = self.requests.expire(current, self.step)
        if self.thread in (0, thread):
            self.mark(OTHER, now_ns, cpu_ns if thread == self._pass_thread else UNREAD)
            self._mark_cpu_ns, self._pass_thread = cpu_ns, thread
        if self.ended_by == UNIT_PASS and self._passes:
            self.gauge(current)
            self.end(current, now_ns, cpu_ns)

    def on_pass_end(self, now_ns: int, thread: int, cpu_ns: int) -> None:
        """End a forward pass of the top-level module."""
        if self.thread in (0, thread):
            self.mark(FORWARD, now_ns, cpu_ns if thread == self._pass_thread else UNREAD)
        self._passes += 1

    def on_optimizer(self, thread: int) -> None:
        """Note the thread that trains: it is about to step an optimizer."""
        if thread != self.thread:
            self.thread = thread
            self._training_threads.add(thread)

    def on_backward(self, now_ns: int, cpu_ns: int) -> None:
        """End the forward pass, or the time after it where the module's own call was seen."""
        self.mark(OTHER if self.sees_passes and self._passes else FORWARD, now_ns, cpu_ns)

    def mark(self, phase: int, now_ns: int, cpu_ns: int = UNREAD) -> None:
        """Count the time since the last mark to the phase that ends now; `cpu_ns` may be UNREAD."""
        self._at_boundary = False
        spent_ns = now_ns - self._mark_ns
        if phase == OTHER and cpu_ns != UNREAD != self._mark_cpu_ns:
            self._outside_cpu_ns += cpu_ns - self._mark_cpu_ns
            self._outside_measured_ns += spent_ns
        self._phase_ns[phase] += spent_ns
        self._mark_ns, self._mark_cpu_ns = now_ns, cpu_ns
        if self._device_times.sampling:
            self._device_times_hook.attempt(self._device_times.mark, phase)

    def on_copy(self, duration_ns: int) -> None:
        """Report a copy to a device by the calling thread."""
        self.calls.log((self._hook, self._add_copy, duration_ns, threading.get_ident()))

    def _add_copy(self, duration_ns: int, thread: int) -> None:
        if self.thread in (0, thread):
            self._phase_ns[COPY] += duration_ns
            self._mark_ns += duration_ns  # so that the phase around the copy does not count it too

    def read_gauges(self) -> Reading | None:
        """Read the allocator of every device in use now, for a call that is logged; None if there is none."""
        return self._gauges_hook.attempt(self._gauges.read)

    def gauge(self, current: session.Session, reading: Reading | None = None) -> None:
        """Record the allocators, once per step and always in the same phase: as read before, or as they are now."""
        if reading is None and self.uses_device:
            reading = self.read_gauges()
        if reading is not None:
            self._gauges_hook.attempt(self._gauges.write, current, self.step, reading)

    def end(self, current: session.Session, now_ns: int, cpu_ns: int = UNREAD) -> None:
        """End the step: hold its record and begin the next one."""
        spent_ns, outside_cpu_ns = self._phase_ns, MISSING_INT64
        spent_ns[OTHER] += now_ns - self._mark_ns
        duration_ns = now_ns - self._boundary_ns if self._boundary_ns else MISSING_INT64
        phases_ns = (
            spent_ns[WAIT] if self.sees_batches else MISSING_INT64,
            spent_ns[COPY] if self.sees_copies else MISSING_INT64,
            spent_ns[FORWARD] or MISSING_INT64,
            spent_ns[BACKWARD] or MISSING_INT64,
            spent_ns[OPTIMIZE] or MISSING_INT64,
            spent_ns[OTHER],
        )
        # The stretch before a backward pass alone tells nothing of a wait for data, many times as long.
        if 0 < spent_ns[OTHER] <= 2 * self._outside_measured_ns and not self.sees_batches:
            outside_cpu_ns = max(0, self._outside_cpu_ns) * spent_ns[OTHER] // self._outside_measured_ns
        samples = self._samples if self._samples > 0 else MISSING_INT32
        passes = self._passes if self.sees_passes else MISSING_INT32
        counts = self._batches, passes, samples
        current.step((now_ns, self.step, duration_ns, *phases_ns, outside_cpu_ns, *counts, self.ended_by))
        if self.uses_device and not self.calls.are_deferred:
            self._device_times_hook.attempt(self._device_times.end_step, current, self.step, now_ns)
            self._defer_calls()
        self.step += 1
        self.begin(now_ns)
        self._mark_cpu_ns = cpu_ns

    def catch_up(self, now_ns: int) -> None:
        """Write, and do the work that waits for the end of a step; called between two steps or batches when due."""
        current = session.active
        if current is None:
            return
        self.calls.run()
        if stages.pending_tallies and now_ns >= stages.due_ns:
            stages.write_loop_stages(now_ns)
        if now_ns >= self._heap.due_ns:
            self._heap_hook.attempt(self._heap.record, current)
        if self._at_boundary and now_ns >= self.requests.due_ns:
            self._serve(current)
        if self._at_boundary and self.uses_device and self.calls.are_deferred:
            self._device_times_hook.attempt(self._device_times.begin_if_due, current, now_ns)
            self._defer_calls()
        self.calls.write(current, now_ns)

    def _serve(self, current: session.Session) -> None:
        self._detect_device()
        if self.uses_device and is_capturing(in_use(sys.modules["torch"])):
            return  # the requests can wait until the graph is there
        now_ns = self.requests.serve(current, self.step - 1)
        self.begin(now_ns)
        self._detect_device()

    def _detect_device(self) -> None:
        """Find out whether there are gauges of a device, which must be read at the moment of a call."""
        torch = sys.modules.get("torch")
        self.uses_device = torch is not None and in_use(torch) is not None
        self._defer_calls()

    def _defer_calls(self) -> None:
        """Defer the calls, unless some read the device at their moment: events of a sampled step, and gauges.

        A call of the optimizer's hook carries the gauges with it. Where another unit ends the steps, none does.
        """
        reads_device = self.uses_device and (self._device_times.sampling or self.ended_by != UNIT_OPTIMIZER)
        self.calls.set_deferred(yes=not reads_device and self.requests.due_ns > 0)
