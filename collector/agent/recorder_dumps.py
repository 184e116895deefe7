"""Finds the dumps of PyTorch's Flight Recorder that the training processes of a run write, and reads new ones.

The prefix of their names is in the environment of the training; the rank follows. The default is that of
`DebugInfoWriter::getWriter` (torch/csrc/distributed/c10d/FlightRecorder.cpp), which older versions had elsewhere.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from collector.agent.samplers import procfs
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.programs import read_environ

#: Variables that hold the prefix.
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Default of older versions of torch.
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"
#: Most dumps that are read at once, those of this host's ranks first; one takes some 0.1 s.
_MOST_FILES = 16
#: Uncertainty of a process's start on the wall clock, in ns.
_SLACK_NS = 2_000_000_000


@dataclass(slots=True)
class _Place:
    """Place of the dumps of some processes: the start of the oldest (wall clock), their owners and ranks."""

    since_ns: int
    owners: set[int]
    ranks: set[int]


class _File(NamedTuple):
    path: str
    rank: int
    status: os.stat_result


class RecorderDumps:
    """The dumps of a run."""

    def __init__(self) -> None:
        self._noted: set[LocalProcess] = set()
        self._places: dict[str, _Place] = {}
        #: Path -> time of change and size when it was read.
        self._read: dict[str, tuple[int, int]] = {}
        self._found: list[dict[str, Any]] = []
        self._reader: threading.Thread | None = None
        self._failure: Exception | None = None

    def note(self, processes: Iterable[LocalProcess]) -> None:
        """Learn from the environment of each new process where it writes dumps."""
        for process in processes:
            if process in self._noted:
                continue
            self._noted.add(process)
            environ = read_environ(procfs.PROC, process.pid)
            if environ is not None:
                self._learn(process, environ)

    def _learn(self, process: LocalProcess, environ: Mapping[str, str]) -> None:
        try:
            directory = os.readlink(f"{procfs.PROC}/{process.pid}/cwd")
            owner = os.stat(f"{procfs.PROC}/{process.pid}").st_uid
        except OSError:
            return
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - process.start_ticks * procfs.NS_PER_TICK
        since_ns = time.time_ns() - age_ns - _SLACK_NS
        rank = environ.get("RANK", "")
        for prefix in prefixes(environ):
            place = self._places.setdefault(os.path.join(directory, prefix), _Place(since_ns, set(), set()))
            place.since_ns = min(place.since_ns, since_ns)
            place.owners |= {owner, os.geteuid()}
            place.ranks |= {int(rank)} if rank.isdecimal() else set()

    def read_new(self, wait_seconds: float) -> list[dict[str, Any]]:
        """Return the fields of a `flight-recorder` event for each dump that is new or has changed.

        They are read by a thread, since a network file system may not answer: what is not there within
        `wait_seconds` comes with a later call.
        """
        if not self._places:
            return []
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_guarded, name="flight recorder", daemon=True)
            self._reader.start()
        self._reader.join(wait_seconds)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        count = len(self._found)
        found, self._found[:count] = self._found[:count], []
        return found

    def _read_guarded(self) -> None:
        try:
            self._read_files()
        except Exception as error:  # noqa: BLE001
            self._failure = error

    def _read_files(self) -> None:
        places = [*self._places.items()]
        new = [(file, place) for prefix, place in places for file in _files(prefix) if self._is_new(file, place)]
        new.sort(key=lambda item: (item[0].rank not in item[1].ranks, item[0].rank))
        for file, place in new[:_MOST_FILES]:
            self._read[file.path] = (file.status.st_mtime_ns, file.status.st_size)
            self._found.append(_fields(file, place.since_ns))

    def _is_new(self, file: _File, place: _Place) -> bool:
        status = file.status
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_uid in place.owners
            and status.st_mtime_ns >= place.since_ns
            and self._read.get(file.path) != (status.st_mtime_ns, status.st_size)
        )


def prefixes(environ: Mapping[str, str]) -> list[str]:
    """Return the prefixes of the paths to which a process with this environment may write dumps."""
    if given := [environ[name] for name in _VARIABLES if environ.get(name)]:
        return given
    home = os.path.join(environ.get("HOME") or "/tmp", ".cache")
    caches = dict.fromkeys((environ.get("XDG_CACHE_HOME") or home, home))
    return [*(os.path.join(cache, "torch", "comm_lib_trace_rank_") for cache in caches), _OLD_DEFAULT]


def _files(prefix: str) -> Iterator[_File]:
    directory, start = os.path.split(prefix)
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                rank = entry.name.removeprefix(start)
                if entry.name.startswith(start) and rank.isdecimal() and len(rank) < 8:
                    yield _File(entry.path, int(rank), entry.stat(follow_symlinks=False))
    except OSError:
        return


def _fields(file: _File, since_ns: int) -> dict[str, Any]:
    now_ns = time.time_ns()
    fields: dict[str, Any] = {
        "path": file.path,
        "of_rank": file.rank,
        "age_seconds": (now_ns - file.status.st_mtime_ns) / 1e9,
        "version": None,
        "is_whole": None,
        "groups": [],
        "error": None,
    }
    # Imported here, since its 2 MiB are wasted on a training that never hangs.
    from collector.flight_recorder import MOST_BYTES, DumpError, dump_fields

    try:
        data = _contents(file.path, MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise DumpError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return {**fields, **dump_fields(data, now_ns=now_ns, since_ns=since_ns)}
    except (OSError, DumpError) as error:
        return {**fields, "error": str(error)}


def _contents(path: str, most_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return stream.read(most_bytes)
