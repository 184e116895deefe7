"""The files of a run that can still grow; files of finished workers then cost nothing.

Workers that are restarted for each epoch leave files by the thousand. So a file that was read after its
writer had ended is not checked again, and a directory is listed only after it has changed.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from collector.store.journals.segments import list_names

#: Resolution of modification times: two changes within it may look like one.
_MTIME_RESOLUTION_NS = 2_000_000_000
#: Time after which all files are checked again: a writer may be invisible (another pid namespace), and an
#: event log grows again when its pid is reused.
_RECHECK_NS = 300_000_000_000


class GrowingFiles:
    """The journals or event logs in one directory that may have grown.

    Args:
        directory: the directory of the journals or event logs.
        suffix: end of the files' names.
        host: host whose processes /proc shows; files of other hosts may always have grown.
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
        this_host = re.escape(socket.gethostname() if host is None else host)
        self._name_here = re.compile(rf"{this_host}\.(\d+)(?:\.\w+\.\d+)?{re.escape(suffix)}")
        self._proc = proc
        self._clock_ns = clock_ns
        #: Name -> pid of its writer, None on another host.
        self._growing: dict[str, int | None] = {}
        self._paths: dict[str, Path] = {}
        #: Growing files whose writer had ended when they were last listed.
        self._gone: set[str] = set()
        #: Files that were read to their end after that: by the pid of their writer, and the other way round.
        self._finished: dict[int, set[str]] = {}
        self._finished_pids: dict[str, int] = {}
        self._mtime_ns: int | None = None
        self._mtime_changed_ns = self._rechecked_ns = clock_ns()
        self._listed_ns: int | None = None

    def list_growing(self) -> list[Path]:
        """Return the files that may have grown since they were last read; call it before reading them.

        Raises:
            TidegaugeError: the directory cannot be listed.
        """
        now_ns = self._clock_ns()
        if now_ns - self._rechecked_ns >= _RECHECK_NS:
            self.recheck_all()
        self._list(now_ns)
        # A process that has ended before the files are read cannot write afterwards.
        present_pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        for pid in present_pids & self._finished.keys():
            names = self._finished.pop(pid)
            for name in names:
                self._growing[name] = self._finished_pids.pop(name)
        self._gone = {name for name, pid in self._growing.items() if pid is not None and pid not in present_pids}
        return [self._paths[name] for name in self._growing]

    def mark_read(self, names: Iterable[str]) -> None:
        """Record that these files were read to their end; those whose writer has ended are finished."""
        for name in self._gone.intersection(names):
            pid = self._growing.pop(name)
            assert pid is not None
            self._finished.setdefault(pid, set()).add(name)
            self._finished_pids[name] = pid

    def mark_deleted(self, name: str) -> None:
        """Record that a file was deleted."""
        self._growing.pop(name, None)
        self._paths.pop(name, None)
        pid = self._finished_pids.pop(name, None)
        if pid is not None:
            self._finished[pid].remove(name)
            if not self._finished[pid]:
                del self._finished[pid]

    def recheck_all(self) -> None:
        """Check every file again."""
        self._growing.update(self._finished_pids)
        self._finished.clear()
        self._finished_pids.clear()
        self._rechecked_ns = self._clock_ns()

    def _list(self, now_ns: int) -> None:
        try:
            mtime_ns = os.stat(self._directory).st_mtime_ns
        except OSError:
            mtime_ns = None  # the listing reports the error
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._mtime_changed_ns = mtime_ns, now_ns
        if self._listed_ns is not None and self._listed_ns - self._mtime_changed_ns >= _MTIME_RESOLUTION_NS:
            return
        for name in list_names(self._directory, self._suffix):
            if name not in self._growing and name not in self._finished_pids:
                here = self._name_here.fullmatch(name)
                self._growing[name] = int(here[1]) if here else None
                self._paths[name] = self._directory / name
        self._listed_ns = now_ns
