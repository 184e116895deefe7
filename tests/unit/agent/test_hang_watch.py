"""Stacks are taken after a silence that the training's own pace does not explain, and not before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from collector.agent.samplers.hang_watch import IDLE_SECONDS, SERIES_DUMPS, HangWatch
from collector.agent.samplers.process_roles import ProcessRoles
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError
from collector.findings import Locus
from collector.stacks import SUSPENDED, Frame, Stack

HOST = "node.example"
MAIN = LocalProcess(os.getpid(), 77)


@pytest.fixture
def roles():
    roles = ProcessRoles(HOST, lambda pid: 77, boot_offset_ns=0)
    roles.learn({"kind": "process-start", "host": HOST, "pid": MAIN.pid, "start_ticks": 77, "rank": None})
    return roles


class Training:
    """A training whose clock is turned by hand; `train` appends a batch every so often, `wait` lets time pass."""

    def __init__(self, directory, roles, read, started=()):
        self.now = 0.0
        self._alive = [MAIN, *started]
        self.taken = []
        self._journal = directory / f"{HOST}.{MAIN.pid}.batch.0.journal"
        self._watch = HangWatch(directory, HOST, roles, read=read)

    def set_timeout(self, seconds):
        loader = {"kind": "loader", "pid": MAIN.pid, "start_ticks": MAIN.start_ticks, "timeout_seconds": seconds}
        self._watch.note_event(loader)
        return self

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
            if (fields := self._watch.tick(round(self.now * 1e9), self._alive)) is not None:
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


@pytest.mark.parametrize(("batches_seconds", "timeout_seconds"), [(60, 8), (0, 8), (0, 40)])
def test_stacks_are_taken_before_a_loader_times_out(training, batches_seconds, timeout_seconds):
    begin = training.wait(20).set_timeout(timeout_seconds).train(batches_seconds).now
    training.wait(timeout_seconds)
    first, _ = training.taken[0]
    assert first - begin == pytest.approx(timeout_seconds / 2, abs=1)
    assert len(training.taken) == SERIES_DUMPS


def test_steps_as_long_as_the_timeout_of_the_loader_have_stacks_taken_once(training):
    times = training.set_timeout(8).train(300, every=6).times
    assert len(times) > 0
    assert max(times) < 12


def test_stacks_at_the_timeout_replace_none_at_the_budget(training):
    begin = training.set_timeout(8).train(60).now
    training.wait(20)
    starts = training.times[::SERIES_DUMPS]
    assert [round(start - begin) for start in starts] == pytest.approx([4, 15], abs=1)


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
    assert (entry["error"], entry["threads"], entry["waits"]) == ("not allowed here", [], "computing")
    assert entry["cpu_seconds"] is not None


def test_a_python_process_that_the_training_started_is_in_the_dumps(tmp_path, roles):
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child, subprocess.Popen(["sleep", "60"]) as program:
        child.stdout.readline()
        started = [LocalProcess(child.pid, 78), LocalProcess(program.pid, 79)]
        training = Training(tmp_path, roles, lambda pid, where, proc: [], started).train(10).wait(20)
        child.kill()
        program.kill()
    pids = [process["pid"] for process in training.taken[0][1]["processes"]]
    assert pids == [MAIN.pid, child.pid]


class Foreign:
    """A process without hooks whose CPU time is set by hand; its main thread stands in one place."""

    def __init__(self, directory, frames, waits, *, read=None, state="S"):
        self.now = 0.0
        self.taken = []
        self._ticks = self._read_bytes = 0
        self._state = state
        self._stat = directory / "proc" / "500" / "stat"
        self._stat.parent.mkdir(parents=True)
        self._stat.with_name("cmdline").write_bytes(b"python\0train.py\0")
        self._stat.with_name("environ").write_bytes(b"")
        stack = Stack(locus=Locus(), thread="MainThread", frames=tuple(frames), waits=waits)
        roles = ProcessRoles(HOST, lambda pid: 77, boot_offset_ns=0)
        read = read or (lambda pid, where, proc: [stack])
        self._watch = HangWatch(directory, HOST, roles, proc=str(directory / "proc"), read=read)

    def run(self, seconds, ticks_per_second=0, bytes_per_second=0):
        for _ in range(seconds):
            self.now += 1
            self._read_bytes += bytes_per_second
            self._stat.with_name("io").write_text(f"rchar: {self._read_bytes}\nwchar: 0\n")
            self._ticks += ticks_per_second
            self._stat.write_text(f"500 (python) {self._state} 1 {'0 ' * 9}{self._ticks} 0 {'0 ' * 6}77 0")
            if (fields := self._watch.tick(round(self.now * 1e9), [LocalProcess(500, 77)])) is not None:
                self.taken.append((self.now, fields))
        return self


FOR_A_BATCH = [
    Frame("Connection.poll", "/usr/lib/python3.12/multiprocessing/connection.py", 1),
    Frame("_try_get_data", "/opt/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 1),
]
FOR_REQUESTS = [Frame("Event.wait", "/usr/lib/python3.12/threading.py", 1), Frame("serve", "/srv/serve.py", 1)]
POLL, LOCK = "waiting for a pipe or socket", "blocked on a lock (futex)"


def test_a_run_without_hooks_that_idles_with_work_pending_is_recorded(tmp_path):
    foreign = Foreign(tmp_path, FOR_A_BATCH, POLL).run(60, ticks_per_second=50)
    begin = foreign.now
    foreign.run(260)
    starts = [round(now - begin) for now, _ in foreign.taken[::SERIES_DUMPS]]
    assert starts == pytest.approx([IDLE_SECONDS, 2 * IDLE_SECONDS], abs=6)
    assert len(foreign.taken) == 2 * SERIES_DUMPS
    fields = foreign.taken[-1][1]
    assert fields["silent"] == []
    assert fields["idle_seconds"] == pytest.approx(242, abs=8)
    assert (fields["processes"][0]["pid"], fields["processes"][0]["parent_pid"]) == (500, 1)


def test_a_run_without_hooks_that_a_signal_has_suspended_is_recorded(tmp_path):
    foreign = Foreign(tmp_path, FOR_REQUESTS, SUSPENDED).run(60, ticks_per_second=50).run(130)
    assert len(foreign.taken) == SERIES_DUMPS


@pytest.mark.parametrize(("state", "count"), [("T", SERIES_DUMPS), ("S", 0)], ids=["suspended", "asleep"])
def test_a_run_without_hooks_and_stacks_is_recorded_only_if_a_signal_has_suspended_it(tmp_path, state, count):
    def refuse(pid, where, proc):
        raise StackError("not allowed here")

    foreign = Foreign(tmp_path, [], None, read=refuse, state=state)
    thread = tmp_path / "proc" / "500" / "task" / "500" / "stat"
    thread.parent.mkdir(parents=True)
    thread.write_text(f"500 (python) {state} 1 0")
    foreign.run(60, ticks_per_second=50).run(130)
    assert [fields["processes"][0]["waits"] for _, fields in foreign.taken] == [SUSPENDED] * count


def test_stacks_say_when_a_process_last_received_data(tmp_path):
    foreign = Foreign(tmp_path, FOR_A_BATCH, POLL).run(60, ticks_per_second=50)
    foreign.run(125, bytes_per_second=10)
    assert foreign.taken[-1][1]["processes"][0]["moved_seconds_ago"] < 10
    assert foreign.taken[-1][1]["processes"][0]["received_seconds_ago"] is None, "they came from a file"
    foreign.run(120)
    assert foreign.taken[-1][1]["processes"][0]["moved_seconds_ago"] == pytest.approx(119, abs=6)


def test_stacks_of_a_process_that_receives_nothing_say_so(tmp_path):
    foreign = Foreign(tmp_path, FOR_A_BATCH, POLL).run(60, ticks_per_second=50).run(125)
    assert foreign.taken[-1][1]["processes"][0]["moved_seconds_ago"] is None


@pytest.mark.parametrize("ticks_per_second", [3, 100])
def test_a_run_without_hooks_that_computes_is_left_alone(tmp_path, ticks_per_second):
    assert Foreign(tmp_path, FOR_A_BATCH, POLL).run(600, ticks_per_second).taken == []


def test_a_run_without_hooks_that_computes_now_and_then_is_left_alone(tmp_path):
    foreign = Foreign(tmp_path, FOR_A_BATCH, POLL)
    for _ in range(6):
        foreign.run(100).run(1, ticks_per_second=60)
    assert foreign.taken == []


@pytest.mark.parametrize(("frames", "waits"), [(FOR_REQUESTS, LOCK), (FOR_REQUESTS, POLL)])
def test_a_server_that_waits_for_requests_is_left_alone(tmp_path, frames, waits):
    assert Foreign(tmp_path, frames, waits).run(500).taken == []
