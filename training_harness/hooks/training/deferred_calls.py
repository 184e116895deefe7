"""Calls that hooks log in the training loop and that run later, those of many short steps in one go.

Code in the middle of a step costs far more than the same code in a tight loop: the model has pushed it out of the
caches, and it pushes the model out in turn. That is some 0.7 µs for each function call, whatever the function does.
So the hooks only log an observation with its time, and work out its meaning when they write it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from training_harness import session

#: Largest number of deferred calls: a forked child that only iterates its parent's loader never runs them.
_CALLS_AT_MOST = 65_536


class DeferredCalls:
    """Logged calls, in their order.

    Attributes:
        log: function that takes a call, `(hook, function, *arguments)`. The call runs if the hook is still active;
            its error counts as the hook's.
        are_deferred: whether the calls wait, so that it does not matter in which step of the loop they are logged.
        due_ns: time of the next write, at the end of a step or when a batch is requested.
        batch_due_ns: time of the next write when a batch arrives: the loop may die of that batch.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=_CALLS_AT_MOST)
        self._running = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget the calls; the next ones wait."""
        self._calls.clear()
        self.due_ns = self.batch_due_ns = 0
        self.set_deferred(yes=True)

    def set_deferred(self, *, yes: bool) -> None:
        """Defer the calls, or run each as it is logged: some read a gauge at that moment."""
        self.are_deferred = yes
        self.log = self._calls.append if yes else self._log_and_run
        if not yes:
            self.run()

    def run(self) -> None:
        """Run the logged calls. One thread at a time does so; the others return at once."""
        if not self._running.acquire(blocking=False):
            return
        try:
            while self._calls:
                hook, function, *arguments = self._calls.popleft()
                if hook.active:
                    try:  # as `Hook.attempt` does, without the cost of another call
                        function(*arguments)
                    except Exception as error:
                        hook.fail(error)
        finally:
            self._running.release()

    def write(self, current: session.Session, now_ns: int) -> None:
        """Write all logged calls and all records on hold."""
        self.due_ns = self.batch_due_ns = now_ns + session.HOLD_NS
        current.flush()

    def write_batches(self, current: session.Session, now_ns: int) -> None:
        """Write the logged batches, and their fetches where no worker made them."""
        self.batch_due_ns = now_ns + session.HOLD_NS
        self.run()
        current.writers["batch"].flush()
        current.writers["fetch"].flush()

    def _log_and_run(self, call: tuple[Any, ...]) -> None:
        self._calls.append(call)
        self.run()
