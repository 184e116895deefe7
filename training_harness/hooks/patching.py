"""How hooks get in and out: reversible replacements, and a guard that makes them fail open.

A `Hook` owns the replacements for one source of truth. When its code raises, the hook takes its
replacements out, says so once in an event, and the training goes on as without it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from training_harness import session


class Hook:
    """A named set of replaced attributes; a `with` block of installing is undone if it raises.

    Attributes:
        active: False once removed or failed; wrappers that others have wrapped in turn stay in
            place and look at this flag.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.active = True
        self._undo: list[Callable[[], None]] = []
        self._handles: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.remove()

    def replace(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.attribute` to `make(original)` until `remove`.

        Raises:
            AttributeError: this torch has no such name; the caller decides what that costs.
        """
        original = getattr(owner, attribute)
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        replacement = make(original)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if getattr(owner, attribute, None) is not replacement:
                return  # somebody wrapped our wrapper: it stays, and passes through
            if inherited:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)

        self._undo.append(undo)

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Register what else to undo; not at a failure, which may come while torch goes through its hooks."""
        self._handles.append(undo)

    def remove(self) -> None:
        """Take every replacement out, the last one first."""
        self._put_back()
        while self._handles:
            self._handles.pop()()

    def _put_back(self) -> None:
        self.active = False
        while self._undo:
            self._undo.pop()()

    def fail(self, error: BaseException) -> None:
        """Take the hook out after an error of its own, and say so once.

        Raises:
            BaseException: `error`, where a signal handler raised it while the hook ran: torch's does when a worker
                was killed, and that is meant for the training.
        """
        if _is_from_signal_handler(error):
            raise error
        if not self.active:
            return
        self.active = False
        try:
            current = session.active
            if current is not None:
                current.events.append("hook-disabled", hook=self.name, error=f"{type(error).__name__}: {error}")
            self._put_back()
        except Exception:
            pass


def _is_from_signal_handler(error: BaseException) -> bool:
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
