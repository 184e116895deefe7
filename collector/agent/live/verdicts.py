"""Verdicts while the run goes on, as often as their CPU time allows.

The imports and tables of a verdict take more memory than everything else in the collector, and would stay there.
So another process makes it, `tidegauge report --format json`, and a thread waits for its output.
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

from collector.agent.ingest_process import stand_back
from collector.agent.loader_settings import LoaderSettings
from collector.agent.problems import Problems
from collector.agent.samplers import procfs
from collector.errors import last_line
from collector.findings import Finding, from_json
from collector.store import Run

#: Shortest pause between the begins of two verdicts, in seconds.
EVERY_SECONDS = 30.0
#: Shortest pause if a limit is near, in seconds: then verdicts follow each other faster, whatever they cost.
LEAST_SECONDS = 10.0
#: Share of the time until the nearest limit that passes before the next verdict: if one verdict is not yet sure of
#: a growth, the next one still comes in time.
_SHARE_OF_TIME_LEFT = 0.25
#: Share of one core that verdicts may take in the long run.
BUDGET_RATIO = 0.01
#: Seconds after which a verdict is killed.
PATIENCE_SECONDS = 120.0


def pause_seconds(cost_seconds: float, nearest_seconds: float = math.inf) -> float:
    """Return the time from the start of one verdict to the start of the next.

    Args:
        cost_seconds: CPU time of the last one.
        nearest_seconds: time until the nearest limit is met, at the present rate.
    """
    usual = max(EVERY_SECONDS, cost_seconds / BUDGET_RATIO)
    return min(usual, max(LEAST_SECONDS, _SHARE_OF_TIME_LEFT * nearest_seconds))


class LiveVerdicts:
    """The verdicts on a run while it goes on; `publish` gets the findings of each, in the thread that waited.

    Without `is_regular`, only those that `hurry` asks for are made. `settings` gets those for loaders, if wanted.

    Attributes:
        spent_ns: CPU time of the verdicts so far.
        is_regular: whether verdicts are made now and then.
    """

    def __init__(
        self,
        run: Run,
        publish: Callable[[Sequence[Finding]], None],
        settings: LoaderSettings,
        *,
        is_regular: bool = True,
    ) -> None:
        self.spent_ns = 0
        self.is_regular = is_regular
        self._run = run
        self._publish = publish
        self._settings = settings
        self._last_begin_ns: int | None = None
        self._is_first = True
        self._is_hurried = False
        self._cost_seconds = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def tick(self, now_ns: int, problems: Problems, nearest_seconds: float = math.inf) -> None:
        """Begin a verdict if one is due and none is being made; the first waits one interval."""
        if self._last_begin_ns is None:
            self._last_begin_ns = now_ns
        cost_seconds = 0.0 if self._is_first else self._cost_seconds
        pause_ns = pause_seconds(cost_seconds, nearest_seconds) * 1e9
        is_due = self._is_hurried or (self.is_regular and now_ns - self._last_begin_ns >= pause_ns)
        if is_due and (self._thread is None or not self._thread.is_alive()):
            self._last_begin_ns, self._is_hurried, self._is_first = now_ns, False, False
            self._thread = threading.Thread(target=self._judge, args=(problems,), name="verdict", daemon=True)
            self._thread.start()

    def restart(self) -> None:
        """Let the next verdict come one shortest pause after the next tick, whatever the last one cost."""
        self._last_begin_ns, self._is_first = None, True

    def hurry(self) -> None:
        """Make a verdict at the next tick, whatever the pause."""
        self._is_hurried = True

    @property
    def anon_bytes(self) -> int | None:
        """Anonymous memory of the process that is making a verdict; None without one."""
        child = self._child
        return procfs.anon_bytes(procfs.PROC, child.pid) if child is not None and child.returncode is None else None

    def close(self) -> None:
        """Kill a verdict that is being made: the one at the end of the run is more complete."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        if self._thread is not None:
            self._thread.join()

    def _judge(self, problems: Problems) -> None:
        with problems.guard("verdict"), tempfile.TemporaryFile() as errors:
            tidegauge = (sys.executable, "-P", "-m", "training_harness.command")
            command = [*tidegauge, "report", str(self._run.path), "--format", "json"]
            if self._settings.is_wanted:
                command.append("--settings")
            # Its own session, since Ctrl-C is for the command alone.
            self._child = child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            if self._closed:
                child.kill()
            stand_back(child.pid)
            output = self._read_output(child)
            if self._closed:
                return
            if child.returncode:
                errors.seek(0)
                reason = last_line(errors.read().decode(errors="replace")) or "it said nothing"
                raise RuntimeError(f"no verdict, status {child.returncode}: {reason}")
            report = json.loads(output)
            self._settings.note(report.get("settings", ()))
            self._publish([from_json(finding) for finding in report["findings"]])

    def _read_output(self, child: subprocess.Popen[bytes]) -> bytes:
        """Read the child's output until it ends, and note its cost, which decides when the next verdict is due."""
        assert child.stdout is not None
        timer = threading.Timer(PATIENCE_SECONDS, child.kill)
        timer.daemon = True
        timer.start()
        with child.stdout:
            output = child.stdout.read()
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = procfs.read_stat(procfs.PROC, child.pid)  # Its times stay until `child.wait`.
        child.wait()
        timer.cancel()
        cost_ns = stat.cpu_ticks * procfs.NS_PER_TICK if stat else 0
        self.spent_ns += cost_ns
        self._cost_seconds = cost_ns / 1e9
        return output
