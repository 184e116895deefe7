"""The processes of a run: the rank, the last step and the last memory of each."""

from __future__ import annotations

import math
import signal as signals

import numpy as np

from collector.diagnosis.run.columns import floats, held_bytes, last, sampled, step_at, whole
from collector.diagnosis.run.tables import RunTables
from collector.findings import Evidence
from collector.store import ProcessKey


def last_memory(tables: RunTables, key: ProcessKey | None) -> tuple[Evidence, ...]:
    """Return the memory of a process at its last samples, as evidence."""
    if key is None:
        return ()
    rows = sampled(tables, key)
    values = (("last_rss_bytes", floats(rows, "rss_bytes")), ("last_held_bytes", held_bytes(rows)))
    return tuple(
        Evidence(name=name, value=round(value), unit="bytes", n=len(rows), window="last sample")
        for name, series in values
        if math.isfinite(value := last(series))
    )


def last_bytes(tables: RunTables, key: ProcessKey | None) -> float:
    """Return the memory of a process at its last sample (`held_bytes`), 0 if unknown."""
    return 0.0 if key is None else float(np.nan_to_num(last(held_bytes(sampled(tables, key)))))


def rank_of(tables: RunTables, key: ProcessKey) -> int | None:
    """Return the rank of a process, from its first event."""
    for event in tables.events:
        if (event.get("host"), event.get("pid"), event.get("start_ticks")) == key:
            return whole(event.get("rank"))
    return None


def last_step(tables: RunTables, key: ProcessKey) -> int | None:
    """Return the last step that a process recorded."""
    return step_at(tables, key, float(tables.now_ns))


def signal_name(number: int | None) -> str | None:
    """Return the name of a signal: `SIGKILL` for 9, None for None."""
    if number is None:
        return None
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fact(name: str, value: float | str, window: str, *, unit: str = "count") -> Evidence:
    """Return a single observation as evidence."""
    return Evidence(name=name, value=value, unit=unit, n=1, window=window)
