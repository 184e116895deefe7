"""Workers that keep up with a loop on average, but not at all times.

The loop takes its batches in bursts, or some batches take far longer than others. Batches that are made ahead even
that out. A replay with an even pace of the loop, or of the fetches, tells such waits from others.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from collector.diagnosis.loading.steady_state import steady_fetches
from collector.diagnosis.run.columns import SECOND_NS, floats
from collector.diagnosis.stalls.case import LoadingCase
from collector.diagnosis.stalls.catalogue import waits_in_words, workers_too_slow
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.replay import predict
from collector.diagnosis.tuning.what_if import Forecast, forecast
from collector.findings import Finding
from collector.units import duration, percent

_MAIN_CAUSE = 0.5  # share of the waits that must go at an even pace


def too_slow_at_times(case: LoadingCase) -> Finding | None:
    """Return a finding if an uneven pace causes most of the waits, and another setting evens it out."""
    loop, outlook = case.loop, forecast(case.loop)
    if not isinstance(outlook, Forecast) or outlook.best is None:
        return None
    trace = outlook.measured.trace
    fast, slow = np.quantile(floats(steady_fetches(loop), "fetch_ns"), (0.05, 0.95)) / SECOND_NS
    even_paces = (
        (
            dataclasses.replace(trace, loop=_even(trace.loop)),
            "with bursts: the loop takes batches faster than they are made, and then none for a while",
        ),
        (
            dataclasses.replace(trace, cpu=_even(trace.cpu), blocked=_even(trace.blocked)),
            f"with batches of unequal cost: nine of ten take {duration(fast)} to {duration(slow)}",
        ),
    )
    replays = ((predict(even, [outlook.measured.setting])[0].wait_ratio, cause) for even, cause in even_paces)
    waited = next((one for one in replays if one[0] <= (1 - _MAIN_CAUSE) * outlook.current.wait_ratio), None)
    if waited is None:
        return None
    wait_ratio, cause = waited
    finding = workers_too_slow(case)
    return dataclasses.replace(
        finding,
        summary=f"The workers of loader {loop.loader} keep up on average (they idle "
        f"{percent(case.steady.idle_ratio)}), but not {cause}. Up to {loop.ramp} batches are made ahead. The loop "
        f"waits {waits_in_words(case.steady)}; at an even pace it would wait {percent(wait_ratio)}.",
        evidence=(*finding.evidence, *case.measured(even_pace_wait_ratio=wait_ratio)),
        limited_by=None,
        fault="your settings",
    )


def _even(seconds: Floats) -> Floats:
    return np.full_like(seconds, seconds.mean())
