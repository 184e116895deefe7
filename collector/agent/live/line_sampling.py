"""Series of stacks that name the lines behind a slow loader, within a budget of CPU time.

A thread waits for py-spy, so the loop goes on. Nothing in the training is paused.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collector.agent.problems import Problems
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError
from collector.agent.samplers.stack_series import record_series
from collector.findings import KINDS, Finding

#: Share of a core that the series may take over the run.
BUDGET_RATIO = 0.01
#: Seconds that a warning must stand.
STANDING_SECONDS = 30.0
#: Length of a series, in seconds; the first one is shorter, so that it comes early within the budget.
SERIES_SECONDS = 3
_FIRST_SERIES_SECONDS = 2
#: Seconds to the next series once there are enough samples.
REPEAT_SECONDS = 300.0
#: CPU time per second of sampling and process, until it is measured.
_FIRST_COST_RATIO = 0.03
#: Failures after which no further series is tried.
_MOST_FAILURES = 3
#: Moments that are enough; pauses fill a small share of them.
_ENOUGH_MOMENTS, _ENOUGH_FOR_PAUSES = 120, 400
_CLOSE_SECONDS = 0.3

#: A training process and its rank.
Main = tuple[LocalProcess, int | None]


class LineSampler:
    """Decides when stacks are worth their cost, and takes them in a thread.

    Args:
        always: sample from the start of the training; else once a warning stands.
        record: takes one series; raises StackError if stacks cannot be read.

    Attributes:
        spent_ns: CPU time of the series so far.
    """

    def __init__(self, *, always: bool, record: Callable[..., dict[str, Any]] = record_series) -> None:
        self.spent_ns = 0
        self._always = always
        self._record = record
        self._begin_ns: int | None = None
        self._now_ns = 0
        #: Finding that a series can explain -> the time at which it was first in a verdict. Only `note` changes it.
        self._standing: dict[tuple[object, ...], int] = {}
        self._findings: Sequence[Finding] = ()
        self._moments = self._turn = 0
        #: With workers or without them -> CPU time per second of sampling.
        self._cost_ratios: dict[bool, float] = {}
        self._last_ns = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._results: list[dict[str, Any]] = []
        self._is_off = False

    def note(self, findings: Sequence[Finding]) -> None:
        """Take note of a verdict, in the thread that made it."""
        found = [finding for finding in findings if finding.has_line]
        if not self._always:
            found = [finding for finding in found if finding.severity != "info"]
        places = ((finding, finding.locus) for finding in found)
        keys = {(f.kind, f.limited_by, at.host, at.rank, at.loader, at.worker) for f, at in places}
        if keys - set(self._standing):
            self._moments = 0
        self._standing = {key: self._standing.get(key, self._now_ns) for key in keys}
        self._findings = found

    def tick(
        self, now_ns: int, mains: Sequence[Main], workers_count: int, problems: Problems
    ) -> list[dict[str, Any]]:
        """Begin a series if one is due; return the fields of the events of the series that have ended."""
        self._now_ns = now_ns
        self._begin_ns = self._begin_ns or now_ns
        if mains and not self._is_off and (self._thread is None or not self._thread.is_alive()):
            main, with_children = self._target(mains)
            processes = 1 + (workers_count / len(mains) if with_children else 0)
            cost_ratio = self._cost_ratios.get(with_children, _FIRST_COST_RATIO * processes)
            seconds = self._seconds(now_ns, cost_ratio)
            if seconds and self._is_due(now_ns):
                self._last_ns = now_ns
                self._turn += 1
                arguments = (main, seconds, with_children, problems)
                self._thread = threading.Thread(target=self._take, args=arguments, name="stacks", daemon=True)
                self._thread.start()
        return self._finished()

    def close(self) -> list[dict[str, Any]]:
        """Take no further series; return the last ones. py-spy ends with the training, or is killed."""
        self._is_off = True
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive() and self._child is not None:
                self._child.kill()
                self._thread.join()
        return self._finished()

    def _finished(self) -> list[dict[str, Any]]:
        return [self._results.pop(0) for _ in range(len(self._results))]

    def _is_due(self, now_ns: int) -> bool:
        since_ns = min(self._standing.values(), default=now_ns)
        if not self._always and now_ns - since_ns < STANDING_SECONDS * 1e9:
            return False
        has_pauses = any(finding.kind == "main-thread-pause" for finding in self._findings)
        if self._moments < (_ENOUGH_FOR_PAUSES if has_pauses else _ENOUGH_MOMENTS):
            return True
        return now_ns - self._last_ns >= REPEAT_SECONDS * 1e9

    def _seconds(self, now_ns: int, cost_ratio: float) -> int:
        """Return the length of the next series, 0 if the budget does not allow it yet."""
        assert self._begin_ns is not None
        left_seconds = (BUDGET_RATIO * (now_ns - self._begin_ns) - self.spent_ns) / 1e9
        seconds = SERIES_SECONDS if self.spent_ns else _FIRST_SERIES_SECONDS
        return seconds if seconds * cost_ratio <= left_seconds else 0

    def _target(self, mains: Sequence[Main]) -> tuple[LocalProcess, bool]:
        """Return the training process to sample, in turn those of the findings, and whether with its workers."""
        if not self._findings:
            return mains[self._turn % len(mains)][0], True
        finding = self._findings[self._turn % len(self._findings)]
        where = finding.locus
        pids = (where.pid if where.role == "main" else None, where.main_pid)
        fitting = (
            process
            for process, rank in mains
            if where.rank in (None, rank) and all(pid in (None, process.pid) for pid in pids)
        )
        return next(fitting, mains[0][0]), KINDS[finding.kind].stacks_of != "main"

    def _take(self, main: LocalProcess, seconds: int, with_children: bool, problems: Problems) -> None:
        def note_child(child: subprocess.Popen[bytes]) -> None:
            self._child = child

        with problems.guard("lines"):
            try:
                fields = self._record(main, seconds, with_children=with_children, on_begin=note_child)
            except StackError:
                if self._is_off or not main.is_alive():
                    return
                self._failures += 1
                self._is_off = self._failures >= _MOST_FAILURES
                raise
            self.spent_ns += round(fields["cpu_seconds"] * 1e9)
            self._cost_ratios[with_children] = max(fields["cpu_seconds"] / seconds, 1e-3)
            self._moments += len(fields["times_ns"])
            self._results.append(fields)
