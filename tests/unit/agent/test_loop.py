import json
import os
import subprocess
from pathlib import Path

import pytest

import training_harness
from collector.agent.ingest_feed import INGEST_RATIO, LONGEST_PAUSE_NS, SHORTEST_PAUSE_NS, WAITING_RECORDS, pause_ns
from collector.agent.launch import child_environment, default_name, run_command
from collector.agent.loop import follow, next_deadline_ns
from collector.agent.problems import Problems
from collector.agent.samplers.samples import record_values
from collector.errors import TidegaugeError
from training_harness.journal import EventLog, Identity
from training_harness.records import STREAMS

SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class Ticks:
    """An agent whose ticks take the given times."""

    def __init__(self, clock, *durations_ns):
        self.clock = clock
        self.durations_ns = list(durations_ns)
        self.at_ns, self.between_ns = [], []
        self.early_end_ns = 0

    def tick(self):
        self.at_ns.append(self.clock.now_ns)
        self.clock.now_ns += self.durations_ns.pop(0)

    def samples_between_ticks(self, now_ns):
        return now_ns < self.early_end_ns

    def sample_between_ticks(self, now_ns):
        self.between_ns.append(now_ns)


def follow_ticks(*durations_ns, early_end_ns=0, interval_seconds=1):
    clock = Clock()
    agent = Ticks(clock, *durations_ns)
    agent.early_end_ns = early_end_ns

    def ended(seconds):
        clock.now_ns += round(seconds * 1e9)
        return not agent.durations_ns

    follow(agent, ended, interval_seconds=interval_seconds, clock_ns=clock)
    ticks, between = ([at_ns / SECOND_NS for at_ns in times] for times in (agent.at_ns, agent.between_ns))
    return (ticks, between) if early_end_ns else ticks


def test_ticks_do_not_drift():
    assert follow_ticks(300_000_000, 900_000_000, 1, 0) == [0, 1, 2, 3]


def test_tick_after_a_long_one_keeps_the_rhythm():
    assert follow_ticks(2_500_000_000, 0, 0) == [0, 3, 4]


def test_early_samples_lie_evenly_between_the_ticks_and_leave_their_rhythm():
    ticks, between = follow_ticks(300_000_000, 1, 0, 0, early_end_ns=1_500_000_000)

    assert ticks == [0, 1, 2, 3]
    assert between == [0.4, 0.6, 0.8, 1.2, 1.4, 1.6]


def test_short_intervals_need_no_early_samples():
    assert follow_ticks(0, 0, 0, early_end_ns=SECOND_NS, interval_seconds=0.25) == ([0, 0.25, 0.5], [])


def test_next_deadline_is_in_the_future():
    assert next_deadline_ns(10, 10, 5) == 15
    assert next_deadline_ns(10, 15, 5) == 20
    assert next_deadline_ns(10, 16, 5) == 20
    assert next_deadline_ns(10, 9, 5) == 15


def test_expensive_ingests_are_less_frequent_unless_many_records_wait():
    assert pause_ns(10, 1, SHORTEST_PAUSE_NS) == SHORTEST_PAUSE_NS
    assert pause_ns(10, 60_000_000, SHORTEST_PAUSE_NS) == 60_000_000 / INGEST_RATIO
    assert pause_ns(10, 900_000_000, SHORTEST_PAUSE_NS) == LONGEST_PAUSE_NS
    assert pause_ns(10**6, 900_000_000, SHORTEST_PAUSE_NS) == SHORTEST_PAUSE_NS
    assert pause_ns(2 * WAITING_RECORDS, 900_000_000, LONGEST_PAUSE_NS) == LONGEST_PAUSE_NS / 2


@pytest.fixture
def events(tmp_path):
    identity = Identity(host="here", pid=1, start_ticks=2)
    return EventLog(tmp_path, identity), tmp_path / "here.1.jsonl"


def test_failing_part_is_reported_once_and_stops_nothing(events):
    log, path = events
    problems = Problems(log)
    for _ in range(3):
        with problems.guard("host"):
            raise RuntimeError("no such thing")
    with problems.guard("devices"):
        raise RuntimeError("nor this")

    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["kind"], one["part"], one["error"]) for one in told] == [
        ("collector-problem", "host", "RuntimeError: no such thing"),
        ("collector-problem", "devices", "RuntimeError: nor this"),
    ]


@pytest.mark.parametrize("stream", STREAMS.values(), ids=lambda stream: stream.name)
def test_an_empty_sample_packs_as_missing_in_every_column(stream):
    time_ns, *values = stream.struct.unpack(stream.struct.pack(*record_values(stream, 5, {})))

    assert time_ns == 5
    for value in values:
        assert not value.strip(b"\0") if isinstance(value, bytes) else value != value or value < -100


def test_child_environment_has_the_run_and_the_shim_first(tmp_path):
    environ = child_environment({"PYTHONPATH": "/a:/b", "X": "1"}, tmp_path / "run", tmp_path)

    shim = str(Path(training_harness.__file__).parent / "bootstrap")
    assert environ["PYTHONPATH"].split(":") == [shim, "/a", "/b"]
    assert environ["TIDEGAUGE_RUN_DIR"] == str(tmp_path / "run")
    assert environ["TIDEGAUGE_HOME"] == str(tmp_path)
    assert environ["TIDEGAUGE_COLLECTOR"].split(".")[0] == str(os.getpid())
    assert environ["X"] == "1"


def test_nested_run_has_the_shim_once_in_its_path(tmp_path):
    once = child_environment({"PYTHONPATH": ""}, tmp_path, tmp_path)

    assert child_environment(once, tmp_path, tmp_path)["PYTHONPATH"] == once["PYTHONPATH"]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["python", "-u", "src/train.py", "--lr", "1"], "train"),
        (["python", "-m", "package.train", "--x"], "package.train"),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "fit.py"], "fit"),
        (["/usr/bin/bash", "job.sh"], "bash"),
        (["./train.py"], "train.py"),
    ],
)
def test_run_is_named_after_its_command(argv, name):
    assert default_name(argv) == name


@pytest.mark.parametrize("interval_seconds", [0, -1, 61, float("nan")])
def test_interval_out_of_bounds_is_refused_before_start(tmp_path, interval_seconds):
    with pytest.raises(TidegaugeError, match=r"not between 0\.05 and 60 s"):
        run_command(["true"], home=tmp_path / "home", name="x", tags={}, interval_seconds=interval_seconds)

    assert not (tmp_path / "home").exists()


def test_manifest_says_whether_files_differ_from_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True
        )

    def dirty():
        outcome = run_command(["true"], home=tmp_path / "home", interval_seconds=1.0)
        return outcome.run.manifest["git_commit"] is not None, outcome.run.manifest["git_dirty"]

    assert dirty() == (False, None)
    (tmp_path / "train.py").write_text("1\n")
    git("init")
    git("add", "train.py")
    git("commit", "-m", "x")
    (tmp_path / "notes.txt").write_text("not tracked\n")
    assert dirty() == (True, False)
    (tmp_path / "train.py").write_text("2\n")
    assert dirty() == (True, True)
