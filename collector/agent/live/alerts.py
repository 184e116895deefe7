"""Alerts: a finding is sent when it appears and again when it becomes more severe, to a command or a webhook.

Each sender has a thread with a bounded queue, so nothing here delays the collector. A failure is one line on
stderr. Messages show only scheme and host of a webhook's URL, since the rest may hold secrets.
"""

from __future__ import annotations

import base64
import contextlib
import html
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

from collector.agent.problems import say
from collector.findings import SEVERITIES, Finding, Locus, as_json

KIND_VARIABLE = "TIDEGAUGE_FINDING_KIND"
SEVERITY_VARIABLE = "TIDEGAUGE_FINDING_SEVERITY"
#: Seconds after which a command is killed with all that it started.
COMMAND_SECONDS = 30.0
#: Seconds that a webhook has to answer, and pauses in seconds before each retry.
REQUEST_SECONDS = 10.0
RETRY_AFTER_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Alerts that can wait for one sender; further ones are dropped.
QUEUE_SIZE = 100
#: Seconds that the end of a run waits for alerts that are still queued.
PATIENCE_SECONDS = 20.0
#: Longest message that Discord takes.
_DISCORD_CHARACTERS = 2000
#: HTTP statuses below 500 after which a retry may succeed.
_RETRIABLE = (408, 425, 429)

#: (kind, locus) -> severity that was sent last, as its index in `SEVERITIES`.
LastSent = dict[tuple[str, Locus], int]


def new_findings(findings: Iterable[Finding], last_sent: LastSent) -> tuple[list[Finding], LastSent]:
    """Return the warnings, and worse, that are new or more severe, and `last_sent` with them. Pure."""
    new, last_sent = [], dict(last_sent)
    for finding in findings:
        index, key = SEVERITIES.index(finding.severity), (finding.kind, finding.locus)
        if finding.severity != "info" and index < last_sent.get(key, len(SEVERITIES)):
            last_sent[key] = index
            new.append(finding)
    return new, last_sent


@dataclass(frozen=True, slots=True)
class Alert:
    """One finding of one run."""

    run_id: str
    name: str
    finding: Finding


#: Sends one alert and returns what went wrong, or None. It waits with the function that it gets, which returns
#: True if it should give up.
Sender = Callable[[Alert, Callable[[float], bool]], str | None]


class Alerts:
    """The alerts on new findings of each verdict: each sender gets every alert, in its own thread."""

    def __init__(self, senders: Iterable[Sender]) -> None:
        self._last_sent: LastSent = {}
        self._channels = [_Channel(sender) for sender in senders]

    def send(self, run_id: str, name: str, findings: Iterable[Finding]) -> None:
        """Queue alerts on the new findings of a verdict; return at once."""
        new, self._last_sent = new_findings(findings, self._last_sent)
        for finding in new:
            for channel in self._channels:
                channel.put(Alert(run_id, name, finding))

    def close(self) -> None:
        """Wait for queued alerts, for a bounded time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for channel in self._channels:
            channel.close(deadline)


class _Channel:
    """The queue of one sender, and the thread that runs it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._queue: queue.Queue[Alert] = queue.Queue(QUEUE_SIZE)
        self._given_up = threading.Event()
        threading.Thread(target=self._work, name="alerts", daemon=True).start()

    def put(self, alert: Alert) -> None:
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            say(f"{alert.finding.kind} was not reported: {QUEUE_SIZE} findings wait already")

    def close(self, deadline: float) -> None:
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks and (left_seconds := deadline - time.monotonic()) > 0:
                self._queue.all_tasks_done.wait(left_seconds)
            left_count = self._queue.unfinished_tasks
        self._given_up.set()
        if left_count:
            say(f"findings not reported within {PATIENCE_SECONDS:g} s of the end: {left_count}")

    def _work(self) -> None:
        while True:
            alert = self._queue.get()
            try:
                problem = self._sender(alert, self._given_up.wait)
            except Exception as error:  # noqa: BLE001 - the other alerts must be sent
                problem = type(error).__name__
            if problem is not None and not self._given_up.is_set():
                say(f"{alert.finding.kind} was not reported: {problem}")
            self._queue.task_done()


def command_sender(command: str, *, option: str = "--on-finding") -> Sender:
    """Make a sender that runs a shell command with the finding's JSON on stdin; its output goes to stderr.

    Messages name `option`.

    Raises:
        ValueError: there is no command.
    """
    if not command.strip() or "\0" in command:
        raise ValueError("it is empty; give a shell command, such as 'mail -s tidegauge me'")

    def send(alert: Alert, _wait: Callable[[float], bool]) -> str | None:
        finding = alert.finding
        environ = {**os.environ, KIND_VARIABLE: finding.kind, SEVERITY_VARIABLE: finding.severity}
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the training alone.
        )
        try:
            process.communicate(json.dumps(as_json(finding)).encode(), COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{option} took longer than {COMMAND_SECONDS:g} s and was killed"
        status = process.returncode
        return None if status == 0 else f"{option} ended with status {status}"

    return send


def webhook_sender(url: str) -> Sender:
    """Make a sender that posts run and finding as JSON, and retries if that may help.

    Raises:
        ValueError: the URL cannot be posted to; the message does not show it.
    """
    request = _request(url)

    def send(alert: Alert, wait: Callable[[float], bool]) -> str | None:
        request.data = json.dumps(payload(alert, request.host)).encode()
        for pause_seconds in (*RETRY_AFTER_SECONDS, None):
            problem, may_retry = _post(request)
            if problem is None:
                return None
            if not may_retry or pause_seconds is None or wait(pause_seconds):
                break
        return f"{request.type}://{request.host}: {problem}"

    return send


def payload(alert: Alert, host: str) -> dict[str, Any]:
    """Return the body of a webhook's request: a text for Slack and Discord, else run and finding as in the report.

    Their forms: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and
    https://docs.discord.com/developers/resources/webhook#execute-webhook.
    """
    finding = alert.finding
    if host in ("hooks.slack.com", "hooks.slack-gov.com"):
        name, summary = (html.escape(text, quote=False) for text in (alert.name, finding.summary))
        return {"text": f"*{name}*: {finding.kind} ({finding.severity})\n{summary}"}
    if f".{host}".endswith((".discord.com", ".discordapp.com")):  # ptb and canary are Discord's test versions
        text = f"**{alert.name}**: {finding.kind} ({finding.severity})\n{finding.summary}"
        return {"content": text[:_DISCORD_CHARACTERS]}
    return {"schema": 1, "run": {"run_id": alert.run_id, "name": alert.name}, "finding": as_json(finding)}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: it would become a GET without the body, and leak the credentials."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _post(request: urllib.request.Request) -> tuple[str | None, bool]:
    """Post a request; return what went wrong, if anything, and whether a retry may succeed."""
    try:
        with _OPENER.open(request, timeout=REQUEST_SECONDS):
            return None, False
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code >= 500 or error.code in _RETRIABLE
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__, True
    except Exception as error:  # noqa: BLE001 - the text of some errors holds the URL
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
