"""Start methods, workers, persistence, kinds of dataset: complete records, equal losses, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess

import psutil
import pytest

from collector.store.runs.run import Run
from tests.conftest import PYTHON, REPOSITORY, SHIM, AttachedRun, bare_environment, wait_for
from training_harness import layout

SCRIPT = REPOSITORY / "tests" / "scripts" / "matrix.py"
BATCHES = 4
KEY = ["loader", "epoch", "index", "worker"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> tuple[AttachedRun, str, dict[str, dict]]:
    """The attached run, what its bare twin printed, and what each left behind."""
    home = tmp_path_factory.mktemp("home")
    directory = layout.create_run(home, name="matrix", argv=[])
    shim = {layout.RUN_DIR_VARIABLE: str(directory), "PYTHONPATH": str(SHIM)}
    running = {
        name: subprocess.Popen(
            [PYTHON, "-W", "ignore", SCRIPT, home / name],
            env=bare_environment() | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, extra in (("bare", {}), ("attached", shim))
    }
    try:
        output = {name: process.communicate(timeout=240) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert running["bare"].returncode == 0, output["bare"][1]
    left = {name: json.loads((home / name).read_text()) for name in running}
    done = subprocess.CompletedProcess([SCRIPT], running["attached"].returncode, *output["attached"])
    return AttachedRun(done, Run(directory)), output["bare"][0], left


def test_losses_are_equal_attached_and_bare(matrix):
    run, bare, _ = matrix
    assert run.done.stderr == ""
    assert run.done.stdout == bare
    assert len(bare.splitlines()) > 300
    assert len(run.events("hook-disabled")) == 0


def test_records_are_complete(matrix):
    run, bare, _ = matrix
    batch, fetch = run.table("batch"), run.table("fetch")
    names = [line.split()[0] for line in bare.splitlines()]
    assert len(batch) == len(run.table("step")) == len(names)
    assert sorted(map(tuple, batch[KEY].to_numpy())) == sorted(map(tuple, fetch[KEY].to_numpy()))
    per_epoch = batch.assign(name=names).groupby(["name", "loader", "epoch"])
    assert (per_epoch.size() == BATCHES).all()
    for (name, _, _), workers in per_epoch.worker:
        _, method, count, _ = name.split("-")
        expected = {-1} if method == "inline" else set(range(int(count)))
        assert set(workers) == expected, name
    promised = {pid for body in run.events("epoch-start").body for pid in json.loads(body)["worker_pids"]}
    assert promised == set(run.events("worker-start").pid) == set(run.events("worker-exit").pid)


def test_no_processes_descriptors_or_segments_are_left(matrix):
    run, _, left = matrix
    assert left["attached"]["children"] == left["bare"]["children"] == 0
    assert left["attached"]["descriptors_again"] <= left["attached"]["descriptors_once"]
    pids = set(run.events("worker-start").pid) | set(run.events("process-start").pid)
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    assert not pids & {int(name.split("_")[1]) for name in shared}
    # The fork server and the tracker notice that they are alone.
    wait_for(lambda: not attached_processes(run), "the end of every process")


def attached_processes(run: AttachedRun) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(layout.RUN_DIR_VARIABLE) == str(run.run.path):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
