"""Exceptions that a DataLoader raised in the training loop: counted by type and line, and recorded as events.

A loop that catches them goes on without those batches, and nothing else shows that. A for loop takes StopIteration
of a dataset for the end of the epoch. A dataset may fail in every batch, so a count is written at the first error,
whenever it has doubled, and at the end.
"""

from __future__ import annotations

import re
import time
import traceback
from typing import NamedTuple

from training_harness import session

#: torch/_utils.py, `ExceptionWrapper.reraise`: the message of a worker's exception has the worker's traceback.
_FROM_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
#: Begin of the message about a worker that died, which is a `worker-died` event.
_DEAD_WORKER = "DataLoader worker (pid"
#: Most pairs of type and line that are counted.
_MOST_PLACES = 50
_MESSAGE_CHARACTERS = 300


class _Count(NamedTuple):
    """Errors of one type and line so far, those that are written, and the time of the last on CLOCK_MONOTONIC."""

    is_of_worker: bool
    errors: int = 0
    written: int = 0
    last_ns: int = 0


class LoaderErrors:
    """Counts of the exceptions of one process's loaders."""

    def __init__(self) -> None:
        #: By loader, type and site.
        self._counts: dict[tuple[int, str, str | None], _Count] = {}

    def note(self, current: session.Session, loader: int, error: BaseException) -> None:
        """Count an exception of a loader, and record the count if it is due."""
        text = session.message_of(error)
        if not isinstance(error, Exception) or text.startswith(_DEAD_WORKER):
            return
        wrapped = _FROM_WORKER.search(text)
        if isinstance(error, StopIteration) and not (wrapped or _is_of_dataset(error)):
            return
        key = (
            loader,
            wrapped[1] if wrapped else type(error).__name__,
            _worker_site(text) if wrapped else session.site_of(error.__traceback__),
        )
        if key not in self._counts and len(self._counts) >= _MOST_PLACES:
            return
        before = self._counts.get(key) or _Count(wrapped is not None)
        self._counts[key] = before._replace(errors=before.errors + 1, last_ns=time.monotonic_ns())
        if (before.errors + 1) & before.errors == 0:
            self._write(current, key, text.rstrip().rpartition("\n")[2])

    def flush(self, current: session.Session) -> None:
        """Record the counts that have risen since they were written."""
        for key, count in list(self._counts.items()):
            if count.errors > count.written:
                self._write(current, key, None)

    def _write(self, current: session.Session, key: tuple[int, str, str | None], message: str | None) -> None:
        count = self._counts[key]
        loader, name, site = key
        current.events.append(
            "loader-error",
            loader=loader,
            type=name,
            message=None if message is None else message[:_MESSAGE_CHARACTERS],
            site=site,
            in_worker=count.is_of_worker,
            count=count.errors,
            error_time_ns=count.last_ns,
        )
        self._counts[key] = count._replace(written=count.errors)


def _is_of_dataset(error: StopIteration) -> bool:
    """Return whether an inline fetch by index raised it, where the sampler ends the epoch (_utils/fetch.py)."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_qualname == "_MapDatasetFetcher.fetch" for frame, _ in frames)


def _worker_site(text: str) -> str | None:
    """Return `file:line, in function` of the innermost frame in the user's own code of a worker's traceback."""
    frames = _FRAME.findall(text)
    own = [frame for frame in frames if session.is_user_code(frame[0])]
    return "{}:{}, in {}".format(*(own or frames)[-1]) if frames else None
