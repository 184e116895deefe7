"""Queries about the collector itself: how much it recorded, at what cost."""

from __future__ import annotations

import pandas as pd

from collector.store.queries.lines import Lines, lines, rollup_lines
from collector.store.queries.spans import GRID_BUCKETS, IN_TIME, Queryable, Span, bucket_source, rollup_view
from collector.store.rollups import tables
from training_harness.records import ROLE_COLLECTOR

#: SQL: a row of the rollups of `process` is a collector's.
_IS_COLLECTOR = f"role_newest = {ROLE_COLLECTOR}"


def sample_counts(snapshot: Queryable, most: int) -> dict[str, int]:
    """Return the number of records behind each figure of a verdict over the whole run.

    Returns:
        At most `most` records, since a verdict reads about that many: data_wait (timed steps, or batches where
        there are none), shm_peak (samples of hosts), allocated_peak and reserved_peak (steps with a device).
        Without that bound: host_peak (samples of processes) and steps.
    """
    reaches = {"shm_peak": "host", "allocated_peak": "device_memory", "reserved_peak": "device_memory"}
    counts = (f", (SELECT n FROM {stream}_reach) {name}" for name, stream in {**reaches, "steps": "step"}.items())
    row = snapshot.query(
        "SELECT coalesce((SELECT sum(timed_n) FILTER (wait_ns IS NOT NULL) "
        f"FROM step{tables.ROLLUP_VIEW}), (SELECT n FROM batch_reach))::BIGINT data_wait{''.join(counts)}, "
        f"(SELECT sum(pss_bytes_n) FROM process{tables.ROLLUP_VIEW})::BIGINT host_peak"
    ).fillna(0)
    all_counts = {str(name): int(n) for name, n in row.iloc[0].items()}
    # The largest process is never thinned out.
    return {name: n if name in ("host_peak", "steps") else min(n, most) for name, n in all_counts.items()}


def agent_summary(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Summarize the work and the cost of each host's collector in the span.

    Returns:
        host, n (its ticks), interval_ms and interval_p95_ms (achieved between two samples), lag_seconds (newest age
        of the oldest record outside the lake), ingested_count, lost_count, cpu_ratio (of one core), smaps_ratio (of
        one core, for reading smaps), private_peak_bytes (private dirty memory) and rss_peak_bytes.
    """
    return snapshot.query(
        "SELECT host, count(*) n, median(interval_ns) / 1e6 interval_ms, "
        "quantile_cont(interval_ns, 0.95) / 1e6 interval_p95_ms, "
        "arg_max(ingest_lag_ns, time_ns) / 1e9 lag_seconds, "
        "max(records_ingested_count) ingested_count, max(records_lost_count) lost_count, "
        "(max(cpu_ns) - min(cpu_ns)) / nullif(max(time_ns) - min(time_ns), 0) cpu_ratio, "
        "(max(smaps_ns) - min(smaps_ns)) / nullif(max(time_ns) - min(time_ns), 0) smaps_ratio, "
        "any_value(private_peak_bytes) private_peak_bytes, max(rss_bytes) rss_peak_bytes FROM agent LEFT JOIN ("
        f"SELECT host, max(private_dirty_bytes_high) private_peak_bytes FROM {rollup_view(within, 'process')} "
        f"WHERE {IN_TIME} AND {_IS_COLLECTOR} GROUP BY host) USING (host) "
        f"WHERE {IN_TIME} GROUP BY host ORDER BY host",
        within.bounds,
    )


def collector_lines(snapshot: Queryable, within: Span) -> dict[str, Lines]:
    """Return sampling interval and lag (seconds), one line per host."""
    values = {"interval": "interval_ns / 1e9", "lag": "ingest_lag_ns / 1e9"}
    return lines(snapshot, within, "agent", values, series="host")


def collector_memory(snapshot: Queryable, within: Span) -> Lines:
    """Return the private dirty memory (bytes) of each host's collector, one line per host."""
    source, width = bucket_source(snapshot, within, "process", GRID_BUCKETS)
    metric = "private_dirty_bytes"
    return rollup_lines(snapshot, within, source, [metric], where=_IS_COLLECTOR, series="host", width=width)[metric]
