"""`tidegauge stacks` on a training whose worker hangs: it tells the line, and the training goes on as before."""

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
        groups = stacks_of(home)
        odd = groups[0] if groups else {"frames": [{"function": ""}]}
        return odd if odd["frames"][0]["function"] == "hang_lock" else None

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
