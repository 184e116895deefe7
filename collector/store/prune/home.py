"""Delete old runs of a home: choose them, keep those still in use, and survive a kill at any point.

A run is first renamed to a name that no run has, under the locks of its collector and its readers, and then
deleted. So no process ever sees half a run, and after a kill the next prune deletes the rest.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from collector.errors import TidegaugeError
from collector.store.catalogue import is_trial, list_runs
from collector.store.journals import segments
from collector.store.lake import lake
from collector.store.runs import locks
from collector.store.runs.run import (
    PRUNED_PREFIX,
    ProcessKey,
    Run,
    command_and_collector,
    living_processes,
    of_this_boot,
)

#: Unit of `st_blocks`, whatever the file system's block size (stat(2)).
_BLOCK_BYTES = 512
#: Time that a run without any event yet has to begin before it can be deleted.
_BEGINS_WITHIN_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run, its size on disk, and the reason to keep it; None if it can be deleted."""

    run: Run
    size_bytes: int
    keep_reason: str | None


def stored_runs(home: Path) -> list[StoredRun]:
    """Return all runs of a home that this node takes part in, the oldest first.

    Raises:
        TidegaugeError: the home cannot be read.
    """
    return [
        StoredRun(run=run, size_bytes=disk_bytes(run.path), keep_reason=keep_reason(run))
        for run in reversed(list_runs(home))
        if not run.is_mirror
    ]


def runs_beyond(stored: Sequence[StoredRun], *, keep: int | None, max_bytes: int | None) -> list[StoredRun]:
    """Return the runs that exceed the number or the size to keep; like `stored`, the oldest first.

    A run with a reason to keep it counts, and stays. The result has it only if its age alone would delete it.
    Trials of `tidegauge tune` do not count: those older than the oldest run to keep are in the result.
    """
    excess = list(stored[: _oldest_kept(stored, keep)]) if keep is not None else []
    deleted_bytes = sum(run.size_bytes for run in excess if not run.keep_reason)
    remaining_bytes = sum(run.size_bytes for run in stored) - deleted_bytes
    for run in stored[len(excess) :]:
        if max_bytes is None or remaining_bytes <= max_bytes:
            break
        excess.append(run)
        remaining_bytes -= 0 if run.keep_reason else run.size_bytes
    return excess


def _oldest_kept(stored: Sequence[StoredRun], keep: int) -> int:
    """Return the place of the oldest of the `keep` newest runs that are no trials."""
    counted = [place for place, one in enumerate(stored) if not is_trial(one.run)]
    if keep >= len(counted):
        return 0
    return counted[-keep] if keep else len(stored)


def keep_reason(run: Run) -> str | None:
    """Return the reason to keep a run: it is pinned, or a process of it lives, maybe on another host; else None."""
    if run.annotation.is_pinned:
        return "it is pinned"
    try:
        manifest = run.manifest
        keys = {*_event_writers(run), *command_and_collector(manifest)}
        writing = any(_is_being_written(path) for path in segments.list_segments(run))
    except TidegaugeError as error:
        return f"it cannot be read: {error}"
    if writing or living_processes(run, keys):
        return "it is running"
    if run.awaits_store:
        return f"its records wait for the store: `tidegauge collect {run.run_id}`"
    if manifest["end_time_ns"] is not None:
        return None
    here = socket.gethostname()
    other_hosts = ({host for host, _, _ in keys} | set(manifest["anchors"])) - {here}
    if other_hosts:
        return f"it may be running on {', '.join(sorted(other_hosts))}"
    if not keys and of_this_boot(run):
        age_ns = time.monotonic_ns() - int(manifest["anchors"][here]["time_ns"])
        return "it is about to begin" if age_ns < _BEGINS_WITHIN_SECONDS * 1e9 else None
    return None


def delete(home: Path, runs: Iterable[Run]) -> dict[Run, str]:
    """Delete runs of a home, and the rest of killed deletions; return why some stay after all.

    Raises:
        TidegaugeError: something cannot be deleted.
    """
    staying = {}
    for run in runs:
        try:
            _retire(run)
        except TidegaugeError as error:
            staying[run] = str(error)
    try:
        _sweep(home)
    except OSError as error:
        raise TidegaugeError(
            f"cannot delete {error.filename}: {error.strerror}; make it writable and prune again"
        ) from None
    return staying


def leftovers(home: Path) -> list[Path]:
    """Return directories of runs whose deletion was killed."""
    return sorted((home / "runs").glob(f"{PRUNED_PREFIX}*"))


def disk_bytes(directory: Path) -> int:
    """Return the size on disk of a directory and everything in it."""
    total = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):  # a run that is running deletes journals
                total += os.lstat(path).st_blocks * _BLOCK_BYTES
    return total


def _retire(run: Run) -> None:
    """Rename a run, so that it is a leftover to delete; raise a TidegaugeError if it stays."""
    with ExitStack() as stack:
        stack.callback(os.close, locks.follow_run(run))
        try:
            stack.enter_context(lake.lock_files(run, exclusive=True))
            if reason := keep_reason(run):
                raise TidegaugeError(reason)
            os.rename(run.path, run.path.with_name(f"{PRUNED_PREFIX}{run.run_id}"))
        except BlockingIOError:
            raise TidegaugeError("somebody is reading it") from None
        except OSError as error:
            raise TidegaugeError(f"{error.strerror}: {error.filename}") from None


def _sweep(home: Path) -> None:
    """Delete the leftovers, and the links of launchers whose run is gone."""
    for path in leftovers(home):
        while os.path.lexists(path):
            with suppress(FileNotFoundError):  # another prune deletes it too
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    for link in (home / "launches").glob("*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def _event_writers(run: Run) -> Iterator[ProcessKey]:
    for path in segments.list_event_logs(run):
        rows = segments.read_events(path, 0).rows
        yield from {(row["host"], row["pid"], row["start_ticks"]) for row in rows}


def _is_being_written(segment: Path) -> bool:
    """Return True if a segment's writer holds its lock; a lock is visible from another container, a pid is not."""
    # A writer takes its lock before it writes the header.
    try:
        return segments.read_header(segment) is not None and not segments.is_finished(segment)
    except segments.JournalError:
        return False
