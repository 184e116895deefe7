"""The tour of short trainings, and the demo that shows recorded ones."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from collector.commands.demo import replay, tour
from collector.commands.demo.memory_limit import NoLimitError, memory_limited
from collector.diagnosis import diagnose, load_tables
from collector.report.signpost import gravest
from tests.conftest import bare_environment, tidegauge, wait_for

MIB = 2**20
#: Run -> the finding that it shows.
SHOWN = {
    "healthy": None,
    "slow-worker": "slow-worker",
    "worker-leak": "worker-heap-leak",
    "copy-on-read": "copy-on-read-growth",
    "memory-limit": "host-oom-kill",
}
#: The command line where torch cannot be imported.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from collector.cli import main; main()"


@contextlib.contextmanager
def started(*words: object, code: str = "from collector.cli import main; main()", **environ: str):
    """Start a command line in a process group of its own, all of which ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, words)],
        env=bare_environment() | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(lines: Iterable[str], words: str) -> Iterator[str]:
    """Yield lines up to the one that begins with these words."""
    for line in lines:
        yield line
        if line.startswith(words):
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The recorded runs, by name, in the order of the demo."""
    return {run.manifest["name"]: run for run in replay.unpack(tmp_path_factory.mktemp("replayed"))}


def test_recorded_runs_are_those_of_the_tour(replayed):
    assert list(replayed) == [stop.name for stop in tour.STOPS] == list(SHOWN)
    assert sum(path.stat().st_size for path in replay.RECORDED.iterdir()) < 1_000_000


@pytest.mark.parametrize("name", SHOWN)
def test_recorded_run_shows_what_it_is_for(replayed, name):
    found = gravest(verdict := diagnose(load_tables(replayed[name])))
    assert (found.kind if found else None) == SHOWN[name]
    assert verdict.status == ("killed" if name == "memory-limit" else "finished")


def test_demo_shows_recorded_runs_without_torch(tmp_path):
    port = free_port()
    with started("demo", "--port", port, code=WITHOUT_TORCH, TMPDIR=str(tmp_path)) as demo:
        text = "".join(until(demo.stderr, "Look first"))
        assert all(f"{name}  " in text for name in SHOWN)
        assert text.count("See  http://localhost") == len(SHOWN)
        (page,) = re.findall(r"^Look first: (\S+) \(which worker and which stage make training wait\)$", text, re.M)
        with urllib.request.urlopen(page) as answer:
            assert answer.status == 200
        assert len(list(tmp_path.glob("tidegauge-demo-*/runs/*"))) == len(SHOWN)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(30) in (0, 130)  # 130 if the signal comes before the last wait
    assert not list(tmp_path.glob("tidegauge-demo-*"))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(page)


def test_recorded_runs_may_be_unpacked_again(tmp_path):
    before = replay.unpack(tmp_path)
    assert replay.unpack(tmp_path) == before
    listed = tidegauge(tmp_path, "runs").stdout
    assert all(f"-{name}-" in listed for name in SHOWN)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_home_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = tidegauge(tmp_path, "demo", "--no-dashboard", "--home", tmp_path / "file" / "home")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give --home a folder that can be written" in done.stderr


@pytest.mark.parametrize("command", [("demo",), ("job", "tour"), ("job", "--dashboard", "images")])
def test_port_in_use_is_a_one_line_error_before_anything_is_trained(tmp_path, command):
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        job, *name = command
        done = tidegauge(tmp_path, job, "--port", other.getsockname()[1], *name)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "give another with --port" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_tour_shows_its_help_as_every_command_does(tmp_path):
    done = tidegauge(tmp_path, "job", "tour", "-h")
    assert (done.returncode, "--no-dashboard" in done.stdout) == (0, True)


def test_job_without_torch_says_what_to_install_and_what_works_without(tmp_path):
    with started("job", "tour", code=WITHOUT_TORCH, TIDEGAUGE_HOME=str(tmp_path)) as job:
        _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors.count("\n")) == (2, 1)
    assert "pip install 'tidegauge[jobs]'" in errors
    assert "`tidegauge demo`" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("job", "tour", "--steps", "3"),
            "No such option '--steps'. Did you mean '--help'? See tidegauge job tour --help",
        ),
        (("job", "--investigate", "tour"), "the tour takes only --port, --home and --no-dashboard"),
        (("demo", "--port", "0"), "0 is not in the range 1<=x<=65535; see tidegauge demo --help"),
    ],
)
def test_bad_input_is_a_one_line_error(tmp_path, words, said):
    done = tidegauge(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_tour_trains_in_turn_and_goes_on_without_a_memory_limit(tmp_path, monkeypatch):
    def refuse(*_):
        raise NoLimitError("no memory limit can be set here: it is a test")

    short = [("limited", 64), ("free", None)]
    job = ("fault", "main-leak", "--steps", "2", "--num-workers", "0")
    stops = [tour.Stop(name=name, job=job, shows="two steps", memory_mib=limit) for name, limit in short]
    monkeypatch.setattr(tour, "STOPS", stops)
    monkeypatch.setattr(tour, "memory_limited", refuse)
    done = tidegauge(tmp_path, "job", "tour", "--no-dashboard")
    assert done.returncode == 0, done.stderr
    assert "tidegauge: no memory limit can be set here: it is a test; this run is left out\n" in done.stderr
    assert "tidegauge: 2 of 2, free: two steps\n" in done.stderr
    assert re.findall(r"^(\w+)  finished, 2 steps", done.stderr, re.M) == ["free"]
    assert "dashboard, then http://localhost:8501/overview?run=" in done.stderr.splitlines()[-1]


def test_ctrl_c_ends_the_tour_and_all_its_processes(tmp_path):
    with started("job", "tour", "--no-dashboard", TIDEGAUGE_HOME=str(tmp_path)) as job:
        wait_for(lambda: list(tmp_path.glob("runs/*/journal/*.step.*")), "the first step")
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=60)
        wait_for(lambda: not group_lives(job.pid), "the end of all processes")
    assert job.returncode == 130
    assert "1 of 5, healthy" in errors
    assert "2 of 5" not in errors
    assert errors.count("Traceback") == 0


def group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_command_under_a_memory_limit_is_killed_at_it():
    hungry = [sys.executable, "-S", "-c", f"x = b'x' * {200 * MIB}"]
    try:
        with memory_limited(hungry, 64 * MIB) as command:
            group = Path(command[3])
            assert group.is_dir()
            assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    except NoLimitError as error:
        pytest.skip(str(error))
    assert not group.exists()


def test_no_memory_limit_without_control_groups(tmp_path):
    limited = memory_limited(["true"], 64 * MIB, tmp_path)
    with pytest.raises(NoLimitError, match="no control group of memory is mounted"), limited:
        pass
