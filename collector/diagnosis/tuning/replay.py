"""Replay of a stretch of data loading under other settings of its DataLoader. Pure functions on plain arrays.

A DataLoader is a closed system: batch k is dispatched when batch k - P·N is yielded, worker k mod N makes it when
done with batch k - N, and it is yielded when the loop asks for it, in order (torch, `_try_put_index` and
`_next_data` of `_MultiProcessingDataLoaderIter`). With `in_order=False` (torch >= 2.7) the batch that is made first
is yielded, and its worker gets the next index. So the times of each batch follow from those of earlier ones.

Workers may wait for a shared resource that serves them in turn (a disk, a pipe, a lock). Then the blocked part of a
fetch begins when that of the fetch before is over (`Trace.in_turn`, `shared_resource.py`).

Computing is slower if there are more threads than cores. A fixed point gives the slowdown: the busier the threads
are in one replay, the longer they wait for a core in the next. Blocked time does not compete.

All times are in seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.overheads import NO_OVERHEADS, Overheads

_ROUNDS = 8  # of the fixed point; each halves its error
_FIXED_POINT_BATCHES = 400
_RESAMPLES_COUNT = 24
_BLOCK_BATCHES = 25  # batches that are resampled together, since neighbours are alike
_Z = 1.645  # standard errors on each side of a 90 % interval
#: Times of yields, waits, and times that batches were ready, by batch, setting and column of `order`; seconds.
_Timeline: TypeAlias = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """Settings of a DataLoader; `prefetch_factor` means nothing without workers."""

    num_workers: int
    prefetch_factor: int
    in_order: bool = True

    @property
    def in_flight(self) -> int:
        """Largest number of batches that are dispatched and not yet yielded."""
        return self.num_workers * self.prefetch_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Costs of a stretch of a run without waits for a core: one entry per batch, in the sampler's order; seconds.

    Attributes:
        cpu, blocked: parts of a fetch. While a fetch computes, `threads` threads do.
        in_turn: whether `blocked` is the service time of a shared resource, which serves one fetch at a time.
        loop: time of the loop after a batch. `loop_cpu_ratio` of it is computing, in `loop_threads` threads.
        overheads: costs of passing batches and indices.
        epochs: number of batches of each epoch; empty if the stretch is a part of one epoch, in its steady state.
        creation: time to create each worker at the beginning of an epoch, before any gets an index; 0 if workers
            stay.
        start, start_each: time until the first worker of an epoch fetches, and until each further one does.
        cores: cores for this training process and its workers.
    """

    cpu: Floats
    blocked: Floats
    loop: Floats
    in_turn: bool = False
    threads: float = 1.0
    loop_cpu_ratio: float = 0.0
    loop_threads: float = 1.0
    overheads: Overheads = NO_OVERHEADS
    epochs: tuple[int, ...] = ()
    creation: float = 0.0
    start: float = 0.0
    start_each: float = 0.0
    cores: float = np.inf

    @property
    def apart(self) -> Floats:
        """Part of a fetch that takes no turns."""
        return self.cpu if self.in_turn else self.cpu + self.blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction for a setting.

    Attributes:
        batches_per_second: throughput on the trace.
        wait_ratio: share of its time that the loop waits on the trace.
        held_batches: mean number of batches that are ready, or in use by the loop.
        spread: standard error of the logarithm of the throughput.
    """

    setting: Setting
    batches_per_second: float
    wait_ratio: float
    held_batches: float
    spread: float

    def interval(self, error: float) -> tuple[float, float]:
        """Return the 90 % interval of the throughput in another stretch as long.

        The error of the model in nine of ten cases, as a logarithm, adds to the spread.
        """
        factor = math.exp(math.hypot(_Z * math.sqrt(2) * self.spread, error))
        return self.batches_per_second / factor, self.batches_per_second * factor


def predict(trace: Trace, settings: Sequence[Setting], *, cores: Floats | None = None) -> list[Prediction]:
    """Predict each setting on a trace, with these cores or those of the trace.

    The spread comes from resampled blocks of the trace.
    """
    order = _resamples(len(trace.loop), np.random.default_rng(0))
    rates, waits, ready = _replay(trace, settings, order, cores)
    spread = np.log(rates[:, 1:]).std(axis=1, ddof=1)
    return [
        Prediction(
            setting=setting,
            batches_per_second=float(rates[at, 0]),
            wait_ratio=float(waits[at, 0]),
            held_batches=float(ready[at, 0]) + 1,  # the loop lets go of one when it has the next
            spread=float(spread[at]),
        )
        for at, setting in enumerate(settings)
    ]


def throughputs(trace: Trace, settings: Sequence[Setting]) -> Floats:
    """Return the batches per second of each setting as `predict` gives them, without a spread."""
    return _replay(trace, settings, np.arange(len(trace.loop))[:, np.newaxis])[0][:, 0]


def _replay(
    trace: Trace, settings: Sequence[Setting], order: npt.NDArray[np.intp], cores: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Replay with the slowdown of each setting, and no faster than its cores give the CPU time of a batch."""
    cores = np.full(len(settings), trace.cores) if cores is None else cores
    rates, waits, ready = _replay_slowed(trace, settings, slowdown(trace, settings, cores), order)
    spent = trace.cpu * trace.threads + trace.loop * trace.loop_cpu_ratio * trace.loop_threads
    highest = cores[:, np.newaxis] / np.maximum(spent[order].mean(axis=0), 1e-9)
    share = np.minimum(1.0, highest / rates)
    return rates * share, 1 - (1 - waits) * share, ready


def replay_shorter_fetches(
    trace: Trace, setting: Setting, slowdowns: Floats, fetch_ratios: Floats
) -> tuple[Floats, Floats]:
    """Return the batches per second and the share of time waited, by variant, if fetches were shorter.

    The slowdown is assumed to stay. Shorter fetches need fewer cores, so they gain rather more than this.

    Args:
        trace: a stretch of a run.
        setting: the setting of the run.
        slowdowns: times longer that computing took in the workers, and in the loop.
        fetch_ratios: (batches, variants) share of each fetch that is left.
    """
    count = fetch_ratios.shape[1]
    joined = dataclasses.replace(
        trace,
        cpu=(trace.cpu[:, np.newaxis] * fetch_ratios).T.ravel(),
        blocked=(trace.blocked[:, np.newaxis] * fetch_ratios).T.ravel(),
        loop=np.tile(trace.loop, count),
    )
    order = np.arange(count * len(trace.loop)).reshape(count, -1).T
    rates, waits, _ = _replay_slowed(joined, [setting], slowdowns[:, np.newaxis], order)
    return rates[0], waits[0]


def slowdown(trace: Trace, settings: Sequence[Setting], cores: Floats) -> Floats:
    """Return how many times longer computing takes, in workers (row 0) and in the loop (row 1), by setting.

    A thread shares the cores with the threads that compute at the same moment. Each other worker computes for its
    share of the time.
    """
    slowdowns = np.ones((2, len(settings)))
    if not np.isfinite(cores).all():
        return slowdowns
    count = min(len(trace.loop), _FIXED_POINT_BATCHES)
    order = np.arange(count)[:, np.newaxis]
    workers = np.array([setting.num_workers for setting in settings])
    cpu = trace.cpu[:count].mean()
    loop_cpu = trace.loop[:count].mean() * trace.loop_cpu_ratio
    others = np.arange(workers.max(initial=0) + 1)[:, np.newaxis]
    for _ in range(_ROUNDS):
        rates = _replay_slowed(trace, settings, slowdowns, order)[0][:, 0]
        busy = np.minimum(1.0, slowdowns[0] * cpu * rates / np.maximum(workers, 1))
        loop_busy = np.minimum(1.0, slowdowns[1] * loop_cpu * rates)
        other_threads = trace.threads * others
        in_worker = loop_busy * _crowding(trace.threads + other_threads + trace.loop_threads, cores)
        in_worker += (1 - loop_busy) * _crowding(trace.threads + other_threads, cores)
        in_worker = (_probability(others, np.maximum(workers - 1, 0), busy) * in_worker).sum(axis=0)
        in_loop = _crowding(trace.loop_threads + other_threads, cores)
        in_loop = (_probability(others, workers, busy) * in_loop).sum(axis=0)
        due = np.stack([in_worker, in_loop])
        if np.allclose(due, slowdowns, rtol=1e-9, atol=0):
            break  # most often in the first round: there are cores for all
        slowdowns = (slowdowns + due) / 2
    return slowdowns


def _crowding(threads: Floats, cores: Floats) -> Floats:
    """Return how many times longer threads take that compute at one moment, on average over the threads.

    Each stays on its core for a while: if three threads are on two cores, one has a core alone and two share one.
    """
    whole = np.maximum(np.rint(cores), 1.0)
    per_core = np.floor(threads / whole)
    rest = threads - per_core * whole  # cores with one thread more
    uneven = (rest * (per_core + 1) ** 2 + (whole - rest) * per_core**2) / threads
    even = np.maximum(1.0, threads / whole)
    crowding: Floats = np.maximum(1.0, threads / cores) * np.maximum(1.0, uneven / even)
    return crowding


def _probability(count: npt.NDArray[np.intp], workers: npt.NDArray[np.intp], busy: Floats) -> Floats:
    """Return the probability that `count` workers compute at one moment."""
    choices: Floats = np.vectorize(math.comb, otypes=[float])(workers, count)
    probability: Floats = choices * busy**count * (1 - busy) ** np.maximum(workers - count, 0)
    return probability


def _resamples(count: int, generator: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return the order of the trace itself in column 0, and resamples of it in blocks in the others."""
    width = max(1, min(_BLOCK_BATCHES, count // 4))
    starts = generator.integers(0, count, size=(-(-count // width), _RESAMPLES_COUNT))
    blocks = (starts[:, np.newaxis, :] + np.arange(width)[np.newaxis, :, np.newaxis]) % count
    return np.concatenate([np.arange(count)[:, np.newaxis], blocks.reshape(-1, _RESAMPLES_COUNT)[:count]], axis=1)


def _replay_slowed(
    trace: Trace, settings: Sequence[Setting], slowdowns: Floats, order: npt.NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Return batches per second, share of time waited and mean ready batches, by setting and column of `order`."""
    count = len(order)
    ends = np.cumsum(trace.epochs, dtype=np.intp)
    ends = ends[ends <= count] if (ends <= count).any() else np.array([count])
    seconds, waited, ready, batches = (np.zeros((len(settings), order.shape[1])) for _ in range(4))
    parallel = np.array([setting.num_workers > 0 for setting in settings])
    in_order = np.array([setting.in_order for setting in settings])
    for begin, end in itertools.pairwise([0, *ends]):
        part = order[begin:end]
        for group, replay in (
            (~parallel, _replay_inline),
            (parallel & in_order, _replay_in_order),
            (parallel & ~in_order, _replay_out_of_order),
        ):
            if not group.any():
                continue
            chosen = [setting for setting, in_group in zip(settings, group, strict=True) if in_group]
            yields, waits, ready_seconds = replay(chosen, _slowed(trace, part, slowdowns[:, group]))
            # Leave out the first batches: the replay begins with empty queues, the stretch does not.
            first = np.array([min(setting.in_flight, len(part) // 3) for setting in chosen])
            rows, lanes = np.arange(len(part))[:, np.newaxis], np.arange(len(chosen))
            begun = np.zeros_like(yields[0]) if trace.epochs else yields[first, lanes]
            creation = trace.creation * np.array([setting.num_workers for setting in chosen])
            seconds[group] += yields[-1] - begun + bool(trace.epochs) * creation[:, np.newaxis]
            counted = rows >= (0 if trace.epochs else first + 1)
            waited[group] += (waits * counted[:, :, np.newaxis]).sum(axis=0)
            ready[group] += (ready_seconds * counted[:, :, np.newaxis]).sum(axis=0)
            batches[group] += counted.sum(axis=0)[:, np.newaxis]
    seconds = np.maximum(seconds, 1e-9)
    return batches / seconds, np.clip(waited / seconds, 0.0, 1.0), ready / seconds


def _slowed(trace: Trace, part: npt.NDArray[np.intp], slowdowns: Floats) -> Trace:
    """Return a part of `order` with its costs by batch, setting and column, where computing takes longer."""
    worker, looping = slowdowns[:, :, np.newaxis]
    loop, cpu, blocked = (cost[part][:, np.newaxis] for cost in (trace.loop, trace.cpu, trace.blocked))
    cpu = cpu * worker
    overheads = Overheads(
        gap=trace.overheads.gap * worker,
        dispatch=trace.overheads.dispatch * worker,
        transfer=trace.overheads.transfer * worker,
        hand_over=trace.overheads.hand_over * looping,
        busy_hand_over=trace.overheads.busy_hand_over,
    )
    loop = loop + loop * trace.loop_cpu_ratio * (looping - 1)
    blocked = np.broadcast_to(blocked, cpu.shape)
    return dataclasses.replace(trace, cpu=cpu, blocked=blocked, loop=loop, overheads=overheads)


def _replay_inline(_settings: Sequence[Setting], costs: Trace) -> _Timeline:
    """Replay a loop that makes each batch itself."""
    fetch = costs.cpu + costs.blocked
    asked = np.concatenate([np.zeros_like(costs.loop[:1]), costs.loop[:-1]]) + fetch
    return np.cumsum(asked, axis=0), fetch, np.zeros_like(fetch)


def _replay_in_order(settings: Sequence[Setting], costs: Trace) -> _Timeline:
    """Replay workers whose batches are yielded in order."""
    apart, overheads = costs.apart, costs.overheads
    workers = np.array([setting.num_workers for setting in settings])
    places = np.array([setting.in_flight for setting in settings])
    lanes, count = np.arange(len(settings)), len(apart)
    # One row per batch and lane, and results go into existing arrays: a batch costs two dozen calls for all lanes.
    made = np.zeros((count + int(places.max()), *apart.shape[1:]))
    made_rows, apart_rows, blocked_rows = (
        table.reshape(-1, apart.shape[2]) for table in (made, apart, costs.blocked)
    )
    yields, waits = np.empty_like(apart), np.empty_like(apart)
    asked, drained, begun, free, available, taking, turn = (np.zeros_like(apart[0]) for _ in range(7))

    def fetch(rows: npt.NDArray[np.intp], costs_at: npt.NDArray[np.intp], of_lanes: Any = slice(None)) -> None:
        """Make a batch in each of the lanes, from `begun` on."""
        if costs.in_turn:
            begun[of_lanes] = turn[of_lanes] = np.maximum(begun, turn)[of_lanes] + blocked_rows[costs_at]
        made_rows[rows] = begun[of_lanes] + apart_rows[costs_at]

    for first in range(min(count, int(places.max()))):
        is_new, is_next = (workers > first)[:, np.newaxis], (workers <= first)[:, np.newaxis]
        made_rows.take((np.maximum(first - workers, 0)) * len(settings) + lanes, axis=0, out=free, mode="clip")
        begun[:] = is_new * (costs.start + first * costs.start_each) + is_next * (free + overheads.gap)
        dispatched = lanes[places > first]
        rows = first * len(settings) + dispatched
        fetch(rows, rows, dispatched)
    # Rows of the batch that each lane dispatches as batch k is yielded; batches beyond the last have its costs.
    batches = np.arange(count)[:, np.newaxis] + places
    rows_at = batches * len(settings) + lanes
    free_at = rows_at - workers * len(settings)
    made_of = np.minimum(batches, count - 1) * len(settings) + lanes
    for k in range(count):
        yielded = yields[k]
        np.add(made[k], overheads.transfer, out=available)
        np.maximum(asked, available, out=yielded)
        made_rows.take(free_at[k], axis=0, out=free, mode="clip")
        np.subtract(free, yielded, out=taking)
        np.maximum(taking, 0.0, out=taking)  # np.clip takes four times as long on arrays as small as these
        np.minimum(taking, overheads.busy_hand_over, out=taking)
        taking += overheads.hand_over
        np.multiply(available > drained, taking, out=taking)
        yielded += taking
        np.copyto(drained, yielded, where=available > asked)
        np.subtract(yielded, asked, out=waits[k])
        np.add(yielded, costs.loop[k], out=asked)
        free += overheads.gap
        np.add(yielded, overheads.dispatch, out=begun)
        np.maximum(begun, free, out=begun)
        fetch(rows_at[k], made_of[k])
    return yields, waits, yields - made[:count]


def _replay_out_of_order(settings: Sequence[Setting], costs: Trace) -> _Timeline:
    """Replay workers whose batches are yielded as they are made."""
    apart, overheads = costs.apart, costs.overheads
    gap, sending = (np.broadcast_to(cost, (len(settings), 1)) for cost in (overheads.gap, overheads.dispatch))
    workers = np.array([setting.num_workers for setting in settings])
    places = np.array([setting.in_flight for setting in settings])
    count, shape = len(apart), apart.shape[1:]
    lanes, columns = np.arange(shape[0])[:, np.newaxis], np.arange(shape[1])[np.newaxis, :]
    most, depth = int(workers.max()), max(setting.prefetch_factor for setting in settings)
    # By worker: when it is free, and when its dispatched batches are made, oldest first.
    free = np.broadcast_to(costs.start + costs.start_each * np.arange(most), (*shape, most)).copy()
    made_at = np.full((*shape, most, depth + 1), np.inf)
    queued = np.zeros((*shape, most), dtype=np.intp)
    sent, turn = np.zeros(shape, dtype=np.intp), np.zeros(shape)

    def dispatch(to: npt.NDArray[np.intp], now: Floats, where: npt.NDArray[np.bool_]) -> None:
        lane, column = np.nonzero(where)
        worker = to[where]
        earliest = free[lane, column, worker] + gap[lane, 0]
        begun = np.maximum(now[where] + sending[lane, 0], earliest)
        if costs.in_turn:
            begun = turn[where] = np.maximum(begun, turn[where]) + costs.blocked[sent[where], lane, column]
        done = begun + apart[sent[where], lane, column]
        free[lane, column, worker] = done
        made_at[lane, column, worker, queued[lane, column, worker]] = done
        queued[lane, column, worker] += 1
        sent[where] += 1

    asked = np.zeros_like(apart[0])
    for k in range(int(places.max())):
        dispatch(np.broadcast_to((k % workers)[lanes], shape), asked, (k < places)[lanes] & (sent < count))
    yields, waits, ready = (np.empty_like(apart) for _ in range(3))
    for k in range(count):
        first = made_at[:, :, :, 0].argmin(axis=2)
        made = made_at[lanes, columns, first, 0]
        made_at[lanes, columns, first, :-1] = made_at[lanes, columns, first, 1:]
        queued[lanes, columns, first] -= 1
        taken = np.maximum(asked, made + overheads.transfer)
        busy = np.clip(free[lanes, columns, first] - taken, 0.0, overheads.busy_hand_over)
        yields[k] = taken + overheads.hand_over + busy
        waits[k], ready[k] = yields[k] - asked, yields[k] - made
        dispatch(first, yields[k], sent < count)
        asked = yields[k] + costs.loop[k]
    return yields, waits, ready
