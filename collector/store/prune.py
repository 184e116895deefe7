"""Deleting old runs: which go, who still needs one, and a deletion that may be killed at any point.

A run is first renamed to what is no run's name, under the locks of its collector and its readers, and then
deleted. So nobody ever meets half a run, and what a kill leaves is deleted by the next prune.
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
from collector.store import journals, lake, locks
from collector.store.runs import (
    PRUNED_PREFIX,
    ProcessKey,
    Run,
    command_and_collector,
    list_runs,
    living_processes,
    of_this_boot,
)

#: `st_blocks` counts in these, whatever the file system's own (stat(2)).
_BLOCK_BYTES = 512
#: A run of which no process has told anything yet is left to begin for so long.
_BEGINS_WITHIN_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run, what it takes on disk, and who still needs it, in words; None if nobody."""

    run: Run
    size_bytes: int
    needed: str | None


def stored_runs(home: Path) -> list[StoredRun]:
    """All runs of a home that this node has a part in, the oldest first.

    Raises:
        TidegaugeError: the home cannot be read.

    """
    return [
        StoredRun(run=run, size_bytes=disk_bytes(run.path), needed=needed_by(run))
        for run in reversed(list_runs(home))
        if not run.is_mirror
    ]


def beyond(stored: Sequence[StoredRun], *, keep: int | None, max_bytes: int | None) -> list[StoredRun]:
    """The runs that are too many or take too much, the oldest first.

    A run that is needed counts, and stays: it is among the result only where its age alone would let it go.

    Args:
        stored: all runs, the oldest first.
        keep: so many of the newest are not too many.
        max_bytes: so much may all of them take.

    """
    gone = list(stored[: max(0, len(stored) - keep)]) if keep is not None else []
    left_bytes = sum(each.size_bytes for each in stored) - sum(each.size_bytes for each in gone if not each.needed)
    for each in stored[len(gone) :]:
        if max_bytes is None or left_bytes <= max_bytes:
            break
        gone.append(each)
        left_bytes -= 0 if each.needed else each.size_bytes
    return gone


def needed_by(run: Run) -> str | None:
    """Who still needs a run, in words: a process of it that lives, or may live elsewhere; None if nobody."""
    try:
        manifest = run.manifest
        keys = {*_writers(run), *command_and_collector(manifest)}
        writing = any(_is_being_written(path) for path in journals.list_segments(run))
    except TidegaugeError as error:
        return f"it cannot be read: {error}"
    if writing or living_processes(run, keys):
        return "it is running"
    if run.is_shared and not manifest.get("is_stored"):
        return f"its records wait for the store: `tidegauge collect {run.run_id}`"
    if manifest["end_time_ns"] is not None:
        return None
    here = socket.gethostname()
    elsewhere = ({host for host, _, _ in keys} | set(manifest["anchors"])) - {here}
    if elsewhere:
        return f"it may be running on {', '.join(sorted(elsewhere))}"
    if not keys and of_this_boot(run):
        age_ns = time.monotonic_ns() - int(manifest["anchors"][here]["time_ns"])
        return "it is about to begin" if age_ns < _BEGINS_WITHIN_SECONDS * 1e9 else None
    return None


def delete(home: Path, runs: Iterable[Run]) -> dict[Run, str]:
    """Delete runs of a home, and what a killed deletion has left there.

    Returns:
        The runs that stay after all, and why.

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
    """Directories that were runs until a prune that was killed began to delete them."""
    return sorted((home / "runs").glob(f"{PRUNED_PREFIX}*"))


def disk_bytes(directory: Path) -> int:
    """What a directory and all in it take on disk."""
    total = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):  # a run that is running deletes journals
                total += os.lstat(path).st_blocks * _BLOCK_BYTES
    return total


def _retire(run: Run) -> None:
    """Make a run a leftover.

    Raises:
        TidegaugeError: somebody needs it, or it cannot be renamed.

    """
    with ExitStack() as stack:
        stack.callback(os.close, locks.follow(run))
        try:
            stack.enter_context(lake.files_locked(run, exclusive=True))
            if needed := needed_by(run):
                raise TidegaugeError(needed)
            os.rename(run.path, run.path.with_name(f"{PRUNED_PREFIX}{run.run_id}"))
        except BlockingIOError:
            raise TidegaugeError("somebody is reading it") from None
        except OSError as error:
            raise TidegaugeError(f"{error.strerror}: {error.filename}") from None


def _sweep(home: Path) -> None:
    """Delete the leftovers, and the marks of launchers whose run is gone."""
    for path in leftovers(home):
        while os.path.lexists(path):
            with suppress(FileNotFoundError):  # another prune deletes it too
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    for link in (home / "launches").glob("*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def _writers(run: Run) -> Iterator[ProcessKey]:
    """The processes that have written events."""
    for path in journals.list_event_logs(run):
        events = journals.read_events(path, 0).table.select(["host", "pid", "start_ticks"])
        for row in events.group_by(events.column_names).aggregate([]).to_pylist():
            yield row["host"], row["pid"], row["start_ticks"]


def _is_being_written(segment: Path) -> bool:
    """Whether a segment's writer holds its lock: that shows in another container too, where its pid does not."""
    # A writer takes its lock before it writes the header.
    try:
        return journals.read_header(segment) is not None and not journals.is_finished(segment)
    except journals.JournalError:
        return False
