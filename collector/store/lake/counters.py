"""Totals of a run at any moment: those of the lake when its collector opens it, then each record of the journals.

The collector's process reads the journals once, as they grow, with the standard library alone. An ingest lets it
catch up before it deletes any. So the sums equal those over the whole run, and never fall.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collector.store.journals import segments
from collector.store.runs.run import Run
from training_harness.records import MISSING

#: Stream -> name of a sum -> the column that is summed; None counts the records.
SUMS: dict[str, dict[str, str | None]] = {
    "step": {"steps": None, "step_ns": "duration_ns", "data_wait_ns": "data_wait_ns"},
    "batch": {"batches": None, "samples": "samples_count"},
}
#: Columns with a last value per device.
ALLOCATOR = ("allocated_bytes", "reserved_bytes")
_DEVICE_MEMORY = "device_memory"
#: Bytes of a journal that are read at once.
_AT_ONCE_BYTES = 2**20

RankKey = tuple[str, int | None]
"""(host, rank); the rank is None outside a distributed job."""
DeviceKey = tuple[str, int | None, int]
"""(host, rank, device)."""
Places = Mapping[str, tuple[int, Any]]
"""Column -> its position in a record, and the value that stands for missing."""


@dataclass(slots=True)
class Totals:
    """Sums and last values over a run.

    Attributes:
        sums: (host, rank) -> name as in `SUMS` -> value; a column that was always missing has no sum.
        allocator: (host, rank, device) -> `time_ns` and the columns of `ALLOCATOR`, newest record.
    """

    sums: dict[RankKey, dict[str, int]] = field(default_factory=dict)
    allocator: dict[DeviceKey, dict[str, Any]] = field(default_factory=dict)

    def copy(self) -> Totals:
        """Return a copy that can be added to."""
        return Totals({key: dict(sums) for key, sums in self.sums.items()}, dict(self.allocator))

    def add(self, header: segments.SegmentHeader, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add records of a segment, as its layout has them; streams without totals are ignored."""
        places = {name: (index, MISSING[code]) for index, (name, code) in enumerate(header.layout)}
        if header.stream in SUMS:
            self._add_sums(header, list(rows), places)
        elif header.stream == _DEVICE_MEMORY and {"device", "time_ns", *ALLOCATOR} <= places.keys():
            self._keep_last(header, rows, places)

    def _add_sums(self, header: segments.SegmentHeader, rows: list[tuple[Any, ...]], places: Places) -> None:
        sums = self.sums.setdefault((header.host, header.rank), {}) if rows else {}
        for name, column in SUMS[header.stream].items():
            if column is None:
                sums[name] = sums.get(name, 0) + len(rows)
            elif column in places:
                index, missing = places[column]
                values = [row[index] for row in rows if row[index] != missing]
                if values:
                    sums[name] = sums.get(name, 0) + sum(values)

    def _keep_last(self, header: segments.SegmentHeader, rows: Iterable[tuple[Any, ...]], places: Places) -> None:
        device_index, columns = places["device"][0], {name: places[name] for name in ("time_ns", *ALLOCATOR)}
        for row in rows:
            last = {
                name: None if row[index] == missing else row[index] for name, (index, missing) in columns.items()
            }
            self.keep_last((header.host, header.rank, row[device_index]), last)

    def keep_last(self, key: DeviceKey, last: dict[str, Any]) -> None:
        """Keep the last values of a device, unless newer ones are there."""
        if last["time_ns"] >= self.allocator.get(key, last)["time_ns"]:
            self.allocator[key] = last


class Counts:
    """The totals of a run, which any thread may read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._totals = Totals()
        self._offsets: dict[str, int] = {}
        self.has_begun = False

    def begin(self, totals: Totals, offsets: Mapping[str, int]) -> None:
        """Begin with the totals of the lake, which has each journal up to an offset."""
        with self._lock:
            self._totals, self._offsets = totals, dict(offsets)
            self.has_begun = True

    def now(self) -> Totals:
        """Return the totals up to this moment; a journal that cannot be read is left out.

        Raises:
            TidegaugeError: the journals cannot be listed.
        """
        with self._lock:
            self.catch_up()
            return self._totals.copy()

    def catch_up(self) -> None:
        """Count what the journals have now: some of them are about to be deleted."""
        with self._lock:
            for path in segments.list_segments(self._run):
                stream = segments.table_of(path.name)
                if stream in SUMS or stream == _DEVICE_MEMORY:
                    with suppress(segments.JournalError):
                        self._add_records(path)

    def _add_records(self, path: Path) -> None:
        begin, size = self._offsets.get(path.name, 0), segments.size_bytes(path)
        header = segments.read_header(path) if size > begin else None
        if header is None:
            return
        record = struct.Struct("<" + "".join(code for _, code in header.layout))
        begin = max(begin, header.header_bytes)
        at_once = _AT_ONCE_BYTES // record.size * record.size
        while begin + record.size <= size:
            count = min(at_once, (size - begin) // record.size * record.size)
            rows = segments.read_bytes(path, begin, count)
            self._totals.add(header, record.iter_unpack(rows))
            begin += count
            self._offsets[path.name] = begin
