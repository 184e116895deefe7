"""Alerts: a finding is told when it appears and again when it becomes more severe, by a command or a webhook.

Telling happens in a thread with a bounded queue, so nothing here holds up the collector, and what fails is one
line on stderr. Of a webhook's URL only scheme and host are ever shown: the rest may hold secrets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from collector.diagnosis.findings import SEVERITIES, Finding, Locus, as_json

KIND_VARIABLE = "TIDEGAUGE_FINDING_KIND"
SEVERITY_VARIABLE = "TIDEGAUGE_FINDING_SEVERITY"
#: A command that takes longer is killed with all that it started.
COMMAND_SECONDS = 30.0
#: A webhook has this long to answer, and is asked again after so many seconds.
REQUEST_SECONDS = 10.0
RETRY_AFTER_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: What waits to be told; more than that is dropped.
QUEUE_SIZE = 100
#: At the end of a run, this long is waited for what is still to be told.
PATIENCE_SECONDS = 20.0
_TRY_AGAIN = (408, 425, 429)

Told = dict[tuple[str, Locus], int]
"""(kind, locus) -> severity that was told last, as its place in `SEVERITIES`."""


def news(findings: Iterable[Finding], told: Told) -> tuple[list[Finding], Told]:
    """The warnings, and worse, that were not told as severe as they are; and what is told with them. Pure."""
    new, told = [], dict(told)
    for finding in findings:
        place, key = SEVERITIES.index(finding.severity), (finding.kind, finding.locus)
        if finding.severity != "info" and place < told.get(key, len(SEVERITIES)):
            told[key] = place
            new.append(finding)
    return new, told


@dataclass(frozen=True, slots=True)
class Alert:
    """One finding of one run."""

    run_id: str
    name: str
    finding: Finding


#: Tells one alert and returns what went wrong, or None; waits with the function it is given.
Teller = Callable[[Alert, Callable[[float], bool]], str | None]


class Alerts:
    """Tells what is new in each verdict.

    Args:
        tellers: each is given every alert, in a thread of its own.

    """

    def __init__(self, tellers: Iterable[Teller]) -> None:
        self._told: Told = {}
        self._channels = [_Channel(teller) for teller in tellers]

    def tell(self, run_id: str, name: str, findings: Iterable[Finding]) -> None:
        """Tell what is new; returns at once."""
        new, self._told = news(findings, self._told)
        for finding in new:
            for channel in self._channels:
                channel.put(Alert(run_id, name, finding))

    def close(self) -> None:
        """Wait for what is still to be told, for a bounded time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for channel in self._channels:
            channel.close(deadline)


class _Channel:
    """What one teller still has to tell, and the thread that has it told."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._queue: queue.Queue[Alert] = queue.Queue(QUEUE_SIZE)
        self._given_up = threading.Event()
        threading.Thread(target=self._work, name="alerts", daemon=True).start()

    def put(self, alert: Alert) -> None:
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            _say(f"{alert.finding.kind} was not told: {QUEUE_SIZE} findings wait already")

    def close(self, deadline: float) -> None:
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks and (left_seconds := deadline - time.monotonic()) > 0:
                self._queue.all_tasks_done.wait(left_seconds)
            left_count = self._queue.unfinished_tasks
        self._given_up.set()
        if left_count:
            _say(f"findings not told within {PATIENCE_SECONDS:g} s of the end: {left_count}")

    def _work(self) -> None:
        while True:
            alert = self._queue.get()
            try:
                problem = self._teller(alert, self._given_up.wait)
            except Exception as error:  # noqa: BLE001 - the other alerts must be told
                problem = type(error).__name__
            if problem is not None and not self._given_up.is_set():
                _say(f"{alert.finding.kind} was not told: {problem}")
            self._queue.task_done()


def by_command(command: str) -> Teller:
    """Runs a shell command with the finding's JSON on stdin; its output goes to stderr.

    Raises:
        ValueError: there is no command.

    """
    if not command.strip() or "\0" in command:
        raise ValueError("it is empty; give a shell command, such as 'mail -s tidegauge me'")

    def tell(alert: Alert, _wait: Callable[[float], bool]) -> str | None:
        finding = alert.finding
        environ = {**os.environ, KIND_VARIABLE: finding.kind, SEVERITY_VARIABLE: finding.severity}
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env=environ,
            start_new_session=True,  # Ctrl-C is the training's affair
        )
        try:
            process.communicate(json.dumps(as_json(finding)).encode(), COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"--on-finding took longer than {COMMAND_SECONDS:g} s and was killed"
        status = process.returncode
        return None if status == 0 else f"--on-finding ended with status {status}"

    return tell


def by_webhook(url: str) -> Teller:
    """Posts run and finding as JSON, and tries again where that may help.

    Raises:
        ValueError: it is no URL that can be posted to; the message shows scheme and host at most.

    """
    request = _request(url)

    def tell(alert: Alert, wait: Callable[[float], bool]) -> str | None:
        request.data = json.dumps(payload(alert)).encode()
        for pause_seconds in (*RETRY_AFTER_SECONDS, None):
            problem, again = _post(request)
            if problem is None:
                return None
            if not again or pause_seconds is None or wait(pause_seconds):
                break
        return f"{request.type}://{request.host}: {problem}"

    return tell


def payload(alert: Alert) -> dict[str, Any]:
    """What a webhook is sent; the finding is as in the report."""
    return {
        "schema": 1,
        "run": {"run_id": alert.run_id, "name": alert.name},
        "finding": as_json(alert.finding),
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without its body, and would take the credentials along."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _post(request: urllib.request.Request) -> tuple[str | None, bool]:
    """What went wrong, if anything, and whether it may go well another time."""
    try:
        with _OPENER.open(request, timeout=REQUEST_SECONDS):
            return None, False
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code >= 500 or error.code in _TRY_AGAIN
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__, True
    except Exception as error:  # noqa: BLE001 - the text of some holds the URL
        return type(error).__name__, False


def _request(url: str) -> urllib.request.Request:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise ValueError("it is not of the form http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH")
    name = f"[{host}]" if ":" in host else host
    bare = parts._replace(netloc=name if port is None else f"{name}:{port}", fragment="")
    headers = {"Content-Type": "application/json", "User-Agent": "tidegauge"}
    if parts.username is not None:
        user, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    return urllib.request.Request(bare.geturl(), headers=headers, method="POST")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"tidegauge: {text}\n")
        sys.stderr.flush()
