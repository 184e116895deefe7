"""Columns with missing values, and the rows of one process, of a host or of a time, which every rule needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.run.tables import RunTables, once
from collector.diagnosis.statistics.growth import Floats
from collector.store import ProcessKey
from training_harness.records import ROLE_COLLECTOR, ROLE_WORKER

SECOND_NS = 1e9
MIB = 2**20
GIB = 2**30
#: Columns that identify the process that a sample is of, and the process that wrote a record.
PROCESS, WRITER = ["host", "process_pid", "process_start_ticks"], ["host", "pid", "start_ticks"]
#: Streams with a record per iteration of a training.
ITERATIONS = ("batch", "step")
#: Longest gap in the samples between the ticks, in ticks: one long tick is no gap.
_COVERED_TICKS = 4.0


def floats(table: pd.DataFrame, column: str) -> Floats:
    """Return a column as float64, NaN where missing; all NaN if the table lacks the column."""
    if column not in table.columns:
        return np.full(len(table), np.nan)
    values = table[column]
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf":  # takes a fifth of the time
        return values.to_numpy(dtype=np.float64, copy=True)
    return pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)


def whole(value: Any) -> int | None:
    """Return a cell or a JSON value as an integer; None where it is missing."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return None if pd.isna(value) else int(value)
    except (TypeError, ValueError):
        return None


def finite(values: Floats) -> Floats:
    """Return the finite values."""
    return values[np.isfinite(values)]


def mean(values: Floats) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    return float(known.mean()) if len(known := finite(values)) else math.nan


def median(values: Floats) -> float:
    """Return the median of the finite values, NaN if there are none."""
    return float(np.median(known)) if len(known := finite(values)) else math.nan


def last(values: Floats) -> float:
    """Return the last finite value, NaN if there is none."""
    return float(known[-1]) if len(known := finite(values)) else math.nan


def peak(values: Floats) -> float:
    """Return the largest finite value, NaN if there is none."""
    return float(known.max()) if len(known := finite(values)) else math.nan


def seconds(rows: pd.DataFrame) -> Floats:
    """Return the times of rows on the monotonic clock, in seconds."""
    return floats(rows, "time_ns") / SECOND_NS


def key_of(body: Mapping[str, Any] | None, prefix: str = "") -> ProcessKey | None:
    """Return the process that an event or a manifest entry names by host, `PREFIXpid` and `PREFIXstart_ticks`."""
    if not isinstance(body, Mapping):
        return None
    pid, ticks = whole(body.get(f"{prefix}pid")), whole(body.get(f"{prefix}start_ticks"))
    return None if pid is None or ticks is None else (str(body.get("host")), pid, ticks)


def resident_bytes(samples: pd.DataFrame) -> Floats:
    """Return resident memory plus what is swapped out: the process has not given that back."""
    return floats(samples, "rss_bytes") + np.nan_to_num(floats(samples, "swap_bytes"))


def anonymous_bytes(rows: pd.DataFrame) -> Floats:
    """Return anonymous memory (proc(5), RssAnon) plus what is swapped out, since swapping would hide a leak.

    The kernel takes mapped files back, and shared memory has its own rules.
    """
    files, shared = (np.nan_to_num(floats(rows, name)) for name in ("file_bytes", "shm_bytes"))
    anonymous = floats(rows, "anon_bytes") + np.nan_to_num(floats(rows, "swap_bytes"))
    return np.where(np.isfinite(anonymous), anonymous, resident_bytes(rows) - files - shared)


def private_bytes(rows: pd.DataFrame) -> Floats:
    """Return private dirty memory plus what is swapped out, since swapping would hide a leak."""
    return floats(rows, "private_dirty_bytes") + np.nan_to_num(floats(rows, "swap_bytes"))


def held_bytes(samples: pd.DataFrame) -> Floats:
    """Estimate the memory of one process at each of its samples: the last PSS plus the change of RSS since then.

    PSS is read only as often as the budget allows, RSS at each tick.
    """
    proportional, resident = floats(samples, "pss_bytes"), floats(samples, "rss_bytes")
    read = np.flatnonzero(np.isfinite(proportional) & np.isfinite(resident))
    if not len(read):
        return resident
    at = read[np.maximum(np.searchsorted(read, np.arange(len(samples)), side="right") - 1, 0)]
    held: Floats = np.maximum(proportional[at] + resident - resident[at], 0.0)
    return held


def by_process(rows: pd.DataFrame, columns: list[str] = PROCESS) -> Iterator[tuple[ProcessKey, pd.DataFrame]]:
    """Yield each process with its rows; `columns` are `PROCESS`, or `WRITER` for the process that wrote them."""
    for _, of_one in rows.groupby(columns):
        host, pid, ticks = of_one[columns].iloc[0]
        yield (str(host), int(pid), int(ticks)), of_one


def of_process(table: pd.DataFrame, key: ProcessKey) -> pd.DataFrame:
    """Return the rows of a table that this process wrote."""
    host, pid, ticks = key
    rows = table[(table["pid"] == pid) & (table["start_ticks"] == ticks)]  # hosts are text, the slowest to compare
    return rows[rows["host"] == host]


def written(tables: RunTables, name: str, key: ProcessKey | None) -> pd.DataFrame:
    """Return the records of a stream that this process wrote; None stands for all processes."""
    rows = tables.stream(name)
    return rows if key is None else tables.once((name, key), lambda: of_process(rows, key))


@once
def host_samples(tables: RunTables, host: str) -> pd.DataFrame:
    """Return the samples of a host, in the stream of that name."""
    samples = tables.stream("host")
    rows: pd.DataFrame = samples[samples["host"] == host]
    return rows


def worker_samples(tables: RunTables) -> pd.DataFrame:
    """Return the collector's samples of DataLoader workers."""
    process = tables.stream("process")
    rows: pd.DataFrame = process[floats(process, "role") == ROLE_WORKER]
    return rows


def between(rows: pd.DataFrame, begin_ns: float, end_ns: float) -> pd.DataFrame:
    """Return the rows from one time to another, both included."""
    times = floats(rows, "time_ns")
    return rows[(times >= begin_ns) & (times <= end_ns)]


def sampled_on(tables: RunTables, host: str) -> pd.DataFrame:
    """Return the samples of the run's processes on a host, without the collector itself."""
    process = tables.stream("process")
    rows: pd.DataFrame = process[(process["host"] == host).to_numpy() & (floats(process, "role") != ROLE_COLLECTOR)]
    return rows


@once
def sampled(tables: RunTables, key: ProcessKey) -> pd.DataFrame:
    """Return the collector's samples of this process."""
    host, pid, ticks = key
    process = tables.stream("process")
    rows = process[process["process_pid"] == pid]
    start_ticks = rows["process_start_ticks"]
    return rows[(rows["host"] == host) & ((start_ticks == ticks) | start_ticks.isna())]


def early_samples(tables: RunTables, key: ProcessKey) -> pd.DataFrame:
    """Return the collector's samples of this process between its ticks."""
    host, pid, ticks = key
    early = tables.stream("early_process")
    rows = early[(early["process_pid"] == pid) & (early["process_start_ticks"] == ticks)]
    return rows[rows["host"] == host]


def with_early_samples(tables: RunTables, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of one process, with those between the ticks if they cover the same time.

    Those have resident memory and descriptors alone; swapped memory is that of the tick before. Where they cover a
    part of the time, a trend would give that part more weight than the rest.
    """
    if len(rows) < 2:
        return rows
    host, pid, ticks = rows[PROCESS].iloc[0]
    early = early_samples(tables, (host, pid, ticks))
    times = floats(rows, "time_ns")
    early_times = floats(early, "time_ns")
    early = early[(early_times > times[0]) & (early_times < times[-1])]
    gap_ns = _COVERED_TICKS * float(np.median(np.diff(times)))
    if early.empty or np.diff(floats(early, "time_ns"), prepend=times[0], append=times[-1]).max() > gap_ns:
        return rows
    values = early[["time_ns", "rss_bytes", "anon_bytes", "fd_count"]].assign(host=host, process_pid=pid)
    joined: pd.DataFrame = pd.concat([rows, values], ignore_index=True).sort_values("time_ns", kind="stable")
    joined["swap_bytes"] = pd.Series(floats(joined, "swap_bytes"), index=joined.index).ffill()
    return joined


def window_text(tables: RunTables, begin_ns: float, end_ns: float) -> str:
    """Return a time window as text, in seconds from the start of the run; a brief one with a decimal."""
    begin, end = ((time_ns - origin_ns(tables)) / SECOND_NS for time_ns in (begin_ns, end_ns))
    digits = 0 if end - begin >= 2 else 1
    return f"{begin:.{digits}f}-{end:.{digits}f} s"


def origin_ns(tables: RunTables) -> float:
    """Return the start of the run on the monotonic clock."""
    anchors = [
        float(anchor["time_ns"])
        for anchor in (tables.manifest.get("anchors") or {}).values()
        if isinstance(anchor, Mapping) and whole(anchor.get("time_ns")) is not None
    ]
    if anchors:
        return min(anchors)
    first = [floats(rows, "time_ns")[0] for rows in tables.streams.values() if len(rows)]
    first += [float(event["time_ns"]) for event in tables.events[:1]]
    return min(first) if first else float(tables.now_ns)
