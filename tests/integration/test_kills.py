"""SIGKILL at random moments: the report names the victim, and no record in a journal is lost or doubled.

`TIDEGAUGE_KILLS=50` sets how often (make kills); once for each kind of victim is enough for each push.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from collector.store.catalogue import list_runs
from collector.store.journals.arrow import read_records
from collector.store.journals.segments import list_segments, read_header
from collector.store.lake import lake
from collector.store.lake.store import store_of
from collector.store.runs.run import Run
from tests.conftest import TRAIN, bare_environment, tidegauge, wait_for
from training_harness.records import STREAMS

VICTIMS = ("training", "worker", "collector", "all")
TIMES = int(os.environ.get("TIDEGAUGE_KILLS", "4"))
TIDEGAUGE = (sys.executable, "-P", "-m", "collector")


def events(run: Run, kind: str) -> list[dict]:
    lines = (line for path in sorted(run.events_dir.iterdir()) for line in path.read_text().splitlines())
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def start(home: Path) -> tuple[subprocess.Popen, Run]:
    """A run under `tidegauge run` whose two workers have begun to deliver."""
    collector = subprocess.Popen(
        [*TIDEGAUGE, "run", "--name", "kill", "--home", str(home), "--", sys.executable, str(TRAIN),
         "--num-workers=2", "--start-method=fork", "--rows=100000", "--row-ms=2", "--step-ms=1"],
        env=bare_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (run,) = wait_for(lambda: list_runs(home), "the run")
    wait_for(lambda: run.events_dir.is_dir() and len(events(run, "worker-start")) == 2, "both workers")
    return collector, run


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def has_recorded_exit(run: Run, pid: int) -> bool:
    return any(event["pid"] == pid for event in events(run, "worker-exit"))


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def verdict(home: Path, run: Run) -> dict:
    for words in (("collect", run.path.name), ("report", run.path.name, "--format", "json")):
        done = tidegauge(home, *words)
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def journals_kept(run: Run, directory: Path) -> Iterator[Run]:
    """Hold hard links to every journal of a run: the collector deletes those that it has ingested."""
    kept = Run(directory)
    kept.journal_dir.mkdir(parents=True)
    ended = threading.Event()

    def link() -> None:
        for segment in list_segments(run):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(segment, kept.journal_dir / segment.name)

    def keep_linking() -> None:
        while not ended.wait(0.05):
            link()

    thread = threading.Thread(target=keep_linking)
    thread.start()
    try:
        yield kept
    finally:
        ended.set()
        thread.join()
        link()


def assert_every_record_is_in_the_lake_once(run: Run, kept: Run) -> None:
    """Compare the raw journals with the lake, record by record."""
    journalled: dict[str, Counter] = {name: Counter() for name in STREAMS}
    for segment in list_segments(kept):
        header = read_header(segment)
        if header is None:
            continue
        table = read_records(segment, header, header.header_bytes).to_pandas()
        journalled[header.stream].update(zip(table.pid, table.time_ns, strict=True))
    with store_of(run).open_readable() as (connection, _):
        for name, expected in journalled.items():
            rows = connection.execute(f'SELECT pid, time_ns FROM {lake.LAKE}."{name}"').fetchall()
            assert Counter(rows) == expected, name
    assert sum(sum(each.values()) for each in journalled.values()) > 0


@pytest.mark.parametrize("number", range(TIMES))
def test_killed_process_is_named_and_no_record_is_lost(tmp_path, number):
    victim = VICTIMS[number % len(VICTIMS)]
    chance = random.Random()
    collector, run = start(tmp_path)
    main_pid = events(run, "process-start")[0]["pid"]
    workers = {event["worker"]: event["pid"] for event in events(run, "worker-start")}
    killed_worker = chance.choice(sorted(workers))
    with journals_kept(run, tmp_path / "kept") as kept:
        time.sleep(chance.uniform(0.0, 2.0))
        pids = {
            "training": [main_pid],
            "worker": [workers[killed_worker]],
            "collector": [collector.pid],
            "all": [workers[killed_worker], main_pid, collector.pid],
        }[victim]
        kill(pids)
        if victim == "collector":
            time.sleep(1.0)
            assert psutil.pid_exists(main_pid), "the training goes on unharmed"
            kill([main_pid])
        collector.wait(60)
        wait_for(lambda: has_ended(main_pid), "the death of the training")
        survivors = [pid for pid in workers.values() if pid not in pids]
        # An orphaned worker may hang in its exit, where its queue's pipe is full and unread; it has left its loop.
        wait_for(
            lambda: all(has_ended(pid) or has_recorded_exit(run, pid) for pid in survivors), "the survivors' ends"
        )
        report = verdict(tmp_path, run)
    found = {(each["kind"], each["locus"].get("role"), each["locus"].get("worker")) for each in report["findings"]}
    kinds = {kind for kind, _, _ in found}
    if victim in ("training", "collector", "all"):
        assert ("killed", "main", None) in found, found
    if victim in ("worker", "all"):
        assert any(kind == "worker-killed" and worker == killed_worker for kind, _, worker in found), found
    else:
        assert "worker-killed" not in kinds, found
    if victim in ("collector", "all"):
        assert ("killed", "collector", None) in found, found
    else:
        assert ("killed", "collector", None) not in found, found
    if victim == "worker":
        assert ("killed", "main", None) not in found
        assert report["run"]["status"] == "failed"
    else:
        assert report["run"]["status"] == "killed"
    assert_every_record_is_in_the_lake_once(run, kept)
    kill([pid for pid in survivors if not has_ended(pid)])
