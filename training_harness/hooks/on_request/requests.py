"""Answer requests to a running training (`tidegauge snapshot`) at a step boundary.

The answers: a snapshot of the allocator, a census of tensors, the lines whose allocations stay alive, and a profile
of a few steps by `torch.profiler` with memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from training_harness import session
from training_harness.hooks.on_request import risk
from training_harness.hooks.on_request.allocation_growth import Growth
from training_harness.hooks.on_request.snapshots import RefusedError, save, save_allocator, write
from training_harness.hooks.on_request.tensor_census import census
from training_harness.hooks.patching import Hook
from training_harness.layout import REQUESTS
from training_harness.session import Session

POLL_EVERY_NS = 500_000_000
_NEVER_NS = 2**63
_TRAINING = {"role": "main"}

_AnswerMaker = Callable[[session.Session], dict[str, Any] | None]
#: Largest trace in bytes; a larger one is deleted, and its summary stays.
MAX_TRACE_BYTES = 256 * 2**20
#: Longest profile in ns, even if the requested steps take longer: the profiler holds every operator in memory.
LIMIT_NS = 60_000_000_000
_OPERATORS = 50


class Requests:
    """Requests to this process, and other work that waits for the end of a step.

    Args:
        labels: fields that identify this process in addition to host, pid and rank; a training process by default.
        unit: unit at whose end `serve` is called, `steps` or `batches`.

    Attributes:
        due_ns: time after which the next step boundary must call `serve`.
        has_history: whether the allocation history is recorded.
    """

    def __init__(self, labels: Mapping[str, Any] | None = None, unit: str = "steps") -> None:
        self.due_ns = 0
        self.has_history = False
        self._labels = labels or _TRAINING
        self._unit = unit
        self._hook = Hook("requests")
        self._names: set[str] = set()
        self._callback: Callable[[session.Session, int], None] | None = None
        self._running: Profile | Growth | None = None
        self._running_name = ""
        self._running_since_ns = 0

    def call(self, function: Callable[[session.Session, int], None]) -> None:
        """Schedule a call at the end of this step; it replaces one that is scheduled already."""
        self._callback = function
        if self._hook.active:
            self.due_ns = 0

    def serve(self, current: session.Session, step: int) -> int:
        """Do the waiting work at the end of a step; return the time after it in ns. Never raises."""
        try:
            function, self._callback = self._callback, None
            if function is not None:
                function(current, step)
            if self._running is not None:
                self._end_if(current, step, self._running, self._running.end_step)
            for name in self._new_requests(current.run_dir):
                self._answer(current, step, name, functools.partial(self._make_answer, step=step, name=name))
            now_ns = time.monotonic_ns()
            self.due_ns = 0 if self._running is not None else now_ns + POLL_EVERY_NS
        except Exception as error:
            self.due_ns = _NEVER_NS
            self.close()
            self._hook.fail(error)
        return time.monotonic_ns()

    def expire(self, current: session.Session, step: int) -> int:
        """End a profile or trace whose time is up within a long step; return the time after it in ns."""
        if self._running is not None:
            self._end_if(current, step, self._running, self._running.is_expired)
        return time.monotonic_ns()

    def close(self) -> None:
        """Stop a running profile or trace; its request gets no answer. Never raises."""
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(Exception):
                running.stop()

    def _end_if(
        self, current: session.Session, step: int, running: Profile | Growth, is_over: Callable[[], bool]
    ) -> None:
        """End a profile or trace that is over or has failed. A failure concerns only its own request."""
        make: _AnswerMaker = running.save
        try:
            if not is_over():
                return
        except Exception as error:
            self.close()
            make = functools.partial(_fail, error)
        self._running = None
        self._answer(current, step, self._running_name, make, since_ns=self._running_since_ns)

    def _new_requests(self, run_dir: Path) -> list[str]:
        try:
            names = {name[:-5] for name in os.listdir(run_dir / REQUESTS) if name.endswith(".json")}
        except FileNotFoundError:  # there was no request yet
            return []
        new_names, self._names = names - self._names, names
        return sorted(new_names)

    def _answer(
        self, current: session.Session, step: int, name: str, make: _AnswerMaker, *, since_ns: int | None = None
    ) -> None:
        begun_ns = time.monotonic_ns()
        try:
            answer = make(current)
        except RefusedError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            held_ns = time.monotonic_ns() - begun_ns
            what = name.partition("-")[0]
            times = {"begun_ns": since_ns or begun_ns, "held_ns": held_ns}
            current.events.append("snapshot", request=name, what=what, step=step, **times, **self._labels, **answer)

    def _make_answer(self, current: session.Session, *, step: int, name: str) -> dict[str, Any] | None:
        """Return the fields of the answer; None if there is none, or if it follows in a later step."""
        try:
            request = json.loads((current.run_dir / REQUESTS / f"{name}.json").read_bytes())
        except FileNotFoundError:  # the request was withdrawn just now
            return None
        identity = current.identity
        labels = {"host": identity.host, "pid": identity.pid, "rank": identity.rank, **self._labels}
        if (
            request["expires_wall_ns"] < time.time_ns()
            or not request.get("to", _TRAINING).items() <= labels.items()
        ):
            return None
        torch, what = sys.modules["torch"], request["what"]
        if what == "risk":
            risk.call(current, step, request["finding"])
            return None
        if what == "census":
            return save(current, what, {"step": step, **census(torch)})
        if what == "allocator":
            return save_allocator(current, torch, with_history=self.has_history)
        if what not in ("profile", "growth"):
            raise RefusedError(f"this version does not know {what!r}; a newer Tidegauge requested it")
        if self._running is not None:
            raise RefusedError("another profile or growth is being recorded; try again when it has ended")
        steps = int(request["steps"])
        self._running = Profile(torch, steps) if what == "profile" else Growth(torch, steps, self._unit)
        self._running_name, self._running_since_ns = name, time.monotonic_ns()
        return None


def _fail(error: Exception, _current: session.Session) -> NoReturn:
    raise error


class Profile:
    """Profile of the next steps of this process, for a minute at most; it begins at once.

    Raises:
        RefusedError: the training profiles itself, and only one profiler can run.
    """

    def __init__(self, torch: Any, steps: int) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RefusedError("the training runs a profiler of its own; try again when that has ended")
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # else the profiler would initialise it
            activities.append(profiler.ProfilerActivity.CUDA)
        self._steps = self._steps_left = steps
        self._thread = threading.get_ident()
        self._end_ns = time.monotonic_ns() + LIMIT_NS
        self._profile = profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def end_step(self) -> bool:
        """Count a step; return True when it was the last one and `save` comes next."""
        self._steps_left -= 1
        return self._steps_left == 0 or self.is_expired()

    def is_expired(self) -> bool:
        """Return whether the time is up, in the thread that began the profile: no other thread can end it."""
        return time.monotonic_ns() >= self._end_ns and threading.get_ident() == self._thread

    def stop(self) -> None:
        """End the profile and drop it."""
        self._profile.stop()

    def save(self, current: Session) -> dict[str, Any]:
        """End the profile; write the trace and the operators that allocated most."""
        self._profile.stop()
        operators = top_operators(self._profile.key_averages())
        answer = save(current, "profile", {"steps_count": self._steps - self._steps_left, "operators": operators})
        try:
            return {**answer, "trace": write(current, "trace.json.gz", self._export)["path"]}
        except ValueError as error:
            return {**answer, "trace_error": str(error)}

    def _export(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))
        size = path.stat().st_size
        if size > MAX_TRACE_BYTES:
            raise ValueError(
                f"a trace of {size} bytes is over the bound of {MAX_TRACE_BYTES}: give a smaller --steps"
            )


def top_operators(averages: Any) -> list[dict[str, Any]]:
    """Return the bytes that each operator of a profile itself allocated and did not free, the largest first."""
    first = next(iter(averages), None)
    name = "self_device_memory_usage" if hasattr(first, "self_device_memory_usage") else "self_cuda_memory_usage"
    rows = [
        {
            "operator": entry.key,
            "calls_count": entry.count,
            "cpu_bytes": entry.self_cpu_memory_usage,
            "device_bytes": getattr(entry, name),
        }
        for entry in averages
    ]
    rows = [row for row in rows if max(row["cpu_bytes"], row["device_bytes"]) > 0]
    rows.sort(key=lambda row: -max(row["cpu_bytes"], row["device_bytes"]))
    return rows[:_OPERATORS]
