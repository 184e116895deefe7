"""Files that are read again, and files that never are."""

import os

import pytest

from collector.store.journals.growing_files import GrowingFiles

SECOND_NS = 10**9


class World:
    def __init__(self, root):
        self.now_ns = 0
        self.proc, self.logs = root / "proc", root / "events"
        self.proc.mkdir()
        self.logs.mkdir()
        self.files = GrowingFiles(self.logs, ".jsonl", host="here", proc=self.proc, clock_ns=lambda: self.now_ns)

    def alive(self, *pids):
        for path in self.proc.iterdir():
            path.rmdir()
        for pid in pids:
            (self.proc / str(pid)).mkdir()

    def write(self, *names):
        for name in names:
            (self.logs / f"{name}.jsonl").write_text("x")

    def read_growing(self, *, seconds=1):
        self.now_ns += seconds * SECOND_NS
        names = [path.stem for path in self.files.list_growing()]
        self.files.mark_read(f"{name}.jsonl" for name in names)
        return sorted(names)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_file_is_read_once_more_after_its_writer_exits(world):
    world.alive(1, 2)
    world.write("here.1", "here.2")
    assert world.read_growing() == world.read_growing() == ["here.1", "here.2"]
    world.alive(1)
    assert world.read_growing() == ["here.1", "here.2"]
    assert world.read_growing() == ["here.1"]


def test_file_of_a_writer_between_two_listings_is_read(world):
    world.read_growing()
    world.write("here.3")
    assert world.read_growing() == ["here.3"]
    assert world.read_growing() == []


def test_file_is_read_again_when_its_pid_is_reused(world):
    world.write("here.3")
    world.read_growing()
    world.alive(3)
    assert world.read_growing() == world.read_growing() == ["here.3"]


def test_deleted_file_is_not_listed_even_if_its_pid_is_reused(world):
    world.write("here.3", "here.4")
    world.read_growing()
    for name in ("here.3", "here.4"):
        (world.logs / f"{name}.jsonl").unlink()
        world.files.mark_deleted(f"{name}.jsonl")
    world.alive(3, 4)
    assert world.read_growing() == []
    assert world.read_growing(seconds=300) == []


def test_files_of_another_host_are_always_read(world):
    world.write("there.3", "here.x.3")
    assert world.read_growing() == world.read_growing() == ["here.x.3", "there.3"]


def test_file_created_in_the_clock_tick_of_a_listing_is_found(world):
    world.write("there.1")
    before = os.stat(world.logs)
    world.read_growing()
    world.write("there.2")
    os.utime(world.logs, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert world.read_growing() == ["there.1", "there.2"]


def test_unchanged_directory_is_not_listed(world):
    world.write("there.1")
    before = os.stat(world.logs)
    for _ in range(3):
        world.read_growing(seconds=3)
    world.write("there.2")
    os.utime(world.logs, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert world.read_growing() == ["there.1"]


def test_all_files_are_read_again_after_some_minutes(world):
    world.write("here.3")
    world.read_growing()
    assert world.read_growing() == []
    assert world.read_growing(seconds=300) == ["here.3"]


def test_unread_file_stays_listed(world):
    world.write("here.3")
    assert len(world.files.list_growing()) == len(world.files.list_growing()) == 1
