"""Real jobs with one known fault each, and their twins without it: the verdict names the fault.

The jobs mostly sleep, so those of a group run side by side; each is started once for the module. Those of loading
run alone: their share of the time depends on what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, bare_environment, tidegauge

TIDEGAUGE = (sys.executable, "-P", "-m", "collector")
JOB = (sys.executable, "-P", "-m", "training_harness.jobs")
#: More samples than by default, in a shorter training.
SAMPLED = ("--interval", "0.25")
GROUPS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "slow-worker": (*JOB, "fault", "slow-worker", "--steps", "400"),
        "workers-too-slow": (*JOB, "fault", "workers-too-slow", "--steps", "400"),
    },
    {  # shares are of the run's time, so they are small while most of it is the import of torch
        "sampler-bound": (*JOB, "fault", "sampler-bound", "--steps", "150"),
        "epoch-refill": (*JOB, "fault", "epoch-refill", "--steps", "300"),
    },
    {
        "copy-on-read": (*JOB, "fault", "copy-on-read", "--steps", "700"),
        "copy-on-read-fixed": (*JOB, "fault", "copy-on-read", "--fixed", "--steps", "700"),
        "fd-leak-fixed": (*JOB, "fault", "fd-leak", "--fixed", "--steps", "600"),
        "shm-leak-fixed": (*JOB, "fault", "shm-leak", "--fixed", "--steps", "600"),
        "two ranks": (
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *(str(REPOSITORY / "examples" / "plain_train.py"), "--steps", "200"),
        ),
    },
    {  # separate from the healthy jobs: memory that these take is a risk to other jobs of the host
        "main-leak": (*JOB, "fault", "main-leak", "--steps", "900"),
        "fd-leak": (*JOB, "fault", "fd-leak", "--steps", "600"),
        "shm-leak": (*JOB, "fault", "shm-leak", "--steps", "600"),
    },
)


#: Jobs whose verdict depends on the load of the machine.
LOADING = (*GROUPS[0], *GROUPS[1])


@pytest.fixture(scope="module")
def report_of(tmp_path_factory) -> Callable[[str], dict]:
    """Returns the report of a job; the first of a group starts the group."""
    home: Path = tmp_path_factory.mktemp("home")
    found: dict[str, dict] = {}

    def get(wanted: str) -> dict:
        if wanted not in found:
            (group,) = [group for group in GROUPS if wanted in group]
            running = {name: start(home / name, name, command) for name, command in group.items()}
            for name, process in running.items():
                _, card = process.communicate(timeout=240)
                assert process.returncode == 0, card
                found[name] = report(home / name)
        return found[wanted]

    return get


def start(home: Path, name: str, command: tuple[str, ...]) -> subprocess.Popen:
    return subprocess.Popen(
        [*TIDEGAUGE, "run", "--name", name.replace(" ", "-"), "--home", str(home), *SAMPLED, "--", *command],
        env=bare_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(home: Path) -> dict:
    done = tidegauge(home, "report", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def warnings(report: dict) -> dict[str, dict]:
    return {each["kind"]: each for each in report["findings"] if each["severity"] != "info"}


@pytest.mark.alone
def test_one_slow_worker_and_slow_workers_are_distinguished(report_of):
    one, all_slow = warnings(report_of("slow-worker")), warnings(report_of("workers-too-slow"))
    assert set(one) == {"slow-worker"}
    assert one["slow-worker"]["locus"]["worker"] == 1
    assert set(all_slow) == {"workers-too-slow"}
    assert "worker" not in all_slow["workers-too-slow"]["locus"]


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["sampler-bound", "epoch-refill"])
def test_other_causes_are_named_with_their_cost(report_of, kind):
    found = warnings(report_of(kind))
    assert set(found) == {kind}
    cost = {each["name"]: each["value"] for each in found[kind]["evidence"]}
    assert cost["lost_wall_ratio"] > 0.1
    assert cost["lost_seconds"] > 0.5


def test_copy_on_read_is_found_and_its_fixed_twin_is_silent(report_of):
    found = warnings(report_of("copy-on-read"))
    assert set(found) == {"copy-on-read-growth"}
    assert len(found["copy-on-read-growth"]["evidence"]) >= 2
    assert warnings(report_of("copy-on-read-fixed")) == {}


def test_leak_in_the_main_process_is_found_there(report_of):
    found = warnings(report_of("main-leak"))
    assert "main-heap-leak" in found
    assert found["main-heap-leak"]["locus"]["role"] == "main"
    assert found["main-heap-leak"]["rate"]["value"] > 0
    assert not {"copy-on-read-growth", "worker-heap-leak"} & set(found)


def test_fd_leak_is_found_and_its_fixed_twin_is_silent(report_of):
    found = warnings(report_of("fd-leak"))
    assert found["fd-leak"]["locus"]["role"] == "main"
    assert found["fd-leak"]["rate"]["value"] > 0
    assert warnings(report_of("fd-leak-fixed")) == {}


def test_shm_leak_is_found_and_its_fixed_twin_is_silent(report_of):
    found = warnings(report_of("shm-leak"))
    assert found["shm-leak"]["limit"] is None
    (risk,) = [each for each in report_of("shm-leak")["findings"] if each["kind"] == "shm-exhaustion-risk"]
    assert risk["limit"]["name"] == "/dev/shm", "information where it is nearly empty"
    assert warnings(report_of("shm-leak-fixed")) == {}


def test_two_ranks_make_one_run_and_every_worker_reports(report_of):
    report = report_of("two ranks")
    assert report["run"]["workers_reporting"] == [4, 4]
    assert report["run"]["steps"] == 200
    assert {each["locus"]["rank"] for each in report["findings"] if "rank" in each["locus"]} == {0, 1}
    assert warnings(report) == {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.alone if name in LOADING else ()) for group in GROUPS for name in group],
)
def test_every_finding_has_evidence_locus_and_advice(report_of, name):
    for finding in report_of(name)["findings"]:
        assert len({each["name"] for each in finding["evidence"]}) >= 2
        assert all(each["unit"] and each["window"] and each["n"] > 0 for each in finding["evidence"])
        if finding["severity"] != "info":
            assert finding["advice"]
            assert finding["locus"]
