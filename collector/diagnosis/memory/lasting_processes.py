"""Find processes that get more and more: the training starts them, and they do not end.

None of them grows, so no rule on a single process sees the memory that they hold together. Workers of a DataLoader
have rules of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from collector.diagnosis.memory.leak import GrowingUse, Use, leak_finding
from collector.diagnosis.memory.resources import LASTING_PROCESSES
from collector.diagnosis.run.columns import (
    PROCESS,
    by_process,
    finite,
    floats,
    host_samples,
    median,
    private_bytes,
    sampled_on,
    seconds,
)
from collector.diagnosis.run.host_memory import sum_of_processes
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import while_training
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, MIN_POINTS, Floats
from collector.findings import Finding, Locus, fact
from training_harness.records import ROLE_OTHER


def find_lasting_processes(tables: RunTables) -> list[Finding]:
    """Find `main-heap-leak` of processes that the training starts and never ends, at most once per host."""
    hosts = sorted({host for host, *_ in lifecycle_of(tables).mains})
    return [finding for host in hosts if (finding := _of_host(tables, host)) is not None]


def _of_host(tables: RunTables, host: str) -> Finding | None:
    times = seconds(while_training(tables, host_samples(tables, host)))
    if len(times) < MIN_POINTS:
        return None
    children = _children(tables, host)
    # A fork shares the memory of the training until it writes it. Of many processes, some are never read.
    typical = median(finite(np.array([median(finite(private_bytes(rows))) for _, rows in by_process(children)])))

    def private_of(rows: pd.DataFrame) -> Floats:
        private = private_bytes(rows)
        return private if np.isfinite(private).any() else np.full(len(rows), typical)

    private, counts = sum_of_processes(children, times, private_of)
    use = Use.of(tables, "processes", Locus(host=host, role="other"), times, np.nan_to_num(private))
    living = replace(use, values=counts, unit="count")
    # A rise below one for each block of the trend is a few single events, as with threads.
    trend, more = use.growth(), living.growth(BLOCK_COUNTS[0])
    if trend is None or more is None:
        return None
    number = round(more.rise)
    return leak_finding(
        LASTING_PROCESSES,
        GrowingUse(use, trend, (fact("process_rise_count", number, "same window", n=more.n),)),
        iterates=False,  # a pool may take as long until it is full as a process until it has loaded its data
        count=number,
    )


def _children(tables: RunTables, host: str) -> pd.DataFrame:
    """Return the samples of processes on a host that are neither training nor workers."""
    rows = sampled_on(tables, host)
    rows = rows[floats(rows, "role") == ROLE_OTHER]
    mains = lifecycle_of(tables).mains
    is_main = [(str(h), int(p), int(t)) in mains for h, p, t in rows[PROCESS].itertuples(index=False)]
    children: pd.DataFrame = rows[~np.array(is_main, dtype=bool)]
    return children
