"""The rules for growth on a resource: a leak, growth that cannot be called a leak yet, and growth that ends.

A leak grows without bound, and another measurement confirms it. The other two are information.

A cache that fills decelerates towards an end, and the finding says when it will be full, and how large.

Growth may also be too small or too brief to be called a leak: some seconds more would tell. A suspicion is tested
with a run of 20 seconds. There a leak of 0.5 MiB/s has taken no more than the interpreter and the allocator may
take by themselves, and a growth that began 5 s ago may be a buffer that fills.

The rules share their arguments: `trend` is the growth of a `use`, and a rise below `negligible` is no leak. `grows`
and `fills` are subject and verb of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.memory.occasions import RiseAtOccasions, occasions_of, rise_at_occasions
from collector.diagnosis.memory.resources import HEAP_BEFORE_ITERATIONS, Resource
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    anonymous_bytes,
    finite,
    floats,
    origin_ns,
    seconds,
    window_text,
    written,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import iterations_within, step_at, step_numbers, training_end_ns
from collector.diagnosis.statistics.growth import (
    BLOCK_COUNTS,
    MIN_POINTS,
    PARTS_COUNT_OF_STEPS,
    Floats,
    Growth,
    growth,
    lower_envelope,
    theil_sen,
)
from collector.diagnosis.statistics.saturation import FULL_RATIO, LENIENT, STRICT, Saturation, saturation
from collector.findings import Evidence, Finding, Locus, Rate, Severity, fact
from collector.store import ProcessKey
from collector.units import count, duration, number, quantity, size
from training_harness.records import HOST_DEVICE

#: A rise below this comes from the interpreter and the allocator themselves.
NEGLIGIBLE_BYTES = 16 * MIB
#: The same as a share of the memory that the process holds.
_NEGLIGIBLE_RATIO = 0.01
#: Share of the growth that a witness must show at least.
CONFIRMED = 0.5
#: Growth that lasts less than this may still end by itself; without iterations, the process may still import
#: modules and load its data.
_MOMENT_SECONDS = 10.0
LOADING_SECONDS = 120.0
#: The same in steps or batches: as many as a trend needs points. The first few of a training warm it up.
_FEW_ITERATIONS = MIN_POINTS
#: Least rise, as a share of what a leak must take: some arenas of Python's allocator, which are of 1 MiB.
_YOUNG_RATIO = 0.25
#: A growth that lasts longer and is still small is slow, not young; a briefer one is a single allocation or two.
_LONGEST_SECONDS, _SHORTEST_SECONDS = 120.0, _MOMENT_SECONDS / 2
#: Share of a growth that the test for a leak measures: without the first tenth, from the middle of the first of 12
#: blocks to that of the last.
_MEASURED_RATIO = 0.9 * 11 / 12
_CONFIDENCE_OF_INFORMATION = 0.7
#: Time that the answers are rounded up to, in seconds.
_ROUNDING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of a resource over time: by one process, on one device or on one host.

    Attributes:
        key: the process whose steps count; None for the steps of the run.
        times: times of the samples, seconds.
        values: the use at these times, in `unit`; NaN where not known.
        steps: the step that the training was in at these times.
        unit: `bytes` or `count`.
    """

    tables: RunTables = field(repr=False)
    series: str
    locus: Locus
    key: ProcessKey | None = None
    times: Floats
    values: Floats
    steps: Floats
    unit: str = "bytes"

    @classmethod
    def of(
        cls,
        tables: RunTables,
        series: str,
        locus: Locus,
        times: Floats,
        values: Floats,
        *,
        key: ProcessKey | None = None,
        unit: str = "bytes",
    ) -> Use:
        """Return a use with the steps of its process, or of its host."""
        steps = step_numbers(tables, key or str(locus.host), times)
        return cls(
            tables=tables, series=series, locus=locus, key=key, times=times, values=values, steps=steps, unit=unit
        )

    def where(self, mask: npt.NDArray[np.bool_]) -> Use:
        """Return the use at some of its times."""
        return replace(self, times=self.times[mask], values=self.values[mask], steps=self.steps[mask])

    def growth(self, negligible: float | None = None) -> Growth | None:
        """Return its growth without bound, if any; a rise below `negligible` is none."""
        least = negligible_bytes(self.values) if negligible is None else negligible
        return growth(self.times, self.values, negligible=least, steps=self.steps)

    def at_occasions(self, least_rise: float) -> RiseAtOccasions | None:
        """Return its growth at checkpoints, evaluations or epochs of its process, if most of it happens there."""
        if self.key is None:
            return None
        return rise_at_occasions(occasions_of(self.tables, self.key), self.times, self.values, least_rise)

    @property
    def lasts_to_end(self) -> bool:
        """True if it was sampled until the training ended, or until now: a worker may have ended before."""
        end_ns = min(training_end_ns(self.tables), self.tables.now_ns)
        return bool(self.times[-1] >= end_ns / SECOND_NS - _SHORTEST_SECONDS)


@dataclass(frozen=True, slots=True)
class GrowingUse:
    """A use, its growth (the trend), and other measurements that confirm it (the witnesses)."""

    use: Use
    trend: Growth
    witnesses: tuple[Evidence, ...] = ()

    @property
    def span_ns(self) -> tuple[float, float]:
        """Begin and end of the growth, in ns."""
        return self.trend.since_seconds * SECOND_NS, float(self.use.times[-1]) * SECOND_NS

    @property
    def window(self) -> str:
        """The time of the growth, in words."""
        return window_text(self.use.tables, *self.span_ns)

    @property
    def since_step(self) -> int | None:
        """The step in which it began, None if that is not known."""
        return step_at(self.use.tables, self.use.key, self.span_ns[0])

    @property
    def lasted_seconds(self) -> float:
        """Time for which it has lasted."""
        return float(self.use.times[-1]) - self.trend.since_seconds

    @property
    def least_seconds(self) -> float:
        """Time that it must last to be a leak: a moment, and a few iterations unless they take minutes."""
        iterations = iterations_within(self.use.tables, self.use.key, *self.span_ns)
        # Without any, the clock alone counts.
        few = _FEW_ITERATIONS * self.lasted_seconds / iterations if iterations else 0.0
        return max(_MOMENT_SECONDS, min(few, _LONGEST_SECONDS))

    @property
    def is_after_last_step(self) -> bool:
        """True if most of it came with batches after the last step: an evaluation that keeps outputs."""
        use, trend = self.use, self.trend
        if use.key is None:
            return False
        steps, batches = (seconds(written(use.tables, name, use.key)) for name in ("step", "batch"))
        if not len(steps) or not (batches > steps[-1]).any():
            return False
        since_step = replace(trend, since_seconds=max(trend.since_seconds, float(steps[-1])))
        return rise_since(use.times, use.values, since_step) >= CONFIRMED * trend.rise

    @property
    def is_brief(self) -> bool:
        """True if it began a moment, or a few iterations, before the end: it might not have gone on."""
        lasted, before = self.lasted_seconds, self.trend.since_seconds - float(self.use.times[0])
        least = self.least_seconds
        is_known_to_last = lasted >= (least if least > _MOMENT_SECONDS else min(least, before))
        return not self.use.tables.goes_on and not is_known_to_last

    @property
    def rise(self) -> Evidence:
        """Its rise, as evidence."""
        return fact(f"{self.use.series}_rise_{self.use.unit}", round(self.trend.rise), self.window, n=self.trend.n)

    @property
    def words(self) -> dict[str, str]:
        """Words for it in the sentences of a resource."""
        if self.use.unit != "bytes":
            return {"rise": count(self.trend.rise), "slope": number(self.trend.slope)}
        per_step = f", {size(self.per_step)} per step" if self.per_step > 0 else ""
        return {"rise": size(self.trend.rise), "slope": size(self.trend.slope), "per_step": per_step}

    @property
    def per_step(self) -> float:
        """Its rise per step, NaN if not known: steps may take longer now than before."""
        use = self.use
        known = np.isfinite(use.values) & np.isfinite(use.steps) & (use.times >= self.trend.since_seconds)
        part = use.where(known)
        blocks = min(BLOCK_COUNTS[0], len(part.times) // 2)
        if blocks < 2 or part.steps[-1] <= part.steps[0]:
            return math.nan
        return theil_sen(*lower_envelope(part.steps, part.values, blocks))

    @property
    def half_slopes(self) -> list[Evidence]:
        """Its slope in the first and in the second half of its time, as evidence."""
        use, trend = self.use, self.trend
        part = use.where(np.isfinite(use.values) & (use.times >= trend.since_seconds))
        times, half = part.times - part.times[0], len(part.times) // 2
        halves = {"first": slice(half), "second": slice(half, None)}
        return [
            fact(
                f"slope_{name}_half",
                round(float(np.polyfit(times[half], part.values[half], 1)[0])),
                f"{name} half",
                unit="bytes/s",
                n=trend.n // 2,
            )
            for name, half in halves.items()
        ]

    @property
    def rate(self) -> Rate:
        """Its rate per second."""
        return Rate(value=self.trend.slope, low=self.trend.low, high=self.trend.high, unit=f"{self.use.unit}/s")


def filling_of(use: Use, trend: Growth | None, negligible: float) -> Saturation | None:
    """Return the growth of a use if it fills up to an end that can be foretold, on the clock of its times.

    Growth that decelerates on one clock alone is a leak whose pace changes. Where `trend` passes the test for a
    leak, more has to be ruled out.
    """
    doubt = LENIENT if trend is None else STRICT
    by_time = saturation(use.times, use.values, negligible=negligible, doubt=doubt)
    if by_time is None or not np.isfinite(use.steps).any():
        return by_time
    by_step = saturation(use.steps, use.values, negligible=negligible, doubt=doubt, parts=PARTS_COUNT_OF_STEPS)
    return by_time if by_step is not None else None


def growth_of(filling: Saturation) -> Growth:
    """Return a growth that ends as a growth with its rate of now."""
    rates = (filling.ends - filling.level) / filling.scales
    return Growth(
        slope=filling.slope,
        low=float(rates.min()),
        high=float(rates.max()),
        rise=filling.rise,
        since_seconds=filling.since,
        n=filling.n,
    )


def witnesses_of(trend: Growth, series: Mapping[str, tuple[Floats, Floats]]) -> tuple[Evidence, ...]:
    """Return the rise of each other series of bytes (times, values) that confirms a growth."""
    return tuple(
        fact(
            name,
            round(rise_since(times, values, trend)),
            "same window",
            n=int((np.isfinite(values) & (times >= trend.since_seconds)).sum()),
        )
        for name, (times, values) in series.items()
        if share_of(times, values, trend) >= CONFIRMED
    )


def share_of(times: Floats, values: Floats, trend: Growth) -> float:
    """Return the share of a growth that another series shows, NaN if it has too few samples.

    A series that is seldom read does not cover the window, so only the growth between its readings counts.
    """
    covered = rise_since(times, np.where(np.isfinite(values), times, np.nan), trend)
    expected = min(trend.rise, trend.slope * covered)
    return rise_since(times, values, trend) / expected if expected > 0 else float("nan")


def rise_since(times: Floats, values: Floats, trend: Growth) -> float:
    """Return the rise of another series over the window of a growth, NaN if it has too few samples."""
    inside = finite(values[times >= trend.since_seconds])
    if len(inside) < 4:
        return float("nan")
    edge = max(1, len(inside) // 6)
    return float(np.median(inside[-edge:]) - np.median(inside[:edge]))


def negligible_bytes(values: Floats) -> float:
    """Return the rise of this series below which it is of no interest."""
    known = finite(values)
    return max(NEGLIGIBLE_BYTES, _NEGLIGIBLE_RATIO * float(np.median(known))) if len(known) else NEGLIGIBLE_BYTES


def freed_bytes(tables: RunTables, key: ProcessKey, rows: pd.DataFrame) -> Floats:
    """Return the freed memory that the process's allocator keeps at each of its samples; 0 where not recorded.

    Holes in the heap get more for a long time after a buffer of varying sizes is full. They are no leak. A heap
    with many holes is read seldom: after the last reading they have the share of the growth that they had before.
    """
    heap, times, resident = written(tables, "heap", key), seconds(rows), anonymous_bytes(rows)
    if heap.empty:
        return np.zeros(len(times))
    at, is_known = seconds(heap), np.isfinite(resident)
    freed = np.interp(times, at, floats(heap, "free_bytes"))
    if not is_known.any() or times[-1] <= at[-1]:
        return freed
    around = np.array([2 * at[-1] - times[-1], at[-1]])
    before, last = np.interp(around, times[is_known], resident[is_known])
    rise = float(np.diff(np.interp(around, at, floats(heap, "free_bytes")))[0])
    ratio = min(max(rise / (last - before), 0.0), 1.0) if last > before else 0.0
    since = np.where(times > at[-1], np.nan_to_num(np.maximum(0.0, resident - last)), 0.0)
    grown: Floats = freed + ratio * since
    return grown


def optimizer_bytes(tables: RunTables, key: ProcessKey, times: Floats, device: int | None = None) -> Floats:
    """Return the gradients and the state of a process's optimizers on a device, or in host memory, in bytes.

    They are those at some times (seconds), 0 where they were not recorded. They end to grow when each parameter has
    its own, or when a history is full, so that growth is no leak.
    """
    rows = written(tables, "optimizer", key)
    rows = rows[floats(rows, "device") == (HOST_DEVICE if device is None else device)]
    if rows.empty:
        return np.zeros(len(times))
    return np.interp(times, seconds(rows), floats(rows, "gradients_bytes") + floats(rows, "state_bytes"))


def optimizer_finding(use: Use, kept: Floats, negligible: float, *, grows: str) -> Finding | None:
    """Return the finding that memory grows by what the optimizers keep (`optimizer_bytes`), if it does.

    `use` is the memory without that, which does not grow.
    """
    whole = replace(use, values=use.values + kept)
    trend = whole.growth(negligible)
    witnesses = witnesses_of(trend, {"optimizer_rise_bytes": (use.times, kept)}) if trend is not None else ()
    if trend is None or not witnesses:
        return None
    summary = (
        f"{grows} by gradients and state of its optimizers: {size(trend.rise)} so far, {size(trend.slope)}/s. "
        "That ends when each parameter has its own, or a history is full."
    )
    growing = GrowingUse(whole, trend, witnesses)
    return _information("bounded-growth", summary, growing, (growing.rise, *witnesses))


def leak_finding(resource: Resource, growing: GrowingUse, *, iterates: bool = True, **words: object) -> Finding:
    """Return the finding that the use of a resource keeps growing; without a witness it is `cannot-tell`.

    A process that does not iterate, over batches or in steps, may still be loading its data. `words` are for the
    sentences of the resource, besides those of the growth and the locus.
    """
    use, witnesses = growing.use, growing.witnesses
    at = use.at_occasions(CONFIRMED * growing.trend.rise)
    words = {**asdict(use.locus), **growing.words, **({"per_step": ""} if at else {}), **words}
    grows = resource.grows.format(**words)
    if at is not None:
        each = quantity(round(at.rise), use.unit)
        grows += f" It grows by {each} around each {at.words} ({at.count} seen), and hardly in between."
    advice = at.advice() if at is not None and resource.is_of_objects else resource.advice(words)
    return Finding(
        kind=resource.leak if witnesses else "cannot-tell",
        severity=_severity(growing, iterates=iterates) if witnesses else "info",
        confidence=resource.confidence,
        summary=grows if witnesses else resource.unconfirmed.format(grows=grows, **words),
        locus=use.locus,
        since_step=growing.since_step,
        evidence=(growing.rise, *(at.facts(use.unit) if at else ()), *witnesses),
        rate=growing.rate,
        advice=advice if witnesses else (),
    )


def _severity(growing: GrowingUse, *, iterates: bool) -> Severity:
    """Return "info" for a growth that is recent while the run goes on, since growth that ends by itself begins so.

    If a limit is near, the risk of meeting it is a warning of its own.
    """
    lasted = growing.lasted_seconds
    if not iterates:
        return "info" if lasted < LOADING_SECONDS else "warning"
    return "info" if growing.use.tables.goes_on and lasted < growing.least_seconds else "warning"


def young_growth(use: Use, trend: Growth | None, negligible: float) -> Growth | None:
    """Return the growth of a use if it goes on at the run's end and is too small or too brief to call a leak.

    `trend` is its growth that is not negligible, if any.
    """
    if trend is not None:
        return trend if GrowingUse(use, trend).is_brief else None
    if not use.lasts_to_end:
        return None
    small = use.growth(_YOUNG_RATIO * negligible)
    if small is None:
        return None
    return small if _SHORTEST_SECONDS <= GrowingUse(use, small).lasted_seconds <= _LONGEST_SECONDS else None


def young_finding(growing: GrowingUse, *, negligible: float, grows: str) -> Finding:
    """Return the finding that a use grows, and how long the run has to be to tell a leak."""
    tables, trend = growing.use.tables, growing.trend
    seconds_to_grow = negligible / (_MEASURED_RATIO * trend.slope)
    degree = "little" if seconds_to_grow > growing.least_seconds else "brief"
    missing = max(growing.least_seconds, seconds_to_grow) - growing.lasted_seconds
    more = f"{_rounded(missing)} more would tell."
    if not tables.goes_on:
        # The run has other phases too, before the training and after it.
        last_seconds = float(growing.use.times[-1]) - origin_ns(tables) / SECOND_NS
        more = f"A run of {_rounded((lifecycle_of(tables).wall_seconds or last_seconds) + missing)} would tell."
    summary = "{grows} by {slope}/s, {rise} so far: too {degree} to call a leak. {more}".format(
        grows=grows, degree=degree, more=more, **growing.words
    )
    return _information("cannot-tell", summary, growing, (growing.rise, *growing.witnesses))


def loading_finding(growing: GrowingUse, *, grows: str) -> Finding:
    """Return the finding that a use grows before the first iteration of the run."""
    words = growing.words
    loads = "at all: it loaded its data, or leaked."
    if growing.use.tables.goes_on:
        loads = "yet: it loads its data, or leaks. If it still grows once it iterates, it leaks."
    summary = (
        f"{grows} by {words['slope']}/s, {words['rise']} so far. No batch, optimizer step or forward pass was seen "
        f"{loads}"
    )
    finding = _information("cannot-tell", summary, growing, (growing.rise, *growing.witnesses))
    return replace(finding, advice=HEAP_BEFORE_ITERATIONS.advice(words))


def bounded_finding(use: Use, filling: Saturation, witnesses: tuple[Evidence, ...], *, fills: str) -> Finding:
    """Return the finding that the growth of a use, in bytes, ends: when, and how large."""
    growing = GrowingUse(use, growth_of(filling), witnesses)
    low, high = float(filling.ends.min()), float(filling.ends.max())
    soonest, likeliest, latest = filling.full_times
    when = f"in about {duration(likeliest)} ({duration(soonest)} to {duration(latest)})"
    now = "now"
    if not use.tables.goes_on:
        now, when = "when the run ended", f"after about {duration(likeliest)} more"
    window = f"{FULL_RATIO:.0%} of the growth"
    summary = (
        f"{fills} a cache or a buffer: {size(filling.level)} {now}, {size(low)} to {size(high)} at the "
        f"end, {when}. This growth decelerates, and ends by itself."
    )
    evidence = (
        fact("level_at_end_low_bytes", round(low), "at the end", n=filling.n),
        fact("level_at_end_high_bytes", round(high), "at the end", n=filling.n),
        fact("time_to_full_seconds", round(likeliest), window, n=filling.n),
        growing.rise,
        fact("time_to_full_low_seconds", round(soonest), window, n=filling.n),
        fact("time_to_full_high_seconds", round(latest), window, n=filling.n),
        *witnesses,
    )
    return _information("bounded-growth", summary, growing, evidence)


def _information(kind: str, summary: str, growing: GrowingUse, evidence: tuple[Evidence, ...]) -> Finding:
    """Return a finding on a growth that is no leak, or not known to be one."""
    return Finding(
        kind=kind,
        severity="info",
        confidence=_CONFIDENCE_OF_INFORMATION,
        summary=summary,
        locus=growing.use.locus,
        since_step=growing.since_step,
        evidence=evidence,
        rate=growing.rate,
    )


def _rounded(seconds: float) -> str:
    return duration(_ROUNDING_SECONDS * math.ceil(seconds / _ROUNDING_SECONDS))
