"""The examples for Slurm in a real Slurm of one node: requeued, killed by both kinds of limit, and in an array."""

import json

import pytest

from tests.conftest import tidegauge, wait_for
from tests.slurm import slurm_or_skip

LEAK = ("--steps", "40", "--leak-mib", "32", "--step-seconds", "0.3")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm that holds jobs to their memory by control groups."""
    yield from slurm_or_skip(tmp_path_factory.mktemp("slurm"), "cgroup")


@pytest.fixture
def counting_slurm(tmp_path):
    """A Slurm that adds up the memory of jobs itself."""
    yield from slurm_or_skip(tmp_path, "count")


def report(slurm, run):
    done = tidegauge(slurm.home, "report", run, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cause_of(slurm, run):
    found = [one for one in report(slurm, run)["findings"] if one["severity"] == "critical"]
    assert [one["kind"] for one in found] == ["host-oom-kill"]
    return found[0]


def test_a_job_short_of_memory_saves_is_requeued_and_goes_on(slurm):
    number = slurm.submit("--mem=700M", "train.sbatch", *LEAK)
    job = slurm.wait(number)
    output = slurm.output(number)
    assert job["JobState"] == "COMPLETED", output
    assert int(job["Restarts"]) >= 1
    assert "resumed at step" in output
    assert output.rstrip().splitlines()[-1]
    first, last = report(slurm, f"train-{number}-0"), report(slurm, f"train-{number}-{job['Restarts']}")
    assert first["run"]["status"] == last["run"]["status"] == "finished"
    assert first["run"]["steps"] + last["run"]["steps"] <= 40


def test_a_kill_in_the_control_group_of_a_job_names_the_job_and_its_option(slurm):
    number = slurm.submit(
        "--mem=500M", "--wrap", "srun tidegauge run --run-id killed -- python train.py " + " ".join(LEAK)
    )
    assert slurm.wait(number)["JobState"] in ("FAILED", "OUT_OF_MEMORY"), slurm.output(number)
    cause = cause_of(slurm, "killed")
    assert f"Slurm job {number}" in cause["summary"]
    assert any("sbatch --mem" in advice["text"] for advice in cause["advice"])


def test_each_task_of_an_array_is_a_run_with_the_tag_of_the_array(slurm):
    number = slurm.submit("array.sbatch")
    jobs = slurm.call("squeue", "--array", "--noheader", "--format=%A", "--job", str(number)).split()
    for job in jobs:
        slurm.wait(int(job))
    listed = json.loads(tidegauge(slurm.home, "runs", "--tag", f"sweep={number}", "--format", "json").stdout)
    assert sorted(run["name"] for run in listed) == ["sweep-0", "sweep-1", "sweep-2"]
    assert {run["status"] for run in listed} == {"finished"}


def test_a_job_that_slurm_kills_at_its_own_count_is_finished_by_the_epilog(counting_slurm):
    slurm = counting_slurm
    number = slurm.submit("--mem=500M", "--no-requeue", "train.sbatch", *LEAK)
    slurm.wait(number)
    wait_for(
        lambda: report(slurm, f"train-{number}-0")["run"]["status"] == "killed", "the epilog has not ended the run"
    )
    cause = cause_of(slurm, f"train-{number}-0")
    assert cause["limit"]["name"] == "Slurm"
    assert cause["limit"]["value"] == 500 * 2**20
    assert f"job {number}" in cause["summary"]
