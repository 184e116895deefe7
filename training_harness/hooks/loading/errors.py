"""Exceptions that a DataLoader raised in the training loop: counted by type and line, and recorded as events.

A loop that catches them goes on without those batches, and nothing else shows that. A dataset may fail in every
batch, so a count is written at the first error, whenever it has doubled, and at the end.
"""

from __future__ import annotations

import re

from training_harness import session

#: torch/_utils.py, `ExceptionWrapper.reraise`: the message of a worker's exception has the worker's traceback.
_FROM_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
#: Begin of the message about a worker that died, which is a `worker-died` event.
_DEAD_WORKER = "DataLoader worker (pid"
#: Most pairs of type and line that are counted.
_MOST_PLACES = 50
_MESSAGE_CHARACTERS = 300


class LoaderErrors:
    """Counts of the exceptions of one process's loaders."""

    def __init__(self) -> None:
        #: (loader, type, site) -> errors so far, errors written, and whether a worker raised them.
        self._counts: dict[tuple[int, str, str | None], tuple[int, int, bool]] = {}

    def note(self, current: session.Session, loader: int, error: BaseException) -> None:
        """Count an exception of a loader, and record the count if it is due."""
        text = str(error)
        if not isinstance(error, Exception) or text.startswith(_DEAD_WORKER):
            return
        wrapped = _FROM_WORKER.search(text)
        key = (
            loader,
            wrapped[1] if wrapped else type(error).__name__,
            _worker_site(text) if wrapped else session.site_of(error.__traceback__),
        )
        if key not in self._counts and len(self._counts) >= _MOST_PLACES:
            return
        count, written, _ = self._counts.get(key, (0, 0, False))
        self._counts[key] = count + 1, written, wrapped is not None
        if (count + 1) & count == 0:
            self._write(current, key, text.rstrip().rpartition("\n")[2])

    def flush(self, current: session.Session) -> None:
        """Record the counts that have risen since they were written."""
        for key, (count, written, _) in list(self._counts.items()):
            if count > written:
                self._write(current, key, None)

    def _write(self, current: session.Session, key: tuple[int, str, str | None], message: str | None) -> None:
        count, _, is_of_worker = self._counts[key]
        loader, name, site = key
        current.events.append(
            "loader-error",
            loader=loader,
            type=name,
            message=None if message is None else message[:_MESSAGE_CHARACTERS],
            site=site,
            in_worker=is_of_worker,
            count=count,
        )
        self._counts[key] = count, count, is_of_worker


def _worker_site(text: str) -> str | None:
    """Return `file:line, in function` of the innermost frame in the user's own code of a worker's traceback."""
    frames = _FRAME.findall(text)
    own = [frame for frame in frames if session.is_user_code(frame[0])]
    return "{}:{}, in {}".format(*(own or frames)[-1]) if frames else None
