"""A recorded run as it was at an earlier moment, and under another limit: what would the rules have found then?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.memory_cases import Case
from collector.diagnosis.run.columns import SECOND_NS, floats, key_of
from collector.diagnosis.run.host_memory import demand_series, kernel_bytes
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import step_numbers, training_end_ns, training_start_ns
from collector.diagnosis.statistics.growth import lower_envelope
from collector.diagnosis.verdict import diagnose
from collector.findings import Eta, Finding

MEMORY = ("memory leak", "memory forecast")
#: Shares of the way to the limit.
HALF, THREE_QUARTERS = 0.5, 0.75
_NEAR_THE_END = 0.97
_ROUNDING_NS = 1_000  # of seconds since 1970: the sample of a moment is seen then
CLOCKS = ("seconds", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast made at one moment, and the time it really took; NaN where nothing was forecast."""

    case: str
    way_ratio: float
    clock: str
    low: float
    mid: float
    high: float
    truth: float

    @property
    def error_ratio(self) -> float:
        """Relative error of the middle."""
        return abs(self.mid - self.truth) / self.truth

    @property
    def holds(self) -> bool:
        """Return whether the interval contains the truth."""
        return self.low <= self.truth <= self.high


def warnings(tables: RunTables) -> list[Finding]:
    """The findings about memory that warn."""
    found = diagnose(tables).findings
    return [each for each in found if each.group in MEMORY and each.severity != "info"]


def until(tables: RunTables, time_ns: float, *, limit_bytes: float | None = None) -> RunTables:
    """The run at that moment, still going on; under a cgroup of that limit."""
    streams = {
        name: rows[floats(rows, "time_ns") <= time_ns + _ROUNDING_NS] for name, rows in tables.streams.items()
    }
    if limit_bytes is not None:
        streams["host"] = streams["host"].assign(cgroup_limit_bytes=limit_bytes)
    keys = [key_of(tables.manifest.get("command")), *Lifecycle(tables).mains]
    ended = {"end_time_ns": None, "exit_status": None}
    return dataclasses.replace(
        tables,
        manifest={**tables.manifest, **ended},
        events=[event for event in tables.events if event["time_ns"] <= time_ns],
        streams=streams,
        living=frozenset(key for key in keys if key is not None),
        now_ns=int(time_ns),
        totals={},
    )


def forecasts(case: Case, tables: RunTables) -> list[Forecast]:
    """Those half of the way to the limit, and at three quarters: to the kill, or to a limit put near the end."""
    times, demand = _demand(tables)
    begun = float(times[0]) + _onset(case) * float(times[-1] - times[0])
    killed = case.group == "kill"
    limit = case.limit_mib * 2**20 if killed else _low_near(times, demand, float(times[-1]), _NEAR_THE_END)
    end = training_end_ns(tables) / SECOND_NS if killed else _first_met(times, demand, limit)
    start = float(np.median(demand[times >= begun][:8]))
    found = []
    for ratio in (HALF, THREE_QUARTERS):
        # The level that is never given back again: what comes and goes is not of the way.
        beyond = np.flatnonzero((demand < start + ratio * (limit - start)) & (times < end))
        at = float(times[min(beyond[-1] + 1, len(times) - 1)]) if len(beyond) else end
        if not begun < at < end:
            continue
        # What the kernel itself holds counts towards a limit, and is no demand.
        kernel = 0.0 if killed else kernel_bytes(until(tables, at * SECOND_NS), _host(tables))
        told = warnings(until(tables, at * SECOND_NS, limit_bytes=limit + kernel))
        eta = next((each.eta for each in told if each.kind == "host-oom-risk" and each.eta), None)
        truths = end - at, float(np.diff(step_numbers(tables, Lifecycle(tables).mains[0], np.array([at, end])))[0])
        found += of_both_clocks(case.name, ratio, eta, truths)
    return found


def of_both_clocks(case: str, way_ratio: float, eta: Eta | None, truths: Sequence[float]) -> list[Forecast]:
    """Return what was forecast in seconds and in steps, with the truth of each."""
    found = []
    for clock, truth in zip(CLOCKS, truths, strict=True):
        when = {name: _known(getattr(eta, f"{name}_{clock}", None)) for name in ("low", "mid", "high")}
        found.append(Forecast(case=case, way_ratio=way_ratio, clock=clock, truth=truth, **when))
    return found


FORECASTS_HEAD = (
    "| share of the way seen | clock | leaks | forecasts | median error | p90 error | 90 % interval holds |",
    "|---|---|---|---|---|---|---|",
)


def forecasts_row(ratio: float, clock: str, leaks: str, forecasts: Sequence[Forecast]) -> str | None:
    """Return the row of those made at that part of the way; None if there was none."""
    here = [each for each in forecasts if each.way_ratio == ratio and each.clock == clock]
    told = [each for each in here if math.isfinite(each.mid)]
    if not told:
        return None
    errors = [each.error_ratio for each in told]
    held = sum(each.holds for each in told)
    return (
        f"| {ratio:.0%} | {clock} | {leaks} | {len(told)} of {len(here)} | {np.median(errors):.0%} | "
        f"{np.quantile(errors, 0.9):.0%} | {held} of {len(told)} ({held / len(told):.0%}) |"
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _demand(tables: RunTables) -> tuple[np.ndarray, np.ndarray]:
    """Times (seconds) and demand while it trained."""
    times, demand = demand_series(tables, _host(tables))
    begin, end = training_start_ns(tables) / SECOND_NS, training_end_ns(tables) / SECOND_NS
    inside = np.isfinite(demand) & (times >= begin) & (times <= end)
    return times[inside], demand[inside]


def _host(tables: RunTables) -> str:
    return str(tables.stream("host")["host"].iloc[0])


def _onset(case: Case) -> float:
    return float(case.job[case.job.index("--onset") + 1]) if "--onset" in case.job else 0.0


def _first_met(times: np.ndarray, demand: np.ndarray, limit: float) -> float:
    """Return the time the demand first met the limit, between two samples; the last sample's if it never did."""
    met = np.flatnonzero(demand >= limit)
    around = slice(max(met[0] - 1, 0), met[0] + 1) if len(met) else slice(-1, None)
    return float(np.interp(limit, demand[around], times[around]))


def _low_near(times: np.ndarray, demand: np.ndarray, end: float, ratio: float) -> float:
    """The lower envelope of the demand so far along."""
    middle, low = lower_envelope(times, demand, 30)
    return float(np.interp(times[0] + ratio * (end - times[0]), middle, low))
