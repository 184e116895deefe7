"""Stacks are taken after a silence that the training's own pace does not explain, and not before."""

from __future__ import annotations

import os

import pytest

from collector.agent.samplers.hang_watch import SERIES_DUMPS, HangWatch
from collector.agent.samplers.process_roles import ProcessRoles
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError

HOST = "node.example"
MAIN = LocalProcess(os.getpid(), 77)


@pytest.fixture
def roles():
    roles = ProcessRoles(HOST, lambda pid: 77, boot_offset_ns=0)
    roles.learn({"kind": "process-start", "host": HOST, "pid": MAIN.pid, "start_ticks": 77, "rank": None})
    return roles


class Training:
    """A training whose clock is turned by hand; `train` appends a batch every so often, `wait` lets time pass."""

    def __init__(self, directory, roles, read):
        self.now = 0.0
        self.taken = []
        self._journal = directory / f"{HOST}.{MAIN.pid}.batch.0.journal"
        self._watch = HangWatch(directory, HOST, roles, read=read)

    def train(self, seconds, every=1):
        for second in range(seconds):
            if second % every == 0:
                with self._journal.open("ab") as journal:
                    journal.write(b"x" * 64)
            self.wait(1)
        return self

    def wait(self, seconds):
        for _ in range(seconds):
            self.now += 1
            if (fields := self._watch.tick(round(self.now * 1e9), [MAIN])) is not None:
                self.taken.append((self.now, fields))
        return self

    @property
    def times(self):
        return [time for time, _ in self.taken]


@pytest.fixture
def training(tmp_path, roles):
    return Training(tmp_path, roles, lambda pid, where, proc: [])


def test_a_training_that_goes_on_is_left_alone(training):
    assert training.train(600).train(600, every=14).times == []


def test_three_dumps_are_taken_at_half_of_the_budget_at_the_budget_and_at_twice_the_budget(training):
    begin = training.train(60).now
    training.wait(100)
    starts = training.times[::SERIES_DUMPS]
    assert [round(start - begin) for start in starts] == pytest.approx([15, 30, 60], abs=1)
    assert len(training.taken) == 3 * SERIES_DUMPS
    assert [fields["is_last"] for _, fields in training.taken[:3]] == [False, False, True]


def test_the_budget_follows_the_longest_pause_of_the_training_itself(training):
    training.train(100, every=20)
    begin = training.now
    training.wait(250)
    times = [time - begin for time in training.times if time > begin]
    silence = training.taken[-1][1]["silent"][0]
    assert silence["longest_seconds"] == pytest.approx(20, abs=1)
    assert silence["budget_seconds"] == pytest.approx(200, abs=10)
    assert times[0] > 60


def test_a_training_without_a_first_batch_has_two_minutes_for_its_start(training):
    training.wait(55)
    assert training.times == []
    training.wait(80)
    assert training.taken[-1][1]["silent"][0]["longest_seconds"] is None


def test_a_new_batch_ends_the_series_and_the_next_silence_begins_anew(training):
    training.train(30).wait(16)
    count = len(training.taken)
    assert 0 < count <= SERIES_DUMPS
    training.train(30)
    assert len(training.taken) == count


def test_a_process_whose_stacks_cannot_be_read_is_recorded_with_the_reason(tmp_path, roles):
    def refuse(pid, where, proc):
        raise StackError("not allowed here")

    training = Training(tmp_path, roles, refuse).train(10).wait(20)
    entry = training.taken[0][1]["processes"][0]
    assert (entry["error"], entry["threads"]) == ("not allowed here", [])
    assert entry["cpu_seconds"] is not None
