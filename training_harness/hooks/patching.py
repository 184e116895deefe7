"""Hooks: reversible replacements, and a guard that makes them fail open.

A `Hook` owns the replacements for one source of truth. When its code raises, the hook removes its
replacements, records one event, and the training goes on as without it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, Self, TypeVar, cast

from training_harness import session

#: Python's warnings pass over frames of files with both of these in their names (CPython, Python/_warnings.c,
#: `is_internal_filename`).
_INTERNAL = " (as importlib._bootstrap)"

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def unseen_by_warnings(function: _Function) -> _Function:
    """Let a replacement be no caller for `warnings.warn(…, stacklevel=2)` in the function that it calls.

    The warning names the line of the real caller, and filters by module and line have their usual effect.
    """
    replacement = cast("FunctionType", function)
    code = replacement.__code__
    replacement.__code__ = code.replace(co_filename=code.co_filename + _INTERNAL)
    return function


class Hook:
    """A named set of replaced attributes; a `with` block that installs them undoes them if it raises.

    Attributes:
        active: False once removed or failed; wrappers that other code has wrapped in turn stay in
            place and check this flag.
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
        """Set `owner.attribute` to `make(original)` until `remove`."""
        original = getattr(owner, attribute)
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        replacement = make(original)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if getattr(owner, attribute, None) is not replacement:
                return  # other code has wrapped the replacement: it stays, and passes through
            if inherited:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)

        self._undo.append(undo)

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Register another undo for `remove`. `fail` skips it, since torch may be iterating over its hooks then."""
        self._handles.append(undo)

    def remove(self) -> None:
        """Undo every replacement, the last one first."""
        self._restore()
        while self._handles:
            self._handles.pop()()

    def _restore(self) -> None:
        self.active = False
        while self._undo:
            self._undo.pop()()

    def attempt(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result | None:
        """Return the result of a function of the hook's own; None if the hook is inactive or fails by it."""
        if self.active:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.fail(error)
        return None

    def fail(self, error: BaseException) -> None:
        """Remove the hook after an error of its own, and record that once.

        Raises:
            BaseException: `error`, if a signal handler raised it while the hook ran: torch's handler does so when a
                worker was killed, and that error is meant for the training.
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
            self._restore()
        except Exception:
            pass


def _is_from_signal_handler(error: BaseException) -> bool:
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
