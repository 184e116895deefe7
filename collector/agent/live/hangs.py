"""Reports of a training that hangs, while it hangs: a line on stderr, and the action of `--on-hang`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from collector.agent.live.alerts import Alerts, command_sender
from collector.agent.problems import say
from collector.agent.samplers import procfs
from collector.agent.samplers.procfs import LocalProcess
from collector.findings import Finding, Locus
from collector.store import Run
from training_harness.journal import EventLog, Identity

#: Value of `--on-hang` that ends the command; any other one is a shell command.
CANCEL = "cancel"
#: Seconds that the command has to end after SIGTERM.
CANCEL_SECONDS = 30.0
_POLL_SECONDS = 0.05
#: Workers that are checked, and dropped if they have ended, whenever one starts; with 1 the list could only grow.
_CHECKED_COUNT = 2


class HangReports:
    """Reports of the hangs of one run; the action is taken once, at the first.

    Args:
        on_hang: `CANCEL`, a shell command that gets the finding as JSON on stdin, or None.

    Raises:
        ValueError: the shell command is empty.
    """

    def __init__(self, on_hang: str | None = None) -> None:
        self._is_cancelled = on_hang == CANCEL
        commands = [] if on_hang is None or self._is_cancelled else [on_hang]
        self._command = Alerts([command_sender(command, option="--on-hang") for command in commands])
        self._reported: set[tuple[Locus, int | None]] = set()
        self._workers: list[LocalProcess] = []

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Take note of an event of the run's processes on this host: cancelling ends their workers."""
        if self._is_cancelled and event["kind"] == "worker-start":
            oldest, others = self._workers[:_CHECKED_COUNT], self._workers[_CHECKED_COUNT:]
            self._workers[:] = [*others, *filter(LocalProcess.is_alive, oldest), LocalProcess.of(event)]

    def report(self, run: Run, name: str, findings: Iterable[Finding]) -> None:
        """Report the hangs that are new and certain."""
        for finding in findings:
            key = (finding.locus, finding.since_step)
            if finding.kind != "hang" or finding.severity == "info" or key in self._reported:
                continue
            is_first = not self._reported
            self._reported.add(key)
            say(f"{finding.summary.removesuffix('.')}; see: tidegauge stacks {run.run_id}")
            if is_first:
                self._act(run, name, finding)

    def _act(self, run: Run, name: str, finding: Finding) -> None:
        self._command.send(run.run_id, name, [finding])
        command = run.manifest["command"]
        if self._is_cancelled and command is not None and command["host"] == socket.gethostname():
            EventLog(run.events_dir, Identity.of_this_process()).append(
                "hang-cancelled", command_pid=command["pid"]
            )
            say(f"--on-hang cancel: the command gets SIGTERM, and SIGKILL after {CANCEL_SECONDS:g} s")
            processes = LocalProcess.of(command), self._workers, finding.locus
            threading.Thread(target=_cancel, args=processes, name="cancel", daemon=True).start()

    def close(self) -> None:
        """Wait for the shell command, for a bounded time."""
        self._command.close()


def _cancel(command: LocalProcess, workers: Sequence[LocalProcess], culprit: Locus) -> None:
    """End the command, then the processes that may hang: a stuck worker does not notice that its parent is gone."""
    _send(command, signal.SIGTERM)
    deadline = time.monotonic() + CANCEL_SECONDS
    while command.is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _send(command, signal.SIGKILL)
    for process in (*_living(culprit), *workers):
        _send(process, signal.SIGKILL)


def _send(process: LocalProcess, number: int) -> None:
    if process.is_alive():
        with suppress(OSError):
            os.kill(process.pid, number)


def _living(locus: Locus) -> Iterator[LocalProcess]:
    """Yield the process of a finding if it lives on this host."""
    pid = locus.pid if locus.host == socket.gethostname() else None
    ticks = None if pid is None else procfs.start_ticks(procfs.PROC, pid)
    if pid is not None and ticks is not None:
        yield LocalProcess(pid, ticks)
