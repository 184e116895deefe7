"""A real memory cgroup, and a real kill in it."""

import signal
import subprocess
import sys

import pytest

from collector.agent.samplers.host import HostSampler
from tests.cgroups import cgroup_or_skip

MIB = 2**20


@pytest.fixture
def memory_group():
    """A cgroup v1 of 64 MiB, without swap."""
    yield from cgroup_or_skip(64)


HUNGRY = "import os, sys; print('ready', flush=True); sys.stdin.readline(); x = b'x' * (200 << 20)"


def test_cgroup_limit_and_oom_kill_are_sampled(memory_group):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    (memory_group / "cgroup.procs").write_text(str(process.pid))
    sampler = HostSampler(process.pid)
    before = sampler.sample()
    process.communicate("eat\n")
    assert process.returncode == -signal.SIGKILL
    after = sampler.sample()
    memory_group.rmdir()
    kept = sampler.sample()

    assert before["cgroup_limit_bytes"] == 64 * MIB
    assert sampler.limit[:2] == (f"/{memory_group.name}", 64 * MIB)
    assert after["cgroup_oom_kill_count"] == before["cgroup_oom_kill_count"] + 1
    assert after["cgroup_oom_count"] > before["cgroup_oom_count"]
    assert after["host_oom_kill_count"] > before["host_oom_kill_count"]
    assert 0 <= before["cgroup_usage_bytes"] < 64 * MIB
    assert kept["cgroup_limit_bytes"] == after["cgroup_limit_bytes"]
    assert kept["cgroup_oom_kill_count"] is None
