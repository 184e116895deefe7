"""Figures from the driver alone: a process that is watched from outside, and another job on the same GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cuda_sim.conftest import PROGRAMS, TIDEGAUGE, evidence

LEAK = (sys.executable, str(PROGRAMS / "growth.py"), "tensors", "--bytes", str(512 << 10))


def test_watched_process_gets_a_forecast_for_its_gpu(devices, tmp_path: Path):
    environ, home = devices(memory="1G"), ("--home", str(tmp_path / "home"))
    with subprocess.Popen([*LEAK, "--steps", "900"], env=environ) as training:
        watched = subprocess.run(
            [*TIDEGAUGE, "watch", *home, str(training.pid)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    report = subprocess.run(
        [*TIDEGAUGE, "report", *home, "--format", "json"], env=environ, capture_output=True, text=True, check=True
    )
    [risk] = [each for each in json.loads(report.stdout)["findings"] if each["kind"] == "gpu-oom-risk"]
    assert risk["limit"]["value"] == 1 << 30
    assert evidence(risk)["process_used_rise_bytes"] > 100 << 20
    assert "GPU 0" in watched.stderr  # the card


def test_growth_of_another_job_is_not_blamed_on_the_run(watched, devices):
    environ = devices(memory="1500M")
    with subprocess.Popen([*LEAK, "--steps", "2000"], env=environ) as other:
        run = watched("growth.py", "nothing", "--steps", "700", environ=environ)
        other.kill()
    assert run.done.returncode == 0, run.done.stderr
    assert run.warned == {"gpu-oom-risk"}
    [risk] = run.findings("gpu-oom-risk")
    assert "Other processes grow" in risk["summary"]
