"""Reasons for absent hooks in a process, read from its own command line and environment."""

import os
import subprocess
import sys

import pytest

from collector.agent.samplers import programs
from collector.agent.samplers.programs import ProgramLog, find_left_running, has_torch, obstacle, read_program
from tests.conftest import wait_for
from training_harness.journal import start_ticks
from training_harness.layout import DISABLED_VARIABLE, RUN_DIR_VARIABLE

SHIM = "/opt/tidegauge/training_harness/bootstrap"
RUN = {RUN_DIR_VARIABLE: "/home/ann/runs/one", "PYTHONPATH": f"{SHIM}:/home/ann/project"}


@pytest.mark.parametrize(
    ("argv", "changes", "reason"),
    [
        (["python", "train.py"], {}, None),
        (["python", "-u", "-X", "dev", "-W", "ignore", "train.py", "-S", "-E"], {}, None),
        (["python", "-m", "package", "-I"], {}, None),
        (["python", "-c", "print(1)", "-E"], {}, None),
        (["python", "-Wignore", "-E", "train.py"], {}, "-E"),
        (["python", "-uI", "train.py"], {}, "-I"),
        (["python", "-S", "-E", "train.py"], {}, "-S"),
        (["python", "train.py"], {"PYTHONPATH": "."}, "PYTHONPATH replaced"),
        (["python", "train.py"], {"PYTHONPATH": None}, "PYTHONPATH replaced"),
        (["python", "train.py"], {RUN_DIR_VARIABLE: None}, "environment cleared"),
        (["python", "train.py"], {DISABLED_VARIABLE: "1"}, "disabled"),
        (["python", "train.py"], {RUN_DIR_VARIABLE: "/home/ann/runs/two"}, "another run"),
    ],
)
def test_obstacle_to_the_hooks_is_named(argv, changes, reason):
    environ = {name: value for name, value in {**RUN, **changes}.items() if value is not None}
    assert obstacle(argv, environ, RUN[RUN_DIR_VARIABLE]) == reason


@pytest.fixture
def child():
    environ = {**os.environ, RUN_DIR_VARIABLE: "/home/ann/runs/one", "PYTHONPATH": "."}
    argv = [sys.executable, "-c", "input()", "--api-key", "hunter2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environ) as process:
        wait_for(lambda: read_program("/proc", process.pid), "its command line")  # it is there soon after exec(2)
        yield process
        process.kill()


def test_living_process_is_described_without_secrets(child):
    program = read_program("/proc", child.pid)
    assert program.is_python
    assert program.obstacle == "PYTHONPATH replaced"
    assert program.argv[-2:] == ("--api-key", "***")
    assert not has_torch("/proc", child.pid)


def test_obstacle_of_another_program_is_that_it_is_not_python():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={RUN_DIR_VARIABLE: "/x"}) as process:
        program = wait_for(lambda: read_program("/proc", process.pid), "its command line")
        assert program.obstacle == programs.NO_PYTHON
        process.kill()


def test_a_process_in_a_pid_namespace_of_its_own_is_said_to_be_in_one(tmp_path):
    for pid, pids in ((os.getpid(), b"7"), (500, b"500\t2"), (501, b"501")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_bytes(b"Name:\tpython\nNSpid:\t" + pids + b"\nNSsid:\t0\n")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"python\0train.py\0")
        environ = b"\0".join(os.fsencode(f"{name}={value}") for name, value in RUN.items())
        (tmp_path / str(pid) / "environ").write_bytes(environ)
    assert read_program(str(tmp_path), 500).obstacle == "PID namespace"
    assert read_program(str(tmp_path), 501).obstacle is None


def test_processes_left_running_are_found_by_their_environment(child):
    since = start_ticks(child.pid)
    assert [key.pid for key in find_left_running("/home/ann/runs/one", since)] == [child.pid]
    assert find_left_running("/home/ann/runs/another", since) == []
    assert find_left_running("/home/ann/runs/one", since + 1) == []


def test_process_is_recorded_once_and_not_in_its_first_tick(child):
    key = programs.LocalProcess(child.pid, start_ticks(child.pid))
    log = ProgramLog(RUN[RUN_DIR_VARIABLE])
    assert log.update([key]) == []
    (noted,) = log.update([key])
    assert (noted["process_pid"], noted["is_python"], noted["has_torch"]) == (child.pid, True, False)
    assert [log.update([key]) for _ in range(20)] == [[]] * 20


def test_number_of_recorded_programs_is_limited(child, monkeypatch):
    monkeypatch.setattr(ProgramLog, "AT_MOST", 1)
    log = ProgramLog(RUN[RUN_DIR_VARIABLE])
    keys = [programs.LocalProcess(child.pid, start_ticks(child.pid)), programs.LocalProcess(os.getpid(), 1)]
    log.update(keys)
    assert len(log.update(keys)) == 1
