"""Roles of a run's processes, from the events that the processes wrote about themselves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.agent.samplers.procfs import LocalProcess
from collector.store import EVENT_LOG_SUFFIX, GrowingFiles, JournalError, read_events, size_bytes
from training_harness.records import ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: A start time is in ticks of 10 ms, an event's time in nanoseconds.
_CLOCK_SLACK_NS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Role of a process in the run: `role` as in `records.ROLES`; None is unknown."""

    role: int
    rank: int | None = None
    loader: int | None = None
    worker: int | None = None


UNKNOWN = Role(role=ROLE_OTHER)


class ProcessRoles:
    """The processes that the run's events name, with their roles.

    A worker is identified by the pid that DataLoader recorded, whatever its parent is: under forkserver
    it is no child of the training process.

    Args:
        host: this host; only its events name processes that can be sampled here.
        start_ticks: returns the start time of a living process, None if there is none.
        boot_offset_ns: CLOCK_BOOTTIME, the clock of start times, minus CLOCK_MONOTONIC.
    """

    def __init__(
        self, host: str, start_ticks: Callable[[int], int | None], *, boot_offset_ns: int | None = None
    ) -> None:
        self._host = host
        self._start_ticks = start_ticks
        if boot_offset_ns is None:
            boot_offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        self._boot_offset_ns = boot_offset_ns
        self._with_device: set[LocalProcess] = set()
        self._mains: set[LocalProcess] = set()
        self._roles: dict[LocalProcess, Role] = {}
        self._detached: set[LocalProcess] = set()
        self._exits_ns: dict[LocalProcess, int] = {}

    @property
    def recording_pids(self) -> set[int]:
        """Processes that record PyTorch's allocator at each step; others do so at an error alone.

        The driver may still hold memory of one that has ended, so they are not forgotten.
        """
        return {key.pid for key in self._with_device & self._mains}

    def __iter__(self) -> Iterator[LocalProcess]:
        return iter(self._roles)

    def role_of(self, key: LocalProcess) -> Role:
        """Return the role of a process; `other` if no event names it."""
        return self._roles.get(key, UNKNOWN)

    def mains(self) -> list[LocalProcess]:
        """Return the training processes."""
        return [key for key, role in self._roles.items() if role.role == ROLE_MAIN]

    def workers(self) -> list[LocalProcess]:
        """Return the DataLoader workers."""
        return [key for key, role in self._roles.items() if role.role == ROLE_WORKER]

    def has_detached(self, key: LocalProcess) -> bool:
        """Return whether a living process has left the run, as a notebook that detaches does."""
        return key in self._detached

    def exit_ns(self, key: LocalProcess) -> int | None:
        """Return when a process recorded that it ended or detached (CLOCK_MONOTONIC), None if it did not."""
        return self._exits_ns.get(key)

    def forget(self, key: LocalProcess) -> None:
        """Drop a process that has ended, since a long run without persistent workers names thousands."""
        self._roles.pop(key, None)

    def learn(self, event: dict[str, Any]) -> None:
        """Learn from one event; it changes nothing unless it names a process of this host."""
        if event.get("host") != self._host:
            return
        kind, rank, process = event.get("kind"), event.get("rank"), LocalProcess.of(event)
        if kind == "process-start":
            self._mains.add(process)
            self._roles.setdefault(process, Role(role=ROLE_MAIN, rank=rank))
        elif kind == "process-exit":
            self._exits_ns[process] = event["time_ns"]
            if event.get("detached"):
                self._detached.add(process)
                self._mains.discard(process)
                self.forget(process)
        elif kind == "cuda-device":
            self._with_device.add(process)
        elif kind == "worker-start":
            self._roles[process] = Role(role=ROLE_WORKER, rank=rank, loader=event["loader"], worker=event["worker"])
        elif kind == "epoch-start":
            for worker, pid in enumerate(event["worker_pids"]):
                key = self._living_since(pid, event["time_ns"])
                if key is not None:
                    self._roles[key] = Role(role=ROLE_WORKER, rank=rank, loader=event["loader"], worker=worker)

    def _living_since(self, pid: int, time_ns: int) -> LocalProcess | None:
        """Return the process that had this pid at that time, if it still has it."""
        ticks = self._start_ticks(pid)
        if ticks is None:
            return None
        started_ns = ticks * 1_000_000_000 // _TICKS_PER_SECOND - self._boot_offset_ns
        return LocalProcess(pid, ticks) if started_ns <= time_ns + _CLOCK_SLACK_NS else None


class EventTail:
    """A reader of the events of one host's processes, or of all hosts': each event once, as it is written."""

    def __init__(self, directory: Path, host: str | None = None) -> None:
        self._files = GrowingFiles(directory, EVENT_LOG_SUFFIX, host=host)
        self._prefix = "" if host is None else f"{host}."
        self._ends_bytes: dict[str, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last call; the ingest reports damaged lines."""
        events = []
        logs = [path for path in self._files.list_growing() if path.name.startswith(self._prefix)]
        for path in logs:
            begin_bytes = self._ends_bytes.get(path.name, 0)
            with suppress(JournalError):
                if size_bytes(path) > begin_bytes:
                    lines = read_events(path, begin_bytes)
                    self._ends_bytes[path.name] = lines.end_bytes
                    events += [{**json.loads(row.pop("body")), **row} for row in lines.rows]
        self._files.mark_read(path.name for path in logs)
        return events
