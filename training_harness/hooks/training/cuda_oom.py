"""CUDA out of memory: the requested, available and allocated memory, and a snapshot of the allocator.

The allocator calls observers before it raises. Only then do temporaries of the failing step still exist: when an
exception hook runs, value stacks and autograd's buffers are gone. So the observer reads the allocator's statistics
and, for the first errors, takes a snapshot. That is safe: the allocator has released its lock by then, and PyTorch
takes the GIL before that lock everywhere (c10/cuda/CUDACachingAllocator.cpp `malloc`; its documentation takes
snapshots in an observer, too). The event is written later: by the exception hook, at the end of the next step if
the training caught the error and went on, or at the exit; at once in a DataLoader worker.
"""

from __future__ import annotations

import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from training_harness import session
from training_harness.hooks.on_request.snapshots import save_allocator
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import error_of_child, is_worker
from training_harness.hooks.training.devices import number_in_run
from training_harness.hooks.training.loaded_states import LoadedStates
from training_harness.hooks.training.step_phases import Progress
from training_harness.layout import MEMORY_HISTORY_VARIABLE

#: Number of first errors that get a snapshot each; later ones get one a minute at most. A training that tries batch
#: sizes until one fits would otherwise get one for each size.
_SNAPSHOTS_AT_ONCE = 2
_SNAPSHOT_EVERY_NS = 60 * 10**9
_SNAPSHOT = ("path", "bytes", "pickle")
#: Gauges of the allocator that are read at the error.
_GAUGES = ("allocated_bytes", "reserved_bytes")
_ERRORS_AT_MOST = 64
_MESSAGE_CHARACTERS = 2000
#: The device in the allocators' messages (c10/cuda: CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp).
_DEVICE = re.compile(r"(?:^Allocation on device|\bGPU) (\d+) (?:would|has)")


class OomHook(Hook):
    """Hook that watches for errors once CUDA is initialised, and records the allocation history if switched on."""

    def __init__(self, progress: Progress, states: LoadedStates | None, torch: Any) -> None:
        super().__init__("cuda_oom")
        self._states = states
        self._progress = progress
        self._torch = torch
        self._errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS_AT_MOST)
        self._snapshots_left = _SNAPSHOTS_AT_ONCE
        self._next_snapshot_ns = 0

    def cuda_is_ready(self) -> None:
        """Start watching, once CUDA is initialised. Never raises: torch would report an error of CUDA."""
        if not self.active:
            return
        self.replace(sys, "excepthook", self._excepthook)
        self.replace(threading, "excepthook", self._thread_excepthook)
        multiprocessing.util.Finalize(None, lambda: self._report_uncaught(error_of_child()), exitpriority=1)
        for name, start in (("cuda_oom_observer", self._observe), ("memory_history", self._record_history)):
            Hook(name).attempt(start)

    def on_error(self, device: int, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Note an error that the allocator is about to raise. Never raises: the training would get that instead.

        Args:
            device: number of the device that has no memory left.
            requested_bytes: size of the failed allocation.
            limit_bytes: memory of the device, or the share of it that the process may use.
            free_bytes: free memory of the device, as CUDA reports it.
        """
        current = session.active
        if current is None or not self.active:
            return
        in_worker = is_worker()
        self._progress.calls.run()  # deferred calls may end steps
        error: dict[str, Any] = {
            "device": number_in_run(device),
            "step": None if in_worker else self._progress.step,
            "error_time_ns": time.monotonic_ns(),
            "requested_bytes": requested_bytes,
            "limit_bytes": limit_bytes,
            "free_bytes": free_bytes,
        }
        self._gauge(current)
        if not in_worker:
            self._progress.read_optimizers()
        try:
            # A backward pass allocates in a thread of its own, which has no other frames.
            if (frame := session.user_frame(sys._getframe().f_back)) is not None:
                error["site"] = session.line_of(frame.f_code, frame.f_lineno)
            stats = self._torch.cuda.memory_stats_as_nested_dict(device)
            error |= {name: stats[name]["all"]["current"] for name in _GAUGES if name in stats}
            error |= self._snapshot_of(error, current)
            if self._states is not None:
                error["loaded_state_bytes"] = self._states.attempt(self._states.bytes_on, device)
        except Exception as problem:
            error["snapshot_error"] = f"{type(problem).__name__}: {problem}"
        if in_worker and "path" in error:  # a worker ends no step, and the training ends its workers by a signal
            current.events.append("cuda-oom", caught=None, errors_count=1, **error)
            return
        self._errors.append(error)
        self._progress.requests.call(self._report_caught)

    def report(
        self,
        current: session.Session,
        step: int,
        *,
        caught: bool | None,
        error: BaseException | None = None,
        thread: str | None = None,
    ) -> None:
        """Write a `cuda-oom` event for the errors since the last event, and a snapshot."""
        context = error and error.__context__
        in_handler = bool(error and context and context is not error.__cause__ and is_out_of_memory(context))
        errors = [self._errors.popleft() for _ in range(len(self._errors))]
        if not errors and error is None:
            return
        # Without an observer, or for memory outside the allocator, the exception is the only source.
        last = errors[-1] if errors else {"device": _device_of(str(error)), "step": step}
        if not caught and "path" not in last:
            last |= {**self._snapshot(current), "is_snapshot_later": True}
        if error is not None:
            last |= {"type": type(error).__name__, "message": str(error)[:_MESSAGE_CHARACTERS]}
            site = session.site_of(error.__traceback__) or last.get("site")
            last |= {"site": site, "in_handler": in_handler, "thread": thread}
        current.events.append("cuda-oom", caught=caught, errors_count=max(1, len(errors)), **last)

    def _snapshot_of(self, error: Mapping[str, Any], current: session.Session) -> dict[str, Any]:
        """Take a snapshot if one is due. A library that retries at once with less fails in the same state."""
        before = self._errors[-1] if self._errors else {}
        if before.get("step") == error["step"] and "path" in before:
            return {name: before[name] for name in _SNAPSHOT if name in before}
        if self._snapshots_left <= 0 and error["error_time_ns"] < self._next_snapshot_ns:
            return {}
        self._snapshots_left -= 1
        snapshot = self._snapshot(current)
        self._next_snapshot_ns = time.monotonic_ns() + _SNAPSHOT_EVERY_NS
        return snapshot

    def _observe(self) -> None:
        """Attach an observer. Other allocators accept none: their errors are known from the exception alone."""
        if self._torch.cuda.get_allocator_backend() != "native":
            return
        self._torch._C._cuda_attach_out_of_memory_observer(self.on_error)

    def _record_history(self) -> None:
        entries = int(os.environ.get(MEMORY_HISTORY_VARIABLE) or 0)
        if entries > 0:
            record = self._torch.cuda.memory._record_memory_history
            record(enabled="all", stacks="python", max_entries=entries)
            self._progress.requests.has_history = True
            self.on_remove(lambda: record(enabled=None))

    def _report_caught(self, current: session.Session, step: int) -> None:
        self.report(current, step, caught=True)

    def _excepthook(self, previous: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._report_uncaught(error)
            previous(kind, error, trace)

        return excepthook

    def _report_uncaught(self, error: BaseException | None) -> None:
        """Report an out-of-memory error behind the exception that ends this process, if there is one."""
        cause = self.attempt(_out_of_memory_behind, error)
        # Without one, another error ended the training, perhaps a consequence of the one that it caught.
        self._guarded_report(caught=None if cause is None else False, error=cause)

    def _thread_excepthook(self, previous: Any) -> Any:
        def excepthook(args: threading.ExceptHookArgs) -> None:
            cause = self.attempt(_out_of_memory_behind, args.exc_value)
            if cause is not None and args.thread is not None:
                is_training = args.thread.ident == self._progress.thread
                self._guarded_report(caught=False if is_training else None, error=cause, thread=args.thread.name)
            previous(args)

        return excepthook

    def _guarded_report(
        self, *, caught: bool | None = None, error: BaseException | None = None, thread: str | None = None
    ) -> None:
        if (current := session.active) is not None:
            if error is not None and not self._errors:  # no observer has read anything
                self._progress.calls.run()
                self._gauge(current)
            self.attempt(self.report, current, self._progress.step, caught=caught, error=error, thread=thread)

    def _gauge(self, current: session.Session) -> None:
        """Record the allocators: the step may never reach its own record, and no step may have ended yet."""
        self._progress.uses_device = not is_worker()
        self._progress.gauge(current)

    def _snapshot(self, current: session.Session) -> dict[str, Any]:
        try:
            return save_allocator(current, self._torch, with_history=self._progress.requests.has_history)
        except Exception as error:
            return {"snapshot_error": f"{type(error).__name__}: {error}"}


def _device_of(message: str) -> int | None:
    """Return the run's number of the device that an error names; a worker's error is recorded in the worker."""
    named = None if message.startswith("Caught ") else _DEVICE.search(message)
    return number_in_run(int(named[1])) if named else None


def _out_of_memory_behind(error: BaseException | None) -> BaseException | None:
    """Return the error, or the one that it was raised from, if CUDA's memory ran out."""
    seen: list[BaseException] = []  # `raise error from error` makes an error its own cause
    while error is not None and not any(error is each for each in seen):
        if is_out_of_memory(error):
            return error
        seen.append(error)
        error = error.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether CUDA's memory ran out, by torch's allocator or by an error of CUDA itself to a library."""
    text = str(error)
    is_named = "out of memory" in text and any(name in text for name in ("CUDA", "HIP", "XPU"))
    # Without NVML the allocator fails while it composes its message (`reportProcessMemoryInfo`), and nowhere else.
    is_named |= "NVML_SUCCESS" in text and "CachingAllocator" in text
    return type(error).__name__ == "OutOfMemoryError" or is_named


def install(progress: Progress, states: LoadedStates | None) -> OomHook:
    """Wait for CUDA to be initialised; nothing is done to CUDA before."""
    hook = OomHook(progress, states, sys.modules["torch"])
    sys.modules["torch.cuda"]._lazy_call(hook.cuda_is_ready)
    return hook
