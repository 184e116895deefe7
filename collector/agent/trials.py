"""A short trial of a training: in a process group of its own, followed for a while, then ended as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from collector.agent.launch import child_environment
from collector.agent.loop import Agent, follow, manifest_process, update_manifest
from collector.agent.procfs import ProcessKey
from collector.errors import TidegaugeError
from collector.store.runs import Run
from training_harness.journal import start_ticks
from training_harness.layout import TRIAL_LOADER_VARIABLE, TRIAL_VARIABLE, create_run

#: A training that has no batch by then is ended.
STARTUP_SECONDS = 300.0
_GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
_POLL_SECONDS = 0.2
_INTERVAL_SECONDS = 0.5
_LOG = "trial.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a trial went.

    Attributes:
        run: what was recorded.
        exit_status: of a training that ended by itself, -n for signal n; None if it was ended here.
        began: whether it had a batch.

    """

    run: Run
    exit_status: int | None
    began: bool

    @property
    def failure(self) -> str:
        """What went wrong, with the last line that the training said; empty if nothing did."""
        if self.exit_status:
            what = f"the training failed with exit status {self.exit_status}"
        elif not self.began:
            what = "the training ended without a batch"
            if self.exit_status is None:
                what = f"no batch within {STARTUP_SECONDS:.0f} s"
        else:
            return ""
        said = (self.run.path / _LOG).read_text(errors="replace").strip().splitlines()[-1:]
        return f"{what}: {said[0]}" if said else what


def run_trial(
    argv: Sequence[str],
    *,
    home: Path,
    name: str,
    loader: str | None,
    seconds: float,
    interrupted: Callable[[], bool],
) -> Trial:
    """Run a command under Tidegauge for so many seconds from its first batch on.

    Its output goes to a file in the run directory.

    Args:
        argv: the command and its arguments.
        home: Tidegauge home.
        name: of the run.
        loader: what its loaders are to be (`TRIAL_LOADER_VARIABLE`); None: as the script says.
        seconds: from the first batch.
        interrupted: whether to end at once.

    Raises:
        TidegaugeError: the home cannot be written, or the command cannot be started.

    """
    try:
        run = Run(create_run(home, name=name, argv=argv, tags={"tune": loader or "as it is"}))
    except OSError as error:
        raise TidegaugeError(f"cannot write in {home}: {error.strerror}; give --home another directory") from None
    child = _start(argv, _environment(run, home, loader), run)
    leash = _leash(child.pid)
    began_at: float | None = None
    is_read = False
    start = time.monotonic()

    def ended(wait_seconds: float) -> bool:
        nonlocal began_at, is_read
        until = time.monotonic() + wait_seconds
        while child.poll() is None and not interrupted():
            now = time.monotonic()
            if began_at is None and any(run.journal_dir.glob("*.batch.*")):
                began_at = now
            if now >= (start + STARTUP_SECONDS if began_at is None else began_at + seconds):
                return True
            if not is_read and began_at is not None and now >= began_at + seconds / 2:
                is_read = True  # a short trial may have no other reading since its workers started
                agent.read_all()
            if now >= until:
                return False
            time.sleep(min(_POLL_SECONDS, until - now))
        return True

    try:
        command = ProcessKey(child.pid, start_ticks(child.pid))
        agent = Agent(run, command=command, is_parent=True)
        update_manifest(run, collector=manifest_process(agent.key), command=manifest_process(command))
        follow(agent, ended, interval_seconds=_INTERVAL_SECONDS)
        exit_status = child.poll()
    finally:
        _end(child)
        leash.kill()
        leash.communicate()
    update_manifest(run, end_time_ns=time.monotonic_ns(), exit_status=child.returncode)
    began = began_at is not None or any(run.journal_dir.glob("*.batch.*"))
    agent.command_ended(child.returncode)
    agent.finish()
    return Trial(run=run, exit_status=exit_status, began=began)


def _start(argv: Sequence[str], environ: Mapping[str, str], run: Run) -> subprocess.Popen[bytes]:
    try:
        with (run.path / _LOG).open("wb") as output:
            return subprocess.Popen(
                list(argv), env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # nothing ran: a typo must not become the latest run
        raise TidegaugeError(f"{argv[0]}: cannot be started ({error.strerror}); give a command that runs") from None


def _leash(group: int) -> subprocess.Popen[bytes]:
    """A shell that ends the trial when this process is gone: the kernel then closes what it reads from."""
    end = f"kill -TERM -{group}; sleep {_GRACE_SECONDS:.0f}; kill -KILL -{group}"
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read _ || {{ {end}; }}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _environment(run: Run, home: Path, loader: str | None) -> dict[str, str]:
    environ = child_environment(os.environ, run.path, home) | {TRIAL_VARIABLE: "1"}
    return environ | ({TRIAL_LOADER_VARIABLE: loader} if loader else {})


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the whole group, and what left the group but descends from the command, as torchrun's ranks do."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(child.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    child.wait()
