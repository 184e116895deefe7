"""Short trials of a training for `tidegauge tune`: run it, follow it for a while, end it, and read its run.

The training gets its own process group, so that all its processes end together.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from collector.agent.launch import EXIT_SIGNAL_BASE, child_environment
from collector.agent.loop import Agent, follow, manifest_process, update_manifest
from collector.agent.samplers.procfs import LocalProcess
from collector.diagnosis import RunTables, diagnose, load_tables
from collector.diagnosis.loading import Loop, loops
from collector.errors import TidegaugeError, last_line, one_line
from collector.store import Run
from training_harness.journal import start_ticks
from training_harness.layout import TRIAL_LOADER_VARIABLE, TRIAL_VARIABLE, create_run

#: Seconds until a training without a batch is ended.
STARTUP_SECONDS = 300.0
#: Seconds from SIGTERM to SIGKILL.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_INTERVAL_SECONDS = 0.5
_LOG = "trial.log"
#: Kinds of death for lack of memory.
_MEMORY_DEATHS = ("host-oom-kill", "cuda-oom", "shm-bus-error")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial that is over: its run, and the loop with most batches, None without a batch.

    `failure` says why it failed, and is empty if it did not. `fits` is False if memory ran out.
    """

    tables: RunTables
    loop: Loop | None
    failure: str
    fits: bool


def try_once(
    command: Sequence[str], home: Path, *, name: str, loader: str | None, seconds: float, signals: Sequence[int]
) -> TrialResult:
    """Run a command under Tidegauge for some seconds from its first batch on, and read its run.

    Its output goes to a file in the run directory.

    `loader` are the settings of its loaders (`TRIAL_LOADER_VARIABLE`); None leaves them as the script has them.
    A signal in `signals` ends it at once.

    Raises:
        TidegaugeError: the home cannot be written, the command cannot be started, or its run cannot be read.
    """
    run, exit_status, has_batch = _train(command, home, name, loader, seconds, signals)
    tables = load_tables(run)
    shortage, failure = memory_shortage(tables, exit_status), _failure(run, exit_status, has_batch=has_batch)
    if not failure and (raised := tables.events_of("exception")):  # it may be recorded before the process ends
        failure = one_line(f"the training failed: {raised[-1]['type']}: {raised[-1]['message']}")
    return TrialResult(
        tables=tables,
        loop=max(loops(tables), key=lambda loop: len(loop.batches), default=None),
        failure=f"does not fit: {shortage}" if shortage else failure,
        fits=not shortage,
    )


def _train(
    argv: Sequence[str], home: Path, name: str, loader: str | None, seconds: float, signals: Sequence[int]
) -> tuple[Run, int | None, bool]:
    """Run and follow the command; return its run, its exit status, and whether it yielded a batch.

    The exit status is that of a training that ended by itself, -n for signal n; None if the trial ended it.
    """
    try:
        run = Run(create_run(home, name=name, argv=argv, tags={"tune": loader or "as it is"}, is_trial=True))
    except OSError as error:
        raise TidegaugeError(f"cannot write in {home}: {error.strerror}; give --home another directory") from None
    environ = child_environment(os.environ, run.path, home) | {TRIAL_VARIABLE: "1"}
    child = _start(argv, environ | ({TRIAL_LOADER_VARIABLE: loader} if loader else {}), run)
    watchdog = _start_watchdog(child.pid)
    first_batch_at: float | None = None
    is_read = False
    start = time.monotonic()

    def wait(wait_seconds: float) -> bool:
        nonlocal first_batch_at, is_read
        until = time.monotonic() + wait_seconds
        while child.poll() is None and not signals:
            now = time.monotonic()
            if first_batch_at is None and any(run.journal_dir.glob("*.batch.*")):
                first_batch_at = now
            if now >= (start + STARTUP_SECONDS if first_batch_at is None else first_batch_at + seconds):
                return True
            if not is_read and first_batch_at is not None and now >= first_batch_at + seconds / 2:
                is_read = True  # A short trial may have no other reading since its workers started.
                agent.read_all()
            if now >= until:
                return False
            time.sleep(min(_POLL_SECONDS, until - now))
        return True

    try:
        command = LocalProcess(child.pid, start_ticks(child.pid))
        agent = Agent(run, command=command, is_parent=True)
        update_manifest(run, collector=manifest_process(agent.key), command=manifest_process(command))
        follow(agent, wait, interval_seconds=_INTERVAL_SECONDS)
        exit_status = child.poll()
    finally:
        _end(child)
        watchdog.kill()
        watchdog.communicate()
    update_manifest(run, end_time_ns=time.monotonic_ns(), exit_status=child.returncode)
    has_batch = first_batch_at is not None or any(run.journal_dir.glob("*.batch.*"))
    agent.command_ended(child.returncode)
    agent.finish()
    return run, exit_status, has_batch


def _failure(run: Run, exit_status: int | None, *, has_batch: bool) -> str:
    """Return why a trial failed, with the last line of the training's output; empty if it did not."""
    if exit_status:
        what = f"the training failed with exit status {exit_status}"
    elif has_batch:
        return ""
    elif exit_status is None:
        what = f"no batch within {STARTUP_SECONDS:.0f} s"
    else:
        what = "the training ended without a batch"
    output = (run.path / _LOG).read_text(errors="replace")
    return ": ".join(filter(None, (what, last_line(output))))


def _start(argv: Sequence[str], environ: Mapping[str, str], run: Run) -> subprocess.Popen[bytes]:
    try:
        with (run.path / _LOG).open("wb") as output:
            return subprocess.Popen(
                list(argv), env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # Nothing ran: a typo must not become the latest run.
        raise TidegaugeError(f"{argv[0]}: cannot be started ({error.strerror}); give a command that runs") from None


def _start_watchdog(group: int) -> subprocess.Popen[bytes]:
    """Start a shell that ends the trial if this process dies: the kernel then closes the pipe that it reads."""
    end = f"kill -TERM -{group}; sleep {_GRACE_SECONDS:.0f}; kill -KILL -{group}"
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read _ || {{ {end}; }}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the whole group, and descendants of the command that left the group, as torchrun's ranks do."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        descendants = psutil.Process(child.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.Error):
            process.kill()
    child.wait()


def memory_shortage(tables: RunTables, exit_status: int | None) -> str:
    """Return how memory ran out, in words; empty if it did not.

    SIGKILL counts if nothing else explains the end: memory guards send it too, and the kernel's own kills cannot be
    counted everywhere. The exit status is that of `_train`.
    """
    if not exit_status and not tables.events_of("exception"):
        return ""  # Its processes that died were ended with the trial.
    deaths = {finding.kind: finding.summary for finding in diagnose(tables).findings}
    for kind in _MEMORY_DEATHS:
        if kind in deaths:
            return one_line(deaths[kind])
    is_worker = any(event.get("exit_code") == -signal.SIGKILL for event in tables.events_of("worker-died"))
    if is_worker or exit_status in (-signal.SIGKILL, EXIT_SIGNAL_BASE + signal.SIGKILL):
        whose = "a worker" if is_worker else "the training"
        return f"{whose} was killed by SIGKILL, which the kernel sends when memory runs out"
    return ""
