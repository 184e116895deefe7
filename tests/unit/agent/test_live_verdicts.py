"""Live verdicts that fail, hang or come too late; tests/integration has those that are reported."""

import json
import math
import sys
import threading
from pathlib import Path

import pytest

from collector.agent.live import verdicts
from collector.agent.live.limits import Headroom, seconds_left
from collector.agent.live.verdicts import BUDGET_RATIO, EVERY_SECONDS, LEAST_SECONDS, LiveVerdicts, pause_seconds
from collector.agent.loader_settings import LoaderSettings
from collector.agent.problems import Problems
from collector.store.runs.run import Run
from tests.conftest import wait_for
from training_harness.journal import EventLog, Identity


class World:
    """Live verdicts of a run that does not exist, and what they report."""

    def __init__(self, path):
        self.messages = []
        self.outlook = LiveVerdicts(Run(path / "gone"), self.messages.append, LoaderSettings())
        self.problems = Problems(EventLog(path, Identity(host="here", pid=1, start_ticks=2)))
        self.events = path / "here.1.jsonl"

    def begin(self):
        self.outlook.tick(0, self.problems)
        self.outlook.tick(round(EVERY_SECONDS * 1e9), self.problems)

    def error(self):
        wait_for(self.events.exists, "the problem")
        event = json.loads(self.events.read_text())
        assert (event["kind"], event["part"]) == ("collector-problem", "verdict")
        return event["error"]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def hanging_program(tmp_path, monkeypatch):
    """A program in place of Python that makes a file when it begins, and never ends."""
    program = tmp_path / "hangs"
    program.write_text(f"#!/bin/sh\necho > {tmp_path / 'began'}\nexec sleep 300\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path / "began"


def test_a_verdict_on_the_start_of_a_command_delays_none_on_its_training(world):
    def begins(seconds):
        world.outlook.tick(round(seconds * 1e9), world.problems)
        thread, world.outlook._thread = world.outlook._thread, None
        if thread is not None:
            thread.join()
            world.outlook._cost_seconds = 5.0
        return thread is not None

    assert [begins(seconds) for seconds in (0, 30, 60, 70)] == [False, True, False, False]
    world.outlook.restart()
    assert [begins(seconds) for seconds in (71, 90, 101, 131)] == [False, False, True, False]


def test_failing_verdict_is_only_a_problem(world):
    world.begin()

    assert "no verdict, status 2: " in world.error()
    assert str(world.outlook._run.path) in world.error()
    assert world.messages == []
    world.outlook.close()


def test_hanging_verdict_is_killed(world, hanging_program, monkeypatch):
    monkeypatch.setattr(verdicts, "PATIENCE_SECONDS", 0.1)
    world.begin()

    assert "no verdict, status -9" in world.error()
    world.outlook.close()


def test_kernel_kills_a_verdict_before_the_training(world, hanging_program):
    world.begin()
    wait_for(hanging_program.exists, "the start of the verdict")
    pid = world.outlook._child.pid
    wait_for(lambda: Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n", "the word to the kernel")
    assert world.outlook.anon_bytes > 0
    world.outlook.close()
    assert world.outlook.anon_bytes is None


def test_end_of_the_run_does_not_wait_for_a_verdict(world, hanging_program):
    world.begin()
    wait_for(hanging_program.exists, "the start of the verdict")
    world.outlook.close()

    assert "verdict" not in [thread.name for thread in threading.enumerate()]
    assert world.messages == []
    assert not world.events.exists()


def test_verdicts_are_more_frequent_near_a_limit():
    assert pause_seconds(0.1) == EVERY_SECONDS
    assert pause_seconds(1.5) == 1.5 / BUDGET_RATIO
    for nearest in (1000.0, 200.0, 100.0):
        assert pause_seconds(1.5, nearest) <= nearest / 2
    assert pause_seconds(1.5, 1.0) == LEAST_SECONDS


def test_seconds_left_extrapolates_falling_headroom():
    falling = [(float(at), 1000.0 - 10 * at) for at in range(30)]
    assert seconds_left(falling) == pytest.approx(75, rel=0.1)
    assert seconds_left(falling[:4]) == math.inf, "too little was seen"
    assert seconds_left([(at, 500.0) for at, _ in falling]) == math.inf
    spike = [(at, left - 400 * (10 <= at < 13)) for at, left in [(at, 500.0) for at, _ in falling]]
    assert seconds_left(spike) == math.inf


def test_nearest_limit_is_that_of_any_device_or_the_host():
    headroom = Headroom()
    assert headroom.nearest_seconds == math.inf
    for at in range(60):
        devices = [
            {"device": 0, "total_bytes": 1000, "used_bytes": 100, "reserved_bytes": None},
            {"device": 1, "total_bytes": 1000, "used_bytes": 100 + 5 * at, "reserved_bytes": None},
        ]
        host = {"memory_available_bytes": 10_000 - 10 * at, "shm_total_bytes": None, "shm_used_bytes": 7}
        headroom.note(float(at), {"device": devices, "host": [host], "process": []})
    assert headroom.nearest_seconds == pytest.approx((1000 - 100 - 5 * 59) / 5, rel=0.1)
