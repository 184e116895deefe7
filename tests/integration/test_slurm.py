"""The examples for Slurm in a real Slurm of one node: requeued, killed by both kinds of limit, and in an array."""

import json

import pytest

from tests.conftest import tidegauge, wait_for
from tests.slurm import slurm_or_skip

#: Slow enough for several samples of each process on a busy machine, before any of the limits below is met.
LEAK = ("--steps", "150", "--leak-mib", "16", "--step-seconds", "0.3")


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


def steps(slurm, run):
    if not (slurm.home / "runs" / run / "run.json").exists():
        return 0
    return report(slurm, run)["run"]["steps"]


def cause_of(slurm, run):
    found = [one for one in report(slurm, run)["findings"] if one["severity"] == "critical"]
    assert [one["kind"] for one in found] == ["host-oom-kill"]
    return found[0]


def test_a_signal_to_all_processes_of_a_job_has_it_saved_requeued_and_completed(slurm):
    number = slurm.submit("train.sbatch", "--steps", "150", "--step-seconds", "0.1")
    wait_for(lambda: steps(slurm, f"train-{number}-0"), "no step yet", seconds=120)
    slurm.call("scancel", "--signal=USR1", str(number))  # as --signal does it before the time limit
    job = slurm.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), slurm.output(number)
    first, second = steps(slurm, f"train-{number}-0"), steps(slurm, f"train-{number}-1")
    assert first > 0 < second
    assert first + second == 150
    assert f"resumed at step {first}\n" in slurm.output(number)


def test_a_job_short_of_memory_saves_first_and_is_requeued(slurm):
    number = slurm.submit("--mem=1200M", "train.sbatch", *LEAK)
    wait_for(lambda: slurm.job(number)["Restarts"] != "0", "the job was not requeued", seconds=150)
    assert "SIGUSR1 sent" in slurm.output(number)
    assert "saved at step" in slurm.output(number)
    slurm.call("scancel", str(number))


def test_a_kill_in_the_control_group_of_a_job_names_the_job_and_its_option(slurm):
    command = f"srun tidegauge run --run-id killed -- python train.py {' '.join(LEAK)}"
    number = slurm.submit("--mem=900M", "--wrap", command)
    assert slurm.wait(number)["JobState"] in ("FAILED", "OUT_OF_MEMORY"), slurm.output(number)
    cause = cause_of(slurm, "killed")
    assert f"Slurm job {number}" in cause["summary"]
    assert any("sbatch --mem" in advice["text"] for advice in cause["advice"])


def test_each_task_of_an_array_is_a_run_with_the_tag_of_the_array(slurm):
    number = slurm.submit("array.sbatch")

    def listed():
        done = tidegauge(slurm.home, "runs", "--tag", f"sweep={number}", "--format", "json")
        return {run["name"]: run["status"] for run in json.loads(done.stdout)}

    names = ("sweep-0", "sweep-1", "sweep-2")
    wait_for(lambda: listed() == dict.fromkeys(names, "finished"), "the three tasks have not finished", seconds=150)


def test_a_job_that_slurm_kills_at_its_own_count_is_finished_by_the_epilog(counting_slurm):
    slurm = counting_slurm
    number = slurm.submit("--mem=1400M", "--no-requeue", "train.sbatch", *LEAK)
    slurm.wait(number)
    wait_for(
        lambda: report(slurm, f"train-{number}-0")["run"]["status"] == "killed", "the epilog has not ended the run"
    )
    cause = cause_of(slurm, f"train-{number}-0")
    assert cause["limit"]["name"] == "Slurm"
    assert cause["limit"]["value"] == 1400 * 2**20
    assert f"job {number}" in cause["summary"]
