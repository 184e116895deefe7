"""Verdicts of other methods on the same traces: published rules and plain statistics.

Sources of the rules: TraceML 0.3.6, `process/policy.py` (RSS of the training process at 80 % of the host's
memory; its rule on creeping growth covers GPU memory alone); Stormlog 0.2.9 (more than 100 MB of growth, with
more than 10 % of the differences positive); earlyoom's defaults (10 % available).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from collector.diagnosis.run.columns import SECOND_NS, floats, with_early_samples
from collector.diagnosis.run.host_memory import demand_series
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import training_end_ns, training_start_ns
from training_harness.records import ROLE_MAIN, ROLE_WORKER

MIB = 2**20
_POINTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Series of one run on one grid of times (seconds), and the limits that they run into."""

    seconds: np.ndarray
    main_rss: np.ndarray
    summed_rss: np.ndarray
    demand: np.ndarray
    limit_bytes: float
    host_bytes: float

    def before(self, count: int) -> Trace:
        """Return the same series, cut to the first `count` points."""
        parts = {name: getattr(self, name)[:count] for name in ("seconds", "main_rss", "summed_rss", "demand")}
        return Trace(**parts, limit_bytes=self.limit_bytes, host_bytes=self.host_bytes)


def trace(tables: RunTables) -> Trace:
    """The series while it trained; what is sampled in other moments is carried on."""
    host, process = tables.stream("host"), tables.stream("process")
    times, demand = demand_series(tables, str(host["host"].iloc[0]))
    begin, end = training_start_ns(tables) / SECOND_NS, training_end_ns(tables) / SECOND_NS
    grid = np.linspace(begin, end, _POINTS)
    roles = floats(process, "role")
    return Trace(
        seconds=grid,
        main_rss=_summed(tables, process[roles == ROLE_MAIN], grid),
        summed_rss=_summed(tables, process[(roles == ROLE_MAIN) | (roles == ROLE_WORKER)], grid),
        demand=np.interp(grid, times[np.isfinite(demand)], demand[np.isfinite(demand)]),
        limit_bytes=float(np.nanmax(floats(host, "cgroup_limit_bytes"))),
        host_bytes=float(np.nanmax(floats(host, "memory_total_bytes"))),
    )


def _summed(tables: RunTables, process: pd.DataFrame, grid: np.ndarray) -> np.ndarray:
    total = np.zeros(len(grid))
    for _, of_one in process.groupby(["process_pid", "process_start_ticks"]):
        rows = with_early_samples(tables, of_one)
        times, rss = floats(rows, "time_ns") / SECOND_NS, np.nan_to_num(floats(rows, "rss_bytes"))
        at = np.searchsorted(times, grid, side="right") - 1
        total += np.where((at >= 0) & (grid <= times[-1] + 1), rss[np.maximum(at, 0)], 0.0)
    return total


def _rises(values: np.ndarray) -> bool:
    return float(values[-1] - values[0]) > 0


def mann_kendall(values: np.ndarray) -> bool:
    return _rises(values) and bool(stats.kendalltau(np.arange(len(values)), values).pvalue < 0.05)


def ols(values: np.ndarray) -> bool:
    fit = stats.linregress(np.arange(len(values)), values)
    return bool(fit.slope > 0 and fit.rvalue**2 > 0.8)


def theil_sen(values: np.ndarray) -> bool:
    return stats.theilslopes(values, np.arange(len(values))).low_slope > 0


def stormlog(values: np.ndarray) -> bool:
    return values[-1] - values[0] > 100e6 and bool((np.diff(values) > 0).mean() > 0.1)


#: name -> does it warn?
METHODS: dict[str, Callable[[Trace], bool]] = {
    "main RSS, 80 % of the limit": lambda t: bool(t.main_rss.max() >= 0.8 * t.limit_bytes),
    "summed RSS, 80 % of the limit": lambda t: bool(t.summed_rss.max() >= 0.8 * t.limit_bytes),
    "Mann-Kendall p < 0.05, main RSS": lambda t: mann_kendall(t.main_rss),
    "Mann-Kendall p < 0.05, summed RSS": lambda t: mann_kendall(t.summed_rss),
    "OLS R² > 0.8, summed RSS": lambda t: ols(t.summed_rss),
    "Theil-Sen interval > 0, summed RSS": lambda t: theil_sen(t.summed_rss),
    "TraceML (RSS at 80 % of the host)": lambda t: bool(t.main_rss.max() >= 0.8 * t.host_bytes),
    "Stormlog (100 MB, 10 % rising), main RSS": lambda t: stormlog(t.main_rss),
    "earlyoom (10 % left), in the cgroup": lambda t: bool(t.demand.max() >= 0.9 * t.limit_bytes),
}
