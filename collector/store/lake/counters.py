"""Totals of a run at any moment, without a scan: sums updated at each commit, plus the journals beyond the lake.

The ingest adds the records that it commits. A caller reads the other records from the journals: those of some
seconds, however long the run is. So the sums equal those over the whole run, and never fall.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from collector.store.journals import arrow, segments
from collector.store.lake import lake
from collector.store.runs.run import Run

#: Stream -> name of a sum -> the column that is summed; None counts the records.
SUMS: dict[str, dict[str, str | None]] = {
    "step": {"steps": None, "step_ns": "duration_ns", "data_wait_ns": "data_wait_ns"},
    "batch": {"batches": None, "samples": "samples_count"},
}
#: Columns with a last value per device.
ALLOCATOR = ("allocated_bytes", "reserved_bytes")
_DEVICE_MEMORY = "device_memory"
#: Stream -> the columns that the totals need.
COLUMNS = {
    **{name: ("host", "rank", *filter(None, sums.values())) for name, sums in SUMS.items()},
    _DEVICE_MEMORY: ("host", "rank", "device", "time_ns", *ALLOCATOR),
}

RankKey = tuple[str, int | None]
"""(host, rank); the rank is None outside a distributed job."""
DeviceKey = tuple[str, int | None, int]
"""(host, rank, device)."""


@dataclass(slots=True)
class Totals:
    """Sums and last values over a run.

    Attributes:
        sums: (host, rank) -> name as in `SUMS` -> value; a column that was always missing has no sum.
        allocator: (host, rank, device) -> `time_ns` and the columns of `ALLOCATOR`, newest record.

    """

    sums: dict[RankKey, dict[str, int]] = field(default_factory=dict)
    allocator: dict[DeviceKey, dict[str, int]] = field(default_factory=dict)

    def copy(self) -> Totals:
        """Return a copy that can be added to."""
        return Totals({key: dict(sums) for key, sums in self.sums.items()}, dict(self.allocator))

    def add(self, stream: str, table: pa.Table) -> None:
        """Add records of a stream; streams without totals are ignored."""
        if stream in SUMS:
            self._add_sums(SUMS[stream], table)
        elif stream == _DEVICE_MEMORY:
            self._keep_last(table)

    def _add_sums(self, sums: Mapping[str, str | None], table: pa.Table) -> None:
        aggregates: list[Any] = [
            ([], "count_all") if column is None else (column, "sum") for column in sums.values()
        ]
        rows = table.group_by(["host", "rank"]).aggregate(aggregates)
        for row in rows.to_pylist():
            rank_sums = self.sums.setdefault((row["host"], row["rank"]), {})
            for name, column in sums.items():
                value = row["count_all" if column is None else f"{column}_sum"]
                if value is not None:
                    rank_sums[name] = rank_sums.get(name, 0) + value

    def _keep_last(self, table: pa.Table) -> None:
        keys, values = ["host", "rank", "device"], ["time_ns", *ALLOCATOR]
        grouped = table.sort_by("time_ns").group_by(keys, use_threads=False)
        for row in grouped.aggregate([(name, "last") for name in values]).to_pylist():
            key = (row["host"], row["rank"], row["device"])
            last = {name: row[f"{name}_last"] for name in values}
            if last["time_ns"] >= self.allocator.get(key, last)["time_ns"]:
                self.allocator[key] = last


class Counts:
    """The totals of a run: the ingest updates them, and any thread may read them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._totals = Totals()
        self._offsets: dict[str, int] = {}

    def restart(self, tables: Iterable[tuple[str, pa.Table]], offsets: Mapping[str, int]) -> None:
        """Start from all records of a lake that was just opened."""
        totals = Totals()
        for stream, table in tables:
            totals.add(stream, table)
        with self._lock:
            self._totals, self._offsets = totals, dict(offsets)

    def add(self, tables: Mapping[str, pa.Table], offsets: Mapping[str, int]) -> None:
        """Add committed records, and the offsets up to which each journal is now in the lake."""
        with self._lock:
            for stream, table in tables.items():
                self._totals.add(stream, table)
            self._offsets.update(offsets)

    def now(self) -> Totals:
        """Return the totals up to this moment; a journal that cannot be read is left out.

        Raises:
            TidegaugeError: the journals cannot be listed.

        """
        # The lock keeps journals from being deleted, so records that are committed meanwhile are still read here.
        with lake.lock_files(self._run, exclusive=False):
            with self._lock:
                totals, offsets = self._totals.copy(), dict(self._offsets)
            for path in segments.list_segments(self._run):
                stream = segments.table_of(path.name)
                begin = offsets.get(path.name, 0)
                if stream not in COLUMNS:
                    continue
                try:
                    size = segments.size_bytes(path)
                    header = segments.read_header(path) if size > begin else None
                    if header is not None:
                        totals.add(stream, arrow.read_records(path, header, begin, size))
                except segments.JournalError:
                    continue
        return totals
