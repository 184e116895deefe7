"""Workers that keep up with a loop on average, but not at all times.

All workers are slow for a while, as when the storage pauses. Or the loop takes its batches in bursts, or some
batches take far longer than others. Batches that are made ahead even that out. A replay with an even pace of the
loop, or of the fetches, tells such waits from others.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import is_tail, steady_fetches
from collector.diagnosis.loading.worker_limit import worker_limit
from collector.diagnosis.run.columns import SECOND_NS, floats, window_text
from collector.diagnosis.stalls.advice import advise_spells
from collector.diagnosis.stalls.case import LoadingCase
from collector.diagnosis.stalls.catalogue import waits_in_words, workers_too_slow
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.replay import predict
from collector.diagnosis.tuning.what_if import Forecast, forecast
from collector.findings import Finding, fact
from collector.units import counted, duration, percent

_MAIN_CAUSE = 0.5  # share of the waits that must go at an even pace
_LEAST_TOGETHER = 0.5  # share of the slow batches that another slow one must follow
_LEAST_SIGMAS = 3.0  # beyond what chance gives, in standard deviations of a binomial count
_LISTED_SPELLS = 10


def slow_in_spells(case: LoadingCase) -> Finding | None:
    """Return a finding if slow batches come together in time, and not because neighbours in the data are alike."""
    loop, steady = case.loop, case.steady
    fetches = steady_fetches(loop)
    begin_ns = floats(fetches, "time_ns") - floats(fetches, "fetch_ns")
    fetches = fetches.assign(begin_ns=begin_ns, slow=_is_slow(fetches)).sort_values("begin_ns", kind="stable")
    spells = _spells(fetches)
    if not spells or not _is_of_time(loop, fetches):
        return None
    slow, usual = fetches[fetches["slow"]], fetches.loc[~fetches["slow"], "fetch_ns"]
    limit = worker_limit(loop, fetches=slow)
    lasting = float(np.median([end - begin for begin, end in spells])) / SECOND_NS
    longer, short = (duration(float(np.median(part)) / SECOND_NS) for part in (slow["fetch_ns"], usual))
    who = f"All workers of loader {loop.loader} are slow at the same times"
    if loop.num_workers == 1:
        who = f"The worker of loader {loop.loader} is slow at times"
    listed = ", ".join(window_text(loop.tables, *spell) for spell in spells[:_LISTED_SPELLS])
    return Finding(
        kind="workers-too-slow",
        summary=f"{who}: in {counted(len(spells), 'spell')} of about {duration(lasting)}, a batch takes {longer} "
        f"instead of {short}. That causes {percent(steady.tail_wait_ratio)} of the waiting; in these spells "
        f"{limit.because}.",
        evidence=(
            *case.waiting_evidence,
            *case.measured(straggler_wait_ratio=steady.tail_wait_ratio, worker_idle_ratio=steady.idle_ratio),
            fact("slow_spells", listed, f"at most the first {_LISTED_SPELLS}", n=len(spells)),
            *limit.evidence,
        ),
        advice=advise_spells(case, limit),
        limited_by=limit.by,
        fault=limit.fault,
        **case.facts("worker"),
    )


def _is_slow(fetches: pd.DataFrame) -> pd.Series:
    """Return which fetches take most of the time of the slow ones: those that take a little long are left out."""
    tail, durations = is_tail(fetches), fetches["fetch_ns"]
    longest = np.sort(durations[tail].to_numpy(dtype=float))
    if not len(longest):
        return tail
    usual = longest[np.searchsorted(longest.cumsum(), longest.sum() / 2)]
    is_slow: pd.Series = tail & (durations >= usual / 3)
    return is_slow


def _spells(fetches: pd.DataFrame) -> list[tuple[float, float]]:
    """Return begin and end (ns) of the spells in which fetches are slow; empty if slow ones come alone.

    Slow samples fall anywhere, so a slow batch follows another one as often as chance has it. `fetches` are in the
    order of their begins, over all workers.
    """
    slow = fetches["slow"].to_numpy(dtype=bool)
    count, followed = int(slow.sum()), int((slow[1:] & slow[:-1]).sum())
    by_chance = count * slow.mean() if count else 0.0
    sigma = math.sqrt(by_chance * (1 - slow.mean())) if count else 0.0
    if followed < max(_LEAST_TOGETHER * count, by_chance + _LEAST_SIGMAS * sigma, 1):
        return []
    begins, ends = floats(fetches, "begin_ns")[slow], floats(fetches, "time_ns")[slow]
    ends = np.maximum.accumulate(ends)
    new = np.flatnonzero(begins[1:] > ends[:-1] + np.median(floats(fetches, "fetch_ns")[slow])) + 1
    edges = [0, *new, count]
    return [(float(begins[a]), float(ends[b - 1])) for a, b in pairwise(edges)]


def _is_of_time(loop: Loop, fetches: pd.DataFrame) -> bool:
    """Return whether slow batches that come together are no neighbours in the data.

    A random sampler mixes the samples, and shards of an iterable dataset have nothing in common but the time. In
    data that is read in its order, a batch that is slow by itself is slow again in another epoch.
    """
    if loop.setting.get("iterable") or "Random" in str(loop.setting.get("sampler")):
        return True
    known = fetches.groupby("index")["slow"].agg(["sum", "count"])
    again = known[(known["sum"] > 0) & (known["count"] > 1)]
    return len(again) > 0 and float((again["sum"] - 1).sum() / (again["count"] - 1).sum()) < _LEAST_TOGETHER


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
