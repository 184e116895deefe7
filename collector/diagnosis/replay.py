"""Replays a stretch of data loading under other settings of its DataLoader. Pure functions on plain arrays.

A DataLoader is a closed system: batch k is dispatched when batch k - P·N is yielded, worker k mod N makes it when
done with batch k - N, and it is yielded when the loop asks for it, in order (torch, `_try_put_index` and
`_next_data` of `_MultiProcessingDataLoaderIter`). With `in_order=False` (torch >= 2.7) whatever is made first is
yielded, and its worker gets the next index. So the times of each batch follow from those of earlier ones.

What workers wait for may be one thing that serves them in turn (a disk, a pipe, a lock): then the blocked part of a
fetch begins when that of the one before is over. Which it is the trace says (`sharing.py`).

Computing is slower where there are more threads than cores. How much is found by a fixed point: the busier the
threads are in a replay, the longer they wait for a core in the next one. Blocked time does not compete.

All times are in seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import binom

from collector.diagnosis.trends import Floats

_ROUNDS = 8  # of the fixed point; each halves its error
_FIXED_POINT_BATCHES = 400
_RESAMPLES_COUNT = 24
_BLOCK = 25  # batches that are resampled together, for neighbours are alike
_Z = 1.645  # a 90 % interval
#: By batch, setting and column: when it is yielded, how long the loop waits for it, and how long it stood ready.
Played: TypeAlias = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """What a DataLoader can be told; `prefetch_factor` means nothing without workers."""

    num_workers: int
    prefetch_factor: int
    in_order: bool = True

    @property
    def in_flight(self) -> int:
        """Batches that are dispatched and not yet yielded, at most."""
        return self.num_workers * self.prefetch_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A stretch of a run as if it had had the machine for itself: one entry per batch, in the sampler's order.

    Attributes:
        cpu, blocked: what the fetch of a batch takes. While it computes, so do `threads` threads.
        in_turn: the workers are blocked by one thing in common, which takes so long for a batch.
        loop: what the loop takes after a batch, of which `loop_cpu_ratio` is computing, in `loop_threads` threads.
        gap: of a worker that has its next index, between two fetches.
        dispatch: from a yield until a worker that waits for an index begins its next fetch.
        transfer: from a batch's making until the loop can take it.
        hand_over: what the loop needs to take it. While it waits for a batch it takes those that come before it, so
            they cost it nothing later (torch parks them in `_task_info`).
        busy_hand_over: how much longer that takes, at most, while the worker that made it computes its next batch:
            threads of that worker send the batch and its file descriptors, and wait for its GIL.
        epochs: how many batches each epoch has; none of them: the stretch is a part of one, in its steady state.
        creation: of each worker at the beginning of an epoch, before any gets an index; 0 if workers stay.
        start, start_each: of the first worker in an epoch, and of each further one after that.
        cores: that are there for this training process and its workers.

    """

    cpu: Floats
    blocked: Floats
    loop: Floats
    in_turn: bool = False
    threads: float = 1.0
    loop_cpu_ratio: float = 0.0
    loop_threads: float = 1.0
    gap: float = 0.0
    dispatch: float = 0.0
    transfer: float = 0.0
    hand_over: float = 0.0
    busy_hand_over: float = 0.0
    epochs: tuple[int, ...] = ()
    creation: float = 0.0
    start: float = 0.0
    start_each: float = 0.0
    cores: float = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a setting gives.

    Attributes:
        setting: which one.
        batches_per_second, wait_ratio: of the trace itself.
        held_batches: made and waiting for the loop, or in use by it: the mean over time.
        spread: the standard error of the logarithm of the throughput.

    """

    setting: Setting
    batches_per_second: float
    wait_ratio: float
    held_batches: float
    spread: float

    def interval(self, error: float = 0.0) -> tuple[float, float]:
        """Return the 90 % interval of the throughput in another stretch as long.

        Args:
            error: by how much the model may be off besides, in nine of ten cases, as a logarithm.

        """
        factor = math.exp(math.hypot(_Z * math.sqrt(2) * self.spread, error))
        return self.batches_per_second / factor, self.batches_per_second * factor


def predict(
    trace: Trace, settings: Sequence[Setting], *, cores: Floats | None = None, seed: int = 0
) -> list[Prediction]:
    """What each setting gives on this trace; how sure that is, resampled blocks of the trace tell.

    Args:
        trace: the stretch that is replayed.
        settings: to predict.
        cores: that there are in each setting, instead of those of the trace.
        seed: of the resampling.

    """
    order = _resamples(len(trace.loop), np.random.default_rng(seed))
    rates, waits, ready = _played(trace, settings, order, cores)
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
    """The batches per second of each setting as `predict` gives them, without saying how sure that is."""
    return _played(trace, settings, np.arange(len(trace.loop))[:, np.newaxis])[0][:, 0]


def _played(
    trace: Trace, settings: Sequence[Setting], order: npt.NDArray[np.intp], cores: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Play with the slowdown of each setting, and no faster than its cores give the CPU time of a batch."""
    cores = np.full(len(settings), trace.cores) if cores is None else cores
    rates, waits, ready = _play(trace, settings, slowdown(trace, settings, cores), order)
    spent = trace.cpu * trace.threads + trace.loop * trace.loop_cpu_ratio * trace.loop_threads
    highest = cores[:, np.newaxis] / np.maximum(spent[order].mean(axis=0), 1e-9)
    kept = np.minimum(1.0, highest / rates)
    return rates * kept, 1 - (1 - waits) * kept, ready


def variants(trace: Trace, setting: Setting, slower: Floats, fetch_ratios: Floats) -> tuple[Floats, Floats]:
    """Batches per second, and the share of the time waited, if fetches took a part of what they did.

    The want of cores is taken to stay as it is, so what is saved buys rather more than this says.

    Args:
        trace: a stretch of a run.
        setting: with which it ran.
        slower: how many times longer computing took in its workers, and in its loop.
        fetch_ratios: (batches, variants): what is left of each fetch.

    """
    many = fetch_ratios.shape[1]
    together = dataclasses.replace(
        trace,
        cpu=(trace.cpu[:, np.newaxis] * fetch_ratios).T.ravel(),
        blocked=(trace.blocked[:, np.newaxis] * fetch_ratios).T.ravel(),
        loop=np.tile(trace.loop, many),
    )
    order = np.arange(many * len(trace.loop)).reshape(many, -1).T
    rates, waits, _ = _play(together, [setting], slower[:, np.newaxis], order)
    return rates[0], waits[0]


def slowdown(trace: Trace, settings: Sequence[Setting], cores: Floats) -> Floats:
    """How many times longer computing takes, in workers (row 0) and in the loop (row 1), by setting.

    A thread shares the cores with those that want to compute at the same moment; each of the others does so for
    its share of the time.
    """
    slower = np.ones((2, len(settings)))
    if not np.isfinite(cores).all():
        return slower
    count = min(len(trace.loop), _FIXED_POINT_BATCHES)
    order = np.arange(count)[:, np.newaxis]
    workers = np.array([setting.num_workers for setting in settings])
    cpu = trace.cpu[:count].mean()
    loop_cpu = trace.loop[:count].mean() * trace.loop_cpu_ratio
    others = np.arange(workers.max(initial=0) + 1)[:, np.newaxis]
    for _ in range(_ROUNDS):
        rates = _play(trace, settings, slower, order)[0][:, 0]
        busy = np.minimum(1.0, slower[0] * cpu * rates / np.maximum(workers, 1))
        loop_busy = np.minimum(1.0, slower[1] * loop_cpu * rates)
        wanted = trace.threads * others
        beside = _at_once(others, np.maximum(workers - 1, 0), busy)
        crowd = loop_busy * _crowding(trace.threads + wanted + trace.loop_threads, cores)
        crowd += (1 - loop_busy) * _crowding(trace.threads + wanted, cores)
        of_loop = _crowding(trace.loop_threads + wanted, cores)
        found = np.stack([(beside * crowd).sum(axis=0), (_at_once(others, workers, busy) * of_loop).sum(axis=0)])
        slower = (slower + found) / 2
    return slower


def _crowding(threads: Floats, cores: Floats) -> Floats:
    """How many times longer threads take that compute at one moment, on average over the threads.

    Each stays on its core for a while: of three on two cores one has its core alone, and the others share one.
    """
    whole = np.maximum(np.rint(cores), 1.0)
    each = np.floor(threads / whole)  # threads on each core, one more on some
    more = threads - each * whole
    uneven = (more * (each + 1) ** 2 + (whole - more) * each**2) / threads
    even = np.maximum(1.0, threads / whole)
    slower: Floats = np.maximum(1.0, threads / cores) * np.maximum(1.0, uneven / even)
    return slower


def _at_once(count: npt.NDArray[np.intp], workers: npt.NDArray[np.intp], busy: Floats) -> Floats:
    """How likely it is that so many of the workers compute at one moment; importing scipy.stats takes 0.6 s."""
    likely: Floats = binom(workers, count) * busy**count * (1 - busy) ** np.maximum(workers - count, 0)
    return likely


def _resamples(count: int, generator: np.random.Generator) -> npt.NDArray[np.intp]:
    """The trace itself in column 0, and resamples of it in blocks."""
    width = max(1, min(_BLOCK, count // 4))
    starts = generator.integers(0, count, size=(-(-count // width), _RESAMPLES_COUNT))
    blocks = (starts[:, np.newaxis, :] + np.arange(width)[np.newaxis, :, np.newaxis]) % count
    return np.concatenate([np.arange(count)[:, np.newaxis], blocks.reshape(-1, _RESAMPLES_COUNT)[:count]], axis=1)


def _play(
    trace: Trace, settings: Sequence[Setting], slower: Floats, order: npt.NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Batches per second, the share of time waited and the ready batches, by setting and column of `order`."""
    count = len(order)
    ends = np.cumsum(trace.epochs, dtype=np.intp)
    ends = ends[ends <= count] if (ends <= count).any() else np.array([count])
    seconds, waited, stood, batches = (np.zeros((len(settings), order.shape[1])) for _ in range(4))
    parallel = np.array([setting.num_workers > 0 for setting in settings])
    in_order = np.array([setting.in_order for setting in settings])
    for begin, end in itertools.pairwise([0, *ends]):
        part = order[begin:end]
        for mine, play in (
            (~parallel, _play_inline),
            (parallel & in_order, _play_in_order),
            (parallel & ~in_order, _play_out_of_order),
        ):
            if not mine.any():
                continue
            chosen = [setting for setting, is_mine in zip(settings, mine, strict=True) if is_mine]
            worker_slower, loop_slower = (each[mine][:, np.newaxis] for each in slower)
            loop, cpu, blocked = (each[part][:, np.newaxis] for each in (trace.loop, trace.cpu, trace.blocked))
            loop = loop + loop * trace.loop_cpu_ratio * (loop_slower - 1)
            own = cpu * worker_slower + (0 if trace.in_turn else blocked)
            served = np.broadcast_to(blocked if trace.in_turn else 0.0, own.shape)
            overheads = _Overheads.of(trace, worker_slower, loop_slower)
            yields, waits, stands = play(trace, chosen, own, served, loop, overheads)
            # The queues were empty at the beginning of the replay, those of the run were not.
            first = np.array([min(setting.in_flight, len(part) // 3) for setting in chosen])
            rows, lanes = np.arange(len(part))[:, np.newaxis], np.arange(len(chosen))
            begun = np.zeros_like(yields[0]) if trace.epochs else yields[first, lanes]
            creation = trace.creation * np.array([setting.num_workers for setting in chosen])
            seconds[mine] += yields[-1] - begun + bool(trace.epochs) * creation[:, np.newaxis]
            counted = rows >= (0 if trace.epochs else first + 1)
            waited[mine] += (waits * counted[:, :, np.newaxis]).sum(axis=0)
            stood[mine] += (stands * counted[:, :, np.newaxis]).sum(axis=0)
            batches[mine] += counted.sum(axis=0)[:, np.newaxis]
    seconds = np.maximum(seconds, 1e-9)
    return batches / seconds, np.clip(waited / seconds, 0.0, 1.0), stood / seconds


@dataclass(frozen=True, slots=True)
class _Overheads:
    """The cost of passing batches and indices, by setting, where computing takes so many times longer."""

    gap: Floats
    dispatch: Floats
    transfer: Floats
    hand_over: Floats

    @classmethod
    def of(cls, trace: Trace, worker_slower: Floats, loop_slower: Floats) -> _Overheads:
        """Scale what workers do by their slowdown, and what the loop does by its own."""
        return cls(
            trace.gap * worker_slower,
            trace.dispatch * worker_slower,
            trace.transfer * worker_slower,
            trace.hand_over * loop_slower,
        )


def _play_inline(
    trace: Trace, settings: Sequence[Setting], own: Floats, served: Floats, loop: Floats, overheads: _Overheads
) -> Played:
    """The loop makes each batch itself."""
    fetch = own + served
    asked = np.concatenate([np.zeros_like(loop[:1]), loop[:-1]]) + fetch
    return np.cumsum(asked, axis=0), fetch, np.zeros_like(fetch)


def _play_in_order(
    trace: Trace, settings: Sequence[Setting], own: Floats, served: Floats, loop: Floats, overheads: _Overheads
) -> Played:
    workers = np.array([setting.num_workers for setting in settings])
    places = np.array([setting.in_flight for setting in settings])
    lanes, count = np.arange(len(settings)), len(own)
    # One row per batch and lane, and into arrays that are there: a batch costs two dozen calls, whatever is played.
    made = np.zeros((count + int(places.max()), *own.shape[1:]))
    made_rows, own_rows, served_rows = (each.reshape(-1, own.shape[2]) for each in (made, own, served))
    yields, waits = np.empty_like(own), np.empty_like(own)
    asked, drained, begun, free, there, taking, turn = (np.zeros_like(own[0]) for _ in range(7))

    def fetch(batch: npt.NDArray[np.intp], of_lanes: npt.NDArray[np.intp]) -> None:
        """Make a batch in each of the lanes, from `begun` on."""
        rows = np.minimum(batch, count - 1) * len(settings) + of_lanes
        if trace.in_turn:
            begun[of_lanes] = turn[of_lanes] = np.maximum(begun, turn)[of_lanes] + served_rows[rows]
        made[batch, of_lanes] = begun[of_lanes] + own_rows[rows]

    for first in range(min(count, int(places.max()))):
        is_new, is_next = (workers > first)[:, np.newaxis], (workers <= first)[:, np.newaxis]
        made_rows.take((np.maximum(first - workers, 0)) * len(settings) + lanes, axis=0, out=free, mode="clip")
        begun[:] = is_new * (trace.start + first * trace.start_each) + is_next * (free + overheads.gap)
        dispatched = lanes[places > first]
        fetch(np.full(len(dispatched), first), dispatched)
    for k in range(count):
        yielded = yields[k]
        np.add(made[k], overheads.transfer, out=there)
        np.maximum(asked, there, out=yielded)
        made_rows.take((k + places - workers) * len(settings) + lanes, axis=0, out=free, mode="clip")
        np.subtract(free, yielded, out=taking)
        np.clip(taking, 0.0, trace.busy_hand_over, out=taking)
        taking += overheads.hand_over
        np.multiply(there > drained, taking, out=taking)
        yielded += taking
        np.copyto(drained, yielded, where=there > asked)
        np.subtract(yielded, asked, out=waits[k])
        np.add(yielded, loop[k], out=asked)
        free += overheads.gap
        np.add(yielded, overheads.dispatch, out=begun)
        np.maximum(begun, free, out=begun)
        fetch(k + places, lanes)
    return yields, waits, yields - made[:count]


def _play_out_of_order(
    trace: Trace, settings: Sequence[Setting], own: Floats, served: Floats, loop: Floats, overheads: _Overheads
) -> Played:
    workers = np.array([setting.num_workers for setting in settings])
    places = np.array([setting.in_flight for setting in settings])
    count, shape = len(own), own.shape[1:]
    lanes, columns = np.arange(shape[0])[:, np.newaxis], np.arange(shape[1])[np.newaxis, :]
    most, depth = int(workers.max()), max(setting.prefetch_factor for setting in settings)
    # Of each worker: when it is free, and when the batches that it has made and will make are there, oldest first.
    free = np.broadcast_to(trace.start + trace.start_each * np.arange(most), (*shape, most)).copy()
    line = np.full((*shape, most, depth + 1), np.inf)
    queued = np.zeros((*shape, most), dtype=np.intp)
    sent, turn = np.zeros(shape, dtype=np.intp), np.zeros(shape)

    def dispatch(to: npt.NDArray[np.intp], now: Floats, where: npt.NDArray[np.bool_]) -> None:
        lane, column = np.nonzero(where)
        worker = to[where]
        ready = free[lane, column, worker] + overheads.gap[lane, 0]
        begun = np.maximum(now[where] + overheads.dispatch[lane, 0], ready)
        if trace.in_turn:
            begun = turn[where] = np.maximum(begun, turn[where]) + served[sent[where], lane, column]
        done = begun + own[sent[where], lane, column]
        free[lane, column, worker] = done
        line[lane, column, worker, queued[lane, column, worker]] = done
        queued[lane, column, worker] += 1
        sent[where] += 1

    asked = np.zeros_like(own[0])
    for k in range(int(places.max())):
        dispatch(np.broadcast_to((k % workers)[lanes], shape), asked, (k < places)[lanes] & (sent < count))
    yields, waits, stands = (np.empty_like(own) for _ in range(3))
    for k in range(count):
        first = line[:, :, :, 0].argmin(axis=2)
        made = line[lanes, columns, first, 0]
        line[lanes, columns, first, :-1] = line[lanes, columns, first, 1:]
        queued[lanes, columns, first] -= 1
        taken = np.maximum(asked, made + overheads.transfer)
        busy = np.clip(free[lanes, columns, first] - taken, 0.0, trace.busy_hand_over)
        yields[k] = taken + overheads.hand_over + busy
        waits[k], stands[k] = yields[k] - asked, yields[k] - made
        dispatch(first, yields[k], sent < count)
        asked = yields[k] + loop[k]
    return yields, waits, stands
