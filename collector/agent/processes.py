"""The processes of a run: which they are, and a sample of each per tick.

Every descendant of the command belongs to the run, and so does every process that the events name;
once seen, a process stays followed until it ends, whoever its parent is by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from collector.agent import procfs
from collector.agent.budget import Budget, Candidate, choose, expected_cost_ns
from collector.agent.procfs import ProcessKey, Stat, Status
from collector.agent.roster import Role, Roster
from collector.agent.samples import NamedSample
from training_harness.records import ROLE_COLLECTOR

#: Strangers are looked at again this often: a pid may be used again, and a process be re-parented.
_RECHECK_TICKS = 30


class ProcessTree:
    """Finds the processes of the run.

    A tick costs one listing of /proc and one stat per process that is followed or new; the others
    are remembered as strangers, since reading all of a busy node's processes is what would cost.

    Args:
        proc: root of the proc file system.
        collector: never followed as a descendant, nor what it starts: a notebook that attached is its parent.

    """

    def __init__(self, proc: str, collector: int) -> None:
        self._proc = proc
        self._collector = collector
        self._followed: dict[int, int] = {}
        self._strangers: set[int] = set()
        self._ticks = 0

    def update(self, named: Iterable[ProcessKey]) -> tuple[dict[ProcessKey, Stat], list[ProcessKey]]:
        """Look again.

        Args:
            named: processes that belong to the run whatever their parents are.

        Returns:
            The living processes of the run, and those that have ended since the last call.

        """
        present = procfs.pids(self._proc)
        alive: dict[ProcessKey, Stat] = {}
        gone = []
        for pid, start_ticks in list(self._followed.items()):
            stat = procfs.read_stat(self._proc, pid)
            if stat is None or stat.ended or stat.start_ticks != start_ticks:
                del self._followed[pid]
                gone.append(ProcessKey(pid, start_ticks))
            else:
                alive[ProcessKey(pid, start_ticks)] = stat
        for key in named:
            if key.pid in present and key.pid not in self._followed:
                stat = procfs.read_stat(self._proc, key.pid)
                if stat is not None and not stat.ended and stat.start_ticks == key.start_ticks:
                    self._followed[key.pid] = key.start_ticks
                    alive[key] = stat
        for pid, stat in self._descendants(present):
            alive[ProcessKey(pid, stat.start_ticks)] = stat
        return alive, gone

    def _descendants(self, present: set[int]) -> list[tuple[int, Stat]]:
        """New children, and theirs, of the processes that are followed; follows them."""
        self._ticks += 1
        if self._ticks % _RECHECK_TICKS == 0:
            self._strangers.clear()
        self._strangers &= present
        unknown = {}
        for pid in present - self._strangers - self._followed.keys() - {self._collector}:
            stat = procfs.read_stat(self._proc, pid)
            if stat is not None and not stat.ended:
                unknown[pid] = stat
        found: list[tuple[int, Stat]] = []
        while children := [pid for pid, stat in unknown.items() if stat.parent_pid in self._followed]:
            for pid in children:
                stat = unknown.pop(pid)
                self._followed[pid] = stat.start_ticks
                found.append((pid, stat))
        self._strangers.update(unknown)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """When a process's smaps_rollup was read last (or it was first seen), at what cost, and what it showed."""

    at_ns: int
    cost_ns: float
    rss_bytes: int
    private_dirty_bytes: int
    grown_bytes_per_second: float


class ProcessSampler:
    """One sample per process and tick, and a last one when a process has ended.

    Args:
        roster: who is who.
        collector: this process, sampled like the others.
        child: the command, if this process is its parent: its last sample waits for its exit status
            and comes from `last_sample`.
        now_ns: when the budget begins to be earned.
        proc: root of the proc file system.

    """

    def __init__(
        self,
        roster: Roster,
        collector: ProcessKey,
        *,
        child: ProcessKey | None = None,
        now_ns: int,
        proc: str = "/proc",
    ) -> None:
        self.budget = Budget(now_ns)
        self.alive: frozenset[ProcessKey] = frozenset()
        self.reads_all = False  # at the next sample, whatever the budget has left
        self._roster = roster
        self._collector = collector
        self._child = child
        self._proc = proc
        self._tree = ProcessTree(proc, collector.pid)
        self._readings: dict[ProcessKey, _Reading] = {}
        #: Have had a child since their last reading: with a fork, half of what was theirs is shared.
        self._parents: set[int] = set()
        self._cost_ratio = 1.0  # of a reading to what was expected

    def sample(
        self, now_ns: int, roots: Iterable[ProcessKey], *, headroom_bytes: float | None = None
    ) -> list[NamedSample]:
        """Sample every process of the run.

        Args:
            now_ns: CLOCK_MONOTONIC.
            roots: followed beside those that the roster names.
            headroom_bytes: before the memory limit that binds; the less, the more growth matters.

        """
        alive, gone = self._tree.update([*roots, *self._roster])
        self.alive = frozenset(alive)
        samples = [self.last_sample(key) for key in gone if key != self._child]
        # Some lived shorter than a tick. The child's role waits for its exit status.
        for key in [key for key in self._roster if key not in alive and key != self._child]:
            self._roster.forget(key)
        own = procfs.read_stat(self._proc, self._collector.pid)
        if own is not None:
            alive[self._collector] = own
        statuses = {key: procfs.read_status(self._proc, key.pid) for key in alive}
        for key, stat in alive.items():
            if key not in self._readings:  # one just born says little yet: its age counts from now on
                self._parents.add(stat.parent_pid)
                cost_ns = self._cost_ratio * expected_cost_ns(_resident(statuses[key]))
                self._readings[key] = self._reading(now_ns, key, cost_ns, statuses[key], None)
        rollups = self._read_rollups(now_ns, statuses, math.inf if headroom_bytes is None else headroom_bytes)
        for key, stat in alive.items():
            samples.append(self._sample(key, stat, statuses[key], rollups.get(key)))
        return samples

    def last_sample(self, key: ProcessKey, exit_status: int | None = None) -> NamedSample:
        """The sample of a process that has ended; forgets it."""
        sample = {**_identity(key, self._role_of(key)), "alive": 0, "exit_status": exit_status}
        self._readings.pop(key, None)
        self._parents.discard(key.pid)
        self._roster.forget(key)
        return sample

    def _sample(
        self, key: ProcessKey, stat: Stat, status: Status | None, rollup: procfs.Rollup | None
    ) -> NamedSample:
        return {
            **_identity(key, self._role_of(key)),
            **(status._asdict() if status else {}),
            **({**rollup._asdict(), "fd_limit_count": procfs.read_fd_limit(self._proc, key.pid)} if rollup else {}),
            "fd_count": procfs.count_fds(self._proc, key.pid),
            "wait_channel": None if stat.runs else procfs.read_wait_channel(self._proc, key.pid),
            "cpu_ns": stat.cpu_ticks * procfs.NS_PER_TICK,
            "run_queue_ns": procfs.read_run_queue_ns(self._proc, key.pid),
            "alive": 1,
        }

    def _role_of(self, key: ProcessKey) -> Role:
        return Role(role=ROLE_COLLECTOR) if key == self._collector else self._roster.role_of(key)

    def _read_rollups(
        self, now_ns: int, statuses: Mapping[ProcessKey, Status | None], headroom_bytes: float
    ) -> dict[ProcessKey, procfs.Rollup]:
        balance_ns = math.inf if self.reads_all else self.budget.balance_ns(now_ns)
        self.reads_all = False
        if balance_ns <= 0:
            return {}
        candidates = [
            self._candidate(now_ns, key, status, headroom_bytes) for key, status in statuses.items() if status
        ]
        rollups = {}
        for key in choose(candidates, balance_ns):
            before_ns = time.thread_time_ns()
            rollup = procfs.read_rollup(self._proc, key.pid)
            cost_ns = max(time.thread_time_ns() - before_ns, 1)
            self.budget.charge(cost_ns)
            if rollup is not None:
                rollups[key] = rollup
                self._cost_ratio = cost_ns / expected_cost_ns(_resident(statuses[key]))
            self._readings[key] = self._reading(now_ns, key, cost_ns, statuses[key], rollup)
            self._parents.discard(key.pid)
        return rollups

    def _candidate(self, now_ns: int, key: ProcessKey, status: Status, headroom_bytes: float) -> Candidate:
        last = self._readings[key]
        age_seconds = max((now_ns - last.at_ns) / 1e9, 1e-9)
        # Copy-on-read growth leaves the resident set flat, so both kinds of growth count.
        resident = abs((status.rss_bytes or 0) - last.rss_bytes) / age_seconds
        return Candidate(
            key=key,
            age_seconds=age_seconds,
            cost_ns=last.cost_ns,
            growth_ratio=math.inf
            if key.pid in self._parents
            else max(
                resident / max(min(last.rss_bytes, headroom_bytes), 1),
                last.grown_bytes_per_second / max(min(last.private_dirty_bytes, headroom_bytes), 1),
            ),
        )

    def _reading(
        self, now_ns: int, key: ProcessKey, cost_ns: float, status: Status | None, rollup: procfs.Rollup | None
    ) -> _Reading:
        last = self._readings.get(key)
        dirty_bytes = (rollup.private_dirty_bytes if rollup else None) or 0
        grown_bytes_per_second = 0.0
        if last is not None and last.private_dirty_bytes and now_ns > last.at_ns:
            grown_bytes_per_second = abs(dirty_bytes - last.private_dirty_bytes) / ((now_ns - last.at_ns) / 1e9)
        return _Reading(
            at_ns=now_ns,
            cost_ns=cost_ns,
            rss_bytes=_resident(status),
            private_dirty_bytes=dirty_bytes,
            grown_bytes_per_second=grown_bytes_per_second,
        )


def _resident(status: Status | None) -> int:
    return (status.rss_bytes if status else None) or 0


def _identity(key: ProcessKey, role: Role) -> dict[str, float | bytes | None]:
    return {
        "process_pid": key.pid,
        "process_start_ticks": key.start_ticks,
        "process_rank": role.rank,
        "role": role.role,
        "loader": role.loader,
        "worker": role.worker,
    }
