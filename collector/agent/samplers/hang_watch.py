"""Notices that a training has stopped for longer than its pace explains, and takes stacks while it stands still.

Silence alone is no hang. So this only decides when stacks are worth their cost (some 20 ms for each process, all of
it in the collector); whether the training hangs, and on what, is for the diagnosis to say.

A process that waits for long may be downloading. So from the first stacks on, the bytes that each process has moved
are compared from tick to tick, and the stacks say how long ago they last changed.

A run in which no process has begun to train with the hooks has no pace. Its sign of life is CPU time: stacks are
taken when all of its processes together have used next to none for two minutes, and kept only if one of them stands
where work is pending.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.agent.samplers import procfs
from collector.agent.samplers.moved_bytes import Moved, moved_bytes, sockets, tcp_moved
from collector.agent.samplers.process_roles import ProcessRoles
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.programs import read_program
from collector.agent.samplers.stack_dumps import StackError, locus, read_stacks, wait_of
from collector.findings import Locus
from collector.stacks import PLACE, SUSPENDED, from_fields, stack_fields
from training_harness.records import ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

#: Silence that is suspicious: this many times the longest one before it, in seconds at least `_LEAST_SECONDS`.
PACE_FACTOR = 10.0
_LEAST_SECONDS = 30.0
#: Budget before the first step or batch, which waits for imports, compilation, downloads.
_FIRST_SECONDS = 120.0
#: Stacks are taken at half of a DataLoader's timeout if that is this many times the longest silence so far.
_TIMEOUT_FACTOR = 2.0
#: Dumps of one series, one per tick: they show whether a stack moves.
SERIES_DUMPS = 3
#: Most processes of which stacks are read in one tick: 16 take a third of a second.
_MOST_PROCESSES = 16
_STREAMS = ("batch", "step")
#: Seconds without CPU time after which the stacks of a run without hooks are taken; then after twice as many.
IDLE_SECONDS = 120.0
#: Seconds between two looks at the CPU time of its processes.
_IDLE_EVERY_SECONDS = 5.0
#: CPU time of an idle run: some ticks, and a share of one core for timeouts and for watching a parent.
_NOISE_TICKS = 2
_NOISE_RATIO = 0.02

Sizes = dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Pace:
    """The records of one training process: their sizes, the time of the last one, and the longest silence.

    `timeout_ns` is the shortest timeout of its DataLoaders, and `timeout_known_ns` the time since when it is known.
    """

    changed_ns: int
    sizes: Sizes | None = None
    longest_ns: int = 0
    series_count: int = 0
    timeout_ns: float = math.inf
    timeout_known_ns: int = 0
    has_timeout_series: bool = False

    def note(self, now_ns: int, sizes: Sizes) -> None:
        if sizes and sizes != self.sizes:
            if self.sizes is not None:
                self.longest_ns = max(self.longest_ns, now_ns - self.changed_ns)
            self.sizes, self.changed_ns, self.series_count = sizes, now_ns, 0
            self.has_timeout_series = False

    @property
    def budget_ns(self) -> float:
        if self.sizes is None:
            return _FIRST_SECONDS * 1e9
        return max(_LEAST_SECONDS * 1e9, PACE_FACTOR * self.longest_ns)

    def begin_series(self, now_ns: int) -> bool:
        """Return whether a series is due: at half of the budget, at the budget, at twice the budget and so on.

        There is one more at half of the timeout of a DataLoader, which may raise before then.
        """
        if now_ns - self.changed_ns >= self.budget_ns * 2.0 ** (self.series_count - 1):
            self.series_count += 1
            return True
        since_ns = self.timeout_known_ns if self.sizes is None else self.changed_ns
        is_long = self.timeout_ns >= 2 * _TIMEOUT_FACTOR * self.longest_ns
        if self.has_timeout_series or not is_long or now_ns - since_ns < self.timeout_ns / 2:
            return False
        self.has_timeout_series = True
        return True

    @property
    def is_silent(self) -> bool:
        """True if stacks were taken in the silence that lasts."""
        return self.series_count > 0 or self.has_timeout_series


@dataclass(slots=True)
class _Idleness:
    """The time since when the processes of a run have used next to no CPU time."""

    since_ns: int
    ticks: int
    noted_ns: int
    series_count: int = 0

    def note(self, now_ns: int, ticks: int) -> None:
        noise_ticks = _NOISE_TICKS + _NOISE_RATIO * (now_ns - self.noted_ns) / procfs.NS_PER_TICK
        if not 0 <= ticks - self.ticks <= noise_ticks:  # A process that ends takes its ticks with it.
            self.since_ns, self.series_count = now_ns, 0
        self.ticks, self.noted_ns = ticks, now_ns

    def is_due(self, now_ns: int) -> bool:
        return now_ns - self.since_ns >= IDLE_SECONDS * 1e9 * 2.0**self.series_count


@dataclass(slots=True)
class _Traffic:
    """The bytes that a process and its children have moved, and when they, or those of TCP, last changed."""

    total: Moved | None
    changed_ns: int | None = None
    tcp_changed_ns: int | None = None

    def note(self, now_ns: int, total: Moved | None) -> None:
        if total is not None and self.total is not None and total != self.total:
            self.changed_ns = now_ns
            if total.tcp_bytes != self.total.tcp_bytes:
                self.tcp_changed_ns = now_ns
        self.total = total


class HangWatch:
    """Watches the training processes of this host.

    Args:
        journal_dir: journals of the run, whose growth is the sign of life.
        host: name of this host.
        roles: roles of the processes.
        proc: root of the proc file system.
        read: returns the stacks of a process; raises StackError if they cannot be read.
    """

    def __init__(
        self,
        journal_dir: Path,
        host: str,
        roles: ProcessRoles,
        *,
        proc: str = procfs.PROC,
        read: Callable[[int, Locus, str], Any] = read_stacks,
    ) -> None:
        self._journal_dir = journal_dir
        self._prefix = f"{host}."
        self._roles = roles
        self._proc = proc
        self._read = read
        self._paces: dict[LocalProcess, _Pace] = {}
        self._timeouts_ns: dict[LocalProcess, float] = {}
        self._idleness: _Idleness | None = None
        self._traffic: dict[LocalProcess, _Traffic] = {}
        self._dumps_left = 0

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Take note of an event of the run: a DataLoader with a timeout."""
        if event["kind"] == "loader" and (seconds := event.get("timeout_seconds")):
            process = LocalProcess.of(event)
            self._timeouts_ns[process] = min(seconds * 1e9, self._timeouts_ns.get(process, math.inf))

    def tick(self, now_ns: int, alive: Iterable[LocalProcess]) -> dict[str, Any] | None:
        """Return the fields of a `stacks` event if stacks are due; call it once per sample."""
        alive = frozenset(alive)
        mains = [process for process in self._roles.mains() if process in alive]
        fields = self._watch_paces(now_ns, mains, alive) if mains else self._watch_idleness(now_ns, alive)
        if fields is None:
            self._dumps_left = 0
            return None
        self._dumps_left -= 1
        return {"is_last": not self._dumps_left, **fields, **self._helpers(alive)}

    def _watch_paces(
        self, now_ns: int, mains: Iterable[LocalProcess], alive: frozenset[LocalProcess]
    ) -> dict[str, Any] | None:
        """Return the silent training processes, and the stacks of the training, while a series of dumps goes on."""
        self._idleness = None
        sizes = self._sizes({process.pid for process in mains})
        self._paces = {process: self._paces.get(process) or _Pace(now_ns) for process in mains}
        for process, pace in self._paces.items():
            pace.note(now_ns, sizes.get(process.pid, {}))
            pace.timeout_ns = self._timeouts_ns.get(process, math.inf)
            if math.isinf(pace.timeout_ns):
                pace.timeout_known_ns = now_ns
            if pace.begin_series(now_ns):
                self._dumps_left = SERIES_DUMPS
        silent = {process: pace for process, pace in self._paces.items() if pace.is_silent}
        chosen = self._of_training(alive) if silent else []
        self._note_traffic(now_ns, chosen, alive)
        if not silent or not self._dumps_left:
            return None
        return {
            "silent": [
                {
                    **process._asdict(),
                    "silent_seconds": (now_ns - pace.changed_ns) / 1e9,
                    "longest_seconds": pace.longest_ns / 1e9 if pace.sizes is not None else None,
                    "budget_seconds": pace.budget_ns / 1e9,
                }
                for process, pace in silent.items()
            ],
            "idle_seconds": None,
            "processes": [self._stacks(now_ns, process) for process in chosen],
        }

    def _watch_idleness(self, now_ns: int, alive: frozenset[LocalProcess]) -> dict[str, Any] | None:
        """Return the stacks of an idle run while a series of dumps goes on, if one of them has work pending."""
        idleness = self._idleness
        if idleness and not self._dumps_left and now_ns - idleness.noted_ns < _IDLE_EVERY_SECONDS * 1e9:
            return None
        ticks = sum(stat.cpu_ticks for stat in self._stats(alive))
        idleness = self._idleness = idleness or _Idleness(now_ns, ticks, now_ns)
        idleness.note(now_ns, ticks)
        if idleness.is_due(now_ns):
            idleness.series_count += 1
            self._dumps_left = SERIES_DUMPS
        is_idle = now_ns - idleness.since_ns >= IDLE_SECONDS / 2 * 1e9
        self._note_traffic(now_ns, sorted(alive)[:_MOST_PROCESSES] if is_idle else [], alive)
        if not self._dumps_left or not idleness.series_count:
            return None
        chosen = list(filter(self._is_python, sorted(alive)))
        processes = [self._stacks(now_ns, process) for process in chosen[:_MOST_PROCESSES]]
        stacks = (from_fields(thread, Locus()) for process in processes for thread in process["threads"])
        is_suspended = any(process["waits"] == SUSPENDED for process in processes)  # without stacks, too
        if not is_suspended and not any(stack.shows_pending_work for stack in stacks):
            return None
        return {"silent": [], "idle_seconds": (now_ns - idleness.since_ns) / 1e9, "processes": processes}

    def _of_training(self, alive: frozenset[LocalProcess]) -> list[LocalProcess]:
        """Return the training processes, their workers, and other children of theirs in Python.

        They come in this order, as many as are read in one tick.
        """
        ranked = [(self._roles.role_of(process).role, process) for process in alive]
        mains = sorted(process for role, process in ranked if role == ROLE_MAIN)
        workers = sorted(process for role, process in ranked if role == ROLE_WORKER)
        pids = {process.pid for process in mains}
        children = (process for process in sorted(self._helpers_of(alive)) if self._parent_pid(process) in pids)
        return [*mains, *workers, *filter(self._is_python, children)][:_MOST_PROCESSES]

    def _stats(self, processes: Iterable[LocalProcess]) -> list[procfs.Stat]:
        stats = (procfs.read_stat(self._proc, process.pid) for process in processes)
        return [stat for stat in stats if stat is not None]

    def _parent_pid(self, process: LocalProcess) -> int | None:
        stat = procfs.read_stat(self._proc, process.pid)
        return stat.parent_pid if stat else None

    def _is_python(self, process: LocalProcess) -> bool:
        program = read_program(self._proc, process.pid)
        return program is not None and program.is_python

    def _helpers_of(self, alive: frozenset[LocalProcess]) -> list[LocalProcess]:
        return [process for process in alive if self._roles.role_of(process).role == ROLE_OTHER]

    def _helpers(self, alive: frozenset[LocalProcess]) -> dict[str, Any]:
        """Return the CPU time of processes that neither train nor load, and how many of them are runnable."""
        stats = self._stats(self._helpers_of(alive))
        return {
            "helpers_cpu_seconds": sum(stat.cpu_ticks for stat in stats) * procfs.NS_PER_TICK / 1e9,
            "helpers_runnable_count": sum(stat.is_runnable for stat in stats),
        }

    def _note_traffic(self, now_ns: int, processes: Iterable[LocalProcess], alive: frozenset[LocalProcess]) -> None:
        """Compare the bytes that these processes have moved with those of the last tick; forget all others.

        A child that neither trains nor loads, such as a program that downloads, counts for its parent. The
        connections that a forked worker has from its parent do not count for the worker.
        """
        processes = list(processes)
        if not processes:
            self._traffic.clear()
            return
        tcp, helpers = tcp_moved(), self._helpers_of(alive)
        by_pid = {process.pid: process for process in processes}
        moved = {each: self._moved_bytes(each, by_pid, tcp) for each in {*processes, *helpers}}
        totals = {process: moved[process][1] for process in processes}
        for process in helpers:
            parent, total = moved[process]
            if parent is None or total is None:
                continue
            if process not in totals or self._roles.role_of(parent).role == ROLE_MAIN:
                totals[parent] = total.plus(totals[parent] or Moved())
        self._traffic = {
            process: self._traffic.get(process) or _Traffic(total) for process, total in totals.items()
        }
        for process, total in totals.items():
            self._traffic[process].note(now_ns, total)

    def _moved_bytes(
        self, process: LocalProcess, by_pid: Mapping[int, LocalProcess], tcp: Mapping[str, int]
    ) -> tuple[LocalProcess | None, Moved | None]:
        """Return its parent, if that is among `by_pid`, and the bytes that it moved by itself."""
        parent = by_pid.get(self._parent_pid(process) or 0)
        inherited = sockets(self._proc, parent.pid) if parent else set()
        return parent, moved_bytes(self._proc, process.pid, tcp, inherited)

    def _stacks(self, now_ns: int, process: LocalProcess) -> dict[str, Any]:
        role = self._roles.role_of(process)
        stat = procfs.read_stat(self._proc, process.pid)
        where = locus(process, role)
        traffic = self._traffic.get(process) or _Traffic(None)

        def seconds_since(changed_ns: int | None) -> float | None:
            return None if changed_ns is None else (now_ns - changed_ns) / 1e9

        fields: dict[str, Any] = {
            **process._asdict(),
            **{name: getattr(where, name) for name in PLACE},
            "parent_pid": stat.parent_pid if stat else None,
            "cpu_seconds": stat.cpu_ticks * procfs.NS_PER_TICK / 1e9 if stat else None,
            "moved_seconds_ago": seconds_since(traffic.changed_ns),
            "received_seconds_ago": seconds_since(traffic.tcp_changed_ns),
            "waits": None,
            "error": None,
        }
        try:
            stacks = self._read(process.pid, where, self._proc)
        except StackError as error:
            waits = wait_of(self._proc, process.pid, process.pid)
            return {**fields, "threads": [], "waits": waits, "error": str(error)}
        return {**fields, "threads": [stack_fields(stack) for stack in stacks]}

    def _sizes(self, pids: set[int]) -> dict[int, Sizes]:
        """Return the newest segment and its size in bytes, of each stream of iterations of these processes."""
        found: dict[int, Sizes] = {}
        if not pids:
            return found
        with os.scandir(self._journal_dir) as entries:
            for entry in entries:
                host, *rest = entry.name.rsplit(".", 4)
                if len(rest) != 4 or f"{host}." != self._prefix or rest[1] not in _STREAMS:
                    continue
                pid, stream, sequence, _ = rest
                if pid.isdigit() and int(pid) in pids and sequence.isdigit():
                    try:
                        size = entry.stat().st_size
                    except OSError:  # deleted, since it is in the lake
                        continue
                    of_process = found.setdefault(int(pid), {})
                    of_process[stream] = max(of_process.get(stream, (-1, 0)), (int(sequence), size))
        return found
