"""GPU peaks: the rows that show what took a GPU's memory when most of it was in use.

The driver's samples and the allocators' records are rows of one table here. In each bucket of time, the moments at
which the driver or a process had most are peaks (`is_moment`). The rows around each peak stay: the records of every
process and the driver's samples just before and after it. Selecting again in wider buckets that hold whole narrower
ones gives the same rows as selecting from all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collector.store.rollups.facts import SAMPLE_EVERY, Rollup

#: The pid that stands for the driver.
DRIVER_PID = 0
#: Stream -> its columns of bytes.
COLUMNS = {
    "device": ("used_bytes", "process_used_bytes", "other_used_bytes"),
    "device_memory": ("allocated_bytes", "reserved_bytes", "inactive_split_bytes"),
}
_KEYS = (("host", "VARCHAR"), ("device", "SMALLINT"), ("pid", "INTEGER"), ("time_ns", "BIGINT"))
_BYTES = tuple(column for columns in COLUMNS.values() for column in columns)
# A tensor from the cache adds nothing to reserved: among records with equal reserved, most allocated wins.
_TAKEN = "coalesce(used_bytes, reserved_bytes / 512.0 + allocated_bytes / (reserved_bytes + 1.0))"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPeakRollup(Rollup):
    """The rows around the peaks, unchanged; their `n` add up to the number of all rows in the bucket."""

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column."""
        return (*_KEYS, *((name, "BIGINT") for name in _BYTES), ("n", "INTEGER"), ("is_moment", "BOOLEAN"))

    @property
    def stream_columns(self) -> Mapping[str, str]:
        """Both streams, in the columns of one table."""
        pids = {"device": str(DRIVER_PID), "device_memory": "pid"}
        return {
            stream: f"time_ns, host, device, {pids[stream]} AS pid, {', '.join(columns)}"
            for stream, columns in COLUMNS.items()
        }

    def rollup_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that selects the rows around the peaks of `source`."""
        return peak_sql(f"({self.row_sql(source)})", self.width_ns)

    def merge_sql(self, source: str, span_ns: int, *, thin_by: int) -> str:
        """Return SQL that selects again, in wider buckets, from rows that were selected before."""
        return peak_sql(source, self.merged_width_ns(span_ns))

    def row_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that makes each row of `source` a peak."""
        return f"SELECT *, 1 AS n, TRUE AS is_moment FROM {source}"


def peak_sql(source: str, width_ns: int, since_ns: int = 0) -> str:
    """Return SQL that selects the rows around the peaks of each bucket; buckets are counted from `since_ns`.

    Only a row with `is_moment` can become a peak: when rows are selected again, those around other rows are gone.
    """
    key = "host, device, bucket"
    values = ", ".join(f"any_value(row.{name})::BIGINT AS {name}" for name in _BYTES)
    return (
        f"WITH row AS MATERIALIZED (SELECT *, {_TAKEN} AS taken, (time_ns - {since_ns}) // {width_ns} AS bucket "
        f"FROM {source}), "
        # Each process: the time of its peak, its last row, and its first and last row with a value.
        f"peak AS MATERIALIZED (SELECT {key}, pid, arg_max(time_ns, taken) FILTER (is_moment) AS at_ns, "
        "max(time_ns) AS last_ns, max(time_ns) FILTER (taken IS NOT NULL) AS last_known_ns, "
        f"min(time_ns) FILTER (taken IS NOT NULL) AS first_known_ns, sum(n) AS n FROM row GROUP BY {key}, pid), "
        f"moment AS MATERIALIZED (SELECT DISTINCT {key}, at_ns FROM peak WHERE at_ns IS NOT NULL), "
        # Every process: its rows just before and just after each moment.
        f"around AS (SELECT {key}, pid, unnest([max(time_ns) FILTER (time_ns <= at_ns), "
        "min(time_ns) FILTER (time_ns >= at_ns)]) AS time_ns "
        f"FROM row JOIN moment USING ({key}) WHERE taken IS NOT NULL GROUP BY {key}, pid, at_ns), "
        f"edge AS (SELECT {key}, pid, unnest([last_ns, last_known_ns, first_known_ns]) AS time_ns FROM peak), "
        f"selected AS (SELECT {key}, pid, time_ns FROM around UNION SELECT {key}, pid, time_ns FROM edge) "
        f"SELECT host, device, pid::INTEGER AS pid, time_ns, {values}, "
        "(CASE WHEN time_ns = any_value(last_ns) THEN any_value(peak.n) ELSE 0 END)::INTEGER AS n, "
        "bool_or(moment.at_ns IS NOT NULL) AS is_moment "
        f"FROM row JOIN selected USING ({key}, pid, time_ns) JOIN peak USING ({key}, pid) "
        f"LEFT JOIN moment ON moment.host = row.host AND moment.device = row.device AND moment.at_ns = row.time_ns "
        "GROUP BY host, device, pid, time_ns"
    )
