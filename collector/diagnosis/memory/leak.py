"""The rules for growth on a resource: a leak, growth that cannot be called a leak yet, and growth that ends.

A leak grows without bound, and another measurement confirms it. The other two are information.

A cache that fills decelerates towards an end, and the finding says when it will be full, and how large.

Growth may also be too small or too brief to be called a leak: some seconds more would tell. A suspicion is tested
with a run of 20 seconds. There a leak of 0.5 MiB/s has taken no more than the interpreter and the allocator may
take by themselves, and a growth that began 5 s ago may be a buffer that fills.

The rules share their arguments: `trend` is the growth of a `use`, `witnesses` confirm it, and a rise below
`negligible` is no leak. `grows` and `fills` are subject and verb of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from collector.diagnosis.memory.occasions import RiseAtOccasions, occasions_of, rise_at_occasions
from collector.diagnosis.memory.resources import Resource
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    finite,
    floats,
    iterations_within,
    origin_ns,
    seconds,
    step_at,
    step_numbers,
    training_end_ns,
    window_text,
    written,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import MIN_POINTS, PARTS_COUNT_OF_STEPS, Floats, Growth, growth
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
#: Growth that lasts less than this may still end by itself; without iterations, the data may still be loading.
_MOMENT_SECONDS = 10.0
_LOADING_SECONDS = 120.0
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
        series: name of the measurement in the evidence.
        locus: its place.
        key: the process whose steps count; None for the steps of the run.
        times: times of the samples, seconds.
        values: the use at these times, in `unit`; NaN where not known.
        steps: the step that the training was in at these times.
        unit: `bytes` or `count`.
    """

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
        return cls(series=series, locus=locus, key=key, times=times, values=values, steps=steps, unit=unit)

    def where(self, mask: npt.NDArray[np.bool_]) -> Use:
        """Return the use at some of its times."""
        return replace(self, times=self.times[mask], values=self.values[mask], steps=self.steps[mask])

    def growth(self, negligible: float | None = None) -> Growth | None:
        """Return its growth without bound, if any; a rise below `negligible` is none."""
        least = negligible_bytes(self.values) if negligible is None else negligible
        return growth(self.times, self.values, negligible=least, steps=self.steps)

    def at_occasions(self, tables: RunTables, least_rise: float) -> RiseAtOccasions | None:
        """Return its growth at checkpoints, evaluations or epochs of its process, if most of it happens there."""
        if self.key is None:
            return None
        return rise_at_occasions(occasions_of(tables, self.key), self.times, self.values, least_rise)

    def span_ns(self, trend: Growth) -> tuple[float, float]:
        """Return begin and end of a growth, in ns."""
        return trend.since_seconds * SECOND_NS, float(self.times[-1]) * SECOND_NS

    def lasted_seconds(self, trend: Growth) -> float:
        """Return how long a growth has lasted."""
        return float(self.times[-1]) - trend.since_seconds


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


def optimizer_finding(
    tables: RunTables, use: Use, kept: Floats, negligible: float, *, grows: str
) -> Finding | None:
    """Return the finding that memory grows by what the optimizers keep (`optimizer_bytes`), if it does.

    `use` is the memory without that, which does not grow.
    """
    whole = replace(use, values=use.values + kept)
    trend = whole.growth(negligible)
    witnesses = witnesses_of(trend, {"optimizer_rise_bytes": (use.times, kept)}) if trend is not None else ()
    if trend is None or not witnesses:
        return None
    told = (
        f"{grows} by gradients and state of its optimizers: {size(trend.rise)} so far, {size(trend.slope)}/s. "
        "That ends when each parameter has its own, or a history is full."
    )
    return _information(tables, "bounded-growth", told, whole, trend, (rise_of(tables, whole, trend), *witnesses))


def leak_finding(
    tables: RunTables,
    resource: Resource,
    use: Use,
    trend: Growth,
    witnesses: tuple[Evidence, ...],
    *,
    iterates: bool = True,
    **words: object,
) -> Finding:
    """Return the finding that the use of a resource keeps growing; without a witness it is `cannot-tell`.

    A process that does not iterate, over batches or in steps, may still be loading its data. `words` are for the
    sentences of the resource, beside those of the growth and the locus.
    """
    words = {**asdict(use.locus), **_growth_words(use, trend), **words}
    grows = resource.grows.format(**words)
    at = use.at_occasions(tables, CONFIRMED * trend.rise)
    if at is not None:
        each = quantity(round(at.rise), use.unit)
        grows += f" It grows by {each} around each {at.words} ({at.count} seen), and hardly in between."
    advice = at.advice() if at is not None and resource.is_of_objects else resource.advice(words)
    return Finding(
        kind=resource.leak if witnesses else "cannot-tell",
        severity=_severity(tables, use, trend, iterates=iterates) if witnesses else "info",
        confidence=resource.confidence,
        summary=grows if witnesses else resource.unconfirmed.format(grows=grows, **words),
        locus=use.locus,
        since_step=step_at(tables, use.key, use.span_ns(trend)[0]),
        evidence=(rise_of(tables, use, trend), *(at.facts(use.unit) if at else ()), *witnesses),
        rate=rate(trend, use.unit),
        advice=advice if witnesses else (),
    )


def _growth_words(use: Use, trend: Growth) -> dict[str, str]:
    """Return the words for a growth in the sentences of a resource."""
    if use.unit == "bytes":
        return {"rise": size(trend.rise), "slope": size(trend.slope)}
    return {"rise": count(trend.rise), "slope": number(trend.slope)}


def rise_of(tables: RunTables, use: Use, trend: Growth) -> Evidence:
    """Return the rise of a growth as evidence."""
    window = window_text(tables, *use.span_ns(trend))
    return fact(f"{use.series}_rise_{use.unit}", round(trend.rise), window, n=trend.n)


def rate(trend: Growth, unit: str) -> Rate:
    """Return the growth as a rate of `unit` per second."""
    return Rate(value=trend.slope, low=trend.low, high=trend.high, unit=f"{unit}/s")


def _severity(tables: RunTables, use: Use, trend: Growth, *, iterates: bool) -> Severity:
    """Return "info" for a growth that is recent while the run goes on, since growth that ends by itself begins so.

    If a limit is near, the risk of meeting it is a warning of its own.
    """
    lasted = use.lasted_seconds(trend)
    if not iterates:
        return "info" if lasted < _LOADING_SECONDS else "warning"
    return "info" if tables.goes_on and lasted < _least_seconds(tables, use, trend) else "warning"


def _least_seconds(tables: RunTables, use: Use, trend: Growth) -> float:
    """Return how long a growth must last to be a leak: a moment, and a few iterations unless they take minutes."""
    iterations = iterations_within(tables, use.key, *use.span_ns(trend))
    # Without any, the clock alone counts.
    few = _FEW_ITERATIONS * use.lasted_seconds(trend) / iterations if iterations else 0.0
    return max(_MOMENT_SECONDS, min(few, _LONGEST_SECONDS))


def young_growth(tables: RunTables, use: Use, trend: Growth | None, negligible: float) -> Growth | None:
    """Return the growth of a use if it goes on at the run's end and is too small or too brief to call a leak.

    `trend` is its growth that is not negligible, if any.
    """
    if trend is not None:
        return trend if is_brief(tables, use, trend) else None
    if not lasts_to_end(tables, use):
        return None
    small = use.growth(_YOUNG_RATIO * negligible)
    is_young = small is not None and _SHORTEST_SECONDS <= use.lasted_seconds(small) <= _LONGEST_SECONDS
    return small if is_young else None


def lasts_to_end(tables: RunTables, use: Use) -> bool:
    """Return whether a use was sampled until the training ended, or until now: a worker may have ended before."""
    return bool(use.times[-1] >= min(training_end_ns(tables), tables.now_ns) / SECOND_NS - _SHORTEST_SECONDS)


def is_brief(tables: RunTables, use: Use, trend: Growth) -> bool:
    """Return whether a growth began a moment, or a few iterations, before the end: it might not have gone on."""
    lasted, before = use.lasted_seconds(trend), trend.since_seconds - float(use.times[0])
    least = _least_seconds(tables, use, trend)
    return not tables.goes_on and lasted < (least if least > _MOMENT_SECONDS else min(least, before))


def young_finding(
    tables: RunTables,
    use: Use,
    trend: Growth,
    witnesses: tuple[Evidence, ...],
    *,
    negligible: float,
    grows: str,
) -> Finding:
    """Return the finding that a use grows, and how long the run has to be to tell a leak."""
    lasted, degree = use.lasted_seconds(trend), "little" if trend.rise < negligible else "brief"
    missing = max(_least_seconds(tables, use, trend), negligible / (_MEASURED_RATIO * trend.slope)) - lasted
    more = f"{_rounded(missing)} more would tell."
    if not tables.goes_on:
        # The run has other phases too, before the training and after it.
        lasted_in_all = lifecycle_of(tables).wall_seconds or float(use.times[-1]) - origin_ns(tables) / SECOND_NS
        more = f"A run of {_rounded(lasted_in_all + missing)} would tell."
    summary = "{grows} by {slope}/s, {rise} so far: too {degree} to call a leak. {more}".format(
        grows=grows, degree=degree, more=more, **_growth_words(use, trend)
    )
    evidence = (rise_of(tables, use, trend), *witnesses)
    return _information(tables, "cannot-tell", summary, use, trend, evidence)


def bounded_finding(
    tables: RunTables, use: Use, filling: Saturation, witnesses: tuple[Evidence, ...], *, fills: str
) -> Finding:
    """Return the finding that the growth of a use, in bytes, ends: when, and how large."""
    trend = growth_of(filling)
    low, high = float(filling.ends.min()), float(filling.ends.max())
    soonest, likeliest, latest = filling.full_times
    when = f"in about {duration(likeliest)} ({duration(soonest)} to {duration(latest)})"
    now = "now"
    if not tables.goes_on:
        now, when = "when the run ended", f"after about {duration(likeliest)} more"
    window = f"{FULL_RATIO:.0%} of the growth"
    told = (
        f"{fills} a cache or a buffer: {size(filling.level)} {now}, {size(low)} to {size(high)} at the "
        f"end, {when}. This growth decelerates, and ends by itself."
    )
    evidence = (
        fact("level_at_end_low_bytes", round(low), "at the end", n=filling.n),
        fact("level_at_end_high_bytes", round(high), "at the end", n=filling.n),
        fact("time_to_full_seconds", round(likeliest), window, n=filling.n),
        rise_of(tables, use, trend),
        fact("time_to_full_low_seconds", round(soonest), window, n=filling.n),
        fact("time_to_full_high_seconds", round(latest), window, n=filling.n),
        *witnesses,
    )
    return _information(tables, "bounded-growth", told, use, trend, evidence)


def _information(
    tables: RunTables, kind: str, summary: str, use: Use, trend: Growth, evidence: tuple[Evidence, ...]
) -> Finding:
    """Return a finding on a growth that is no leak, or not known to be one."""
    return Finding(
        kind=kind,
        severity="info",
        confidence=_CONFIDENCE_OF_INFORMATION,
        summary=summary,
        locus=use.locus,
        since_step=step_at(tables, use.key, use.span_ns(trend)[0]),
        evidence=evidence,
        rate=rate(trend, use.unit),
    )


def _rounded(seconds: float) -> str:
    return duration(_ROUNDING_SECONDS * math.ceil(seconds / _ROUNDING_SECONDS))
