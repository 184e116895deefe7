"""Which files of a run can still grow, so that those of finished workers cost nothing.

Workers that are made anew for each epoch leave files by the thousand. So a file that was read after its
writer had gone is not looked at again, and a directory is listed only after it has changed.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from collector.store.journals import list_names

#: File systems note the time of a change this coarsely: two changes within it may look like one.
_SETTLED_NS = 2_000_000_000
#: All are looked at again this often: a writer may be out of sight (another pid namespace), and an event
#: log grows again when its pid is used anew.
_LOOK_AGAIN_NS = 300_000_000_000


class GrowingFiles:
    """The journals or event logs in one directory that may have grown.

    Args:
        directory: of the run.
        suffix: how the names end.
        host: whose processes /proc shows; files of other hosts may always have grown.
        proc: root of the proc file system.
        clock_ns: CLOCK_MONOTONIC.

    """

    def __init__(
        self,
        directory: Path,
        suffix: str,
        *,
        host: str | None = None,
        proc: Path = Path("/proc"),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._directory = directory
        self._suffix = suffix
        own = re.escape(socket.gethostname() if host is None else host)
        self._own_name = re.compile(rf"{own}\.(\d+)(?:\.\w+\.\d+)?{re.escape(suffix)}")
        self._proc = proc
        self._clock_ns = clock_ns
        self._growing: dict[str, int | None] = {}
        self._paths: dict[str, Path] = {}
        self._gone: set[str] = set()
        self._finished: dict[int, set[str]] = {}
        self._finished_pids: dict[str, int] = {}
        self._changed_ns: int | None = None
        self._changed_seen_ns = self._forgot_ns = clock_ns()
        self._listed_ns: int | None = None

    def look(self) -> list[Path]:
        """The files that may have grown since they were read last; to be called before they are read.

        Raises:
            TidegaugeError: the directory cannot be listed.

        """
        now_ns = self._clock_ns()
        if now_ns - self._forgot_ns >= _LOOK_AGAIN_NS:
            self.forget()
        self._list(now_ns)
        # Who is absent now, before the files are read, cannot write any more afterwards.
        present = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        for pid in present & self._finished.keys():
            names = self._finished.pop(pid)
            for name in names:
                self._growing[name] = self._finished_pids.pop(name)
        self._gone = {name for name, pid in self._growing.items() if pid is not None and pid not in present}
        return [self._paths[name] for name in self._growing]

    def read(self, names: Iterable[str]) -> None:
        """These were read to their end since the last look; those of gone writers are finished."""
        for name in self._gone.intersection(names):
            pid = self._growing.pop(name)
            assert pid is not None
            self._finished.setdefault(pid, set()).add(name)
            self._finished_pids[name] = pid

    def deleted(self, name: str) -> None:
        """This one is no more."""
        self._growing.pop(name, None)
        self._paths.pop(name, None)
        pid = self._finished_pids.pop(name, None)
        if pid is not None:
            self._finished[pid].remove(name)
            if not self._finished[pid]:
                del self._finished[pid]

    def forget(self) -> None:
        """Look at every file again."""
        self._growing.update(self._finished_pids)
        self._finished.clear()
        self._finished_pids.clear()
        self._forgot_ns = self._clock_ns()

    def _list(self, now_ns: int) -> None:
        try:
            changed_ns = os.stat(self._directory).st_mtime_ns
        except OSError:
            changed_ns = None  # the listing says what is wrong
        if changed_ns != self._changed_ns:
            self._changed_ns, self._changed_seen_ns = changed_ns, now_ns
        if self._listed_ns is not None and self._listed_ns - self._changed_seen_ns >= _SETTLED_NS:
            return
        for name in list_names(self._directory, self._suffix):
            if name not in self._growing and name not in self._finished_pids:
                own = self._own_name.fullmatch(name)
                self._growing[name] = int(own[1]) if own else None
                self._paths[name] = self._directory / name
        self._listed_ns = now_ns
