"""The examples for Ray with a real Ray: one of its own under `tidegauge run`, and a cluster that runs already."""

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import REPOSITORY, bare_environment, tidegauge, wait_for
from training_harness import layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'"
)
EXAMPLES = REPOSITORY / "examples" / "ray"
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def runs(home):
    return [Run(path) for path in sorted((home / "runs").iterdir())]


def query(run, sql):
    with read(run) as snapshot:
        return snapshot.query(sql)


def steps_of_ranks(run):
    rows = query(run, "SELECT rank, count(*) AS n FROM step GROUP BY rank ORDER BY rank")
    return dict(zip(rows["rank"].tolist(), rows["n"].tolist(), strict=True))


@pytest.fixture
def cluster():
    """The address of a Ray that runs on this machine, outside of any run."""
    folder = tempfile.mkdtemp(prefix="ray")  # the path of a socket has room for 107 characters
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}", "--num-cpus=2"]
    with (Path(folder) / "head.log").open("w") as log:
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), *words, "--include-dashboard=false"],
            env=bare_environment() | ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    try:
        log_path = Path(folder) / "head.log"
        wait_for(lambda: "Ray runtime started" in log_path.read_text(), "Ray has not started", seconds=120)
        yield f"{socket.gethostbyname(socket.gethostname())}:{port}"
    finally:
        head.terminate()  # it ends Ray's other processes first
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(100)
        head.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_workers_of_ray_train_are_the_ranks_of_one_run(under_tidegauge, home):
    done = under_tidegauge(home, "run", "--", sys.executable, EXAMPLES / "train.py", **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    [run] = runs(home)
    assert steps_of_ranks(run) == {0: 40, 1: 40}
    workers = query(run, 'SELECT DISTINCT rank, worker FROM "fetch" ORDER BY rank')
    assert workers.values.tolist() == [[0, 0], [1, 0]]


def test_a_training_fed_by_ray_data_has_steps_and_the_wait_as_a_stage(under_tidegauge, home):
    done = under_tidegauge(home, "run", "--", sys.executable, EXAMPLES / "data.py", **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    [run] = runs(home)
    assert list(steps_of_ranks(run).values()) == [100]
    assert query(run, "SELECT DISTINCT stage FROM stage")["stage"].tolist() == ["ray data"]
    seen = query(run, "SELECT count(DISTINCT process_pid) AS n FROM process")
    assert seen["n"].item() > 1  # Ray's own processes


def test_each_job_of_a_cluster_is_a_run_that_ends(cluster, home):
    for count in (1, 2):
        done = subprocess.run(
            [sys.executable, EXAMPLES / "train.py", "--address", cluster],
            env=bare_environment() | ENVIRONMENT | {layout.HOME_VARIABLE: str(home)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert len(runs(home)) == count
    for run in runs(home):
        wait_for(lambda run=run: run.manifest["end_time_ns"], "the collector has not ended the run")
        assert steps_of_ranks(run) == {0: 40, 1: 40}
    assert tidegauge(home, "report").returncode == 0
