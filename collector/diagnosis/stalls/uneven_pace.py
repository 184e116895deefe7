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
from collector.findings import Advice, Finding, advise, fact
from collector.units import counted, duration, percent

_MAIN_CAUSE = 0.5  # share of the waits that must go at an even pace
_LEAST_TOGETHER = 0.5  # share of the slow batches that another slow one must follow
_REPEATS = 0.5  # share of the other epochs in which a batch that is slow by itself is slow, too
_LEAST_IN_SPELLS = 0.75  # share of the time of slow batches that lies in spells
_TOGETHER_RATIO = 0.3  # time between the ends of a spell's batches over that between their begins
_LEAST_SIGMAS = 3.0  # beyond what chance gives, in standard deviations of a binomial count
_LISTED_SPELLS = 10


def slow_in_spells(case: LoadingCase) -> Finding | None:
    """Return a finding if slow batches come together in time, and not because neighbours in the data are alike."""
    loop, steady = case.loop, case.steady
    fetches = steady_fetches(loop)
    begin_ns = floats(fetches, "time_ns") - floats(fetches, "fetch_ns")
    fetches = fetches.assign(begin_ns=begin_ns, slow=_is_slow(fetches)).sort_values("begin_ns", kind="stable")
    spells = _spells(fetches, loop.num_workers)
    if not spells or not (_end_together(spells) or _is_of_time(loop, fetches)):
        return None
    slow, usual = pd.concat(spells), fetches.loc[~fetches["slow"], "fetch_ns"]
    in_spells = float(slow["fetch_ns"].sum() / fetches.loc[fetches["slow"], "fetch_ns"].sum())
    if in_spells < _LEAST_IN_SPELLS:
        return None
    waiting_ratio = in_spells * steady.tail_wait_ratio
    limit = worker_limit(loop, fetches=slow)
    spans = [(float(spell["begin_ns"].min()), float(spell["time_ns"].max())) for spell in spells]
    lasting = float(np.median([end - begin for begin, end in spans])) / SECOND_NS
    longer, short = (duration(float(np.median(part)) / SECOND_NS) for part in (slow["fetch_ns"], usual))
    most = "Both" if loop.num_workers == 2 else "Most"
    subject = f"{most} workers of loader {loop.loader} are slow at the same times"
    if loop.num_workers == 1:
        subject = f"The worker of loader {loop.loader} is slow at times"
    listed = ", ".join(window_text(loop.tables, *span) for span in spans[:_LISTED_SPELLS])
    return Finding(
        kind="workers-too-slow",
        summary=f"{subject}: in {counted(len(spells), 'spell')} of about {duration(lasting)}, a batch takes "
        f"{longer} instead of {short}. That causes {percent(waiting_ratio)} of the waiting; in these spells "
        f"{limit.because}.",
        evidence=(
            *case.waiting_evidence,
            *case.measured(straggler_wait_ratio=steady.tail_wait_ratio, worker_idle_ratio=steady.idle_ratio),
            fact("slow_spells", listed, f"at most the first {_LISTED_SPELLS}", n=len(spells)),
            *limit.evidence,
        ),
        advice=advise_spells(case, limit, waiting_ratio),
        limited_by=limit.by,
        fault=limit.fault,
        **case.facts("worker"),
    )


def _is_slow(fetches: pd.DataFrame) -> pd.Series:
    """Return which fetches are slow ones: a third at least of a time that half of the tail's time exceeds."""
    tail, durations = is_tail(fetches), fetches["fetch_ns"]
    longest = np.sort(durations[tail].to_numpy(dtype=float))
    if not len(longest):
        return tail
    usual = longest[np.searchsorted(longest.cumsum(), longest.sum() / 2)]
    is_slow: pd.Series = tail & (durations >= usual / 3)
    return is_slow


def _spells(fetches: pd.DataFrame, num_workers: int) -> list[pd.DataFrame]:
    """Return the slow fetches of each spell in which most workers are slow; none if slow ones come alone.

    Slow samples fall anywhere, so a slow batch follows another one as often as chance has it. `fetches` are in the
    order of their begins, over all workers.
    """
    is_slow = fetches["slow"].to_numpy(dtype=bool)
    count, followed = int(is_slow.sum()), int((is_slow[1:] & is_slow[:-1]).sum())
    by_chance = count * is_slow.mean() if count else 0.0
    sigma = math.sqrt(by_chance * (1 - is_slow.mean())) if count else 0.0
    if followed < max(_LEAST_TOGETHER * count, by_chance + _LEAST_SIGMAS * sigma, 1):
        return []
    slow = fetches[is_slow]
    ends = np.maximum.accumulate(floats(slow, "time_ns"))
    gaps = floats(slow, "begin_ns")[1:] - ends[:-1]
    edges = [0, *(np.flatnonzero(gaps > np.median(floats(slow, "fetch_ns"))) + 1), count]
    spells = (slow.iloc[begin:end] for begin, end in pairwise(edges))
    return [spell for spell in spells if len(spell) > 1 and 2 * spell["worker"].nunique() > num_workers]


def _end_together(spells: list[pd.DataFrame]) -> bool:
    """Return whether slow batches begin apart and end together, as those that wait for one thing do."""
    ratios = [np.ptp(floats(spell, "time_ns")) / max(np.ptp(floats(spell, "begin_ns")), 1.0) for spell in spells]
    return bool(np.median(ratios) <= _TOGETHER_RATIO)


def _is_of_time(loop: Loop, fetches: pd.DataFrame) -> bool:
    """Return whether slow batches that come together are no neighbours in the data.

    A random sampler mixes the samples, and so does a distributed one that shuffles. In data that is read in its
    order, or by shards, a batch that is slow by itself is slow again in another epoch.
    """
    if _is_shuffled(loop):
        return True
    known = fetches.groupby("index")["slow"].agg(["sum", "count"])
    again = known[(known["sum"] > 0) & (known["count"] > 1)]
    return len(again) > 0 and float((again["sum"] - 1).sum() / (again["count"] - 1).sum()) < _REPEATS


def _is_shuffled(loop: Loop) -> bool:
    is_random = loop.setting.get("shuffle") or "Random" in str(loop.setting.get("sampler"))
    return bool(is_random and not loop.setting.get("iterable"))


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
    least = min(option.wait_ratio for option in outlook.options)  # the waits for transfers stay in any setting
    most = least + (1 - _MAIN_CAUSE) * (outlook.current.wait_ratio - least)
    waited = next((one for one in replays if one[0] <= most), None)
    if waited is None:
        return None
    wait_ratio, cause = waited
    finding, advice = workers_too_slow(case), tuple[Advice, ...]()
    if cause == even_paces[1][1] and loop.setting.get("sampler") == "SequentialSampler":
        advice = advise(
            text="If the order of samples may change, give the DataLoader shuffle=True: costly samples that are "
            "neighbours in the data come in different batches then",
            expected=f"the loop waits about {percent(wait_ratio)} of its time",
            effect="changes results",
        )
    return dataclasses.replace(
        finding,
        advice=(*finding.advice[:1], *advice, *finding.advice[1:]),
        summary=f"The workers of loader {loop.loader} keep up on average (they idle "
        f"{percent(case.steady.idle_ratio)}), but not {cause}. Up to {loop.ramp} batches are made ahead. The loop "
        f"waits {waits_in_words(case.steady)}; at an even pace it would wait {percent(wait_ratio)}.",
        evidence=(*finding.evidence, *case.measured(even_pace_wait_ratio=wait_ratio)),
        limited_by=None,
        fault="your settings",
    )


def _even(seconds: Floats) -> Floats:
    return np.full_like(seconds, seconds.mean())
