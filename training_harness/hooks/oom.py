"""CUDA out of memory: what was asked for, what there was, and who held it.

The allocator calls observers before it raises, with the GIL held: they copy four integers and no more, since
whatever takes the allocator's lock there may wait for a thread that wants the GIL. The rest is done afterwards: by
the exception hook while the traceback still keeps the tensors alive, at the end of the next step if the training
caught the error and went on, or at the exit. (c10/cuda/CUDACachingAllocator.cpp `malloc`; the third integer is the
device's memory, or the share of it that the process may use.)
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook
from training_harness.hooks.progress import Progress
from training_harness.hooks.snapshots import save_allocator
from training_harness.layout import MEMORY_HISTORY_VARIABLE

#: A training that tries batch sizes until one fits gets no snapshot of each: the last error gets its own.
_SNAPSHOTS_OF_CAUGHT = 2
_KEPT = 64
_MESSAGE_CHARACTERS = 2000


class OomHook(Hook):
    """Watches for errors from the moment when CUDA is initialised, and records the allocation history if asked to.

    Args:
        progress: tells the step, and ends it.
        torch: the module.
    """

    def __init__(self, progress: Progress, torch: Any) -> None:
        super().__init__("cuda_oom")
        self._progress = progress
        self._torch = torch
        self._noticed: deque[tuple[int, int, int, int, int]] = deque(maxlen=_KEPT)
        self._snapshots_left = _SNAPSHOTS_OF_CAUGHT

    def cuda_is_ready(self) -> None:
        """CUDA has just been initialised. Never raises: torch would take it for an error of CUDA's."""
        if not self.active:
            return
        self.replace(sys, "excepthook", self._excepthook)
        multiprocessing.util.Finalize(None, self._guarded_tell, exitpriority=1)
        for name, start in (("cuda_oom_observer", self._observe), ("memory_history", self._record_history)):
            try:
                start()
            except Exception as error:  # cudaMallocAsync has neither
                Hook(name).fail(error)

    def noticed(self, device: int, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """The allocator is about to raise."""
        if self.active:
            self._noticed.append((time.monotonic_ns(), device, requested_bytes, limit_bytes, free_bytes))
            self._progress.requests.call(self._training_went_on)

    def tell(
        self, current: session.Session, step: int, *, caught: bool | None, error: BaseException | None = None
    ) -> None:
        """Write a `cuda-oom` event for the errors since the last one, and a snapshot."""
        errors = [self._noticed.popleft() for _ in range(len(self._noticed))]
        if not errors and error is None:
            return
        # An allocator without observers, or memory that is not the allocator's, leaves the exception alone.
        at_ns, device, requested, limit, free = errors[-1] if errors else (None,) * 5
        said: dict[str, Any] = {}
        if not caught or self._snapshots_left > 0:
            self._snapshots_left -= 1
            said = self._snapshot(current)
        if error is not None:
            said |= {"type": type(error).__name__, "message": str(error)[:_MESSAGE_CHARACTERS]}
        if device is not None:
            stats = self._torch.cuda.memory_stats_as_nested_dict(device)
            said |= {name: stats[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes")}
        current.events.append(
            "cuda-oom",
            device=device,
            step=step,
            caught=caught,
            error_time_ns=at_ns,
            errors_count=max(1, len(errors)),
            requested_bytes=requested,
            limit_bytes=limit,
            free_bytes=free,
            **said,
        )

    def _observe(self) -> None:
        self._torch._C._cuda_attach_out_of_memory_observer(self.noticed)

    def _record_history(self) -> None:
        entries = int(os.environ.get(MEMORY_HISTORY_VARIABLE) or 0)
        if entries > 0:
            record = self._torch.cuda.memory._record_memory_history
            record(enabled="all", stacks="python", max_entries=entries)
            self._progress.requests.has_history = True
            self.on_remove(lambda: record(enabled=None))

    def _training_went_on(self, current: session.Session, step: int) -> None:
        self.tell(current, step, caught=True)

    def _excepthook(self, previous: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if is_out_of_memory(error):
                self._guarded_tell(caught=False, error=error)
            else:  # something else ended the training, perhaps for want of what it caught
                self._guarded_tell()
            previous(kind, error, trace)

        return excepthook

    def _guarded_tell(self, *, caught: bool | None = None, error: BaseException | None = None) -> None:
        current = session.active
        if current is None or not self.active:
            return
        try:
            self.tell(current, self._progress.step, caught=caught, error=error)
        except Exception as problem:
            self.fail(problem)

    def _snapshot(self, current: session.Session) -> dict[str, Any]:
        try:
            return save_allocator(current, self._torch, with_history=self._progress.requests.has_history)
        except Exception as error:
            return {"snapshot_error": f"{type(error).__name__}: {error}"}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether CUDA's memory ran out: torch's allocator says so, or CUDA itself to a library."""
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or ("CUDA" in text and "out of memory" in text)


def install(progress: Progress) -> OomHook:
    """Wait for CUDA to be initialised; nothing is done to it before, and nothing where it never is.

    Raises:
        AttributeError: this torch cannot call back then.
        KeyError: `torch.cuda` is not imported yet.
    """
    hook = OomHook(progress, sys.modules["torch"])
    sys.modules["torch.cuda"]._lazy_call(hook.cuda_is_ready)
    return hook
