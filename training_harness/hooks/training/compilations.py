"""Compilations by `torch.compile`: a `compilation` event after each, so that code that is compiled again is seen.

Dynamo records its own measurements after each compilation, of the backward pass too (torch/_dynamo/utils.py,
`record_compilation_metrics`, as of torch 2.6).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook

_MODULE = "torch._dynamo.utils"
#: From this number of events on, one follows another after 10 s at the earliest; each has the totals so far.
_EVERY_ONE = 1000
_EVERY_NS = 10**10
_REASON_CHARACTERS = 200


class _Compilations:
    """The compilations of this process."""

    def __init__(self) -> None:
        self._is_again = False
        self._again_count = self._again_ns = 0
        self._events_count = self._written_ns = 0

    def note(self, elapsed_ns: int, measured: Mapping[str, Any]) -> None:
        """Record a compilation that ends now, with the measurements that Dynamo made of it."""
        current, now_ns = session.active, time.monotonic_ns()
        if current is None or measured.get("is_runtime"):
            return
        reason, function = measured.get("recompile_reason"), measured.get("co_name")
        gave_up = reason is not None and function is None
        if measured.get("is_forward") is not False:  # a backward pass is compiled again as its forward pass was
            self._is_again = reason is not None and not gave_up
            self._again_count += self._is_again
        if self._is_again:
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
    path, frame = measured["co_filename"], sys._getframe(1)
    while not session.is_user_code(path) and frame.f_back is not None:
        frame = frame.f_back
        if session.is_user_code(frame.f_code.co_filename):
            return session.line_of(frame.f_code, frame.f_lineno)
    return f"{path}:{measured['co_firstlineno']}, in {function}"


def _condition(reason: str) -> str:
    """Return the condition that failed, of a text like `0/3: k.scale == 4.0   # source line`."""
    return reason.partition("\n")[0].partition(": ")[2].partition("  #")[0].strip()[:_REASON_CHARACTERS]


def install() -> Hook:
    """Note what Dynamo measures of each compilation."""
    compilations = _Compilations()
    with Hook("compilation") as hook:

        def make(record: Callable[..., None]) -> Callable[..., None]:
            if "metrics" not in record.__code__.co_varnames:
                raise AttributeError("this torch does not measure compilations as torch 2.6 does")

            @functools.wraps(record)
            def noted(start_time_ns: int, end_time_ns: int, metrics: dict[str, Any], *error: Any) -> None:
                record(start_time_ns, end_time_ns, metrics, *error)
                hook.attempt(compilations.note, end_time_ns - start_time_ns, metrics)

            return noted

        hook.replace(sys.modules[_MODULE], "record_compilation_metrics", make)
    return hook
