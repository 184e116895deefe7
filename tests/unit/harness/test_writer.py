"""The journal writer: what a reader finds after roll-over, a full disk and a fork."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collector.store.journals.arrow import read_records
from collector.store.journals.segments import list_segments, read_header
from collector.store.runs.run import Run
from training_harness import layout, session
from training_harness.journal import RETRY_AFTER_NS, EventLog, Identity, JournalWriter
from training_harness.records import MISSING_INT64, STEP, STREAMS

IDENTITY = Identity(host="node", pid=42, start_ticks=7, rank=3)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(layout.create_run(tmp_path, name="writer", argv=[]))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 64 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("a tmpfs can't be mounted here (needs root)")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def step_record(number: int) -> list[int]:
    return [number, number] + [MISSING_INT64] * 8 + [1, 0, 4, 2]


def steps_in(directory_owner: Run) -> list[int]:
    steps = []
    for segment in list_segments(directory_owner):
        header = read_header(segment)
        assert header is not None
        steps += read_records(segment, header, header.header_bytes)["step"].to_pylist()
    return steps


def test_segments_roll_over_at_their_size_and_keep_every_record(run):
    writer = JournalWriter(
        run.journal_dir, STEP, IDENTITY, segment_bytes=10 * STEP.struct.size, segments_at_most=10
    )
    for number in range(95):
        writer.append(*step_record(number))
    writer.close()
    assert len(list_segments(run)) == 10
    assert steps_in(run) == list(range(95))
    assert writer.lost_count == 0


def test_records_soon_after_a_write_are_held_until_the_next_one(run):
    writer = JournalWriter(run.journal_dir, STEP, IDENTITY, hold_ns=10)
    for time_ns in (0, 5, 9):
        writer.append(*step_record(time_ns))
    assert steps_in(run) == [0]
    writer.append(*step_record(10))
    assert steps_in(run) == [0, 5, 9, 10]
    writer.append(*step_record(12))
    writer.flush()
    assert steps_in(run)[-1] == 12
    writer.append(*step_record(14))
    writer.close()
    assert steps_in(run) == [0, 5, 9, 10, 12, 14]


def test_invalid_value_loses_only_the_records_held_with_it(run):
    events = EventLog(run.events_dir, IDENTITY)
    writer = JournalWriter(run.journal_dir, STEP, IDENTITY, events=events)
    writer.append(*step_record(0))
    writer.hold(step_record(1))
    writer.append(2, "no number")
    writer.append(*step_record(3))
    writer.close()
    assert steps_in(run) == [0, 3]
    losses = [json.loads(line) for line in next(run.events_dir.iterdir()).read_text().splitlines()]
    assert {(each["count"], each["reason"]) for each in losses} == {(2, "not-a-record")}


def test_event_is_recorded_when_the_process_has_no_descriptor_left(run):
    events = EventLog(run.events_dir, IDENTITY)
    events.append("process-exit", lost_count=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        events.append("exception", type="OSError", message="Too many open files", traceback="")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    kinds = [json.loads(line)["kind"] for line in next(run.events_dir.iterdir()).read_text().splitlines()]
    assert kinds == ["process-exit", "exception"]


def test_event_is_not_written_into_a_file_that_took_over_the_descriptor(run, tmp_path):
    events = EventLog(run.events_dir, IDENTITY)
    events.append("process-exit", lost_count=0)
    path = next(run.events_dir.iterdir())
    (number,) = [fd.name for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]
    with (tmp_path / "own.txt").open("w") as own:
        os.dup2(own.fileno(), int(number))  # as after os.closerange()
        events.append("process-exit", lost_count=0)
        os.close(int(number))
    assert (tmp_path / "own.txt").read_text() == ""
    assert len(path.read_text().splitlines()) == 2


def test_threads_that_share_a_writer_lose_and_double_nothing(run):
    writer = JournalWriter(run.journal_dir, STEP, IDENTITY, hold_ns=50)

    def write(numbers: range) -> None:
        for number in numbers:
            writer.append(*step_record(number))

    with ThreadPoolExecutor(4) as pool:
        for first in range(4):
            pool.submit(write, range(first, 40_000, 4))
    writer.close()
    assert sorted(steps_in(run)) == list(range(40_000))


def test_process_with_a_reused_pid_does_not_touch_old_files(run):
    for _ in range(2):
        writer = JournalWriter(run.journal_dir, STEP, IDENTITY)
        writer.append(*step_record(1))
        writer.close()
    assert steps_in(run) == [1, 1]


def test_full_disk_loses_records_and_counts_them(run, small_disk):
    now = [0]
    (run.journal_dir).rmdir()
    run.journal_dir.symlink_to(small_disk)
    writer = JournalWriter(run.journal_dir, STEP, IDENTITY, clock_ns=lambda: now[0])
    for number in range(2000):
        writer.append(*step_record(number))
    assert 0 < writer.lost_count < 2000
    lost = writer.lost_count
    assert steps_in(run) == list(range(2000 - lost)), "what was written is whole and in order"
    first = list_segments(run)[0]
    os.truncate(first, first.stat().st_size // 2)
    writer.append(*step_record(2000))
    assert writer.lost_count == lost + 1, "the disk is not asked again at once"
    now[0] = RETRY_AFTER_NS
    writer.append(*step_record(2001))
    assert steps_in(run)[-1] == 2001
    header = read_header(list_segments(run)[-1])
    assert header is not None
    assert header.lost_before_count == lost + 1
    writer.close()


def test_writer_without_a_collector_stops_until_there_is_room(run):
    now = [0]
    events = EventLog(run.events_dir, IDENTITY)
    writer = JournalWriter(
        run.journal_dir, STEP, IDENTITY, events=events, segment_bytes=10 * STEP.struct.size, segments_at_most=3,
        clock_ns=lambda: now[0],
    )  # fmt: skip
    for number in range(100):
        writer.append(*step_record(number))
    assert steps_in(run) == list(range(30))
    losses = [json.loads(line) for line in next(run.events_dir.iterdir()).read_text().splitlines()]
    assert {(each["kind"], each["stream"], each["reason"]) for each in losses} == {
        ("records-lost", "step", "not-collected")
    }
    assert [each["count"] for each in losses] == [1, 2, 4, 8, 16, 32, 64]
    list_segments(run)[0].unlink()
    now[0] = RETRY_AFTER_NS
    writer.append(*step_record(100))
    assert steps_in(run) == [*range(10, 30), 100]
    header = read_header(list_segments(run)[-1])
    assert header is not None
    assert header.lost_before_count == 70


def test_forked_child_writes_its_own_journal(run, monkeypatch):
    monkeypatch.delenv(layout.DISABLED_VARIABLE, raising=False)
    parent = session.start(run.path)
    assert parent is not None
    try:
        parent.step(step_record(0))
        parent.flush()
        parent.step(step_record(3))  # held, and the parent's own to write
        child = os.fork()
        if child == 0:
            try:
                session.active.step(step_record(1))
                session.active.flush()
                inherited = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
                folder = os.path.realpath(run.path)  # other tests of this process may have left theirs open
                os._exit(any(name.startswith(folder) and f".{os.getppid()}.step" in name for name in inherited))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the parent's segment is the parent's alone"
        parent.step(step_record(2))
    finally:
        session.stop()
    writers = {read_header(segment).pid: segment for segment in list_segments(run)}
    assert set(writers) == {os.getpid(), child}
    assert sorted(steps_in(run)) == [0, 1, 2, 3]


def test_every_stream_begins_with_time_and_its_columns_have_units():
    units = ("_ns", "_bytes", "_count", "_ratio", "_ticks", "_celsius", "_watts", "_status")
    plain = {"step", "device", "loader", "epoch", "index", "worker", "role", "alive", "stage", "unit"} | {
        "process_pid",
        "parent_pid",
        "process_rank",
        "wait_channel",
    }
    for stream in STREAMS.values():
        assert stream.columns[0].name == "time_ns"
        assert [
            each.name for each in stream.columns if not each.name.endswith(units) and each.name not in plain
        ] == []
