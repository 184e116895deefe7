"""Processes that use the GPU in other ways than a command under `tidegauge run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from collector.store.runs.run import Run
from tests.conftest import wait_for
from tests.cuda_sim.conftest import PROGRAMS, TIDEGAUGE, Watched


def test_attach_and_detach_in_the_middle_record_those_steps(devices, tmp_path):
    environ = devices(TIDEGAUGE_HOME=str(tmp_path / "home"))
    command = [sys.executable, str(PROGRAMS / "attached.py"), str(tmp_path / "said")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "said").read_text())
    run = Run(Path(said["run_dir"]))
    wait_for(lambda: run.manifest["end_time_ns"], "the end of the run")
    report = [*TIDEGAUGE, "report", str(run.path), "--format", "json"]
    output = subprocess.run(report, env=environ, capture_output=True, text=True, check=True)
    watched = Watched(done, json.loads(output.stdout), run)
    records = watched.table("device_memory").groupby("step").last()
    assert list(records["allocated_bytes"]) == said["allocated_bytes"]
    (error,) = watched.findings("cuda-oom")
    assert (error["severity"], error["since_step"]) == ("info", said["oom_step"])
    assert watched.failed_hooks == []


def test_out_of_memory_in_a_worker_names_that_worker(watched):
    run = watched("workers.py", memory="1G")
    assert "OutOfMemoryError in DataLoader worker process 1" in run.done.stderr
    found = run.findings("cuda-oom")
    assert {(each["locus"]["role"], each["locus"]["worker"]) for each in found} == {("worker", 1)}
    assert not any("smaller" in advice["text"] for each in found for advice in each["advice"]), "it takes no steps"
    assert "gpu-non-pytorch-growth" not in run.warned, "a worker's PyTorch is no library"
    samples = run.table("device").dropna(subset="process_used_bytes")
    assert (samples["process_used_bytes"] - samples["recorded_used_bytes"]).max() > 512 << 20, "the workers' part"
    assert "GPU —" not in run.done.stderr, "the training's copy of the error is no second one"
    assert not any("other processes" in advice["text"] for each in found for advice in each["advice"])
