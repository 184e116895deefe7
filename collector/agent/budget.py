"""How often each process's smaps_rollup is read, under a fixed budget of CPU time.

One read costs 40 µs for a small process and 100 ms for one of 8 GiB, and holds that process's
memory map meanwhile. So the reads get a fixed share of one core. Which process comes first follows
from making the age of the last reading small over all of them: the one with the largest
`weight · age² / cost`. No process starves, since its age grows until it wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collector.agent.procfs import ProcessKey

#: Share of one core: the rest of a hundredth is for overdrafts and for choosing.
BUDGET_RATIO = 0.008
#: What was not spent is kept for at most this long.
_SAVED_SECONDS = 2.0
#: First guess: 5 ns per KiB resident (measured up to 4 GiB) on top of the fixed part.
_FIXED_COST_NS = 50_000
_COST_NS_PER_BYTE = 5 / 1024
_LARGEST_WEIGHT = 4.0
#: Growth of 1 % per second, of the process or of the headroom before the limit, doubles its weight.
_DOUBLING_GROWTH_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that could be read now.

    Attributes:
        key: which one.
        age_seconds: since its last reading, or since it was first seen.
        cost_ns: CPU time that the reading is expected to take.
        growth_ratio: its growth per second, as a share of its size or of the headroom, whichever is smaller;
            infinite where the last reading no longer holds.

    """

    key: ProcessKey
    age_seconds: float
    cost_ns: float
    growth_ratio: float


def expected_cost_ns(rss_bytes: int) -> float:
    """CPU time of a reading of a process of this size, on a machine like the one that it was measured on."""
    return _FIXED_COST_NS + _COST_NS_PER_BYTE * rss_bytes


def choose(candidates: Iterable[Candidate], balance_ns: float) -> list[ProcessKey]:
    """The processes to read now, in order, for as long as the balance is positive.

    The last one may overdraw it: otherwise a process that costs more than can be saved would never be read.
    """
    chosen = []
    for candidate in sorted(candidates, key=_urgency, reverse=True):
        if balance_ns <= 0:
            break
        balance_ns -= candidate.cost_ns
        chosen.append(candidate.key)
    return chosen


def _urgency(candidate: Candidate) -> float:
    weight = min(1 + max(candidate.growth_ratio, 0) / _DOUBLING_GROWTH_RATIO, _LARGEST_WEIGHT)
    return weight * candidate.age_seconds**2 / candidate.cost_ns


class Budget:
    """CPU time that may be spent: earned as time goes by, and charged with what was measured."""

    def __init__(self, now_ns: int) -> None:
        self.spent_ns = 0
        self._largest_ns = BUDGET_RATIO * _SAVED_SECONDS * 1e9
        self._balance_ns = self._largest_ns
        self._at_ns = now_ns

    def balance_ns(self, now_ns: int) -> float:
        """What can be spent now; negative after an overdraft."""
        earned = BUDGET_RATIO * (now_ns - self._at_ns)
        self._balance_ns = min(self._balance_ns + earned, self._largest_ns)
        self._at_ns = now_ns
        return self._balance_ns

    def charge(self, cost_ns: int) -> None:
        """Take off what a reading has cost."""
        self._balance_ns -= cost_ns
        self.spent_ns += cost_ns
