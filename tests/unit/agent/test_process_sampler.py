import itertools
import os
import shutil
import time

import pytest

from collector.agent.samplers.process_roles import ProcessRoles
from collector.agent.samplers.processes import EarlySampler, ProcessSampler
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.samples import record_values
from training_harness.records import (
    MISSING_INT32,
    MISSING_INT64,
    PROCESS,
    ROLE_COLLECTOR,
    ROLE_MAIN,
    ROLE_OTHER,
    ROLE_WORKER,
)

SECOND_NS = 1_000_000_000
COLLECTOR = LocalProcess(50, 1)
COMMAND = LocalProcess(100, 7)
EPOCH_START = {
    "kind": "epoch-start",
    "host": "here",
    **COMMAND._asdict(),
    "rank": 0,
    "time_ns": SECOND_NS,
    "loader": 4,
    "worker_pids": [300],
}

STATUS = """Name:\tx
VmRSS:\t    {rss} kB
VmData:	     900 kB
RssFile:\t       16 kB
RssShmem:\t       8 kB
VmSwap:\t       4 kB
Threads:\t3
Cpus_allowed:\t00000000,0000000f
"""
ROLLUP = """0-1 ---p 00000000 00:00 0                          [rollup]
Rss:                 300 kB
Pss:                 200 kB
Pss_Dirty:           100 kB
Private_Clean:        10 kB
Private_Dirty:       100 kB
Private_Hugetlb:    2048 kB
"""


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             unlimited            unlimited            processes
Max open files            1024                 4096                 files
"""


class Proc:
    """A /proc to lay out by hand."""

    def __init__(self, root):
        self.root = root
        self.put(COLLECTOR.pid, parent=1, start=COLLECTOR.start_ticks)

    def put(self, pid, *, parent, start=7, name="python", state="S", rss=300, fds=2):
        self.remove(pid)
        directory = self.root / str(pid)
        (directory / "fd").mkdir(parents=True)
        middle = " ".join(["0"] * 9)
        tail = " ".join(["0"] * 5)
        (directory / "stat").write_text(
            f"{pid} ({name}) {state} {parent} {middle} 30 12 {tail} 1 {start} 0 0\n".replace("  ", " ")
        )
        (directory / "status").write_text(STATUS.format(rss=rss))
        (directory / "smaps_rollup").write_text(ROLLUP)
        (directory / "limits").write_text(LIMITS)
        (directory / "schedstat").write_text("900 25000000 12\n")
        (directory / "wchan").write_text("0" if state == "R" else "hrtimer_nanosleep")
        for number in range(fds):
            (directory / "fd" / str(number)).touch()

    def remove(self, pid):
        shutil.rmtree(self.root / str(pid), ignore_errors=True)


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


@pytest.fixture
def roster():
    return ProcessRoles("here", lambda pid: 7, boot_offset_ns=0)


@pytest.fixture
def sampler(proc, roster):
    return ProcessSampler(roster, COLLECTOR, now_ns=0, proc=str(proc.root))


def sampled(sampler, second=1):
    return {one["process_pid"]: one for one in sampler.sample(second * SECOND_NS, [COMMAND])}


def test_only_the_command_its_descendants_and_the_collector_are_sampled(proc, sampler):
    proc.put(100, parent=50)
    proc.put(103, parent=102)
    proc.put(102, parent=100)
    proc.put(400, parent=1)
    proc.put(401, parent=400)

    samples = sampled(sampler)

    assert set(samples) == {50, 100, 102, 103}
    assert samples[50]["role"] == ROLE_COLLECTOR
    assert samples[103]["role"] == ROLE_OTHER


def test_sample_has_every_gauge_of_a_process(proc, sampler):
    proc.put(100, parent=50, fds=5)

    sample = sampled(sampler)[100]

    assert sample == {
        "process_pid": 100,
        "parent_pid": 50,
        "process_start_ticks": 7,
        "process_rank": None,
        "role": ROLE_OTHER,
        "loader": None,
        "worker": None,
        "rss_bytes": 300 * 1024,
        "file_bytes": 16 * 1024,
        "shm_bytes": 8 * 1024,
        "swap_bytes": 4 * 1024,
        "data_bytes": 900 * 1024,
        "thread_count": 3,
        "allowed_cores_count": 4,
        "fd_count": 5,
        "fd_limit_count": 1024,
        "wait_channel": b"hrtimer_nanosleep",
        "cpu_ns": 42 * 10_000_000,
        "run_queue_ns": 25_000_000,
        "pss_bytes": 200 * 1024,
        "private_dirty_bytes": 100 * 1024,
        "uss_bytes": (10 + 100 + 2048) * 1024,
        "alive": 1,
    }


def test_running_process_has_no_wait_channel(proc, sampler):
    proc.put(100, parent=50, state="R")
    assert sampled(sampler)[100]["wait_channel"] is None


def test_process_name_with_blanks_and_brackets_is_parsed(proc, sampler):
    proc.put(100, parent=50, name="a) S 1 (b c")

    assert sampled(sampler)[100]["cpu_ns"] == 42 * 10_000_000


def test_unreadable_gauges_are_missing_not_zero(proc, sampler):
    proc.put(100, parent=50)
    for name in ("status", "smaps_rollup"):
        (proc.root / "100" / name).unlink()
    shutil.rmtree(proc.root / "100" / "fd")

    record = dict(
        zip(
            (column.name for column in PROCESS.columns),
            record_values(PROCESS, 1, sampled(sampler)[100]),
            strict=True,
        )
    )

    for name in ("rss_bytes", "pss_bytes", "private_dirty_bytes", "uss_bytes", "swap_bytes", "shm_bytes"):
        assert record[name] == MISSING_INT64
    assert record["fd_count"] == record["thread_count"] == record["exit_status"] == MISSING_INT32
    assert record["alive"] == 1


def test_orphan_is_still_followed(proc, sampler):
    proc.put(100, parent=50)
    proc.put(102, parent=100)
    sampled(sampler)
    proc.remove(100)
    proc.put(102, parent=1)
    proc.put(103, parent=102)

    samples = sampled(sampler, 2)

    assert samples[100]["alive"] == 0
    assert samples[102]["alive"] == samples[103]["alive"] == 1


@pytest.mark.parametrize("becomes_zombie", [True, False])
def test_ended_process_gets_one_last_record_without_gauges(proc, sampler, becomes_zombie):
    proc.put(100, parent=50)
    proc.put(102, parent=100)
    sampled(sampler)
    proc.remove(102)
    if becomes_zombie:
        proc.put(102, parent=100, state="Z")

    last = sampled(sampler, 2)[102]

    assert last["alive"] == 0
    assert last["exit_status"] is None
    assert "rss_bytes" not in last
    assert 102 not in sampled(sampler, 3)


def test_pid_reused_outside_the_run_is_not_followed(proc, sampler):
    proc.put(100, parent=50)
    proc.put(102, parent=100)
    sampled(sampler)
    proc.put(102, parent=1, start=99)

    assert sampled(sampler, 2)[102]["alive"] == 0
    assert 102 not in sampled(sampler, 3)


def test_pid_reused_by_another_child_is_two_processes(proc, sampler):
    proc.put(100, parent=50)
    proc.put(102, parent=100)
    sampled(sampler)
    proc.put(102, parent=100, start=99)

    pairs = [
        (one["process_start_ticks"], one["alive"])
        for one in sampler.sample(2 * SECOND_NS, [COMMAND])
        if one["process_pid"] == 102
    ]

    assert sorted(pairs) == [(7, 0), (99, 1)]


def test_a_worker_that_is_no_descendant_is_followed_by_its_reported_pid(proc, roster, sampler):
    proc.put(100, parent=50)
    proc.put(300, parent=1)
    roster.learn(EPOCH_START)

    sample = sampled(sampler)[300]

    assert (sample["role"], sample["process_rank"], sample["loader"], sample["worker"]) == (ROLE_WORKER, 0, 4, 0)


def test_a_worker_keeps_its_role_in_its_last_record(proc, roster, sampler):
    proc.put(300, parent=1)
    roster.learn(EPOCH_START)
    sampled(sampler)
    proc.remove(300)

    assert sampled(sampler, 2)[300]["worker"] == 0


def test_worker_that_outlives_its_parent_is_not_charged_with_the_pages_that_they_shared(proc, roster, sampler):
    proc.put(100, parent=50)
    proc.put(300, parent=100)
    roster.learn(EPOCH_START)
    sampler.reads_all = True
    assert "pss_bytes" in sampled(sampler)[300]

    proc.remove(100)
    proc.put(300, parent=1)
    sampler.reads_all = True
    orphan = sampled(sampler, 2)[300]

    assert orphan["rss_bytes"] == 300 * 1024
    assert "pss_bytes" not in orphan


def test_process_adopted_by_the_command_is_found_later(proc, sampler):
    proc.put(100, parent=50)
    proc.put(102, parent=1)
    sampled(sampler)
    proc.put(102, parent=100)

    assert any(102 in sampled(sampler, second) for second in range(2, 40))


def test_last_sample_of_the_command_has_its_exit_status(proc, roster):
    sampler = ProcessSampler(roster, COLLECTOR, child=COMMAND, now_ns=0, proc=str(proc.root))
    proc.put(100, parent=50)
    sampled(sampler)
    proc.put(100, parent=50, state="Z")

    assert 100 not in sampled(sampler, 2)
    last = sampler.last_sample(COMMAND, -9)
    assert (last["alive"], last["exit_status"]) == (0, -9)


def test_status_is_read_without_smaps_when_the_budget_is_spent(proc, sampler):
    proc.put(100, parent=50)
    sampled(sampler)
    sampler.budget.charge(SECOND_NS)

    sample = sampled(sampler, 2)[100]

    assert sample["rss_bytes"] == 300 * 1024
    assert "pss_bytes" not in sample
    sampler.reads_all = True
    assert [all("pss_bytes" in one for one in sampled(sampler, second).values()) for second in (3, 4)] == [
        True,
        False,
    ]


def test_collector_below_a_notebook_is_sampled_once(proc, roster, sampler):
    proc.put(100, parent=1)
    proc.put(50, parent=100, start=COLLECTOR.start_ticks)

    roles = [one["role"] for one in sampler.sample(SECOND_NS, [COMMAND]) if one["process_pid"] == 50]

    assert roles == [ROLE_COLLECTOR]


def test_children_of_the_collector_are_no_part_of_the_run(proc, sampler):
    proc.put(100, parent=1)
    proc.put(50, parent=100, start=COLLECTOR.start_ticks)
    proc.put(51, parent=50)

    assert set(sampled(sampler)) == {50, 100}


def test_growing_process_is_read_more_often_near_the_limit(proc, roster, monkeypatch):
    monkeypatch.setattr(time, "thread_time_ns", itertools.count(0, 10_000_000).__next__)  # a reading takes 10 ms

    def readings(headroom_bytes):
        sampler = ProcessSampler(roster, COLLECTOR, now_ns=0, proc=str(proc.root))
        for pid in range(100, 108):
            proc.put(pid, parent=50 if pid == 100 else 100)
        count = 0
        for second in range(200):
            (proc.root / "100/status").write_text(STATUS.format(rss=10_000_000 + 1000 * second))
            samples = sampler.sample(second * SECOND_NS, [COMMAND], headroom_bytes=headroom_bytes)
            count += any(one["process_pid"] == 100 and "pss_bytes" in one for one in samples)
        return count

    assert readings(10_000_000) > 1.2 * readings(None)


def test_process_with_new_children_is_read_before_others_as_old(proc, sampler, monkeypatch):
    monkeypatch.setattr(time, "thread_time_ns", itertools.count(0, 16_000_000).__next__)  # a reading takes 16 ms

    def read(second):
        return {pid for pid, one in sampled(sampler, second).items() if "pss_bytes" in one}

    for pid in range(100, 104):
        proc.put(pid, parent=50 if pid == 100 else 100)
    assert read(1) == {50, 100, 101, 102, 103}
    for pid in range(200, 204):
        proc.put(pid, parent=102)
    after = [read(second) for second in range(2, 40)]
    assert next(pids for pids in after if pids) == {102}


def test_old_worker_with_a_reused_pid_leaves_no_record(proc, roster, sampler):
    proc.put(300, parent=1, start=99)
    roster.learn(
        {
            "kind": "worker-start",
            "host": "here",
            "pid": 300,
            "start_ticks": 7,
            "rank": None,
            "loader": 0,
            "worker": 1,
        }
    )

    assert 300 not in sampled(sampler)


def test_process_shorter_than_a_tick_is_forgotten(proc, sampler, roster):
    proc.put(100, parent=50)
    proc.put(200, parent=1)
    for pid, ticks in ((200, 7), (200, 6), (300, 7)):  # alive, its pid used again, gone
        roster.learn({"host": "here", "kind": "process-start", "rank": 0, "pid": pid, "start_ticks": ticks})

    assert 200 in sampled(sampler)
    assert list(roster) == [LocalProcess(200, 7)]


def test_pid_reused_by_a_process_of_the_run_gets_its_role(proc, sampler, roster):
    proc.put(100, parent=50)
    proc.put(200, parent=100)
    sampled(sampler)
    proc.remove(200)
    proc.put(200, parent=1, start=9)
    roster.learn({"host": "here", "kind": "process-start", "rank": 0, "pid": 200, "start_ticks": 9})

    ended, born = (one for one in sampler.sample(2 * SECOND_NS, [COMMAND]) if one["process_pid"] == 200)
    assert (ended["alive"], born["alive"], born["role"]) == (0, 1, ROLE_MAIN)


def test_early_samples_have_resident_memory_and_descriptors_of_living_processes(proc):
    page = os.sysconf("SC_PAGE_SIZE")
    proc.put(100, parent=50, fds=3)
    proc.put(101, parent=100)
    (proc.root / "100" / "statm").write_text("9000 500 120 1 0 800 0\n")
    (proc.root / "101" / "statm").write_text("0 0 0 0 0 0 0\n")  # a zombie
    gone = LocalProcess(102, 7)

    samples = EarlySampler(0, str(proc.root)).sample(0, [COMMAND, LocalProcess(101, 7), gone])

    assert samples == [
        {
            "process_pid": 100,
            "process_start_ticks": 7,
            "rss_bytes": 500 * page,
            "anon_bytes": 380 * page,
            "fd_count": 3,
        }
    ]


def test_early_samples_give_way_where_the_ticks_cost_much(proc):
    proc.put(100, parent=50)
    (proc.root / "100" / "statm").write_text("9000 500 120 1 0 800 0\n")
    few, many = EarlySampler(0, str(proc.root)), EarlySampler(0, str(proc.root))
    taken = {few: 0, many: 0}
    for second in range(60):
        few.charge(300_000)  # 0.03 % of a core, and 0.7 %
        many.charge(7_000_000)
        for part in range(1, 5):
            for sampler in taken:
                taken[sampler] += len(sampler.sample(second * SECOND_NS + part * SECOND_NS // 5, [COMMAND]))

    assert taken[few] == 240
    assert taken[many] < 60  # those of the seconds that it had saved up


def test_early_samples_end_after_two_minutes(proc):
    sampler = EarlySampler(5 * SECOND_NS, str(proc.root))

    assert not sampler.is_over(124 * SECOND_NS)
    assert sampler.is_over(125 * SECOND_NS)
