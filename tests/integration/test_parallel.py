"""Several devices and several processes: DataParallel's parts, ranks in one run, separate attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from tests.conftest import REPOSITORY, bare_environment
from training_harness import layout

SCRIPTS = REPOSITORY / "tests" / "scripts"


def test_ranks_and_attempts_of_a_torchrun_job_are_one_run(run_attached, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    # Without this, torch reuses the store of the first attempt, with the address of the dead rank in it.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = run_attached(*launcher, SCRIPTS / "ranks.py", tmp_path / "marker", environ=environ)
    assert run.done.returncode == 0, run.done.stderr
    starts = run.events("process-start")
    attempt_of = {pid: json.loads(body)["attempt"] for pid, body in zip(starts.pid, starts.body, strict=True)}
    assert sorted(zip(starts["rank"], attempt_of.values(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    steps = run.table("step").assign(attempt=lambda table: table.pid.map(attempt_of))
    made = {key: rows.step.tolist() for key, rows in steps.groupby(["attempt", "rank"])}
    # The batch that rank 0 takes before there is an optimizer is no step of the run: optimizer steps count again.
    assert made == {(0, 0): [0, 1, 2], (0, 1): [0, 1, 2], (1, 0): [0, *range(6)], (1, 1): [*range(6)]}
    batches = run.table("batch")
    late = batches[(batches.pid.map(attempt_of) == 1)]
    assert late["rank"].iloc[0] == 0
    assert (late["rank"] == 1).sum() == 6, "the rank that joined late is there in full"

    verdict = diagnose(load_tables(run.run))
    assert (verdict.status, verdict.attempts, verdict.steps) == ("finished", 2, 6)
    [restart] = [finding for finding in verdict.findings if finding.severity != "info"]
    assert restart.severity == "warning"
    assert restart.summary.startswith("Attempt 0 ended after 3 steps with ")


def test_parts_of_data_parallel_are_stages_of_their_batch(run_attached, tmp_path):
    folder = layout.create_run(tmp_path, name="replicas", argv=[])
    run = run_attached(SCRIPTS / "replicas.py", folder, environ={layout.RUN_DIR_VARIABLE: ""}, run_dir=folder)
    assert run.done.returncode == 0, run.done.stderr
    stages = run.table("stage")
    names = {"scatter", "replicate", "parallel_apply", "gather"}
    of_batch = {index: set(rows.stage) & names for index, rows in stages.groupby("index")}
    assert of_batch == dict.fromkeys(range(4), names)
    parts = stages[stages.stage.isin(names)]
    assert (parts.calls_count == 1).all()
    assert (parts[parts.stage == "parallel_apply"].duration_ns >= 2_000_000).all()


def test_ranks_that_attach_from_code_join_one_run(tmp_path):
    """Eight ranks start at once and one late, launched by this process; a rank of another launcher is apart."""
    code = "from pathlib import Path; from training_harness import layout; print(*layout.join_or_create_run("
    code += f"Path({str(tmp_path)!r}), name='ddp', argv=[]))"
    environ = bare_environment() | {"LOCAL_RANK": "0", "WORLD_SIZE": "9"}

    def start(*prefix, **changes):
        argv = [*prefix, sys.executable, "-c", code]
        return subprocess.Popen(argv, env=environ | changes, stdout=subprocess.PIPE, text=True)

    at_once = [start() for _ in range(8)]
    outputs = [process.communicate()[0].split() for process in at_once]
    late = start().communicate()[0].split()
    other = start("sh", "-c", '"$@"; true', "sh").communicate()[0].split()
    alone = start(WORLD_SIZE="1").communicate()[0].split()
    # Ray's own process starts the workers of all jobs.
    ray = {"RAY_RAYLET_PID": str(os.getpid()), "RAY_JOB_ID": "01000000"}
    jobs = [start(**ray, MASTER_PORT=port).communicate()[0].split() for port in ("1001", "1001", "1002")]

    [shared] = {directory for directory, _ in [*outputs, late]}
    assert sorted(made for _, made in outputs) == ["False"] * 7 + ["True"]
    assert late[1] == "False"
    assert (other[1], alone[1]) == ("True", "True")
    assert [made for _, made in jobs] == ["True", "False", "True"]
    assert jobs[0][0] == jobs[1][0]
    assert {directory.name for directory in (tmp_path / "runs").iterdir()} == {
        os.path.basename(directory) for directory in (shared, other[0], alone[0], jobs[0][0], jobs[2][0])
    }
    assert layout.read_manifest(tmp_path / "runs" / os.path.basename(shared))["name"] == "ddp"
