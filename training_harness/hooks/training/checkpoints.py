"""Checkpoints: a `checkpoint` event after `torch.save`, so that growth at each save can be recognised."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker

_MODULE = "torch.serialization"
#: Least time between the records of two saves: files of one checkpoint follow each other faster.
_EVERY_NS = 10**9
#: The same after 1,000 records.
_EVERY_LATER_NS, _LATER = 10**10, 1000


class _Saves:
    """The saves of this process: notes those that begin a new checkpoint, and sums up those of the main thread."""

    def __init__(self) -> None:
        self._due_ns = 0
        self._events_count = 0
        self._saves_count = self._saves_ns = 0  # in the main thread, since its last event

    def note(self, begun_ns: int) -> None:
        """Record a save that ends now."""
        current, now_ns = session.active, time.monotonic_ns()
        if current is None or is_worker():
            return
        in_main_thread = threading.get_ident() == threading.main_thread().ident
        if in_main_thread:
            self._saves_count += 1
            self._saves_ns += now_ns - begun_ns
        if begun_ns < self._due_ns:
            return
        self._events_count += 1
        self._due_ns = now_ns + (_EVERY_NS if self._events_count < _LATER else _EVERY_LATER_NS)
        sums: dict[str, int | None] = {"saves_count": None, "saves_ns": None}
        if in_main_thread:
            sums = {"saves_count": self._saves_count, "saves_ns": self._saves_ns}
            self._saves_count = self._saves_ns = 0
        current.events.append("checkpoint", begun_ns=begun_ns, **sums)


def install() -> Hook:
    """Note the calls of `torch.save`, under both of its names."""
    saves = _Saves()
    with Hook("checkpoint") as hook:

        def make(save: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(save)
            def noted(*args: Any, **kwargs: Any) -> Any:
                begun_ns = time.monotonic_ns()
                result = save(*args, **kwargs)
                hook.attempt(saves.note, begun_ns)
                return result

            return noted

        module = sys.modules[_MODULE]
        hook.replace(module, "save", make)
        # One function under both names, as before, so that it can be pickled.
        hook.replace(sys.modules["torch"], "save", lambda _: module.save)
    return hook
