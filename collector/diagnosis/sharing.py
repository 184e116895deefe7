"""Do the workers of a loader wait for one thing in common (a disk, a pipe, a lock, a link), or each by itself?

One run with one setting shows it in three ways. All are judged against chance:

- Alike: where a thing serves in turns, a slow read delays the fetches beside it too; where turns are not fair, one
  fetch is short because another is long. Waiting alone, neighbours are no more alike than fetches far apart: the
  same fetches are paired again with the other workers shifted in time, which keeps what each worker does by itself
  (drifts, patterns of long and short batches).
- Beside: where a thing is shared in proportion, a fetch goes faster while other workers pause. Then what fetches
  took is less even than what they took counted by their share, time divided by the fetches in progress.
- Turn: who waits for a turn ends no later for having begun later. That is asked besides where fetches differ by no
  more than the machine's own jitter, which makes neighbours alike: a busy moment delays all of them. Nor does it do
  alone: who keeps to a pace of its own ends no later either.

Workers that never pause and whose reads are all alike may leave no trace. And a storage that others make slow for
all workers at once looks like one that they share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.trends import Floats

_SIGMAS = 2.71  # one in 300 by chance; there are three ways to be taken in, so one in 100 in all
_NEARER = 0.5  # of all that neighbours can have in common: nearer to sharing everything than to sharing nothing
_JITTER = 0.02  # of what fetches usually take: a machine makes them differ by so much, also an idle one
_PAUSED = 2e-3  # seconds: a worker that began no later than that after its last fetch had its next index already
_APART = 4  # fetches of a worker: so far apart they never are in progress together
_FEW = 20  # ways to shift, and blocks of fetches
_BLOCK = 5  # batches that are counted together, for neighbours are alike
_AROUND = 15  # fetches of a worker that tell what is usual at a time
_SHAPE = 4.0  # of a Student distribution: few outliers decide nothing
_Whole = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the fetches of different workers depend on each other.

    Attributes:
        alike_ratio: of what neighbours can have in common, what they have: 1 where all wait in one line, 0 where
            each waits by itself, below 0 where one is short because another is long.
        alike_sigmas, beside_sigmas, turn_sigmas: how far from chance it is that neighbours are alike (negative:
            that they differ), that fetches go slower beside others, that they end no later for having begun later.
        spread_ratio: by how much fetches usually differ.
        jitter_ratio: by how much the machine makes them differ.
        service: what each fetch would have been blocked if nobody else had been, shared in proportion; seconds.

    """

    alike_ratio: float
    alike_sigmas: float
    beside_sigmas: float
    turn_sigmas: float
    spread_ratio: float
    jitter_ratio: float
    service: Floats

    @property
    def is_shared(self) -> bool:
        """Whether the workers wait for one thing in common."""
        return bool(self.because)

    @property
    def is_apart(self) -> bool:
        """Whether each worker waits by itself; where neither is true, it cannot be told."""
        alone = self.spread_ratio >= _JITTER and self.beside_sigmas <= -_SIGMAS
        return alone and abs(self.alike_sigmas) < _SIGMAS

    @property
    def because(self) -> str:
        """How that shows, in words; empty where it does not."""
        if not self.is_sure:
            together = min(self.alike_sigmas, self.turn_sigmas) >= _SIGMAS
            return "fetches are late together, and who begins later ends no later" if together else ""
        if self.alike_sigmas >= _SIGMAS and self.alike_ratio >= _NEARER:
            return "a slow fetch delays those beside it"
        if self.beside_sigmas >= _SIGMAS:
            return "a fetch takes longer the more others are in progress"
        if self.alike_sigmas <= -_SIGMAS and self.beside_sigmas > 0:
            return "one fetch is short because another is long"
        return ""

    @property
    def is_sure(self) -> bool:
        """Whether nothing else explains it, as the jitter of the machine and workers that keep to a pace."""
        return self.spread_ratio >= self.jitter_ratio


def sharing(
    begins: Floats, ends: Floats, blocked: Floats, workers: _Whole, places: _Whole, queued_ratio: float = 0.0
) -> Sharing:
    """Judge fetches, in any order.

    Args:
        begins: of each, in seconds.
        ends: of each, in seconds.
        blocked: for how many seconds of it.
        workers: that made it.
        places: in its epoch. The same place in another epoch may be the same samples, so it is no new evidence.
        queued_ratio: share of their time that they wait for a core: so busy a machine makes them differ by that.

    """
    order = np.argsort(begins, kind="stable")
    begins, ends, took = begins[order], ends[order], np.maximum(blocked[order], 1e-6)
    workers, blocks = workers[order], places[order] // _BLOCK
    share, crowd = _shares(begins, ends)
    service = np.empty_like(took)
    service[order] = took * share
    off, spread = _off_usual(np.log(took), workers)
    ratio, sigmas = _alike(begins, ends, off, workers)
    gains = _log_likely(took * share, workers) - np.log(crowd) - _log_likely(took, workers)
    pauses = begins - pd.Series(ends).groupby(workers).shift().to_numpy()
    prompt = pauses < _PAUSED
    late, _ = _off_usual(pauses[prompt], workers[prompt])
    return Sharing(
        alike_ratio=ratio,
        alike_sigmas=sigmas,
        beside_sigmas=_from_chance(gains, blocks),
        turn_sigmas=_from_chance(-late * off[prompt], blocks[prompt]),
        spread_ratio=spread,
        jitter_ratio=max(_JITTER, queued_ratio),
        service=service,
    )


def _off_usual(values: Floats, workers: _Whole) -> tuple[Floats, float]:
    """Whether each is more or less than usual in its worker at that time (-1 to 1, 0 on average); how far usually.

    That it was long or short counts, not by how much: a few stalls that hit all workers at once decide nothing.
    """
    by_worker = pd.Series(values).groupby(workers)
    off = by_worker.transform(lambda each: each - each.rolling(_AROUND, center=True, min_periods=1).median())
    usual = off.abs().groupby(workers).transform("median")
    clipped: pd.Series = (off / np.maximum(usual, 1e-9)).clip(-1.0, 1.0)
    return (clipped - clipped.groupby(workers).transform("mean")).to_numpy(), float(usual.median())


def _shares(begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Of each fetch, the mean of 1 / (fetches in progress) while it was, and how many there were at its end."""
    moments = np.sort(np.concatenate([begins, ends]))
    sorted_ends = np.sort(ends)
    crowd = np.searchsorted(begins, moments, side="right") - np.searchsorted(sorted_ends, moments, side="right")
    served = np.concatenate([[0.0], np.cumsum(np.diff(moments) / np.maximum(crowd[:-1], 1))])
    spent = np.interp(ends, moments, served) - np.interp(begins, moments, served)
    at_end = np.searchsorted(begins, ends) - np.searchsorted(sorted_ends, ends)
    return np.clip(spent / np.maximum(ends - begins, 1e-9), 0.0, 1.0), np.maximum(at_end, 1).astype(float)


def _alike(begins: Floats, ends: Floats, off: Floats, workers: _Whole) -> tuple[float, float]:
    """How alike fetches in progress together are, of what they can be, and how far from chance that is."""
    which, place = pd.factorize(workers)[0], pd.Series(workers).groupby(workers).cumcount().to_numpy()
    made = np.bincount(which)
    later, earlier = _neighbours(begins, ends, which)
    if made.min() < _FEW + 2 * _APART or not len(later):
        return 0.0, 0.0
    kth = np.zeros((len(made), made.max()), dtype=np.intp)
    kth[which, place] = np.arange(len(off))
    theirs, at = which[earlier], place[earlier]

    def likeness(shift: int) -> float:
        return float(np.mean(off[later] * off[kth[theirs, (at + shift) % made[theirs]]]))

    by_chance = np.array([likeness(shift) for shift in range(_APART, int(made.min()) - _APART + 1)])
    took, together = ends - begins, np.minimum(ends[later], ends[earlier]) - begins[later]
    most = float(np.mean(off**2) * np.mean(together / np.sqrt(took[later] * took[earlier])))
    found = likeness(0)
    return found / max(most, 1e-9), (found - float(by_chance.mean())) / max(float(by_chance.std()), 1e-9)


def _neighbours(begins: Floats, ends: Floats, which: _Whole) -> tuple[_Whole, _Whole]:
    """The pairs of fetches of different workers of which the earlier one goes on when the later one begins.

    What a fetch takes says nothing of what was going on when it began. Of which pairs overlap for long it does.
    """
    later = np.arange(len(begins))
    since = np.searchsorted(np.maximum.accumulate(ends), begins, side="right")  # the first that may go on
    counts = np.maximum(later - since, 0)
    later = np.repeat(later, counts)
    earlier = np.arange(len(later)) - np.repeat(np.cumsum(counts) - counts, counts) + since[later]
    goes_on = (ends[earlier] > begins[later]) & (which[earlier] != which[later])
    return later[goes_on], earlier[goes_on]


def _log_likely(took: Floats, workers: _Whole) -> Floats:
    """The logarithm of the likelihood of each duration if those of a worker vary by chance around their median."""
    logs = pd.Series(np.log(took))
    off = (logs - logs.groupby(workers).transform("median")).to_numpy()
    scale = max(1.4826 * float(np.median(np.abs(off))), 1e-4)
    found: Floats = -np.log(scale) - (_SHAPE + 1) / 2 * np.log1p((off / scale) ** 2 / _SHAPE) - logs.to_numpy()
    return found


def _from_chance(gains: Floats, blocks: _Whole) -> float:
    """How many standard errors the mean is above 0; what lies in one block counts as one observation."""
    _, which = np.unique(blocks, return_inverse=True)
    sums = np.bincount(which, weights=gains)
    if len(sums) < _FEW:
        return 0.0
    return float(sums.mean() / max(sums.std(ddof=1) / np.sqrt(len(sums)), 1e-9))
