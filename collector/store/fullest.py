"""What is kept of the rows about GPUs: those that tell what took the memory when most of it was taken.

The driver's samples and the allocators' records are rows of one kind here. Of each piece of time stays, for every
moment at which the driver or a process had most, all that is known of that moment: the records of each process and
the driver's samples around it. `is_moment` says which times are such. To keep some of what was kept, in pieces that
hold whole ones, gives what keeping some of all would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collector.store.tiling import SAMPLED, Tiling

#: The pid of the driver's samples.
DRIVER = 0
#: Stream -> what its rows tell here.
COLUMNS = {
    "device": ("used_bytes", "process_used_bytes", "other_used_bytes"),
    "device_memory": ("allocated_bytes", "reserved_bytes", "inactive_split_bytes"),
}
_KEYS = (("host", "VARCHAR"), ("device", "SMALLINT"), ("pid", "INTEGER"), ("time_ns", "BIGINT"))
_BYTES = tuple(column for columns in COLUMNS.values() for column in columns)
# A tensor out of the cache adds nothing to what is reserved: of equal records the one of most allocated.
_TAKEN = "coalesce(used_bytes, reserved_bytes / 512.0 + allocated_bytes / (reserved_bytes + 1.0))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullest(Tiling):
    """Rows that stay as they are; `n` of those that stay of a piece add up to how many there were."""

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column."""
        return (*_KEYS, *((name, "BIGINT") for name in _BYTES), ("n", "INTEGER"), ("is_moment", "BOOLEAN"))

    @property
    def parts(self) -> Mapping[str, str]:
        """Both streams, in columns of one table."""
        return {
            stream: f"time_ns, host, device, {DRIVER if stream == 'device' else 'pid'} AS pid, {', '.join(columns)}"
            for stream, columns in COLUMNS.items()
        }

    def laid(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: what stays of the rows of `source`."""
        return kept(f"({self.alone(source, every=every)})", self.width_ns)

    def coarser(self, source: str, span_ns: int, *, thinner: int) -> str:
        """SQL: what stays of `source`, itself such rows."""
        return kept(source, self.coarser_ns(span_ns))

    def alone(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: each row of `source` for itself."""
        return f"SELECT *, 1 AS n, TRUE AS is_moment FROM {source}"


def kept(source: str, width_ns: int, since_ns: int = 0) -> str:
    """SQL: what stays of the rows of `source` in pieces of this width since a time.

    Of a time that is no moment any more, what was around it is gone: of what was kept only moments are looked at.
    """
    piece = "host, device, bucket"
    values = ", ".join(f"any_value(row.{name})::BIGINT AS {name}" for name in _BYTES)
    return (
        f"WITH row AS MATERIALIZED (SELECT *, {_TAKEN} AS taken, (time_ns - {since_ns}) // {width_ns} AS bucket "
        f"FROM {source}), "
        f"best AS MATERIALIZED (SELECT {piece}, pid, arg_max(time_ns, taken) FILTER (is_moment) AS at_ns, "
        "max(time_ns) AS last_ns, max(time_ns) FILTER (taken IS NOT NULL) AS last_known_ns, "
        f"min(time_ns) FILTER (taken IS NOT NULL) AS first_known_ns, sum(n) AS n FROM row GROUP BY {piece}, pid), "
        f"moment AS MATERIALIZED (SELECT DISTINCT {piece}, at_ns FROM best WHERE at_ns IS NOT NULL), "
        f"around AS (SELECT {piece}, pid, unnest([max(time_ns) FILTER (time_ns <= at_ns), "
        "min(time_ns) FILTER (time_ns >= at_ns)]) AS time_ns "
        f"FROM row JOIN moment USING ({piece}) WHERE taken IS NOT NULL GROUP BY {piece}, pid, at_ns), "
        f"edge AS (SELECT {piece}, pid, unnest([last_ns, last_known_ns, first_known_ns]) AS time_ns FROM best), "
        f"chosen AS (SELECT {piece}, pid, time_ns FROM around UNION SELECT {piece}, pid, time_ns FROM edge) "
        f"SELECT host, device, pid::INTEGER AS pid, time_ns, {values}, "
        "(CASE WHEN time_ns = any_value(last_ns) THEN any_value(best.n) ELSE 0 END)::INTEGER AS n, "
        "bool_or(moment.at_ns IS NOT NULL) AS is_moment "
        f"FROM row JOIN chosen USING ({piece}, pid, time_ns) JOIN best USING ({piece}, pid) "
        f"LEFT JOIN moment ON moment.host = row.host AND moment.device = row.device AND moment.at_ns = row.time_ns "
        "GROUP BY host, device, pid, time_ns"
    )
