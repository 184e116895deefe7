"""Forecasts for other settings of a loop: num_workers and prefetch_factor on a grid, predicted by the replay.

The replay first predicts the run's own setting. If that does not match the measured rate, there is no forecast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.worker_limit import cores_per_rank
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.calibration import Calibration, calibrate
from collector.diagnosis.tuning.loader_memory import LoaderMemory, loader_memory
from collector.diagnosis.tuning.replay import Prediction, Setting, predict, throughputs
from collector.units import number

#: Error of the model in nine of ten cases, as a logarithm; the second where no worker ran yet.
MODEL_ERROR, UNSEEN_ERROR = 0.09, 0.115
#: Largest error at the run's own setting with which a replay is believed, as a logarithm.
CURRENT_ERROR = 0.12
_WORKERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MOST_WORKERS = _WORKERS[-1]
_PREFETCH = (1, 2, 4, 8)
USUAL_PREFETCH = 2
_REACH = 4  # the grid goes up to this many times the workers that ran, or to one per core
_MARGIN = 1.5  # the grid goes up to this many times the workers that the mean times need
_AS_GOOD = 0.99  # share of the highest throughput that is as good
WORTH = 1.05  # ratio of throughputs that makes a change worth advising
_STRAIN = 1.1  # the advised setting must stay good if fetches take this many times longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A throughput in batches per second with its 90 % interval."""

    batches_per_second: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Rate):
    """Prediction for a setting.

    Attributes:
        if_shared: throughput if the workers wait for a shared resource, where the main prediction is that each
            waits by itself. None where the run decides that, or where it makes no difference.
        if_apart: throughput if each worker waits by itself, where the main prediction is that they share. A run at
            one setting does not show how much they share, and if they share in part, the throughput lies between.
        wait_ratio: share of the time that the loop waits for batches.
        memory_bytes: host memory while the loop runs (`LoaderMemory.needed`), NaN if unknown.
        most_bytes: host memory when the training pauses and the queues are full.
        fits: whether `most_bytes` fits.
    """

    setting: Setting
    if_shared: Rate | None
    if_apart: Rate | None
    wait_ratio: float
    memory_bytes: float
    most_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Predictions for a grid of settings. Two forecasts are equal only if they are the same object.

    Attributes:
        measured: the stretch of the run that was replayed.
        error: error of the model at the run's own setting, as a logarithm.
        memory: memory of the loop's processes.
        cores: cores that the training process may use, its even share of the host's.
        current: prediction for the run's own setting.
        options: predictions for the grid, `current` included.
        best: the option to set; None where nothing is gained.
    """

    measured: Calibration
    error: float
    memory: LoaderMemory
    cores: float
    current: Option
    options: tuple[Option, ...]
    best: Option | None

    def at(self, settings: Sequence[Setting]) -> list[Option]:
        """Predict these settings, which may be outside the grid."""
        return _options(self.measured, self.memory, self.error, self.cores, settings)

    @property
    def front(self) -> list[Option]:
        """Options that fit, each without another one that waits less and takes no more memory."""
        front: list[Option] = []
        fitting = (option for option in self.options if option.fits)
        for option in sorted(fitting, key=lambda option: (np.nan_to_num(option.memory_bytes), option.wait_ratio)):
            if not front or option.wait_ratio < front[-1].wait_ratio:
                front.append(option)
        return front


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a forecast besides the machine's.

    Attributes:
        taken_cores: cores that other loops use.
        taken_bytes, taken_shm_bytes: memory that other loops will take, in all and in /dev/shm.
        most_workers: largest number of workers to consider.
    """

    taken_cores: float = 0.0
    taken_bytes: float = 0.0
    taken_shm_bytes: float = 0.0
    most_workers: int = MOST_WORKERS


NO_LIMITS = Limits()


def option_text(option: Option, per_batch: float = 1.0, unit: str = "batches/s") -> str:
    """Return the throughput with its interval, and the one for the other answer on sharing, in words.

    `unit` is that of the throughput, and `per_batch` the number of its things in a batch, such as samples.
    """
    rate, low, high = (number(value * per_batch) for value in (option.batches_per_second, option.low, option.high))
    words = f"{rate} {unit} ({low}-{high})"
    if option.if_shared is not None:
        shared = number(option.if_shared.batches_per_second * per_batch)
        words += f" if each worker waits for itself, {shared} if they share one thing"
    elif option.if_apart is not None:
        apart = number(option.if_apart.batches_per_second * per_batch)
        words += f" if they share all that they wait for, {apart} if they share nothing"
    else:
        return words
    return f"{words}; `tidegauge tune -- COMMAND` measures which"


def forecast(loop: Loop, limits: Limits = NO_LIMITS) -> Forecast | str:
    """Return the forecast for this loop, or the reason why there is none, in words."""
    measured = calibrate(loop)
    if isinstance(measured, str):
        return measured
    cores = cores_per_rank(loop.tables, loop.main[0])
    settings = [
        setting
        for setting in _grid(measured, cores)
        if setting == measured.setting or setting.num_workers <= limits.most_workers
    ]
    (current,) = predict(measured.trace, [measured.setting])
    error = math.log(current.batches_per_second / measured.batches_per_second)
    low, high = current.interval(CURRENT_ERROR)
    if not low <= measured.batches_per_second <= high:
        return (
            f"the replay gives {number(current.batches_per_second)} batches/s ({number(low)} to {number(high)}) "
            f"where {number(measured.batches_per_second)} were measured, so something other "
            "than fetching and computing takes time"
        )
    memory = loader_memory(loop, current)
    memory = dataclasses.replace(
        memory, room=memory.room - limits.taken_bytes, shm_room=memory.shm_room - limits.taken_shm_bytes
    )
    if limits.taken_cores:
        left = min(measured.trace.cores, max(1.0, cores - limits.taken_cores))
        measured = dataclasses.replace(measured, trace=dataclasses.replace(measured.trace, cores=left))
    options = _options(measured, memory, error, cores, settings)
    trace = measured.trace
    strained = dataclasses.replace(trace, cpu=trace.cpu * _STRAIN, blocked=trace.blocked * _STRAIN)
    return Forecast(
        measured=measured,
        error=error,
        memory=memory,
        cores=cores,
        current=next(option for option in options if option.setting == measured.setting),
        options=tuple(options),
        best=_best(options, throughputs(strained, settings), measured, memory),
    )


def _grid(measured: Calibration, cores: float) -> Iterator[Setting]:
    current, trace = measured.setting, measured.trace
    traces = [trace] if measured.alternative is None else [trace, measured.alternative]
    fetch = max(float((of_trace.cpu + of_trace.blocked).mean()) for of_trace in traces)
    wanted = _MARGIN * fetch / max(float(trace.loop.mean()) + trace.overheads.hand_over, 1e-6)
    reach = max(_REACH * current.num_workers, math.ceil(cores) if math.isfinite(cores) else 0, _REACH)
    most = max(current.num_workers, min(math.ceil(wanted), MOST_WORKERS, reach), USUAL_PREFETCH)
    yield current
    for workers in sorted({current.num_workers, *_WORKERS}):
        for prefetch in sorted({current.prefetch_factor, *_PREFETCH}):
            setting = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=current.in_order)
            if 0 < workers <= most and setting != current:
                yield setting


def _options(
    measured: Calibration, memory: LoaderMemory, error: float, cores: float, settings: Sequence[Setting]
) -> list[Option]:
    """Predict settings.

    If other processes use the cores too, the kernel may share the cores equally between all threads, or between
    groups of processes (cgroups, autogroup). Which of the two it does is not known.
    """
    variants = [predict(measured.trace, settings)]
    if measured.trace.cores < cores:
        threads = np.array([setting.num_workers + 1 for setting in settings], dtype=float)
        others = (measured.setting.num_workers + 1) * (cores / measured.trace.cores - 1)
        variants.append(predict(measured.trace, settings, cores=cores * threads / (threads + others)))
    alternative = measured.alternative
    otherwise: Sequence[Prediction | None] = [None] * len(settings)
    if alternative is not None:
        otherwise = predict(alternative, settings)
    return [
        _option(measured, memory, error, list(of_setting), other)
        for of_setting, other in zip(zip(*variants, strict=True), otherwise, strict=True)
    ]


def _option(
    measured: Calibration,
    memory: LoaderMemory,
    error: float,
    variants: list[Prediction],
    alternative: Prediction | None,
) -> Option:
    """Return the option for one setting; `variants` are predictions for the ways in which cores may be shared."""
    prediction, current = variants[0], measured.setting
    setting = prediction.setting
    rates = [_rate(variant, current, error) for variant in variants]
    low, high = min(rate.low for rate in rates), max(rate.high for rate in rates)
    other_rate = None if alternative is None else _rate(alternative, current, error)
    if other_rate is not None and low <= other_rate.batches_per_second <= high:
        other_rate = None  # the same, within the interval
    more = memory.most(prediction) - memory.held
    more_shm = memory.prefetched(setting) - memory.prefetched(current)
    return Option(
        setting=setting,
        batches_per_second=prediction.batches_per_second,
        low=low,
        high=high,
        if_shared=None if measured.trace.in_turn else other_rate,
        if_apart=other_rate if measured.trace.in_turn else None,
        wait_ratio=prediction.wait_ratio,
        memory_bytes=memory.needed(prediction),
        most_bytes=memory.most(prediction),
        fits=setting == current or not (more > memory.room or more_shm > memory.shm_room),
    )


def _rate(prediction: Prediction, current: Setting, error: float) -> Rate:
    model_error = MODEL_ERROR if current.num_workers or prediction.setting == current else UNSEEN_ERROR
    low, high = prediction.interval(math.hypot(error, model_error))
    return Rate(batches_per_second=prediction.batches_per_second, low=low, high=high)


def _best(
    options: list[Option], strained_rates: Floats, measured: Calibration, memory: LoaderMemory
) -> Option | None:
    """Return, among the options as good as the best that fits, the one of least memory, then of fewest workers."""
    fitting = [(option, rate) for option, rate in zip(options, strained_rates, strict=True) if option.fits]
    enough = _AS_GOOD * max(rate for _, rate in fitting)

    def cost(option: Option) -> tuple[float, int, float]:
        steps = option.most_bytes / memory.step
        setting = option.setting
        unusual = abs(math.log2(setting.prefetch_factor / USUAL_PREFETCH))
        return round(steps) if math.isfinite(steps) else 0, setting.num_workers, unusual

    best = min((option for option, rate in fitting if rate >= enough), key=cost)
    return best if best.batches_per_second >= WORTH * measured.batches_per_second else None
