"""A hang is reported once, and `--on-hang` acts at the first one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from dataclasses import replace

import pytest

from collector.agent.live.hangs import HangReports
from collector.agent.live.outlets import Outlets
from collector.findings import Evidence, Finding, Locus
from collector.store import Run
from training_harness.journal import start_ticks
from training_harness.layout import create_run, read_manifest, write_manifest

HANG = Finding(
    kind="hang",
    severity="critical",
    confidence=0.95,
    summary="Worker 1 of loader 0 hangs: it is blocked on a lock (futex) in load, dataset.py:41.",
    locus=Locus(host="node", worker=1, loader=0, pid=1001),
    since_step=9,
    evidence=tuple(Evidence(name=name, value=1.0, unit="count", n=1, window="run") for name in ("a", "b")),
)


@pytest.fixture
def run(tmp_path):
    return Run(create_run(tmp_path / "home", name="train", argv=["train.py"]))


def test_a_hang_is_one_line_that_names_the_next_command(run, capsys):
    reports = HangReports()
    for _ in range(3):
        reports.report(run, "train", [HANG])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidegauge: Worker 1 of loader 0 hangs: it is blocked")
    assert line.endswith(f"dataset.py:41; see: tidegauge stacks {run.run_id}")


def test_what_may_hang_is_no_line(run, capsys):
    HangReports().report(run, "train", [replace(HANG, severity="info"), replace(HANG, kind="crashed")])
    assert capsys.readouterr().err == ""


def test_the_command_of_on_hang_runs_once_with_the_finding(run, tmp_path):
    out = tmp_path / "finding.json"
    reports = HangReports(f"cat >> {out}; echo >> {out}")
    reports.report(run, "train", [HANG])
    reports.report(run, "train", [replace(HANG, since_step=20)])
    reports.close()
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["locus"]["worker"] == 1


@pytest.fixture
def sleepers(run):
    """Return three processes: the command of the run, and two bystanders."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    pid = processes[0].pid
    manifest = {"host": socket.gethostname(), "pid": pid, "start_ticks": start_ticks(pid)}
    write_manifest(run.path, {**read_manifest(run.path), "command": manifest})
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def worker_start(pid):
    return {"kind": "worker-start", "pid": pid, "start_ticks": start_ticks(pid)}


def cancel(run, locus, *workers):
    """Publish a hang of a run whose workers have started."""
    outlets = Outlets(hangs=HangReports("cancel"))
    outlets.begin(run)
    for worker in workers:
        outlets.note_event(worker_start(worker.pid))
    outlets.publish([replace(HANG, locus=locus)])
    for thread in threading.enumerate():
        if thread.name == "cancel":
            thread.join()


def test_cancelling_ends_no_process_that_has_the_pid_of_one_on_another_host(run, sleepers):
    command, bystander, _ = sleepers
    cancel(run, Locus(host="elsewhere", pid=bystander.pid))
    assert command.wait(timeout=30) == -signal.SIGTERM
    assert bystander.poll() is None


def test_cancelling_ends_all_workers_since_several_may_stand_at_one_lock(run, sleepers):
    _, worker, bystander = sleepers
    cancel(run, Locus(host=socket.gethostname()), worker)
    assert worker.wait(timeout=30) == -signal.SIGKILL
    assert bystander.poll() is None


def test_workers_that_have_ended_are_dropped_and_those_that_live_stay():
    reports = HangReports("cancel")
    reports.note_event(worker_start(os.getppid()))
    for number in range(300):
        reports.note_event({"kind": "worker-start", "pid": 2**22 + 1 + number, "start_ticks": 1})
    reports.note_event(worker_start(os.getpid()))
    pids = [worker.pid for worker in reports._workers]
    assert {os.getpid(), os.getppid()} <= {*pids}
    assert len(pids) < 10


def test_workers_are_noted_only_to_be_ended():
    reports = HangReports("echo")
    reports.note_event(worker_start(os.getpid()))
    assert reports._workers == []


def test_an_empty_command_is_refused():
    with pytest.raises(ValueError, match="empty"):
        HangReports(" ")
