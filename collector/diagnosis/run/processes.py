"""The processes of a run: the rank, the last step and the last memory of each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from signal import Signals
from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import floats, held_bytes, last, sampled, whole
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.run.training import step_at
from collector.findings import Evidence, Locus, fact
from collector.store import ProcessKey
from collector.units import plain_text

#: Break within a sentence of a message.
_BROKEN_LINE = re.compile(r"\n\s*(?=[a-z])")
#: Line of a library of PyTorch's that raised, by its path where PyTorch was built.
_LIBRARY_LINE = re.compile(r"\[/\S*/third_party/(\w+)/\S*:\d+\] ")


def sentence(words: str) -> str:
    """Return words with a capital at the beginning."""
    return words[0].upper() + words[1:]


def worker_locus(samples: pd.DataFrame) -> Locus:
    """Return the place of a worker, from its last sample."""
    last_sample = samples.iloc[-1]
    rank, worker, loader, pid = (
        whole(last_sample[name]) for name in ("process_rank", "worker", "loader", "process_pid")
    )
    return Locus(host=str(last_sample["host"]), rank=rank, role="worker", pid=pid, worker=worker, loader=loader)


def last_memory(
    tables: RunTables, key: ProcessKey | None, until_ns: float = math.inf, window: str = "last sample"
) -> tuple[Evidence, ...]:
    """Return the memory of a process at its last samples (up to a time), as evidence."""
    if key is None:
        return ()
    rows = sampled(tables, key)
    rows = rows[floats(rows, "time_ns") <= until_ns]
    values = (("last_rss_bytes", floats(rows, "rss_bytes")), ("last_held_bytes", held_bytes(rows)))
    return tuple(
        fact(name, round(value), window, n=len(rows))
        for name, series in values
        if math.isfinite(value := last(series))
    )


def last_bytes(tables: RunTables, key: ProcessKey | None) -> float:
    """Return the memory of a process at its last sample (`held_bytes`), 0 if unknown."""
    return 0.0 if key is None else float(np.nan_to_num(last(held_bytes(sampled(tables, key)))))


def rank_of(tables: RunTables, key: ProcessKey) -> int | None:
    """Return the rank of a process, from its events."""
    ranks = (whole(event.get("rank")) for event in tables.events if writer_of(event) == key)
    return next((rank for rank in ranks if rank is not None), None)


def process_at(tables: RunTables, host: str, pid: int) -> ProcessKey | None:
    """Return the process that had this pid last, by the collector's samples or by its events."""
    process = tables.stream("process")
    rows = process[(process["process_pid"] == pid) & (process["host"] == host)]
    if math.isfinite(ticks := last(floats(rows, "process_start_ticks"))):
        return host, pid, int(ticks)
    return next((key for key in map(writer_of, reversed(tables.events)) if key[:2] == (host, pid)), None)


def last_step(tables: RunTables, key: ProcessKey) -> int | None:
    """Return the last step that a process recorded."""
    return step_at(tables, key, float(tables.now_ns))


def message_lines(event: Mapping[str, Any]) -> list[str]:
    """Return the lines of the message that an event recorded, at least one; no line ends within a sentence."""
    message = _LIBRARY_LINE.sub(r"\1: ", plain_text(str(event.get("message") or "")).strip())
    return _BROKEN_LINE.sub(" ", message).splitlines() or [""]


def signal_name(number: int | None) -> str | None:
    """Return the name of a signal: `SIGKILL` for 9, None for None."""
    if number is None:
        return None
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
