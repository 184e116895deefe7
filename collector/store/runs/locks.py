"""The lock of a run's one collector."""

from __future__ import annotations

import contextlib
import fcntl
import os

from collector.errors import TidegaugeError
from collector.store.runs.run import Run

LOCK_NAME = "lake.lock"


def follow_run(run: Run) -> int:
    """Take the lock of the run's one collector; it holds until the returned descriptor is closed.

    Raises:
        TidegaugeError: a collector has it, or there can be no lock.
    """
    path = run.path / LOCK_NAME  # the kernel drops the lock when this process dies
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TidegaugeError(f"cannot follow run {run.run_id}: {error}; make its directory writable") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise TidegaugeError(
            f"run {run.run_id} is already followed by the collector with pid {holder}: "
            "wait until it ends, or stop it"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
