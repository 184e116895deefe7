import json
import os

import pytest

from collector.agent.samplers.process_roles import EventTail, ProcessRoles
from collector.agent.samplers.procfs import LocalProcess
from training_harness.records import ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

SECOND_NS = 1_000_000_000
TICKS_PER_SECOND = 100


def roster(living=None):
    return ProcessRoles("here", (living or {}).get, boot_offset_ns=0)


def event(kind, pid=10, *, host="here", rank=None, at_seconds=100, **fields):
    return {
        "kind": kind,
        "host": host,
        "pid": pid,
        "start_ticks": 5,
        "rank": rank,
        "time_ns": at_seconds * SECOND_NS,
        **fields,
    }


def test_training_process_is_main_and_an_unknown_one_is_other():
    known = roster()
    known.learn(event("process-start", 10, rank=3))

    assert known.role_of(LocalProcess(10, 5)).role == ROLE_MAIN
    assert known.role_of(LocalProcess(10, 5)).rank == 3
    assert known.role_of(LocalProcess(10, 6)).role == ROLE_OTHER


def test_only_a_training_process_records_the_allocator_at_each_step():
    """Other processes record it at a CUDA error alone."""
    known = roster()
    known.learn(event("cuda-device", 10))
    known.learn(event("cuda-device", 11))
    known.learn(event("process-start", 11))

    assert known.recording_pids == {11}


@pytest.mark.parametrize("order", [1, -1])
def test_a_training_process_that_has_ended_recorded_the_memory_that_the_driver_still_shows(order):
    known = roster()
    for kind in ("process-start", "cuda-device")[::order]:
        known.learn(event(kind, 11))
    known.forget(LocalProcess(11, 5))

    assert known.recording_pids == {11}
    known.learn(event("process-exit", 11, detached=True))
    assert known.recording_pids == set(), "it goes on, and records no more"


def test_a_worker_is_known_by_the_pid_that_dataloader_reports():
    known = roster({20: 900, 21: 901})
    known.learn(event("epoch-start", rank=1, loader=2, epoch=0, worker_pids=[20, 21]))

    role = known.role_of(LocalProcess(21, 901))
    assert (role.role, role.rank, role.loader, role.worker) == (ROLE_WORKER, 1, 2, 1)


def test_reused_pid_is_no_worker():
    started_later = 101 * TICKS_PER_SECOND
    known = roster({20: started_later})
    known.learn(event("epoch-start", loader=0, epoch=0, worker_pids=[20], at_seconds=100))

    assert known.role_of(LocalProcess(20, started_later)).role == ROLE_OTHER


def test_worker_that_has_already_ended_is_not_followed():
    known = roster()
    known.learn(event("epoch-start", loader=0, epoch=0, worker_pids=[20]))

    assert list(known) == []


@pytest.mark.parametrize("worker_first", [True, False])
def test_a_worker_that_trains_is_still_a_worker(worker_first):
    told = [event("worker-start", 20, loader=0, epoch=0, worker=1), event("process-start", 20)]
    known = roster()
    for one in told if worker_first else reversed(told):
        known.learn(one)

    assert known.role_of(LocalProcess(20, 5)).role == ROLE_WORKER


def test_processes_of_another_host_are_not_followed():
    known = roster()
    known.learn(event("process-start", host="elsewhere"))

    assert list(known) == []


IDENTITY_FIELDS = {"time_ns": 1, "host": "here", "pid": 1, "start_ticks": 5, "rank": None}


def event_line(kind):
    return json.dumps({"kind": kind, **IDENTITY_FIELDS}) + "\n"


def write(path, *lines):
    with path.open("a") as stream:
        stream.write("".join(lines))


def test_tail_returns_each_whole_line_once(tmp_path):
    tail = EventTail(tmp_path, "here")
    log = tmp_path / "here.1.jsonl"
    torn = event_line("b")
    write(log, event_line("a"), torn[:9])

    assert [one["kind"] for one in tail.read()] == ["a"]
    assert tail.read() == []
    write(log, torn[9:])
    write(tmp_path / "here.2.jsonl", event_line("c"))
    assert sorted(one["kind"] for one in tail.read()) == ["b", "c"]


def test_damaged_line_hides_no_other(tmp_path):
    write(tmp_path / "here.1.jsonl", "\x00\x00{\n", "[1]\n", event_line("b"))

    assert EventTail(tmp_path, "here").read() == [{"kind": "b", **IDENTITY_FIELDS}]


def test_unreadable_log_hides_no_other(tmp_path):
    (tmp_path / "here.1.jsonl").mkdir()
    (tmp_path / "here.2.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "here.3.jsonl")
    write(tmp_path / "here.4.jsonl", event_line("b"))

    assert EventTail(tmp_path, "here").read() == [{"kind": "b", **IDENTITY_FIELDS}]


def test_log_of_another_host_is_ignored(tmp_path):
    write(tmp_path / "there.1.jsonl", event_line("a"))

    assert EventTail(tmp_path, "here").read() == []
