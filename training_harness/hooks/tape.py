"""What hooks log in the training loop: calls that are made later, those of many short steps in one go.

What runs in the middle of a step costs far more than the same code in a tight loop, because the model has pushed it
out of the caches and it pushes the model out in turn: some 0.7 µs for each function that is called, whatever it
does. So the hooks only note what they see, with the time; what that means is worked out when it is written.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook

#: Calls that may wait: a forked child that only iterates its parent's loader never makes them.
_CALLS_AT_MOST = 65_536


class Tape:
    """The calls that wait, in their order.

    Attributes:
        log: takes a call, `(hook, function, *arguments)`: made if the hook is still active, whose error it may be.
        waits: the calls wait, so that it does not matter in which step of the loop they are logged.
        due_ns: when the hooks are to write next, at the end of a step or as a batch is asked for.
        batch_due_ns: when they are to write as a batch comes: what the loop may die of is in that one.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=_CALLS_AT_MOST)
        self._playing = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget the calls; the next ones wait."""
        self._calls.clear()
        self.due_ns = self.batch_due_ns = 0
        self.wait(yes=True)

    def wait(self, *, yes: bool) -> None:
        """Whether the calls wait, or are made as they are logged: where one reads a gauge at its moment, say."""
        self.waits = yes
        self.log = self._calls.append if yes else self._log_and_play
        if not yes:
            self.play()

    def play(self) -> None:
        """Make the calls; in one thread at a time, the others go on."""
        if not self._playing.acquire(blocking=False):
            return
        try:
            while self._calls:
                hook, function, *arguments = self._calls.popleft()
                if hook.active:
                    _call(hook, function, arguments)
        finally:
            self._playing.release()

    def write(self, current: session.Session, now_ns: int) -> None:
        """Write what was logged and what is held."""
        self.due_ns = self.batch_due_ns = now_ns + session.HOLD_NS
        current.flush()

    def write_batches(self, current: session.Session, now_ns: int) -> None:
        """Write the batches that were logged."""
        self.batch_due_ns = now_ns + session.HOLD_NS
        self.play()
        current.writers["batch"].flush()

    def _log_and_play(self, call: tuple[Any, ...]) -> None:
        self._calls.append(call)
        self.play()


def _call(hook: Hook, function: Any, arguments: list[Any]) -> None:
    try:
        function(*arguments)
    except Exception as error:
        hook.fail(error)
