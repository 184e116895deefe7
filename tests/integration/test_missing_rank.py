"""Trainings with a rank that enters no collective: dumps of the Flight Recorder name it, and the collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import tidegauge, wait_for

SCRIPT = Path(__file__).parents[1] / "scripts" / "missing_rank.py"
#: Each step has one collective, and rank 1 stops in the sixth step.
SENTENCE = "ank 1 has not entered all_reduce number 6 of default_pg, "


@pytest.fixture
def training(home, tmp_path):
    """Start the training under Tidegauge, with this timeout; it is killed in the end."""
    started = []

    def start(timeout_seconds: int) -> subprocess.Popen:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "collector", "run", "--", *launcher, str(SCRIPT), str(timeout_seconds)],
            env={
                **os.environ,
                "TIDEGAUGE_HOME": str(home),
                "OMP_NUM_THREADS": "1",
                "TORCH_FR_BUFFER_SIZE": "2000",
                "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_"),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
            for process in family:  # torchrun gives each rank a session of its own
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        child.wait()


def hangs(home: Path) -> list[dict]:
    result = tidegauge(home, "report", "--format", "json")
    return [one for one in json.loads(result.stdout or '{"findings": []}')["findings"] if one["kind"] == "hang"]


def test_dumps_confirm_the_stacks_while_a_training_hangs(training, home):
    training(600)

    def recorded() -> dict | None:
        found = hangs(home) if list(home.glob("runs/*/events/*.jsonl")) else []
        return next((finding for finding in found if "Flight Recorder" in finding["summary"]), None)

    found = wait_for(recorded, "a hang that the dumps name", seconds=120)
    assert (found["locus"]["rank"], found["locus"]["role"]) == (1, "main")
    assert "hang_missing_rank, missing_rank.py:" in found["summary"]
    assert f"Flight Recorder: r{SENTENCE}in which rank 0 waits (missing_rank.py:" in found["summary"]
    facts = {fact["name"]: fact["value"] for fact in found["evidence"]}
    assert facts["last_collective"].startswith("all_reduce number 5 (missing_rank.py:")


def test_a_timeout_before_any_stacks_names_the_missing_rank(training, home):
    assert training(10).wait(timeout=240) == 1
    (found,) = hangs(home)
    assert found["summary"].startswith(f"R{SENTENCE}")
    assert "it timed out after 10" in found["summary"]
    assert (found["severity"], found["locus"]["rank"]) == ("critical", 1)
