"""A checkpoint before a real kill by a memory cgroup, a restart after it, and a function of the training."""

import json
import subprocess
import sys

import pytest

from collector.store import list_runs, read
from tests.cgroups import cgroup_or_skip
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "scripts" / "near_limit.py"
#: More samples than by default, in a shorter training.
SAMPLED = ("--interval", "0.25")


@pytest.fixture
def memory_group():
    """A cgroup v1 of 600 MiB, without swap."""
    yield from cgroup_or_skip(600)


@pytest.fixture
def run_near_limit(tmp_path, memory_group, under_tidegauge):
    """Runs a case of near_limit.py in the cgroup; returns the process, its checkpoints and the runs in order.

    A command that restarts replaces its own process.
    """

    def run(case, steps, *options, restarts=False):
        home, checkpoint = tmp_path / "home", tmp_path / "checkpoint.txt"
        script = (sys.executable, SCRIPT, case, steps, checkpoint, memory_group)
        words = ("run", "--home", home, *SAMPLED, *options, "--", *script)
        if restarts:
            command = [sys.executable, "-P", "-m", "collector", *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        else:
            done = under_tidegauge(home, *words)
        saved = (
            [int(line.split()[0]) for line in checkpoint.read_text().splitlines()] if checkpoint.exists() else []
        )
        return done, saved, list_runs(home)[::-1]

    return run


def events_of(run, kind):
    with read(run) as snapshot:
        bodies = snapshot.query("SELECT body FROM event WHERE kind = ? ORDER BY time_ns", [kind])["body"]
    return [json.loads(body) for body in bodies]


def test_signal_comes_before_the_kill_and_the_command_runs_again(run_near_limit):
    options = ("--before-oom", "USR1", "--restart-on-oom", "1")
    done, saved, runs = run_near_limit("quick-signal", 5000, *options, restarts=True)
    assert done.returncode == 137, done.stderr
    assert "killed for lack of memory; restart 1 of 1" in done.stderr
    assert [run.manifest["tags"]["attempt"] for run in runs] == ["0", "1"]
    assert len(saved) == 2, "once in each attempt"
    for run in runs:
        [event] = events_of(run, "before-oom")
        assert (event["risk"], event["action"]) == ("host-oom-risk", "SIGUSR1")
    assert "Tidegauge sent SIGUSR1 to 1 process" in done.stderr or "before-oom: SIGUSR1 sent" in done.stderr


def test_function_of_the_training_is_called_at_the_end_of_a_step(run_near_limit):
    done, saved, [run] = run_near_limit("quick-function", 5000)
    assert done.returncode == 137, done.stderr
    assert len(saved) == 1
    [call] = events_of(run, "risk-call")
    assert (call["risk"], call["errors"]) == ("host-oom-risk", [])
    assert saved[0] in (call["step"], call["step"] + 1), "the script counts a step after the optimizer does"


def test_healthy_training_is_left_alone(run_near_limit):
    done, saved, [run] = run_near_limit("plain-signal", 120, "--before-oom", "USR1", "--restart-on-oom", "1")
    assert (done.returncode, saved) == (0, []), done.stderr
    assert events_of(run, "before-oom") == []
    assert [start["acts_before_oom"] for start in events_of(run, "collector-start")] == [True]


def test_variable_that_is_no_number_of_attempts_is_ignored(tmp_path, monkeypatch, under_tidegauge):
    monkeypatch.setenv("TIDEGAUGE_ATTEMPT", "first")
    done = under_tidegauge(tmp_path / "home", "run", "--home", tmp_path / "home", "--", "true")
    assert done.returncode == 0, done.stderr
