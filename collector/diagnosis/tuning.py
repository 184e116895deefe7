"""Which num_workers and prefetch_factor a loop should have: what the replay predicts for a grid of them.

The replay is asked first for the setting that the run has. If it does not give what was measured there, it is not
believed anywhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.calibration import Calibrated, calibrate
from collector.diagnosis.limits import cores_per_rank
from collector.diagnosis.loader_memory import Memory, memory_of
from collector.diagnosis.loops import Loop
from collector.diagnosis.replay import Prediction, Setting, Trace, predict, throughputs
from collector.diagnosis.tables import RunTables
from collector.quantities import number

#: How far the model may be off, as a logarithm: at the run's own setting, elsewhere, and where no worker ran yet.
OWN_ERROR, MODEL_ERROR, UNSEEN_ERROR = 0.07, 0.07, 0.15
_WORKERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_PREFETCH = (1, 2, 4, 8)
_USUAL_PREFETCH = 2
_ROOM = 1.5  # times the workers that the mean times ask for are looked at
_AS_GOOD = 0.99  # of the highest throughput
_WORTH = 1.05  # times the present throughput
_STRAIN = 1.1  # times the fetches of the run: what is advised leaves room for so much


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting, its throughput with a 90 % interval (batches per second), and its host memory (NaN: unknown).

    `memory_bytes` is held while the loop runs (`loader_memory.held`), `most_bytes` when the training pauses and the
    queues are full: that must fit.
    """

    setting: Setting
    batches_per_second: float
    low: float
    high: float
    wait_ratio: float
    memory_bytes: float
    most_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """What the grid of settings gives. Two are the same only if they are one.

    Attributes:
        measured: the stretch of the run that was replayed.
        error: of the model at the run's own setting, as a logarithm.
        memory: of the loop's processes.
        shared_io: see `forecast`.
        own, options: predicted for the run's own setting and for all of the grid, that one included.
        best: what to set; None where nothing is gained.

    """

    measured: Calibrated
    error: float
    memory: Memory
    shared_io: bool
    own: Option
    options: tuple[Option, ...]
    best: Option | None

    def at(self, settings: Sequence[Setting]) -> list[Option]:
        """What these settings give, also such as are not on the grid."""
        ways = _possible(self.measured, predict(self.measured.trace, settings))
        each_way = zip(*ways, strict=True)
        return [_option(self.measured, self.memory, self.error, self.shared_io, *ways) for ways in each_way]

    @property
    def is_undecided(self) -> bool:
        """Whether the run does not tell for sure if the workers wait for one thing in common."""
        common = self.measured.common
        return self.measured.otherwise is not None and not (common and common.is_sure)

    @property
    def front(self) -> list[Option]:
        """The settings that fit, of which no other waits less and takes no more memory."""
        found: list[Option] = []
        fitting = (option for option in self.options if option.fits)
        for option in sorted(fitting, key=lambda option: (np.nan_to_num(option.memory_bytes), option.wait_ratio)):
            if not found or option.wait_ratio < found[-1].wait_ratio:
                found.append(option)
        return found


def forecast(tables: RunTables, loop: Loop, *, shared_io: bool = False) -> Forecast | str:
    """What other settings would give this loop; or why that cannot be told, in words.

    Args:
        tables: the run.
        loop: of the run.
        shared_io: its workers read from something that may be the limit for all of them together. That shows only
            where there are several (`sharing`); with fewer nothing may be gained, and the intervals say so.

    """
    measured = calibrate(tables, loop)
    if isinstance(measured, str):
        return measured
    settings = list(_grid(measured))
    predictions = predict(measured.trace, settings)
    own = next(prediction for prediction in predictions if prediction.setting == measured.setting)
    error = math.log(own.batches_per_second / measured.batches_per_second)
    low, high = own.interval(OWN_ERROR)
    if not low <= measured.batches_per_second <= high:
        return (
            f"the replay gives {number(own.batches_per_second)} batches/s ({number(low)} to {number(high)}) "
            f"where {number(measured.batches_per_second)} were measured, so something else than "
            "fetching and computing counts"
        )
    memory = memory_of(tables, loop, own)
    ways = (*_possible(measured, predictions), *_if_equal(measured, settings, cores_per_rank(tables, loop.main[0])))
    options = [_option(measured, memory, error, shared_io, *ways_of_one) for ways_of_one in zip(*ways, strict=True)]
    return Forecast(
        measured=measured,
        error=error,
        memory=memory,
        shared_io=shared_io,
        own=next(option for option in options if option.setting == measured.setting),
        options=tuple(options),
        best=_best(options, _strained(measured.trace, settings), measured, memory),
    )


def _grid(measured: Calibrated) -> Iterator[Setting]:
    own, trace = measured.setting, measured.trace
    ways = [each for each in (trace, measured.otherwise) if each is not None]
    fetch = max(float((each.cpu + each.blocked).mean()) for each in ways)
    wanted = _ROOM * fetch / max(float(trace.loop.mean()) + trace.hand_over, 1e-6)
    most = max(own.num_workers, min(math.ceil(wanted), _WORKERS[-1]), _USUAL_PREFETCH)
    yield own
    for workers in sorted({own.num_workers, *_WORKERS}):
        for prefetch in sorted({own.prefetch_factor, *_PREFETCH}):
            setting = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=own.in_order)
            if 0 < workers <= most and setting != own:
                yield setting


def _possible(measured: Calibrated, predictions: list[Prediction]) -> tuple[list[Prediction], ...]:
    """What there is, and what there may be if the workers share what they wait for, or not.

    Where they do, fewer of them may still be slower: a part of their waiting may be for themselves.
    """
    if measured.otherwise is None:
        return (predictions,)
    others = predict(measured.otherwise, [prediction.setting for prediction in predictions])
    known = measured.setting.num_workers if measured.common and measured.common.is_sure else math.inf
    pairs = zip(predictions, others, strict=True)
    return predictions, [other if other.setting.num_workers < known else mine for mine, other in pairs]


def _if_equal(measured: Calibrated, settings: list[Setting], cores: float) -> tuple[list[Prediction], ...]:
    """What there is where others use a part of the cores, if each thread gets an equal share of them.

    Which it is depends on how the kernel groups processes (cgroups, autogroup), and that is not known.
    """
    if not measured.trace.cores < cores:
        return ()
    threads = np.array([setting.num_workers + 1 for setting in settings], dtype=float)
    others = (measured.setting.num_workers + 1) * (cores / measured.trace.cores - 1)
    return (predict(measured.trace, settings, cores=cores * threads / (threads + others)),)


def _option(
    measured: Calibrated, memory: Memory, error: float, shared_io: bool, prediction: Prediction, *ways: Prediction
) -> Option:
    setting, own = prediction.setting, measured.setting
    unsure = UNSEEN_ERROR if own.num_workers == 0 else OWN_ERROR if setting == own else MODEL_ERROR
    intervals = [way.interval(abs(error) + unsure) for way in (prediction, *ways)]
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    if shared_io and measured.sharing is None:
        low = min(low, measured.batches_per_second)
    more, more_shm = memory.most(prediction) - memory.held, memory.prefetched(setting) - memory.prefetched(own)
    return Option(
        setting=setting,
        batches_per_second=prediction.batches_per_second,
        low=low,
        high=high,
        wait_ratio=prediction.wait_ratio,
        memory_bytes=memory.needed(prediction),
        most_bytes=memory.most(prediction),
        fits=setting == own or not (more > memory.room or more_shm > memory.shm_room),
    )


def _strained(trace: Trace, settings: list[Setting]) -> list[float]:
    """Batches per second by setting if fetches took somewhat longer than in the run."""
    strained = dataclasses.replace(trace, cpu=trace.cpu * _STRAIN, blocked=trace.blocked * _STRAIN)
    return [float(rate) for rate in throughputs(strained, settings)]


def _best(options: list[Option], strained: list[float], measured: Calibrated, memory: Memory) -> Option | None:
    """Of the settings that stay as good as the best that fits: the least memory, then the fewest workers."""
    fitting = [(option, rate) for option, rate in zip(options, strained, strict=True) if option.fits]
    enough = _AS_GOOD * max(rate for _, rate in fitting)

    def cost(option: Option) -> tuple[float, int, float]:
        steps = option.most_bytes / memory.step
        setting = option.setting
        unusual = abs(math.log2(setting.prefetch_factor / _USUAL_PREFETCH))
        return round(steps) if math.isfinite(steps) else 0, setting.num_workers, unusual

    best = min((option for option, rate in fitting if rate >= enough), key=cost)
    return best if best.batches_per_second >= _WORTH * measured.batches_per_second else None
