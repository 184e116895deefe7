"""The action before a limit is met: a signal to the training, a shell command, or a function of the training.

It is due once for each limit of a run: when the lower end of a forecast comes nearer than the lead time, or when
the limit is nearly full and its use still grows. A process gets a signal only if it has a handler for it, since
most signals would end it otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collector.agent.live.alerts import Alerts, command_sender
from collector.agent.live.limits import Headroom, Level
from collector.agent.live.snapshot_request import put_request, request_path, withdraw
from collector.agent.problems import say
from collector.agent.samplers import procfs
from collector.agent.samplers.procfs import LocalProcess
from collector.findings import Finding, Limit, Locus, as_json, measurements
from collector.store import Run
from collector.units import duration, quantity

LEAD_SECONDS = 60.0
_OPTION = "--before-oom"
#: Seconds beyond the lead time for which a request waits for the end of a step.
_EXPIRY_SECONDS = 60.0

#: A limit of a run on this host: the kind of finding that it will be met, GPU and process.
_Key = tuple[str, int | None, int | None]


def parse_action(text: str) -> signal.Signals | str:
    """Return the signal that a text names (`USR1`, `SIGUSR1`), else the text as a shell command.

    Raises:
        ValueError: no process can handle the signal, or there is no such signal or command.
    """
    name = "SIG" + text.strip().upper().removeprefix("SIG")
    if name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"no process can handle {name}; give a signal such as USR1, or a shell command")
    if name in signal.Signals.__members__:
        return signal.Signals[name]
    command_sender(text)
    if text.strip().isalnum() and shutil.which(text.strip()) is None:  # it would fail when it is needed
        raise ValueError(
            f"there is no signal or command {text.strip()}; give a signal such as USR1, or a shell command"
        )
    return text


class BeforeOom:
    """The action of `--before-oom`, and the functions that the training registered with `on_risk`.

    Args:
        action: a signal, or a shell command that gets the finding as JSON on stdin; None for functions alone.
        lead_seconds: time before the limit at which it is due.
    """

    def __init__(self, action: signal.Signals | str | None = None, lead_seconds: float = LEAD_SECONDS) -> None:
        self._signal = action if isinstance(action, signal.Signals) else None
        self._command = Alerts([command_sender(action, option=_OPTION)]) if type(action) is str else None
        self._lead_seconds = lead_seconds
        self._has_functions = False
        self._run: Run | None = None
        self._name = ""
        #: Forecasts of the last verdict: the earliest time at which the limit is met, and the finding.
        self._forecasts: list[tuple[float, Finding]] = []
        self._reached: set[tuple[_Key, LocalProcess | None]] = set()
        self._requests: list[Path] = []
        self._host = socket.gethostname()

    @property
    def is_wanted(self) -> bool:
        """True if there is an option or a function."""
        return self._has_functions or self._signal is not None or self._command is not None

    def begin(self, run: Run, name: str) -> None:
        """Act for this run from now on."""
        self._run, self._name = run, name

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Take note of a function that the training registered."""
        if event["kind"] == "risk-listener":
            self._lead_seconds = max(self._lead_seconds if self.is_wanted else 0.0, float(event["lead_seconds"]))
            self._has_functions = True

    def note_findings(self, findings: Iterable[Finding], now_seconds: float) -> None:
        """Keep the forecasts of a verdict."""
        self._forecasts = [
            (now_seconds + finding.eta.low_seconds, finding)
            for finding in findings
            if finding.group == "memory forecast"
            and finding.eta is not None
            and finding.severity != "info"
            and finding.locus.host in (None, self._host)
        ]

    def tick(
        self, now_seconds: float, headroom: Headroom, processes: Sequence[LocalProcess]
    ) -> Iterator[dict[str, Any]]:
        """Act where it is due, at the time of the last samples; yield the fields of an event for each time it did.

        The processes are the training processes of this host, or the command if none is known.
        """
        due = [finding for at, finding in self._forecasts if at - now_seconds <= self._lead_seconds]
        due += [_nearly_full(level, rate, self._host) for level, rate in headroom.nearly_full()]
        for finding in due:
            yield from self._act(finding, processes)

    def _act(self, finding: Finding, processes: Sequence[LocalProcess]) -> Iterator[dict[str, Any]]:
        key = (finding.kind, finding.locus.device, finding.locus.pid if finding.kind.startswith("fd-") else None)
        fields = {
            "risk": finding.kind,
            "limit": finding.limit.name if finding.limit else None,
            "seconds_left": finding.eta.low_seconds if finding.eta else None,
        }
        if self._signal is not None:
            reached = [process for process in processes if self._send(key, process, self._signal)]
            if reached:
                say(f"{_OPTION}: {self._signal.name} sent. {finding.summary}")
                yield {**fields, "action": self._signal.name, "pids": [process.pid for process in reached]}
        if (key, None) in self._reached or self._run is None:
            return
        self._reached.add((key, None))
        if self._command is not None:
            self._command.send(self._run.run_id, self._name, [finding])
            yield {**fields, "action": "command", "pids": []}
        if self._has_functions:
            self._request(self._run, key, finding)
            yield {**fields, "action": "function", "pids": [process.pid for process in processes]}

    def _send(self, key: _Key, process: LocalProcess, number: signal.Signals) -> bool:
        """Send the signal, once, to a process that handles it; return whether it was sent now."""
        if (key, process) in self._reached or not process.is_alive():
            return False
        if not procfs.handles_signal(procfs.PROC, process.pid, number):
            if (key, None) not in self._reached:
                why = f"{number.name} would end process {process.pid}, which has no handler for it"
                say(f"{_OPTION}: {why}: not sent")
            return False
        self._reached.add((key, process))
        with suppress(OSError):
            os.kill(process.pid, number)
            return True
        return False

    def _request(self, run: Run, key: _Key, finding: Finding) -> None:
        path = request_path(run, "-".join(["risk", *(str(part) for part in key if part is not None)]))
        lasts_seconds = self._lead_seconds + _EXPIRY_SECONDS
        put_request(
            path, "risk", steps=0, lasts_seconds=lasts_seconds, to={"role": "main"}, finding=as_json(finding)
        )
        self._requests.append(path)

    def run_ended(self) -> None:
        """Withdraw the requests."""
        withdraw(self._requests)

    def close(self) -> None:
        """Wait for the shell command, for a bounded time."""
        if self._command is not None:
            self._command.close()


def _nearly_full(level: Level, rate: float, host: str) -> Finding:
    left, total = level.total - level.used, quantity(level.total, level.unit)
    per_second = quantity(rate, level.unit)
    return Finding(
        kind=level.risk,
        severity="critical",
        confidence=0.9,
        summary=f"{quantity(level.used, level.unit)} of {total} ({level.name}) are in use, and grow by "
        f"{per_second}/s; at this rate the rest lasts {duration(left / rate)}.",
        locus=Locus(host=host, device=level.device, pid=level.pid),
        evidence=measurements(
            1, "last samples", **{f"headroom_{level.unit}": left, f"used_{level.unit}": level.used}
        ),
        limit=Limit(name=level.name, value=level.total, unit=level.unit),
    )
