"""Test whether the workers of a loader wait for one shared resource (a disk, a pipe, a lock, a link).

A run with one setting shows it in three ways. Each is compared with chance:

- Correlation (evidence `fetches_alike_sigmas`): a resource that serves in turns lets a slow read delay the other
  fetches in progress too. If the turns are not fair, one fetch is short because another is long. Without a shared
  resource, fetches in progress together are no more alike than fetches far apart. Chance comes from pairing the
  same fetches again with the other workers shifted in time, which keeps what each worker does by itself (drifts,
  patterns of long and short batches).
- Slowdown (`fetches_beside_sigmas`): a resource that is shared in proportion makes a fetch faster while other
  workers pause. Then the times of fetches vary more than these times divided by the fetches in progress.
- Queue (`fetches_turn_sigmas`): a fetch that waits for its turn ends no later for having begun later. The
  correlation needs this second sign where fetches differ by no more than the machine's jitter, since a busy moment
  delays all fetches and makes them alike. It is not enough alone: a worker with a pace of its own shows it too.

Workers that never pause and whose reads are all alike may leave no trace. Storage that other programs make slow for
all workers at once looks like a shared resource.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.statistics.growth import Floats

#: Standard errors that make a test significant: 1 in 300 by chance, so 1 in 100 for the three tests together.
_SIGNIFICANT = 2.71
_LEAST_CORRELATION = 0.5  # nearer to sharing everything than to sharing nothing
_JITTER = 0.02  # relative difference between fetches that a machine makes, even an idle one
#: Seconds between two fetches of a worker that had its next index already, at most.
_PROMPT_SECONDS = 2e-3
_LEAST_SHIFT = 4  # fetches of a worker that far apart are never in progress together
_MIN_SHIFTS, _MIN_BLOCKS = 20, 20
_BLOCK_BATCHES = 5  # batches that count as one observation, since neighbours are alike
_WINDOW_FETCHES = 15  # fetches of a worker whose median is the usual value at a time
_LEAST_DISTANCE = 1e-4  # relative difference between durations that is none
_Integers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Dependence between the fetches of different workers.

    Attributes:
        correlation_ratio: correlation of fetches in progress together over the highest possible: 1 where all wait
            in one line, 0 where each waits by itself, below 0 where one is short because another is long.
        correlation_sigmas, slowdown_sigmas, queue_sigmas: results of the three tests, in standard errors from
            chance. A negative correlation says that fetches in progress together differ.
        spread_ratio: usual relative difference between the fetches of a worker.
        jitter_ratio: relative difference that the machine makes.
        service: seconds that each fetch would have been blocked alone, if the resource is shared in proportion.
    """

    correlation_ratio: float
    correlation_sigmas: float
    slowdown_sigmas: float
    queue_sigmas: float
    spread_ratio: float
    jitter_ratio: float
    service: Floats

    @property
    def is_shared(self) -> bool:
        """True if the workers wait for a shared resource. Where fetches are nearly alike, that stays open."""
        return bool(self.because) and self.is_sure

    @property
    def is_apart(self) -> bool:
        """True if each worker waits by itself. If `is_shared` is false too, the run leaves it open."""
        alone = self.spread_ratio >= _JITTER and self.slowdown_sigmas <= -_SIGNIFICANT
        return alone and abs(self.correlation_sigmas) < _SIGNIFICANT

    @property
    def because(self) -> str:
        """Sign of a shared resource in words; empty if there is none."""
        if not self.is_sure:
            together = min(self.correlation_sigmas, self.queue_sigmas) >= _SIGNIFICANT
            return "fetches are late together, and one that begins later ends no later" if together else ""
        if self.correlation_sigmas >= _SIGNIFICANT and self.correlation_ratio >= _LEAST_CORRELATION:
            return "a slow fetch delays the others in progress"
        if self.slowdown_sigmas >= _SIGNIFICANT:
            return "a fetch takes longer the more others are in progress"
        if self.correlation_sigmas <= -_SIGNIFICANT and self.slowdown_sigmas > 0:
            return "one fetch is short because another is long"
        return ""

    @property
    def is_sure(self) -> bool:
        """True if fetches differ more than by the jitter of the machine.

        Else a busy machine makes fetches late together, and sending a batch while the next one is fetched makes a
        fetch shorter that begins later. Both signs together are a hint then, and no proof.
        """
        return self.spread_ratio >= self.jitter_ratio


def measure_sharing(
    begins: Floats, ends: Floats, blocked: Floats, workers: _Integers, places: _Integers, queued_ratio: float = 0.0
) -> Sharing:
    """Apply the three tests to fetches, given in any order.

    Args:
        begins: begin of each fetch, seconds.
        ends: end of each fetch, seconds.
        blocked: time that each fetch was blocked, seconds.
        workers: worker of each fetch.
        places: index of each batch in its epoch. The same index in another epoch may be the same samples, so it is
            no new evidence.
        queued_ratio: share of their time that the fetches wait for a core. A machine that busy makes them differ by
            as much.
    """
    order = np.argsort(begins, kind="stable")
    begins, ends, durations = begins[order], ends[order], np.maximum(blocked[order], 1e-6)
    workers, blocks = workers[order], places[order] // _BLOCK_BATCHES
    share, in_progress = _shares(begins, ends)
    service = np.empty_like(durations)
    service[order] = durations * share
    deviations, spread = _deviations(np.log(durations), workers)
    ratio, sigmas = _correlation(begins, ends, deviations, workers)
    # The density of a duration is that of its service over the fetches in progress at its end.
    gains = _log_density(durations * share, workers) - np.log(in_progress) - _log_density(durations, workers)
    pauses = begins - pd.Series(ends).groupby(workers).shift().to_numpy()
    prompt = pauses < _PROMPT_SECONDS
    lateness, _ = _deviations(pauses[prompt], workers[prompt])
    return Sharing(
        correlation_ratio=ratio,
        correlation_sigmas=sigmas,
        slowdown_sigmas=_sigmas(gains, blocks),
        queue_sigmas=_sigmas(-lateness * deviations[prompt], blocks[prompt]),
        spread_ratio=spread,
        jitter_ratio=max(_JITTER, queued_ratio),
        service=service,
    )


def _deviations(values: Floats, workers: _Integers) -> tuple[Floats, float]:
    """Return each value's deviation from the usual one of its worker at that time, and the usual distance from it.

    Deviations are in usual distances, clipped to -1..1 and of mean 0. Clipping makes the sign count and not the
    size, so a few stalls that hit all workers at once decide nothing.
    """
    by_worker = pd.Series(values).groupby(workers)
    deviations = by_worker.transform(
        lambda series: series - series.rolling(_WINDOW_FETCHES, center=True, min_periods=1).median()
    )
    distance = deviations.abs().groupby(workers).transform("median")
    clipped: pd.Series = (deviations / np.maximum(distance, 1e-9)).clip(-1.0, 1.0)
    return (clipped - clipped.groupby(workers).transform("mean")).to_numpy(), float(distance.median())


def _shares(begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Return each fetch's mean of 1 / (fetches in progress) while it lasted, and their number at its end."""
    moments = np.sort(np.concatenate([begins, ends]))
    sorted_ends = np.sort(ends)
    counts = np.searchsorted(begins, moments, side="right") - np.searchsorted(sorted_ends, moments, side="right")
    served = np.concatenate([[0.0], np.cumsum(np.diff(moments) / np.maximum(counts[:-1], 1))])
    spent = np.interp(ends, moments, served) - np.interp(begins, moments, served)
    at_end = np.searchsorted(begins, ends) - np.searchsorted(sorted_ends, ends)
    return np.clip(spent / np.maximum(ends - begins, 1e-9), 0.0, 1.0), np.maximum(at_end, 1).astype(float)


def _correlation(begins: Floats, ends: Floats, deviations: Floats, workers: _Integers) -> tuple[float, float]:
    """Return the correlation of fetches in progress together over the highest possible, and its sigmas."""
    numbers, position = pd.factorize(workers)[0], pd.Series(workers).groupby(workers).cumcount().to_numpy()
    counts = np.bincount(numbers)
    later, earlier = _neighbours(begins, ends, numbers)
    if counts.min() < _MIN_SHIFTS + 2 * _LEAST_SHIFT or not len(later):
        return 0.0, 0.0
    fetch_at = np.zeros((len(counts), counts.max()), dtype=np.intp)  # by worker and position
    fetch_at[numbers, position] = np.arange(len(deviations))
    worker, place = numbers[earlier], position[earlier]

    def covariance(shift: int) -> float:
        """Pair each later fetch with the one that comes `shift` fetches after its earlier neighbour."""
        shifted = fetch_at[worker, (place + shift) % counts[worker]]
        return float(np.mean(deviations[later] * deviations[shifted]))

    by_chance = np.array([covariance(shift) for shift in range(_LEAST_SHIFT, int(counts.min()) - _LEAST_SHIFT + 1)])
    durations, overlap = ends - begins, np.minimum(ends[later], ends[earlier]) - begins[later]
    highest = float(np.mean(deviations**2) * np.mean(overlap / np.sqrt(durations[later] * durations[earlier])))
    measured = covariance(0)
    sigmas = (measured - float(by_chance.mean())) / max(float(by_chance.std()), 1e-9)
    return measured / max(highest, 1e-9), sigmas


def _neighbours(begins: Floats, ends: Floats, workers: _Integers) -> tuple[_Integers, _Integers]:
    """Return pairs (later, earlier) of different workers' fetches, the earlier in progress as the later begins.

    The duration of the later fetch has no influence on these pairs. It would on pairs with a long overlap.
    """
    later = np.arange(len(begins))
    first = np.searchsorted(np.maximum.accumulate(ends), begins, side="right")  # that may be in progress
    counts = np.maximum(later - first, 0)
    later = np.repeat(later, counts)
    earlier = np.arange(len(later)) - np.repeat(np.cumsum(counts) - counts, counts) + first[later]
    in_progress = (ends[earlier] > begins[later]) & (workers[earlier] != workers[later])
    return later[in_progress], earlier[in_progress]


def _log_density(durations: Floats, workers: _Integers) -> Floats:
    """Return the log density at each duration, relative to the usual one of its worker, up to a constant.

    It comes from the distance between the durations that are some ranks below and above, so no shape is assumed:
    fetches of two kinds, with and without a slow sample, say, are as little spread as each kind is.
    """
    logs = pd.Series(np.log(durations))
    off = (logs - logs.groupby(workers).transform("median")).to_numpy()
    order, places, ranks = np.argsort(off, kind="stable"), np.arange(len(off)), max(1, round(math.sqrt(len(off))))
    above, below = np.minimum(places + ranks, len(off) - 1), np.maximum(places - ranks, 0)
    distance = np.maximum(off[order[above]] - off[order[below]], _LEAST_DISTANCE)
    density = np.empty_like(off)
    density[order] = np.log(above - below) - np.log(distance)
    relative: Floats = density - logs.to_numpy()
    return relative


def _sigmas(values: Floats, blocks: _Integers) -> float:
    """Return how many standard errors the mean is above 0; a block counts as one observation."""
    _, numbers = np.unique(blocks, return_inverse=True)
    sums = np.bincount(numbers, weights=values)
    if len(sums) < _MIN_BLOCKS:
        return 0.0
    return float(sums.mean() / max(sums.std(ddof=1) / np.sqrt(len(sums)), 1e-9))
