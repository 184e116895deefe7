"""The pod of examples/kubernetes/job.yaml, as far as it goes without Kubernetes.

Each container has a control group, and namespaces of its own for mounts and control groups. Both see all processes.
"""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.cgroups import memory_cgroup
from tests.conftest import PYTHON, REPOSITORY, SHIM, bare_environment, wait_for
from training_harness import layout

MIB = 2**20
LIMIT_MIB = 400
CONTAINER = """
echo $$ > "$GROUP/cgroup.procs"
exec unshare --cgroup --mount sh -ec '
    umount /sys/fs/cgroup/memory
    mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory
    mount -t tmpfs -o size=64m shm /dev/shm
    mount -t tmpfs run /run
    mkdir -p /run/secrets/kubernetes.io
    exec "$@"' sh "$@"
"""
TRAINING = """
import time
import torch
kept = []
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in torch.utils.data.DataLoader(torch.zeros(10000, 8), batch_size=1):
    optimizer.step()
    kept.append(b"x" * (8 << 20))
    time.sleep(0.2)
"""


@pytest.fixture
def groups():
    """A control group for the training and a larger one for the collector."""
    names = [f"tidegauge-{name}-{os.getpid()}" for name in ("train", "collector")]
    try:
        with memory_cgroup(names[0], LIMIT_MIB) as training, memory_cgroup(names[1], 2000) as collector:
            subprocess.run(["unshare", "--cgroup", "--mount", "true"], check=True, capture_output=True)
            yield training, collector
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no containers can be made here: {error}")


def start(group, command, **environ):
    environment = bare_environment() | {"GROUP": str(group)} | environ
    return subprocess.Popen(["sh", "-ec", CONTAINER, "sh", *command], env=environment)


def test_the_sidecar_leaves_the_reason_of_the_kill_by_the_limit_of_the_training(groups, home, tmp_path):
    run = Run(layout.create_run(home, name="train", argv=["train.py"]))
    job = yaml.safe_load((REPOSITORY / "examples/kubernetes/job.yaml").read_text())
    sidecar = job["spec"]["template"]["spec"]["initContainers"][0]["command"]
    verdict = tmp_path / "termination-log"
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    (tmp_path / "train.py").write_text(TRAINING)
    collector = start(
        groups[1], sidecar, PATH=path, TIDEGAUGE_HOME=str(home), TIDEGAUGE_RUN_ID=run.run_id, VERDICT=str(verdict)
    )
    wait_for(lambda: [*run.journal_dir.glob("*.host.*")], "the collector's first sample")
    environ = {"PYTHONPATH": str(SHIM), layout.RUN_DIR_VARIABLE: str(run.path)}
    training = start(groups[0], [PYTHON, str(tmp_path / "train.py")], **environ)
    try:
        assert training.wait(200) == -signal.SIGKILL
    finally:
        training.kill()
        collector.terminate()  # as the kubelet does when the containers have ended
        collector.wait(60)

    with read(run) as snapshot:
        hosts = snapshot.query("SELECT cgroup_limit_bytes, shm_total_bytes FROM host ORDER BY time_ns")
    assert set(hosts.cgroup_limit_bytes.dropna()) == {LIMIT_MIB * MIB}, "never that of the collector"
    assert hosts.shm_total_bytes.dropna().iloc[-1] == 64 * MIB
    text = " ".join(verdict.read_text().split())
    assert "The kernel killed the training process" in text
    assert "the limit is 400 MiB" in text
    assert "(the Kubernetes container)" in text
    assert verdict.stat().st_size < 4096
