"""The processes of a run, and a sample of each per tick.

A read of smaps_rollup costs 40 µs for a small process and 100 ms for one of 8 GiB, and locks that process's
memory map meanwhile. So the reads get a fixed share of one core. The process to read next is the one with the
largest `weight · age² / cost`, which keeps the ages of all last readings small. No process starves, since its age
grows until it wins.

A run of twenty seconds has too few ticks for a trend. So in its first two minutes `EarlySampler` reads resident
memory and descriptors between the ticks too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from collector.agent.samplers import procfs
from collector.agent.samplers.process_roles import ProcessRoles, Role
from collector.agent.samplers.procfs import LocalProcess, Stat, Status
from collector.agent.samplers.samples import NamedSample, Sample
from training_harness.records import ROLE_COLLECTOR, ROLE_WORKER

#: Ticks between two checks of foreign processes: a pid may be used again, a process may get another parent.
_RECHECK_TICKS = 30
#: Share of one core for reads; the rest of 1 % is for overdrafts and for choosing.
BUDGET_RATIO = 0.008
#: Length of the collector's beginning in which processes are sampled between two ticks too, and the interval of
#: these samples.
EARLY_NS, EARLY_INTERVAL_NS = 120 * 10**9, 200_000_000
#: Share of one core for the process samples of that time, those of the ticks among them: enough for five per second
#: of 40 processes, and for few between the ticks from 60 on.
_EARLY_BUDGET_RATIO = 0.006
#: Seconds of budget that can be saved up.
_SAVED_SECONDS = 2.0
#: First guess of the cost of a read: a fixed part and 5 ns per KiB resident (measured up to 4 GiB).
_FIXED_COST_NS = 50_000
_COST_NS_PER_BYTE = 5 / 1024
_LARGEST_WEIGHT = 4.0
#: Growth of 1 % per second, of the process or of the headroom before the limit, doubles its weight.
_DOUBLING_GROWTH_RATIO = 0.01


class ProcessTree:
    """The living processes of the run: those that are named, and their descendants.

    A tick costs one listing of /proc and one stat per process that is followed or new. All others
    are remembered as foreign, since reading every process of a busy node would be expensive.

    Args:
        proc: root of the proc file system.
        collector: pid of the collector. It and its children are never followed as descendants: an attached
            notebook is its parent.
    """

    def __init__(self, proc: str, collector: int) -> None:
        self._proc = proc
        self._collector = collector
        self._followed: dict[int, int] = {}
        self._foreign: set[int] = set()
        self._ticks = 0

    def update(self, named: Iterable[LocalProcess]) -> tuple[dict[LocalProcess, Stat], list[LocalProcess]]:
        """Update the tree; `named` processes belong to the run whatever their parents are.

        Return the living processes of the run, and its processes that have ended since the last call.
        """
        pids = procfs.pids(self._proc)
        alive: dict[LocalProcess, Stat] = {}
        ended = []
        for pid, start_ticks in list(self._followed.items()):
            stat = procfs.read_stat(self._proc, pid)
            if stat is None or stat.has_ended or stat.start_ticks != start_ticks:
                del self._followed[pid]
                ended.append(LocalProcess(pid, start_ticks))
            else:
                alive[LocalProcess(pid, start_ticks)] = stat
        for key in named:
            if key.pid in pids and key.pid not in self._followed:
                stat = procfs.read_stat(self._proc, key.pid)
                if stat is not None and not stat.has_ended and stat.start_ticks == key.start_ticks:
                    self._followed[key.pid] = key.start_ticks
                    alive[key] = stat
        return alive | self._follow_descendants(pids), ended

    def _follow_descendants(self, pids: set[int]) -> dict[LocalProcess, Stat]:
        self._ticks += 1
        if self._ticks % _RECHECK_TICKS == 0:
            self._foreign.clear()
        self._foreign &= pids
        candidates = {}
        for pid in pids - self._foreign - self._followed.keys() - {self._collector}:
            stat = procfs.read_stat(self._proc, pid)
            if stat is not None and not stat.has_ended:
                candidates[pid] = stat
        descendants: dict[LocalProcess, Stat] = {}
        while children := [pid for pid, stat in candidates.items() if stat.parent_pid in self._followed]:
            for pid in children:
                stat = candidates.pop(pid)
                self._followed[pid] = stat.start_ticks
                descendants[LocalProcess(pid, stat.start_ticks)] = stat
        self._foreign.update(candidates)
        return descendants


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The last reading of a process's smaps_rollup, or its first sight: time, cost and values."""

    at_ns: int
    cost_ns: float
    rss_bytes: int
    private_dirty_bytes: int
    growth_bytes_per_second: float


class ProcessSampler:
    """A sampler of processes: one sample per process and tick, and a last one when a process has ended.

    Args:
        roles: roles of the processes.
        collector: this process, sampled like the others.
        child: the command, if this process is its parent: its last sample waits for its exit status
            and comes from `last_sample`.
        now_ns: time from which the budget is earned.
        proc: root of the proc file system.
    """

    def __init__(
        self,
        roles: ProcessRoles,
        collector: LocalProcess,
        *,
        child: LocalProcess | None = None,
        now_ns: int,
        proc: str = procfs.PROC,
    ) -> None:
        self.budget = Budget(now_ns)
        self.alive: frozenset[LocalProcess] = frozenset()
        #: Makes the next sample read every process, whatever is left of the budget.
        self.reads_all = False
        self._roles = roles
        self._collector = collector
        self._child = child
        self._proc = proc
        self._tree = ProcessTree(proc, collector.pid)
        self._readings: dict[LocalProcess, _Reading] = {}
        #: Processes with a child born since their last reading: a fork makes half of their private memory shared.
        self._parents: set[int] = set()
        #: The parent that a process had when it was first seen.
        self._first_parents: dict[LocalProcess, int] = {}
        #: Cost of the last reading, over its expected cost.
        self._cost_ratio = 1.0

    def sample(
        self, now_ns: int, roots: Iterable[LocalProcess], *, headroom_bytes: float | None = None
    ) -> list[NamedSample]:
        """Sample every process of the run: those with a role, the roots and their descendants.

        The less headroom the binding memory limit leaves, the more growth matters.
        """
        alive, ended = self._tree.update([*roots, *self._roles])
        self.alive = frozenset(alive)
        samples = [self.last_sample(key) for key in ended if key != self._child]
        # Some lived shorter than a tick. The child's role stays until its exit status is known.
        for key in [key for key in self._roles if key not in alive and key != self._child]:
            self._roles.forget(key)
        collector = procfs.read_stat(self._proc, self._collector.pid)
        if collector is not None:
            alive[self._collector] = collector
        statuses = {key: procfs.read_status(self._proc, key.pid) for key in alive}
        for key, stat in alive.items():
            if key not in self._readings:  # A new process has little to show yet, so its age starts now.
                self._parents.add(stat.parent_pid)
                self._first_parents[key] = stat.parent_pid
                cost_ns = self._cost_ratio * expected_cost_ns(_resident(statuses[key]))
                self._readings[key] = self._reading(now_ns, key, cost_ns, statuses[key], None)
        readable = {key: status for key, status in statuses.items() if not self._is_orphan(key, alive)}
        rollups = self._read_rollups(now_ns, readable, math.inf if headroom_bytes is None else headroom_bytes)
        return samples + [self._sample(key, stat, statuses[key], rollups.get(key)) for key, stat in alive.items()]

    def last_sample(self, key: LocalProcess, exit_status: int | None = None) -> NamedSample:
        """Return the last sample of a process that has ended, and forget the process."""
        sample = {**_identity(key, self._role_of(key)), "alive": 0, "exit_status": exit_status}
        self._readings.pop(key, None)
        self._first_parents.pop(key, None)
        self._parents.discard(key.pid)
        self._roles.forget(key)
        return sample

    def _sample(
        self, key: LocalProcess, stat: Stat, status: Status | None, rollup: procfs.Rollup | None
    ) -> NamedSample:
        return {
            **_identity(key, self._role_of(key)),
            "parent_pid": stat.parent_pid,
            **(status._asdict() if status else {}),
            **({**rollup._asdict(), "fd_limit_count": procfs.read_fd_limit(self._proc, key.pid)} if rollup else {}),
            "fd_count": procfs.count_fds(self._proc, key.pid),
            "wait_channel": None if stat.is_runnable else procfs.read_wait_channel(self._proc, key.pid),
            "cpu_ns": stat.cpu_ticks * procfs.NS_PER_TICK,
            "run_queue_ns": procfs.read_run_queue_ns(self._proc, key.pid),
            "alive": 1,
        }

    def _role_of(self, key: LocalProcess) -> Role:
        return Role(role=ROLE_COLLECTOR) if key == self._collector else self._roles.role_of(key)

    def _is_orphan(self, key: LocalProcess, alive: Mapping[LocalProcess, Stat]) -> bool:
        """Return whether a worker has outlived its parent: pages that they shared have counted as its own since."""
        first_parent = self._first_parents.get(key)
        return self._role_of(key).role == ROLE_WORKER and first_parent not in (None, alive[key].parent_pid)

    def _read_rollups(
        self, now_ns: int, statuses: Mapping[LocalProcess, Status | None], headroom_bytes: float
    ) -> dict[LocalProcess, procfs.Rollup]:
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

    def _candidate(self, now_ns: int, key: LocalProcess, status: Status, headroom_bytes: float) -> Candidate:
        last = self._readings[key]
        age_seconds = max((now_ns - last.at_ns) / 1e9, 1e-9)
        # Copy-on-read growth leaves the resident set flat, so growth of private dirty counts too.
        rss_growth = abs((status.rss_bytes or 0) - last.rss_bytes) / age_seconds
        return Candidate(
            key=key,
            age_seconds=age_seconds,
            cost_ns=last.cost_ns,
            growth_ratio=math.inf
            if key.pid in self._parents
            else max(
                rss_growth / max(min(last.rss_bytes, headroom_bytes), 1),
                last.growth_bytes_per_second / max(min(last.private_dirty_bytes, headroom_bytes), 1),
            ),
        )

    def _reading(
        self, now_ns: int, key: LocalProcess, cost_ns: float, status: Status | None, rollup: procfs.Rollup | None
    ) -> _Reading:
        last = self._readings.get(key)
        dirty_bytes = (rollup.private_dirty_bytes if rollup else None) or 0
        growth_bytes_per_second = 0.0
        if last is not None and last.private_dirty_bytes and now_ns > last.at_ns:
            growth_bytes_per_second = abs(dirty_bytes - last.private_dirty_bytes) / ((now_ns - last.at_ns) / 1e9)
        return _Reading(
            at_ns=now_ns,
            cost_ns=cost_ns,
            rss_bytes=_resident(status),
            private_dirty_bytes=dirty_bytes,
            growth_bytes_per_second=growth_bytes_per_second,
        )


def _resident(status: Status | None) -> int:
    return (status.rss_bytes if status else None) or 0


def _identity(key: LocalProcess, role: Role) -> dict[str, float | bytes | None]:
    return {
        "process_pid": key.pid,
        "process_start_ticks": key.start_ticks,
        "process_rank": role.rank,
        "role": role.role,
        "loader": role.loader,
        "worker": role.worker,
    }


class EarlySampler:
    """A sampler of resident memory and open descriptors between two ticks, at the beginning of a run.

    One sample covers all processes or is left out, so that every series has the same times. Ticks come first: these
    samples take what those leave of one budget, so that the cost of the beginning does not grow with the processes.

    Args:
        now_ns: time at which the collector begins.
        proc: root of the proc file system.
    """

    def __init__(self, now_ns: int, proc: str = procfs.PROC) -> None:
        self._end_ns = now_ns + EARLY_NS
        self._budget = Budget(now_ns, _EARLY_BUDGET_RATIO)
        self._proc = proc

    def is_over(self, now_ns: int) -> bool:
        """Return whether the beginning is over."""
        return now_ns >= self._end_ns

    def charge(self, tick_cost_ns: int) -> None:
        """Subtract the CPU time that a tick took to sample the processes, smaps excluded."""
        self._budget.charge(tick_cost_ns)

    def sample(self, now_ns: int, keys: Iterable[LocalProcess]) -> list[Sample]:
        """Sample these processes, as far as they are alive; none if the budget is spent."""
        if self._budget.balance_ns(now_ns) <= 0:
            return []
        before_ns = time.thread_time_ns()
        samples: list[Sample] = []
        for key in keys:
            resident = procfs.read_resident(self._proc, key.pid)
            if resident is not None:
                samples.append(
                    {
                        "process_pid": key.pid,
                        "process_start_ticks": key.start_ticks,
                        **resident._asdict(),
                        "fd_count": procfs.count_fds(self._proc, key.pid),
                    }
                )
        self._budget.charge(time.thread_time_ns() - before_ns)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that could be read now.

    Attributes:
        age_seconds: time since its last reading, or since it was first seen.
        cost_ns: expected CPU time of the reading.
        growth_ratio: growth per second, as a share of the process's size or of the headroom, whichever is smaller;
            infinite if the last reading is no longer valid.
    """

    key: LocalProcess
    age_seconds: float
    cost_ns: float
    growth_ratio: float


def expected_cost_ns(rss_bytes: int) -> float:
    """Return the CPU time of reading a process of this size, on a machine like the one it was measured on."""
    return _FIXED_COST_NS + _COST_NS_PER_BYTE * rss_bytes


def choose(candidates: Iterable[Candidate], balance_ns: float) -> list[LocalProcess]:
    """Choose the processes to read now, in order, as long as the balance is positive.

    The last one may overdraw it: otherwise a process that costs more than can be saved would never be read.
    """
    keys = []
    for candidate in sorted(candidates, key=_urgency, reverse=True):
        if balance_ns <= 0:
            break
        balance_ns -= candidate.cost_ns
        keys.append(candidate.key)
    return keys


def _urgency(candidate: Candidate) -> float:
    weight = min(1 + max(candidate.growth_ratio, 0) / _DOUBLING_GROWTH_RATIO, _LARGEST_WEIGHT)
    return weight * candidate.age_seconds**2 / candidate.cost_ns


class Budget:
    """CPU time that may be spent: earned as time goes by, a share of one core, and charged with measured costs."""

    def __init__(self, now_ns: int, ratio: float = BUDGET_RATIO) -> None:
        self.spent_ns = 0
        self._ratio = ratio
        self._largest_ns = ratio * _SAVED_SECONDS * 1e9
        self._balance_ns = self._largest_ns
        self._at_ns = now_ns

    def balance_ns(self, now_ns: int) -> float:
        """Return the CPU time that can be spent now; negative after an overdraft."""
        earned = self._ratio * (now_ns - self._at_ns)
        self._balance_ns = min(self._balance_ns + earned, self._largest_ns)
        self._at_ns = now_ns
        return self._balance_ns

    def charge(self, cost_ns: int) -> None:
        """Subtract the cost of a reading."""
        self._balance_ns -= cost_ns
        self.spent_ns += cost_ns
