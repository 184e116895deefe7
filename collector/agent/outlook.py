"""The verdict while the run goes on: made in a thread, so that sampling goes on, and as often as it may cost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from collector.agent.feed import Problems
from collector.store.runs import Run

if TYPE_CHECKING:
    from collector.diagnosis.verdict import Verdict

EVERY_SECONDS = 30.0
#: Share of one core that verdicts may take in the long run.
BUDGET_RATIO = 0.01
#: An end that comes while a verdict is made waits for it, but no longer.
_PATIENCE_SECONDS = 20.0
_NICENESS = 10


def pause_seconds(cost_seconds: float) -> float:
    """From the begin of a verdict that cost so much CPU time to the begin of the next."""
    return max(EVERY_SECONDS, cost_seconds / BUDGET_RATIO)


class Outlook:
    """Makes a verdict on the run from time to time.

    Args:
        run: which run.
        tell: called with each verdict, in the thread that made it.

    """

    def __init__(self, run: Run, tell: Callable[[Verdict], None]) -> None:
        self._run = run
        self._tell = tell
        self._begun_ns: int | None = None
        self._pause_seconds = EVERY_SECONDS
        self._thread: threading.Thread | None = None
        self._closed = False

    def tick(self, now_ns: int, problems: Problems) -> None:
        """Begin a verdict if it is time for one and none is being made; the first waits one interval."""
        if self._begun_ns is None:
            self._begun_ns = now_ns
        due = now_ns - self._begun_ns >= self._pause_seconds * 1e9
        if due and (self._thread is None or not self._thread.is_alive()):
            self._begun_ns = now_ns
            self._thread = threading.Thread(target=self._judge, args=(problems,), name="outlook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for a verdict that is being made, for a bounded time; one that comes later is not told."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        self._closed = True

    def _judge(self, problems: Problems) -> None:
        with suppress(OSError):  # of this thread alone; the training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with problems.guard("verdict"):
            from collector.diagnosis.tables import load_tables
            from collector.diagnosis.verdict import diagnose

            # DuckDB works in threads of its own, so the process is what is measured.
            before_seconds = time.process_time()
            verdict = diagnose(load_tables(self._run))
            self._pause_seconds = pause_seconds(time.process_time() - before_seconds)
            if not self._closed:
                self._tell(verdict)
