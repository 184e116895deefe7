"""The verdict while the run goes on: made by a process that ends with it, and as often as it may cost.

What a verdict imports and reads takes more memory than all else that the collector does, and would stay with it.
So it is `tidegauge report --format json` that makes it; a thread waits for what it says.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from collector.agent import procfs
from collector.agent.feed import Problems
from collector.diagnosis.findings import Finding, from_json
from collector.store.runs import Run

EVERY_SECONDS = 30.0
#: Where a limit is near, verdicts follow each other faster, whatever they cost, but no faster than this.
LEAST_SECONDS = 10.0
#: Share of the time until the nearest limit that passes before the next verdict: if one verdict is not sure of a
#: growth yet, the next one still comes in time.
_SHARE_OF_TIME_LEFT = 0.25
#: Share of one core that verdicts may take in the long run.
BUDGET_RATIO = 0.01
#: A verdict that takes longer is given up.
PATIENCE_SECONDS = 120.0
_NICENESS = 10
#: Where memory runs out, the kernel kills the verdict, not the training (Documentation/filesystems/proc.rst).
_FIRST_TO_BE_KILLED = "1000"


def pause_seconds(cost_seconds: float, nearest_seconds: float = math.inf) -> float:
    """Return the time from the begin of one verdict to the begin of the next.

    Args:
        cost_seconds: CPU time of the last one.
        nearest_seconds: until the nearest limit is met, at the present rate.

    """
    usual = max(EVERY_SECONDS, cost_seconds / BUDGET_RATIO)
    return min(usual, max(LEAST_SECONDS, _SHARE_OF_TIME_LEFT * nearest_seconds))


class Outlook:
    """Makes a verdict on the run from time to time.

    Args:
        run: which run.
        tell: called with the findings of each verdict, in the thread that waited for it.

    Attributes:
        spent_ns: CPU time of the verdicts so far.

    """

    def __init__(self, run: Run, tell: Callable[[Sequence[Finding]], None]) -> None:
        self.spent_ns = 0
        self._run = run
        self._tell = tell
        self._begun_ns: int | None = None
        self._cost_seconds = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def tick(self, now_ns: int, problems: Problems, nearest_seconds: float = math.inf) -> None:
        """Begin a verdict if it is time for one and none is being made; the first waits one interval."""
        if self._begun_ns is None:
            self._begun_ns = now_ns
        due = now_ns - self._begun_ns >= pause_seconds(self._cost_seconds, nearest_seconds) * 1e9
        if due and (self._thread is None or not self._thread.is_alive()):
            self._begun_ns = now_ns
            self._thread = threading.Thread(target=self._judge, args=(problems,), name="outlook", daemon=True)
            self._thread.start()

    @property
    def anon_bytes(self) -> int | None:
        """Anonymous memory of the process that is making a verdict; None if there is none."""
        child = self._child
        status = procfs.read_status("/proc", child.pid) if child is not None and child.returncode is None else None
        if status is None or status.rss_bytes is None:
            return None
        return status.rss_bytes - (status.file_bytes or 0) - (status.shm_bytes or 0)

    def close(self) -> None:
        """Give up a verdict that is being made: the one at the end of the run says more."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        if self._thread is not None:
            self._thread.join()

    def _judge(self, problems: Problems) -> None:
        with problems.guard("verdict"), tempfile.TemporaryFile() as complaints:
            words = [sys.executable, "-P", "-m", "collector", "report", str(self._run.path), "--format", "json"]
            # A session of its own, since Ctrl-C is the command's affair.
            self._child = child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
            )
            if self._closed:
                child.kill()
            with suppress(OSError):  # the training comes first
                os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
                Path(f"/proc/{child.pid}/oom_score_adj").write_text(_FIRST_TO_BE_KILLED)
            said = self._listen(child)
            if self._closed:
                return
            if child.returncode:
                complaints.seek(0)
                last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
                reason = last[0] if last else "it said nothing"
                raise RuntimeError(f"no verdict, status {child.returncode}: {reason}")
            self._tell([from_json(finding) for finding in json.loads(said)["findings"]])

    def _listen(self, child: subprocess.Popen[bytes]) -> bytes:
        """What the child says until it has ended; its cost says when the next verdict is due."""
        assert child.stdout is not None
        giving_up = threading.Timer(PATIENCE_SECONDS, child.kill)
        giving_up.daemon = True
        giving_up.start()
        with child.stdout:
            said = child.stdout.read()
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = procfs.read_stat("/proc", child.pid)  # its times stay until it is waited for
        child.wait()
        giving_up.cancel()
        cost_ns = stat.cpu_ticks * procfs.NS_PER_TICK if stat else 0
        self.spent_ns += cost_ns
        self._cost_seconds = cost_ns / 1e9
        return said
