"""Growth at certain occasions: a checkpoint, an evaluation, the start of an epoch.

A use that rises at each checkpoint and stays level between them has another cause than one that rises with each
step. The level just before and just after an occasion is compared, and the rate there with the rate in between.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import all_loops, own_pass
from collector.diagnosis.run.columns import SECOND_NS, floats, written
from collector.diagnosis.run.tables import RunTables, once
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.diagnosis.statistics.student_t import student_t_quantile
from collector.findings import Advice, Evidence, fact
from collector.store import ProcessKey

#: Samples on each side of an occasion whose median is the level there: half of those up to the next one, at most
#: this many.
_LEVEL_SAMPLES = 5
_LEAST_SAMPLES = 2
#: Occasions that a finding needs, after the first, at which caches and buffers are made.
_LEAST_RISES = 3
#: Share of the growth that falls on the occasions, and the rate then over the rate in between, at least.
_LEAST_RATIO = 0.5
_LEAST_RATE_RATIO = 3.0
#: Share of the best explanation from which another is as good; then the shorter occasion is named.
_AS_GOOD_RATIO = 0.9
#: One-sided confidence that the mean rise is above zero (Student's t).
_CONFIDENCE = 0.99

_ADVICE = {
    "checkpoint": "Look for what each checkpoint leaves behind: copies of the state that stay referenced, a list "
    "of saved states, a background writer that never ends",
    "evaluation": "Look for what each evaluation leaves behind: a list of outputs that is never emptied, losses "
    "kept with their graph (use torch.no_grad() and .item()), metrics without a reset, a new DataLoader with "
    "persistent workers",
    "start of an epoch": "Look for what each epoch leaves behind: histories of outputs, an iterator, a "
    "DataLoader, a model or an optimizer that is made again and kept (a scheduler keeps its optimizer), callbacks "
    "that are added again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasions:
    """One kind of occasion in a process: when each began and ended, in seconds, in order of time.

    The start of an epoch begins with the end of the epoch before; `passes` has its (loader, epoch).
    """

    name: str
    begins: Floats
    ends: Floats
    passes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RiseAtOccasions:
    """The growth of a use at the occasions of one kind, without the first.

    Attributes:
        names: what happened; several where they coincide.
        rise: mean rise at an occasion, in the unit of the use.
        ratio: share of the growth that falls on them.
        count: their number.
        begin_seconds, end_seconds: time that they span.
        total: growth over that time.
        occasion_seconds: their own part of that time.
    """

    names: tuple[str, ...]
    rise: float
    ratio: float
    count: int
    begin_seconds: float
    end_seconds: float
    total: float
    occasion_seconds: float

    @property
    def words(self) -> str:
        """The occasion, in words."""
        return " or ".join(self.names)

    def facts(self, unit: str) -> tuple[Evidence, ...]:
        """Return the rise at each, and its share of the growth, as evidence."""
        return (
            fact(f"rise_each_time_{unit}", round(self.rise), self.words, unit=unit, n=self.count),
            fact("rise_at_these_times_ratio", round(min(self.ratio, 1.0), 4), self.words, n=self.count),
        )

    def advice(self) -> tuple[Advice, ...]:
        """Return where to look for objects that stay."""
        expected = f"nothing more is kept after each {self.words}"
        return tuple(Advice(text=_ADVICE[name], expected=expected) for name in self.names)

    def growth(self) -> Growth:
        """Return the growth over these occasions, if the rule for growth does not see so few steps."""
        slope = self.total / (self.end_seconds - self.begin_seconds)
        return Growth(
            slope=slope,
            low=slope * (1 - 1 / self.count),
            high=slope * (1 + 1 / self.count),
            rise=self.total,
            since_seconds=self.begin_seconds,
            n=self.count,
        )


@once
def occasions_of(tables: RunTables, key: ProcessKey) -> list[Occasions]:
    """Return the checkpoints, evaluations and starts of epochs of a training process."""
    return [kind for kind in _occasions(tables, key) if len(kind.begins)]


def rise_at_occasions(
    occasions: list[Occasions], times: Floats, values: Floats, least_rise: float
) -> RiseAtOccasions | None:
    """Return the occasions at which a series rises, if it rises there and hardly in between.

    Args:
        occasions: kinds of occasions to choose from.
        times: of the samples, in seconds.
        values: of the use at these times, NaN where not known.
        least_rise: total growth below which it is of no interest.
    """
    is_known = np.isfinite(values)
    times, values = times[is_known], values[is_known]
    found = [
        (rise, segments)
        for kind in occasions
        if (segments := _segments(kind, times)) is not None
        and (rise := _rise(kind, segments, times, values, least_rise)) is not None
    ]
    if not found:
        return None
    enough = _AS_GOOD_RATIO * max(rise.ratio for rise, _ in found)
    best, segments = min(
        (pair for pair in found if pair[0].ratio >= enough), key=lambda pair: pair[0].occasion_seconds
    )
    names = [rise.names for rise, others in found if np.array_equal(others, segments)]
    return dataclasses.replace(best, names=tuple(itertools.chain(*names)))


def _segments(kind: Occasions, times: Floats) -> Floats | None:
    """Return first and last index (exclusive) of the samples between one occasion and the next.

    Occasions with too few samples in between count as one. None if there are too few for a finding.
    """
    first = np.searchsorted(times, kind.ends)
    last = np.searchsorted(times, kind.begins, side="right")
    begins, ends = np.append(0, first), np.append(last, len(times))
    enough = ends - begins >= _LEAST_SAMPLES
    segments = np.stack([begins[enough], ends[enough]], axis=1)[1:]  # not before the first occasion
    return segments if len(segments) > _LEAST_RISES else None


def _rise(
    kind: Occasions, segments: Floats, times: Floats, values: Floats, least_rise: float
) -> RiseAtOccasions | None:
    # No sample counts on both sides, else a short segment would show no growth in between.
    sizes = np.minimum(_LEVEL_SAMPLES, np.diff(segments).ravel() // 2)
    heads, tails = (
        np.array([_level(times, values, begin, begin + size) for begin, size in zip(begins, sizes, strict=True)])
        for begins in (segments[:, 0], segments[:, 1] - sizes)
    )
    at_times, at_values = (heads[1:] - tails[:-1]).T
    between_times, between_values = (tails - heads).T
    count, total = len(at_values), float(tails[-1, 1] - heads[0, 1])
    at_sum, between_sum = float(at_values.sum()), float(between_values.sum())
    if total < max(least_rise, _LEAST_RATIO * at_sum) or at_sum < _LEAST_RATIO * total:
        return None  # it is negligible, is given back in between, or is made in between
    between_seconds = float(between_times.sum())
    if between_seconds > 0 and at_sum / at_times.sum() < _LEAST_RATE_RATIO * between_sum / between_seconds:
        return None
    error = float(at_values.std(ddof=1)) / np.sqrt(count)
    if at_sum / count < student_t_quantile(count - 1, _CONFIDENCE) * error:
        return None
    # Several between two segments: their samples are too few to tell them apart.
    is_inside = (kind.begins >= times[segments[0, 1] - 1]) & (kind.begins <= times[segments[-1, 0]])
    count = max(count, int(is_inside.sum()))
    return RiseAtOccasions(
        names=(kind.name,),
        rise=at_sum / count,
        ratio=at_sum / total,
        count=count,
        begin_seconds=float(heads[0, 0]),
        end_seconds=float(tails[-1, 0]),
        total=total,
        occasion_seconds=float(at_times.sum()),
    )


def _level(times: Floats, values: Floats, begin: int, end: int) -> tuple[float, float]:
    return float(times[begin:end].mean()), float(np.median(values[begin:end]))


def _occasions(tables: RunTables, key: ProcessKey) -> Iterator[Occasions]:
    saves = tables.events_of("checkpoint", by=key)
    yield _in_order("checkpoint", [(event["begun_ns"], event["time_ns"]) for event in saves])
    steps_ns = floats(written(tables, "step", key), "time_ns")
    batches = [
        loop.batches.assign(loader=loop.loader) for loop in all_loops(tables) if loop.main == key and len(steps_ns)
    ]
    if not batches:
        return
    passes = _passes(pd.concat(batches).sort_values("time_ns"), steps_ns)
    is_training = passes["steps"] > 0
    # The last pass may have ended before its first step: its loader says what it was.
    is_last = passes["begin_ns"] == passes["begin_ns"].max()
    is_training |= is_last & passes["loader"].isin(passes.loc[is_training, "loader"])
    evaluations = passes[~is_training]
    yield _in_order("evaluation", evaluations[["begin_ns", "end_ns"]].to_numpy())
    starts: list[tuple[float, float, tuple[int, int]]] = []
    for _, epochs in passes[is_training].groupby("loader"):
        own = itertools.starmap(own_pass, epochs[["loader", "epoch"]].iloc[1:].to_numpy())
        starts += zip(epochs["end_ns"].iloc[:-1], epochs["begin_ns"].iloc[1:], own, strict=True)
    starts.sort()
    occasions = _in_order("start of an epoch", (start[:2] for start in starts))
    yield dataclasses.replace(occasions, passes=tuple(start[2] for start in starts))


def _passes(batches: pd.DataFrame, steps_ns: Floats) -> pd.DataFrame:
    """Return each pass over a loader: its begin, its end and its steps.

    The work on the last batch ends with a step. In a pass without steps it may include metrics, and ends when any
    other batch is asked for or a step ends. After the last step it takes as long as the longest before.
    """
    times = floats(batches, "time_ns")
    begun = times - np.nan_to_num(floats(batches, "wait_ns"))
    table = batches.assign(begin_ns=begun, end_ns=times).groupby(["loader", "epoch"])
    gaps = table["end_ns"].diff()
    passes = table.agg(begin_ns=("begin_ns", "first"), end_ns=("end_ns", "last"))
    passes["longest_ns"] = gaps.groupby([batches["loader"], batches["epoch"]]).max().fillna(0.0)
    passes = passes.reset_index().sort_values("begin_ns")
    last_ns = floats(passes, "end_ns")
    next_ns = np.append(begun, np.inf)[np.searchsorted(times, last_ns, side="right")]
    first, last = (np.searchsorted(steps_ns, edge, side="right") for edge in (passes["begin_ns"], next_ns))
    next_step_ns = np.append(steps_ns, np.inf)[np.searchsorted(steps_ns, last_ns, side="right")]
    idle_ns = np.where(np.isfinite(next_step_ns), next_step_ns, last_ns + floats(passes, "longest_ns"))
    ends = np.where(last > first, np.maximum(steps_ns[last - 1], last_ns), np.minimum(idle_ns, next_ns))
    return passes.assign(steps=last - first, end_ns=ends)


def _in_order(name: str, spans_ns: Iterable[Iterable[float]]) -> Occasions:
    spans = np.array(sorted(map(tuple, spans_ns)), dtype=np.float64).reshape(-1, 2) / SECOND_NS
    return Occasions(name=name, begins=spans[:, 0], ends=np.maximum.accumulate(spans[:, 1]))
