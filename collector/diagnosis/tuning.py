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

#: How far the model may be off in nine of ten cases, as a logarithm; and where no worker ran yet.
MODEL_ERROR, UNSEEN_ERROR = 0.09, 0.115
#: A replay that is further from what was measured at the run's own setting is not believed; as a logarithm.
OWN_ERROR = 0.12
_WORKERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_PREFETCH = (1, 2, 4, 8)
_USUAL_PREFETCH = 2
_ROOM = 1.5  # times the workers that the mean times ask for are looked at
_AS_GOOD = 0.99  # of the highest throughput
_WORTH = 1.05  # times the present throughput
_STRAIN = 1.1  # times the fetches of the run: what is advised leaves room for so much


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A throughput in batches per second with its 90 % interval."""

    batches_per_second: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Rate):
    """What a setting gives.

    Attributes:
        if_shared: its throughput if the workers share what they wait for; None where the run decides that, or where
            it makes no difference. The main prediction then is that each waits for itself.
        if_apart: its throughput if each worker waits for itself, where the main prediction is that they share. No
            run at one setting tells how much they share, so what they share in part gives something between.
        wait_ratio: share of the time that the loop waits for batches.
        memory_bytes: host memory while the loop runs (`loader_memory.held`), NaN if unknown.
        most_bytes: host memory when the training pauses and the queues are full: that must fit.

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
    """What the grid of settings gives. Two are the same only if they are one.

    Attributes:
        measured: the stretch of the run that was replayed.
        error: of the model at the run's own setting, as a logarithm.
        memory: of the loop's processes.
        cores: that its training process may use, shared evenly with the others of the host.
        own, options: predicted for the run's own setting and for all of the grid, that one included.
        best: what to set; None where nothing is gained.

    """

    measured: Calibrated
    error: float
    memory: Memory
    cores: float
    own: Option
    options: tuple[Option, ...]
    best: Option | None

    def at(self, settings: Sequence[Setting]) -> list[Option]:
        """What these settings give, also such as are not on the grid."""
        return _options(self.measured, self.memory, self.error, self.cores, settings)

    @property
    def front(self) -> list[Option]:
        """The settings that fit, of which no other waits less and takes no more memory."""
        found: list[Option] = []
        fitting = (option for option in self.options if option.fits)
        for option in sorted(fitting, key=lambda option: (np.nan_to_num(option.memory_bytes), option.wait_ratio)):
            if not found or option.wait_ratio < found[-1].wait_ratio:
                found.append(option)
        return found


def in_words(option: Option, per_batch: float = 1.0, unit: str = "batches/s") -> str:
    """Return the throughput with its interval, and what it is if sharing turns out the other way.

    Args:
        option: what a setting gives.
        per_batch: how many of what `unit` counts are in a batch.
        unit: of the throughput.

    """
    rate, low, high = (number(each * per_batch) for each in (option.batches_per_second, option.low, option.high))
    words = f"{rate} {unit} ({low}-{high})"
    if option.if_shared is not None:
        shared = number(option.if_shared.batches_per_second * per_batch)
        words += f" if each worker waits for itself, {shared} if they share one thing"
    elif option.if_apart is not None:
        apart = number(option.if_apart.batches_per_second * per_batch)
        words += f" if they share all that they wait for, {apart} if nothing"
    else:
        return words
    return f"{words}; `tidegauge tune -- COMMAND` decides"


def forecast(tables: RunTables, loop: Loop) -> Forecast | str:
    """Return what other settings would give this loop, or why that cannot be told, in words."""
    measured = calibrate(tables, loop)
    if isinstance(measured, str):
        return measured
    settings = list(_grid(measured))
    (own,) = predict(measured.trace, [measured.setting])
    error = math.log(own.batches_per_second / measured.batches_per_second)
    low, high = own.interval(OWN_ERROR)
    if not low <= measured.batches_per_second <= high:
        return (
            f"the replay gives {number(own.batches_per_second)} batches/s ({number(low)} to {number(high)}) "
            f"where {number(measured.batches_per_second)} were measured, so something else than "
            "fetching and computing counts"
        )
    memory = memory_of(tables, loop, own)
    cores = cores_per_rank(tables, loop.main[0])
    options = _options(measured, memory, error, cores, settings)
    return Forecast(
        measured=measured,
        error=error,
        memory=memory,
        cores=cores,
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


def _if_equal(measured: Calibrated, settings: list[Setting], cores: float) -> tuple[list[Prediction], ...]:
    """What there is where others use a part of the cores, if each thread gets an equal share of them.

    Which it is depends on how the kernel groups processes (cgroups, autogroup), and that is not known.
    """
    if not measured.trace.cores < cores:
        return ()
    threads = np.array([setting.num_workers + 1 for setting in settings], dtype=float)
    others = (measured.setting.num_workers + 1) * (cores / measured.trace.cores - 1)
    return (predict(measured.trace, settings, cores=cores * threads / (threads + others)),)


def _options(
    measured: Calibrated, memory: Memory, error: float, cores: float, settings: Sequence[Setting]
) -> list[Option]:
    """Predict settings, on the grid or not."""
    predictions = predict(measured.trace, settings)
    ways = zip(predictions, *_if_equal(measured, list(settings), cores), strict=True)
    others = [None] * len(settings) if measured.otherwise is None else predict(measured.otherwise, settings)
    return [_option(measured, memory, error, list(way), other) for way, other in zip(ways, others, strict=True)]


def _option(
    measured: Calibrated, memory: Memory, error: float, ways: list[Prediction], other: Prediction | None
) -> Option:
    prediction, own = ways[0], measured.setting
    setting = prediction.setting
    rates = [_rate(way, own, error) for way in ways]
    main = Rate(
        batches_per_second=prediction.batches_per_second,
        low=min(rate.low for rate in rates),
        high=max(rate.high for rate in rates),
    )
    otherwise = None if other is None else _rate(other, own, error)
    if otherwise is not None and main.low <= otherwise.batches_per_second <= main.high:
        otherwise = None  # the same, within the interval
    more, more_shm = memory.most(prediction) - memory.held, memory.prefetched(setting) - memory.prefetched(own)
    return Option(
        setting=setting,
        batches_per_second=main.batches_per_second,
        low=main.low,
        high=main.high,
        if_shared=None if measured.trace.in_turn else otherwise,
        if_apart=otherwise if measured.trace.in_turn else None,
        wait_ratio=prediction.wait_ratio,
        memory_bytes=memory.needed(prediction),
        most_bytes=memory.most(prediction),
        fits=setting == own or not (more > memory.room or more_shm > memory.shm_room),
    )


def _rate(prediction: Prediction, own: Setting, error: float) -> Rate:
    unsure = MODEL_ERROR if own.num_workers or prediction.setting == own else UNSEEN_ERROR
    low, high = prediction.interval(math.hypot(error, unsure))
    return Rate(batches_per_second=prediction.batches_per_second, low=low, high=high)


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
