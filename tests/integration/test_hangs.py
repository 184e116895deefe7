"""Trainings that hang: `tidegauge stacks` shows the line, and the verdict names the worker, even after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tidegauge, wait_for

SCRIPT = Path(__file__).parents[1] / "scripts" / "hanging.py"


@pytest.fixture
def hang(home):
    """Start a training that hangs in this way, under Tidegauge; it is killed in the end."""
    started = []

    def start(way: str, *options: str) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "collector", "run", *options, "--", sys.executable, str(SCRIPT), way]
        child = subprocess.Popen(
            command,
            env={**os.environ, "TIDEGAUGE_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stderr.close()


def stacks_of(home: Path) -> list[dict]:
    result = tidegauge(home, "stacks", "--format", "json")
    return json.loads(result.stdout) if result.returncode == 0 else []


def test_stacks_name_the_line_in_which_a_worker_waits_for_a_lock(hang, home):
    hang("lock")

    def stuck() -> dict | None:
        odd = next(iter(stacks_of(home)), {"frames": []})
        return odd if odd["frames"] and odd["frames"][0]["function"] == "hang_lock" else None

    odd = wait_for(stuck, "a worker that hangs")
    assert [thread["worker"] for thread in odd["threads"]] == [0]
    assert odd["waits"] == "blocked on a lock (futex)"
    assert odd["activity"] == "makes a batch"
    assert odd["frames"][0]["path"] == str(SCRIPT)
    text = tidegauge(home, "stacks").stdout
    assert text.splitlines()[0].startswith("worker 0 of loader 0, pid ")
    assert "lock.acquire()" in text


def test_stacks_of_a_run_that_has_ended_are_refused_in_one_line(home):
    assert tidegauge(home, "run", "--", sys.executable, "-c", "pass").returncode == 0
    result = tidegauge(home, "stacks")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "runs on this machine" in result.stderr


def test_a_hang_is_reported_while_it_lasts_and_cancelled_on_request(hang, home):
    plain, cancelled = hang("semaphore", "--name", "plain"), hang("child", "--name", "over", "--on-hang", "cancel")
    _, text = cancelled.communicate(timeout=240)
    assert cancelled.returncode == 128 + signal.SIGTERM
    (line,) = [line for line in text.splitlines() if "see: tidegauge stacks" in line]
    assert line.startswith("tidegauge: Worker 0 of loader 0 hangs: it is waiting for a child process (cat, pid ")
    assert "in hang_child, hanging.py:" in line
    assert "CRITICAL  hang" in text  # the card
    assert "by which Tidegauge cancelled" in " ".join(text.split())
    (run,) = (path.parent for path in home.glob("runs/*-over-*/run.json"))
    recorded = tidegauge(home, "stacks", run.name)
    assert "no process of" in recorded.stderr  # the stuck worker has been ended too
    assert "hang_child" in recorded.stdout
    line = wait_for(lambda: next(iter([plain.stderr.readline()]), None), "a line on stderr")
    assert "blocked on a lock" in line
    assert "hang_semaphore, hanging.py:" in line


def test_the_verdict_after_the_whole_job_was_killed_tells_a_hang_from_a_slow_download(hang, home):
    ways = {"pipe": "pipe", "download": "download", "pool": "main_pool"}
    children = {name: hang(way, "--name", name) for name, way in ways.items()}

    def dumped(name: str) -> bool:
        logs = home.glob(f"runs/*-{name}-*/events/*.jsonl")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return any('"kind": "stacks"' in line and '"is_last": true' in line for line in lines)

    found = {}
    for name, child in children.items():
        wait_for(lambda name=name: dumped(name), "stacks of the training")
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        report = json.loads(tidegauge(home, "report", name, "--format", "json").stdout)
        (found[name],) = [finding for finding in report["findings"] if finding["kind"] == "hang"]
    for name, finding in found.items():
        place = (None, "main") if name == "pool" else (0, "worker")
        assert (finding["locus"].get("worker"), finding["locus"]["role"]) == place
        assert {"silent_seconds", "stands_in"} <= {fact["name"] for fact in finding["evidence"]}
    assert "may hang: it is waiting for a pipe in hang_pipe, hanging.py:" in found["pipe"]["summary"]
    assert "waiting for a process pool in hang_pool, hanging.py:" in found["pool"]["summary"]
    assert "ended just then, and a Pool waits for ever" in found["pool"]["summary"]
    assert "is slow: it is waiting for the network" in found["download"]["summary"]
    assert "It received or sent data within the last" in found["download"]["summary"]
