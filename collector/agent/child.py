"""Follow a command that this process has started to its end, and close its run."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from collector.agent.loop import Agent, follow, manifest_process, update_manifest
from collector.agent.problems import say
from collector.agent.samplers.procfs import LocalProcess
from collector.errors import TidegaugeError
from collector.store import Run
from training_harness.journal import start_ticks

if TYPE_CHECKING:
    from collector.agent.live.outlets import Outlets

#: Seconds that git has to compare the working tree with the commit, once the command has begun.
_GIT_SECONDS = 1.0


def follow_child(
    run: Run, child: subprocess.Popen[bytes], interval_seconds: float, outlets: Outlets | None
) -> bool:
    """Follow the child to its end and close the run; return whether all records are stored."""
    command = LocalProcess(child.pid, start_ticks(child.pid))
    if outlets is not None:
        outlets.begin(run)
    agent = Agent(run, command=command, is_parent=True, outlets=outlets)
    with suppress(OSError, ValueError):
        update_manifest(run, collector=manifest_process(agent.key), command=manifest_process(command))
    # A slow git must not delay the first samples. Nothing else changes the manifest meanwhile.
    git = threading.Thread(target=_compare_with_commit, args=(run,), name="git", daemon=True)
    git.start()
    with _end_of(child) as wait:
        follow(agent, _warn_of_store(agent, wait), interval_seconds=interval_seconds)
    exit_status = child.wait()
    git.join()
    with suppress(OSError, ValueError):
        update_manifest(run, end_time_ns=time.monotonic_ns(), exit_status=exit_status)
    agent.command_ended(exit_status)
    if agent.finish():
        return True
    reason = agent.ingest_failure or "the store does not answer"
    say(f"{reason}; records wait here: `tidegauge collect {run.run_id}` stores them once it can")
    return False


def _compare_with_commit(run: Run) -> None:
    """Note in the manifest whether the working tree differs from the git commit."""
    with suppress(OSError, ValueError, TidegaugeError):
        manifest = run.manifest
        update_manifest(run, git_dirty=_is_dirty(manifest["cwd"]) if manifest["git_commit"] else None)


def _is_dirty(folder: str) -> bool | None:
    """Return True if tracked files differ from the git commit; None if git does not say so quickly."""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(git.stdout.strip()) if git.returncode == 0 else None


def _warn_of_store(agent: Agent, wait: Callable[[float], bool]) -> Callable[[float], bool]:
    """Wrap `wait`, to report once that the store takes no records."""
    warned = False

    def warn_and_wait(seconds: float) -> bool:
        nonlocal warned
        if agent.ingest_failure and not warned:
            warned = True
            say(f"{agent.ingest_failure}; the training goes on, and its records wait here until it can")
        return wait(seconds)

    return warn_and_wait


@contextmanager
def _end_of(child: subprocess.Popen[bytes]) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds or until the child ends, and returns whether it has ended."""

    def wait(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.poll() is not None

    def wait_for_descriptor(seconds: float) -> bool:
        poller.poll(seconds * 1000)
        return child.poll() is not None

    try:
        descriptor = os.pidfd_open(child.pid)
    except OSError:  # A kernel before 5.3, or a sandbox.
        yield wait
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        yield wait_for_descriptor
    finally:
        os.close(descriptor)
