"""Real trainings that wait: the report names the line; without py-spy it has the same finding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from collector.agent.live import line_sampling
from collector.agent.samplers import stack_series
from tests.conftest import tidegauge

SCRIPT = Path(__file__).parents[1] / "scripts" / "slow_lines.py"


def finding_of(home: Path, kind: str) -> dict:
    findings = json.loads(tidegauge(home, "report", "--format", "json").stdout)["findings"]
    return next(finding for finding in findings if finding["kind"] == kind)


@pytest.fixture
def run(home, under_tidegauge, monkeypatch):
    """Run a training that waits in this way; its stacks may cost more than usual, and so come sooner."""
    monkeypatch.setattr(line_sampling, "BUDGET_RATIO", 0.1)

    def to_its_end(case: str, seconds: int) -> None:
        done = under_tidegauge(home, "run", "--investigate", "--", sys.executable, SCRIPT, case, seconds)
        assert done.returncode == 0, done.stderr

    return to_its_end


def test_the_line_that_the_training_waits_for_is_named(home, run):
    run("sleep", 12)
    finding = finding_of(home, "workers-too-slow")
    line = finding["waits_in"][0]
    assert line["source"].startswith("time.sleep(0.02)")
    assert line["site"].endswith(", in Data.make_sleep")
    assert line["callers"][0].endswith(", in Data.__getitem__")
    assert line["n"] >= 20
    text = tidegauge(home, "report").stdout
    assert "Waits in" in text
    assert "time.sleep(0.02)" in text


def test_without_py_spy_the_finding_stands_as_before(home, run, monkeypatch):
    monkeypatch.setattr(stack_series, "py_spy", lambda: None)
    run("sleep", 8)
    finding = finding_of(home, "workers-too-slow")
    assert "waits_in" not in finding
    assert len(finding["evidence"]) >= 2
    events = [
        json.loads(line) for log in home.glob("runs/*/events/*.jsonl") for line in log.read_text().splitlines()
    ]
    problems = [event["error"] for event in events if event["kind"] == "collector-problem"]
    assert [problem for problem in problems if "py-spy is not installed" in problem]
