"""Compilations by `torch.compile`: a `compilation` event after each, so that code that is compiled again is seen.

Dynamo makes its own measurements of each compilation, of the backward pass too (torch/_dynamo/utils.py,
`CompilationMetrics`). It gives them to `create` as of torch 2.7.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook
from training_harness.hooks.training.step_phases import Progress

_MODULE = "torch._dynamo.utils"
#: From this number of events on, one follows another after 10 s at the earliest; each has the totals so far.
_EVERY_ONE = 1000
_EVERY_NS = 10**10
_REASON_CHARACTERS = 200


class _Compilations:
    """The compilations of the thread that trains."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._again_ids: set[str] = set()
        self._again_count = self._again_ns = 0
        self._events_count = self._written_ns = 0

    def note(self, measured: Mapping[str, Any]) -> None:
        """Record a compilation that ends now, with the measurements that Dynamo made of it."""
        current, now_ns = session.active, time.monotonic_ns()
        # A backward pass has the id of its forward pass, and may be compiled in a thread of autograd.
        is_forward, compile_id = measured.get("is_forward") is not False, str(measured["compile_id"])
        if current is None or measured.get("is_runtime"):
            return
        if is_forward and not self._progress.is_training_thread():
            return
        reason, function = measured.get("recompile_reason"), measured.get("co_name")
        elapsed_ns = 1000 * (measured["end_time_us"] - measured["start_time_us"])
        gave_up = reason is not None and function is None
        if reason is not None and not gave_up:
            self._again_ids.add(compile_id)
            self._again_count += 1
        elif is_forward:
            self._again_ids.discard(compile_id)  # ids begin again after torch._dynamo.reset()
        if compile_id in self._again_ids:
            self._again_ns += elapsed_ns
        if self._events_count >= _EVERY_ONE and now_ns < self._written_ns + _EVERY_NS and not gave_up:
            return
        self._events_count, self._written_ns = self._events_count + 1, now_ns
        current.events.append(
            "compilation",
            begun_ns=now_ns - elapsed_ns,
            function=function and _place(function, measured),
            reason=reason and _condition(reason),
            gave_up=gave_up,
            again_count=self._again_count,
            again_ns=self._again_ns,
        )


def _place(function: str, measured: Mapping[str, Any]) -> str:
    """Return where a compiled function is; where the user's code calls it if it is torch's own."""
    path = measured["co_filename"]
    caller = None if session.is_user_code(path) else session.user_frame(sys._getframe(1))
    if caller is not None:
        return session.line_of(caller.f_code, caller.f_lineno)
    return f"{path}:{measured['co_firstlineno']}, in {function}"


def _condition(reason: str) -> str:
    """Return the condition that failed, of a text like `0/3: k.scale == 4.0   # source line`."""
    line = reason.partition("\n")[0]
    return (line.partition(": ")[2] or line).partition("  #")[0].strip()[:_REASON_CHARACTERS]


def install(progress: Progress) -> Hook | None:
    """Note what Dynamo measures of each compilation; None where torch is older than 2.7."""
    measurements = getattr(sys.modules[_MODULE], "CompilationMetrics", None)
    if not hasattr(measurements, "create"):
        progress.capabilities["compilation"] = False
        return None
    compilations = _Compilations(progress)
    with Hook("compilation") as hook:

        def make(create: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(create)
            def noted(measured: dict[str, Any]) -> Any:
                hook.attempt(compilations.note, measured)
                return create(measured)

            return noted

        # The contexts that call `record_compilation_metrics` keep it from their begin on, and it calls this.
        hook.replace(measurements, "create", make)
    return hook
