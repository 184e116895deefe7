"""Findings of a real job, reported by a real command and to a real HTTP server while the job goes on."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from collector.agent.live import alerts
from collector.agent.live.alerts import Alert, command_sender, webhook_sender
from collector.findings import Evidence, Finding
from tests.conftest import bare_environment, wait_for

ALERT = Alert(
    "run-1",
    "demo",
    Finding(
        kind="slow-worker",
        severity="critical",
        confidence=0.9,
        summary="",
        evidence=tuple(Evidence(name=name, value=1, unit="ratio", n=1, window="run") for name in "ab"),
    ),
)
#: The command line, with verdicts every second whatever they cost.
SHORTLY = """
from collector.agent.live import verdicts
verdicts.EVERY_SECONDS = verdicts.BUDGET_RATIO = 1
from collector.cli import main
main()
"""


class Hook(HTTPServer):
    """A server that answers with these statuses, then with 204, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.statuses = list(statuses)
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answered: list[int] = []

    def url(self, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/path?key=secret"


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.server.answered.append(status)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook():
    servers = []

    def start(*statuses: int) -> Hook:
        server = Hook(*statuses)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def at_once(_seconds: float) -> bool:
    return False


def test_live_finding_is_sent_once_to_the_command_and_the_webhook(tmp_path, hook):
    server, log, stderr = hook(503, 500), tmp_path / "told", tmp_path / "stderr"
    home = tmp_path / "home"
    keep = f'(echo "$TIDEGAUGE_FINDING_KIND $TIDEGAUGE_FINDING_SEVERITY"; cat; echo) >> {log}; echo heard; exit 3'
    with stderr.open("w") as stream:
        job = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", SHORTLY, "job"),
                *("--on-finding", keep, "--webhook", server.url("me:secret@")),
                *("fault", "inline-loading", "--steps", "100000"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env={**bare_environment(), "TIDEGAUGE_HOME": str(home), "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_for(lambda: "inline-loading was not reported" in stderr.read_text(), "the command", 120)
        wait_for(lambda: 204 in server.answered, "the webhook")
        assert job.poll() is None
    finally:
        job.terminate()
    assert job.wait(60) == 128 + 15
    lines = log.read_text().splitlines()
    assert lines[0] == "inline-loading warning"
    assert json.loads(lines[1])["kind"] == "inline-loading"
    assert [line for line in lines if line.startswith("inline-loading ")] == lines[:1]
    mine = [body for *_, body in server.asked if json.loads(body)["finding"]["kind"] == "inline-loading"]
    assert len(mine) == 3
    assert json.loads(mine[-1])["finding"] == json.loads(lines[1])
    assert (home / "runs" / json.loads(mine[-1])["run"]["run_id"]).is_dir()
    written = stderr.read_text()
    assert "tidegauge: inline-loading was not reported: --on-finding ended with status 3\n" in written
    assert "heard\n" in written
    assert "secret" not in written
    for path in home.rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path


def test_url_credentials_become_a_header_and_the_query_stays(hook):
    server = hook()
    assert webhook_sender(server.url("me:p%40ss@"))(ALERT, at_once) is None
    ((_, path, headers, body),) = server.asked
    assert path == "/path?key=secret"
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert json.loads(body)["run"] == {"run_id": "run-1", "name": "demo"}


@pytest.mark.parametrize(("statuses", "asked_count"), [([404], 1), ([302], 1), ([429, 503], 3), ([500] * 20, 6)])
def test_only_transient_statuses_are_retried_and_not_for_ever(hook, statuses, asked_count):
    server = hook(*statuses)
    problem = webhook_sender(server.url())(ALERT, at_once)
    assert len(server.asked) == asked_count
    refused = f"http://127.0.0.1:{server.server_port}: HTTP status {statuses[0]}"
    assert problem == (None if 204 in server.answered else refused)


def test_error_of_an_unreachable_server_hides_secrets():
    with socket.socket() as unheard:  # bound, so that no other process has the port; no one listens
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        problem = webhook_sender(f"http://me:secret@127.0.0.1:{port}/secret?key=secret")(ALERT, at_once)
    assert problem == f"http://127.0.0.1:{port}: Connection refused"


def test_hanging_command_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "COMMAND_SECONDS", 0.5)
    problem = command_sender(f"sleep 300 & echo $! > {tmp_path / 'pid'}; wait")(ALERT, at_once)
    assert problem == "--on-finding took longer than 0.5 s and was killed"
    started = int((tmp_path / "pid").read_text())
    state = ["ps", "-o", "stat=", str(started)]

    def ended() -> bool:
        done = subprocess.run(state, capture_output=True, text=True, check=False)
        return done.stdout.strip()[:1] in ("", "Z")

    wait_for(ended, "the end of what it started")


def test_hanging_sender_delays_neither_verdicts_nor_other_senders(capfd, monkeypatch):
    monkeypatch.setattr(alerts, "PATIENCE_SECONDS", 0.2)
    heard = threading.Event()
    hangs = threading.Event()
    telling = alerts.Alerts([lambda _alert, _wait: hangs.wait() and None, lambda _alert, _wait: heard.set()])
    telling.send("run-1", "demo", [ALERT.finding])
    assert heard.wait(60)
    telling.close()
    assert capfd.readouterr().err == "tidegauge: findings not reported within 0.2 s of the end: 1\n"
    hangs.set()
