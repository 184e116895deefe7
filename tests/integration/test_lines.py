"""Real trainings that wait: the report names the line; without py-spy it has the same finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import tidegauge

SCRIPT = Path(__file__).parents[1] / "scripts" / "slow_lines.py"


def finding_of(home: Path, kind: str) -> dict:
    findings = json.loads(tidegauge(home, "report", "--format", "json").stdout)["findings"]
    return next(finding for finding in findings if finding["kind"] == kind)


def run(home: Path, case: str, seconds: int, **environ: str) -> None:
    command = [sys.executable, "-P", "-m", "collector", "run", "--investigate", "--", sys.executable, str(SCRIPT)]
    environment = {**os.environ, "TIDEGAUGE_HOME": str(home), **environ}
    result = subprocess.run([*command, case, str(seconds)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_line_that_the_training_waits_for_is_named(home):
    run(home, "sleep", 28)
    finding = finding_of(home, "workers-too-slow")
    line = finding["waits_in"][0]
    assert line["source"].startswith("time.sleep(0.02)")
    assert line["site"].endswith(", in Data.make_sleep")
    assert line["callers"][0].endswith(", in Data.__getitem__")
    assert line["n"] >= 20
    text = tidegauge(home, "report").stdout
    assert "Waits in" in text
    assert "time.sleep(0.02)" in text


def test_without_py_spy_the_finding_stands_as_before(home, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'collector' in sys.orig_argv:\n"
        "    from collector.agent.samplers import stack_series\n"
        "    stack_series.py_spy = lambda: None\n"
    )
    run(home, "sleep", 20, PYTHONPATH=str(tmp_path))
    finding = finding_of(home, "workers-too-slow")
    assert "waits_in" not in finding
    assert len(finding["evidence"]) >= 2
    events = [
        json.loads(line) for log in home.glob("runs/*/events/*.jsonl") for line in log.read_text().splitlines()
    ]
    problems = [event["error"] for event in events if event["kind"] == "collector-problem"]
    assert [problem for problem in problems if "py-spy is not installed" in problem]
