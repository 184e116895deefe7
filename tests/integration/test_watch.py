"""`tidegauge watch` on real processes: what is seen from outside, and that nothing happens to what is watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from collector.report.listing import list_entry
from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from tests.conftest import bare_environment, wait_for

#: A parent with a child, which end when their stdin is closed.
TREE = """
import subprocess
child = subprocess.Popen(["cat"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def process_tree():
    """A running parent, and its child's pid."""
    environ = bare_environment()
    argv = [sys.executable, "-c", TREE, "--token=hunter2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        yield parent, int(parent.stdout.readline())
        parent.kill()


@pytest.fixture
def start_watch(home):
    """Starts `tidegauge watch` and waits for its first samples."""
    started = []

    def start(pid):
        argv = [
            sys.executable,
            "-P",
            "-m",
            "collector",
            "watch",
            str(pid),
            "--home",
            str(home),
            "--interval",
            "0.1",
        ]
        process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, text=True, env=bare_environment(), start_new_session=True
        )
        started.append(process)
        assert "Ctrl-C ends the watch, not the process" in process.stderr.readline()
        run = find_run(home, "latest")
        wait_for(lambda: list(run.journal_dir.glob("*.process.*")), "a sample of the processes")
        return process, run

    yield start
    for process in started:
        process.kill()
        process.stderr.close()
        process.wait()


def test_watched_process_tree_is_sampled_until_it_ends(process_tree, start_watch):
    parent, child = process_tree
    watcher, run = start_watch(parent.pid)
    parent.stdin.close()
    card = " ".join(watcher.communicate(timeout=60)[1].split())

    assert watcher.returncode == 0
    assert "finished · " in card
    assert "watched from outside, without hooks: its steps, batches" in card
    with read(run) as snapshot:
        process = snapshot.query(
            "SELECT process_pid, max(rss_bytes) rss, min(alive) alive FROM process GROUP BY ALL"
        )
        counts = [len(snapshot.query(f'FROM "{name}"')) for name in ("host", "batch", "step")]
    seen = process.set_index("process_pid")
    assert (seen.loc[[parent.pid, child]].rss > 0).all()
    assert (seen.loc[[parent.pid, child]].alive == 0).all()
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    manifest = run.manifest
    assert (manifest["cwd"], manifest["python"], manifest["git_commit"]) == (None, None, None), (
        "not the watch's own"
    )
    assert "hunter2" not in json.dumps(manifest)


def test_ctrl_c_ends_the_watch_and_not_the_process(process_tree, start_watch):
    parent, _ = process_tree
    watcher, run = start_watch(parent.pid)
    os.killpg(watcher.pid, signal.SIGINT)
    card = " ".join(watcher.communicate(timeout=60)[1].split())

    assert watcher.returncode == 0, card
    assert parent.poll() is None
    assert "running when the watch ended" in card
    assert f"process {parent.pid} goes on" in card
    assert run.manifest["end_time_ns"] is not None
    entry = list_entry(run)
    assert (entry.status, entry.gravest) == ("ended", "nothing needs attention")
