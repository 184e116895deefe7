"""Growth that is no leak, or cannot be called one yet. It is information.

A cache that fills decelerates towards an end, and the finding says when it will be full, and how large.

Growth may also be too small or too brief to be called a leak: some seconds more would tell. A suspicion is tested
with a run of 20 seconds. There a leak of 0.5 MiB/s has taken no more than the interpreter and the allocator may
take by themselves, and a growth that began 5 s ago may be a buffer that fills.
"""

from __future__ import annotations

import math

from collector.diagnosis.memory.leak import MOMENT_SECONDS, Use, growth_of, rate, rise_of
from collector.diagnosis.run.columns import SECOND_NS, origin_ns, step_at, training_end_ns
from collector.diagnosis.run.processes import fact
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Growth
from collector.diagnosis.statistics.saturation import FULL_RATIO, Saturation
from collector.findings import Evidence, Finding
from collector.units import count, duration, number, size

#: Least rise, as a share of what a leak must take: some arenas of Python's allocator, which are of 1 MiB.
_LEAST_RATIO = 0.25
#: A growth that lasts longer and is still small is slow, not young; a briefer one is a single allocation or two.
_LONGEST_SECONDS, _SHORTEST_SECONDS = 120.0, MOMENT_SECONDS / 2
#: Share of a growth that the test for a leak measures: without the first tenth, from the middle of the first of 12
#: blocks to that of the last.
_MEASURED_RATIO = 0.9 * 11 / 12
_CONFIDENCE = 0.7
#: Time that the answers are rounded up to, in seconds.
_ROUNDING_SECONDS = 5.0


def young_growth(tables: RunTables, use: Use, trend: Growth | None, negligible: float) -> Growth | None:
    """Return the growth of a use if it goes on at the run's end and is too small or too brief to call a leak.

    Args:
        tables: the run.
        use: its use.
        trend: the growth of the use that is not negligible, if any.
        negligible: a rise below this is no leak.

    """
    if trend is not None:
        return trend if is_brief(tables, use, trend) else None
    if not lasts_to_end(tables, use):
        return None
    end = float(use.times[-1])
    small = use.growth(_LEAST_RATIO * negligible)
    is_young = small is not None and _SHORTEST_SECONDS <= end - small.since_seconds <= _LONGEST_SECONDS
    return small if is_young else None


def lasts_to_end(tables: RunTables, use: Use) -> bool:
    """Return whether a use was sampled until the training ended, or until now: a worker may have ended before."""
    return bool(use.times[-1] >= min(training_end_ns(tables), tables.now_ns) / SECOND_NS - _SHORTEST_SECONDS)


def is_brief(tables: RunTables, use: Use, trend: Growth) -> bool:
    """Return whether a growth began a moment before the run ended: it might not have gone on."""
    lasted, before = float(use.times[-1]) - trend.since_seconds, trend.since_seconds - float(use.times[0])
    return lasted < min(MOMENT_SECONDS, before) and not tables.goes_on


def young_finding(
    tables: RunTables,
    use: Use,
    trend: Growth,
    witnesses: tuple[Evidence, ...],
    *,
    negligible: float,
    grows: str,
    unit: str = "bytes",
) -> Finding:
    """Return the finding that a use grows, and how long the run has to be to tell a leak.

    Args:
        tables: the run.
        use: its use, in `unit`.
        trend: the growth of the use.
        witnesses: what confirms the growth.
        negligible: a rise below this is no leak.
        grows: subject and verb of the sentence.
        unit: `bytes` or `count`.

    """
    end = float(use.times[-1])
    lasted, degree = end - trend.since_seconds, "little" if trend.rise < negligible else "brief"
    missing = max(MOMENT_SECONDS, negligible / (_MEASURED_RATIO * trend.slope)) - lasted
    more = f"{_rounded(missing)} more would tell."
    if not tables.goes_on:
        more = f"A run of {_rounded(end - origin_ns(tables) / SECOND_NS + missing)} would tell."
    slope, rise = (
        (size(trend.slope), size(trend.rise)) if unit == "bytes" else (number(trend.slope), count(trend.rise))
    )
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=_CONFIDENCE,
        summary=f"{grows} by {slope}/s, {rise} so far: too {degree} to call a leak. {more}",
        locus=use.locus,
        since_step=step_at(tables, use.key, trend.since_seconds * SECOND_NS),
        evidence=(rise_of(tables, use, trend, unit), *witnesses),
        rate=rate(trend, unit),
    )


def bounded_finding(
    tables: RunTables, use: Use, filling: Saturation, witnesses: tuple[Evidence, ...], *, fills: str
) -> Finding:
    """Return the finding that a growth ends: when, and how large.

    Args:
        tables: the run.
        use: the use that grows, in bytes.
        filling: its growth.
        witnesses: what confirms the growth.
        fills: subject and verb of the sentence.

    """
    trend = growth_of(filling)
    low, high = float(filling.ends.min()), float(filling.ends.max())
    soonest, likeliest, latest = filling.full_times
    when = f"in about {duration(likeliest)} ({duration(soonest)} to {duration(latest)})"
    now = "now"
    if not tables.goes_on:
        now, when = "when the run ended", f"after about {duration(likeliest)} more"
    window = f"{FULL_RATIO:.0%} of the growth"
    return Finding(
        kind="bounded-growth",
        severity="info",
        confidence=_CONFIDENCE,
        summary=f"{fills} a cache or a buffer: {size(filling.level)} {now}, {size(low)} to {size(high)} at the "
        f"end, {when}. This growth decelerates, and ends by itself.",
        locus=use.locus,
        since_step=step_at(tables, use.key, trend.since_seconds * SECOND_NS),
        evidence=(
            fact("level_at_end_low_bytes", round(low), "at the end", n=filling.n),
            fact("level_at_end_high_bytes", round(high), "at the end", n=filling.n),
            fact("time_to_full_seconds", round(likeliest), window, n=filling.n),
            rise_of(tables, use, trend, "bytes"),
            fact("time_to_full_low_seconds", round(soonest), window, n=filling.n),
            fact("time_to_full_high_seconds", round(latest), window, n=filling.n),
            *witnesses,
        ),
        rate=rate(trend, "bytes"),
    )


def _rounded(seconds: float) -> str:
    return duration(_ROUNDING_SECONDS * math.ceil(seconds / _ROUNDING_SECONDS))
