"""Deletion of old runs: the choice, runs in use, and a kill at every point of it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import HOST, Writer

from collector.errors import TidegaugeError
from collector.store.catalogue import find_run, list_runs
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.prune.home import (
    StoredRun,
    delete,
    disk_bytes,
    keep_reason,
    leftovers,
    runs_beyond,
    stored_runs,
)
from collector.store.runs.locks import LOCK_NAME
from collector.store.runs.run import Run
from tests.conftest import wait_for
from training_harness import layout

COMMAND = [sys.executable, "-P", "-m", "collector"]
#: Prunes in a fork, which kills itself before the n-th change to a directory; says whether it came to its end.
KILLED = """
import os, signal, sys
from pathlib import Path
from collector.store.prune.home import delete
from collector.store.catalogue import list_runs
home = Path(sys.argv[1])
for line in sys.stdin:
    if (child := os.fork()) == 0:
        left = int(line)
        def count(event, _):
            global left
            if event in ("os.rename", "os.remove", "os.rmdir"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        delete(home, list_runs(home)[1:])
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def make_ended_run(home: Path, name: str = "job") -> Run:
    run = Run(layout.create_run(home, name=name, argv=["x"]))
    layout.write_manifest(run.path, {**run.manifest, "end_time_ns": 1})
    return run


def content(run: Run) -> dict[Path, bytes]:
    """All files but the locks."""
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.suffix != ".lock"}


def make_stored_runs(*runs: tuple[int, str | None]) -> list[StoredRun]:
    return [
        StoredRun(run=Run(Path(f"run{place}")), size_bytes=size, keep_reason=needed)
        for place, (size, needed) in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("keep", "max_bytes", "gone"),
    [
        (4, None, []),
        (9, None, []),
        (3, None, [0]),
        (0, None, [0, 1, 2, 3]),
        (None, 100, []),
        (None, 99, [0]),
        (None, 60, [0, 1, 2]),
        (None, 0, [0, 1, 2, 3]),
        (3, 60, [0, 1, 2]),
        (1, 90, [0, 1, 2]),
    ],
)
def test_oldest_runs_are_deleted_until_both_bounds_are_met(keep, max_bytes, gone):
    runs = make_stored_runs((30, None), (20, "it is running"), (10, None), (40, None))
    assert runs_beyond(runs, keep=keep, max_bytes=max_bytes) == [runs[place] for place in gone]


def test_trials_do_not_count_and_go_with_the_runs_around_them(home):
    for name, is_trial in (("first", False), ("trial", True), ("second", False), ("trial", True), ("third", False)):
        layout.create_run(home, name=name, argv=["x"], is_trial=is_trial)
    stored = [StoredRun(run=run, size_bytes=1, keep_reason=None) for run in reversed(list_runs(home))]
    assert len(stored) == 5
    assert runs_beyond(stored, keep=3, max_bytes=None) == []
    assert runs_beyond(stored, keep=2, max_bytes=None) == stored[:2]
    assert runs_beyond(stored, keep=1, max_bytes=None) == stored[:4]
    assert runs_beyond(stored, keep=0, max_bytes=None) == stored


def test_deleted_run_leaves_no_trace(home):
    old, new = make_ended_run(home, "old"), make_ended_run(home, "new")
    (home / "launches").mkdir()
    for name, run in (("host.1.1", old), ("host.2.2", new)):
        (home / "launches" / name).symlink_to(run.path)
    assert delete(home, [old]) == {}
    assert list((home / "runs").iterdir()) == [new.path]
    assert [path.name for path in (home / "launches").iterdir()] == ["host.2.2"]


def test_size_of_a_run_is_its_size_on_disk(home):
    run = make_ended_run(home)
    (run.path / "snapshots" / "sparse").write_bytes(b"")
    os.truncate(run.path / "snapshots" / "sparse", 2**30)
    (run.path / "data").mkdir()
    (run.path / "data" / "real").write_bytes(os.urandom(2**20))
    du = subprocess.run(["du", "-s", "-B1", run.path], capture_output=True, text=True, check=True)
    assert stored_runs(home)[0].size_bytes == disk_bytes(run.path) == int(du.stdout.split()[0])


def test_running_run_is_not_deleted_before_its_end(home):
    process = subprocess.Popen(
        [*COMMAND, "run", "--home", home, "--name", "alive", "--", "sh", "-c", "read word"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = wait_for(lambda: next(iter(list_runs(home)), None), "the run")
    wait_for(lambda: run.manifest["command"], "the command")
    assert [each.keep_reason for each in stored_runs(home)] == ["it is running"]
    assert list(delete(home, [run])) == [run]
    assert process.poll() is None
    process.communicate(b"end\n", timeout=60)
    assert process.returncode == 0
    assert run.manifest["exit_status"] == 0
    assert keep_reason(run) is None
    assert delete(home, [run]) == {}
    assert list((home / "runs").iterdir()) == []


def test_run_with_a_reader_or_ingester_is_not_deleted(home):
    run = make_ended_run(home)
    with Ingester(run):
        assert "is already followed by the collector" in delete(home, [run])[run]
    with read(run):
        assert delete(home, [run]) == {run: "somebody is reading it"}
    assert content(run)
    assert delete(home, [run]) == {}
    with pytest.raises(TidegaugeError, match="no longer exists"), read(run):
        pass


def test_run_without_a_collector_is_not_deleted_while_it_trains(home):
    """The pid means nothing here, as in another container; the lock on the journal does."""
    run = make_ended_run(home)
    writer = Writer(run, 2**22 + 1, host=HOST)
    writer.write(3)
    assert keep_reason(run) == "it is running"
    assert delete(home, [run]) == {run: "it is running"}
    for journal in writer._journals.values():
        journal.disown()
    assert keep_reason(run) is None


def manifest_of(run: Run, **changes: object) -> None:
    layout.write_manifest(run.path, {**run.manifest, **changes})


def test_run_without_an_end_is_not_deleted_while_it_may_go_on(home):
    run = Run(layout.create_run(home, name="x", argv=["x"]))
    anchor = layout.wall_anchor()
    assert keep_reason(run) == "it is about to begin"
    manifest_of(run, command={"host": HOST, "pid": 2**22 + 1, "start_ticks": 1})
    assert keep_reason(run) is None
    manifest_of(run, command={"host": HOST, "pid": os.getpid(), "start_ticks": layout.start_ticks("self")})
    assert keep_reason(run) == "it is running"
    manifest_of(run, anchors={HOST: {**anchor, "boot_id": "an earlier one"}})
    assert keep_reason(run) is None
    manifest_of(run, command=None, anchors={"node7": anchor})
    assert keep_reason(run) == "it may be running on node7"
    manifest_of(run, end_time_ns=1)
    assert keep_reason(run) is None
    (run.path / layout.MANIFEST).write_text("{")
    assert "is damaged" in keep_reason(run)


def test_killed_prune_leaves_every_run_whole_or_gone(home):
    newest_of_three = [make_ended_run(home, name) for name in ("first", "second", "third")][-1]
    before = {run: content(run) for run in list_runs(home)}
    zygote = subprocess.Popen(
        [sys.executable, "-c", KILLED, home], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with zygote:
        statuses, met = [], set()
        for _ in range(100):
            # One change at a time: each fork goes on with what the one before has left.
            zygote.stdin.write(f"{len(met) and 1}\n")
            zygote.stdin.flush()
            statuses.append(int(zygote.stdout.readline()))
            found = list_runs(home)
            assert all(content(run) == before[run] for run in found)
            assert newest_of_three in found
            met.add((len(found), len(leftovers(home))))
            if statuses[-1] == 0:
                break
        zygote.stdin.close()
    assert statuses[-1] == 0
    assert set(statuses[:-1]) == {signal.SIGKILL}
    assert met == {(3, 0), (2, 1), (1, 2), (1, 1), (1, 0)}
    assert list((home / "runs").iterdir()) == [newest_of_three.path]
    assert find_run(home, "latest") == newest_of_three
    assert not (newest_of_three.path / LOCK_NAME).exists()


def test_prune_asks_at_a_terminal(home):
    run = make_ended_run(home)
    terminal, inside = pty.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as ours:
        process = subprocess.Popen(
            [*COMMAND, "prune", "--keep", "0", "--home", home], stdin=inside, stdout=subprocess.PIPE, text=True
        )
        os.close(inside)
        ours.write(b"n\n")
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "delete? [y/N]: " in said
    assert run.path.exists()
