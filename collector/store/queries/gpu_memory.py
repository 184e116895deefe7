"""Queries about GPU memory: the values that allocators and drivers report, and the moments of peaks and errors.

Each query runs for all GPUs at once, and a figure takes the rows of one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from collector.store.duck import quote
from collector.store.queries.lines import LINE_BUCKETS, Lines, rollup_extremes, split_lines
from collector.store.queries.spans import (
    GRID_BUCKETS,
    GRID_STEP_NS,
    IN_TIME,
    Queryable,
    Span,
    bucket_source,
    rollup_view,
    width_ns,
)
from collector.store.rollups.gpu_peak import COLUMNS, DRIVER_PID, peak_sql

#: One number per GPU of a host: pandas groups by it in a fraction of the time.
_GPU = "(hash(host, device) >> 1)::BIGINT"
_FEWEST_BUCKETS = 200
#: Marks of errors and cache flushes in a figure; more would look like a line.
_MARK_BUCKETS = 200
#: Number of newest errors that are read: a program that tries batch sizes makes many.
_MAX_ERRORS = 200
#: The driver is sampled at least once in this time before an error or before an allocator's last record.
_SAMPLED_WITHIN_NS = 60 * 10**9
#: An allocator's record of an error comes within this time.
_RECORDED_WITHIN_NS = 10**9
#: SQL: the driver's samples since shortly before the last record of an allocator on each GPU.
_TAIL = (
    "WITH torch AS (SELECT host, device, max(time_ns + last_after_ns) AS last_ns FROM device_memory_tiled "
    "GROUP BY ALL), "
    f"tail AS (SELECT * FROM device JOIN torch USING (host, device) WHERE time_ns > last_ns - {_SAMPLED_WITHIN_NS})"
)
#: SQL: last time at which a process with an allocator on a GPU was alive; NULL until all of them are gone.
_LAST_ALIVE = (
    "WITH user AS (SELECT host, device, pid, start_ticks, max(time_ns + last_after_ns) AS last_ns "
    "FROM device_memory_tiled GROUP BY ALL), "
    "life AS (SELECT host, process_pid AS pid, process_start_ticks AS start_ticks, min(alive_low) = 0 AS is_gone "
    "FROM process_tiled GROUP BY ALL), "
    "alive AS (SELECT host, process_pid AS pid, process_start_ticks AS start_ticks, max(time_ns) AS alive_ns "
    "FROM process WHERE alive IS DISTINCT FROM 0 "
    f"AND time_ns > (SELECT max(last_ns) - {_SAMPLED_WITHIN_NS} FROM user) GROUP BY ALL) "
    f"SELECT {_GPU} AS gpu, CASE WHEN bool_and(coalesce(is_gone, FALSE)) THEN max(alive_ns) END AS alive_ns "
    "FROM user LEFT JOIN life USING (host, pid, start_ticks) LEFT JOIN alive USING (host, pid, start_ticks) "
    "GROUP BY host, device"
)
#: SQL: GPUs for which the driver has stopped answering: its last three samples are empty.
_LOST = (
    f"{_TAIL}, late AS (SELECT {_GPU} AS gpu, used_bytes, "
    "row_number() OVER (PARTITION BY host, device ORDER BY time_ns DESC) AS place FROM tail) "
    "SELECT gpu FROM late WHERE place <= 3 GROUP BY gpu HAVING count(*) = 3 AND count(used_bytes) = 0"
)
#: Columns of `cuda_errors` that are fields of the event.
_EVENT_FIELDS = ("step", "requested_bytes", "free_bytes", "limit_bytes", "reserved_bytes", "errors_count")


def devices(snapshot: Queryable) -> pd.DataFrame:
    """Return last usage, peak and capacity (bytes) of each GPU that the run uses, over the whole run.

    Returns:
        gpu (a number that stands for host and device), host, device, used_bytes (the driver's last sample while
        the run used the device; NaN if the driver has stopped answering), used_peak_bytes (the largest sample, or
        the use at an out-of-memory error; all processes), total_bytes, reserved_bytes (last), reserved_peak_bytes
        and allocated_peak_bytes (from the allocator of the worst rank, also between records), and ranks, a list of
        the ranks that use it.
    """
    table = _sampled_devices(snapshot)
    if table.empty:
        return table
    uses = last_uses(snapshot).set_index("gpu")
    table["used_bytes"] = table["gpu"].map(uses["used_bytes"]).fillna(table["used_bytes"])
    table.loc[table["gpu"].isin(snapshot.query(_LOST)["gpu"]), "used_bytes"] = np.nan
    error_peaks = _errors(snapshot).groupby("gpu")["used_bytes"].max()
    table["used_peak_bytes"] = np.fmax(table["used_peak_bytes"], table["gpu"].map(error_peaks).astype(float))
    return table


def last_uses(snapshot: Queryable) -> pd.DataFrame:
    """Return when the run's processes last used each GPU, for GPUs that they have left or died on.

    The driver lists its processes where it can. Where it cannot, as in a container, the last use is the last time
    at which a process with an allocator there was alive, once all of them are gone.

    Returns:
        gpu as in `devices`, until_ns, and used_bytes in the driver's last sample until then, NaN without one.
    """
    uses = snapshot.query(
        f"{_TAIL} SELECT {_GPU} AS gpu, host, device, last_ns, max(time_ns) AS newest_ns, "
        "max(time_ns) FILTER (process_used_bytes > 0) AS until_ns FROM tail GROUP BY ALL"
    )
    if uses["until_ns"].isna().any():
        last_alive = snapshot.query(_LAST_ALIVE)
        uses["until_ns"] = uses["until_ns"].astype(float).fillna(uses.merge(last_alive, "left", "gpu")["alive_ns"])
    uses["until_ns"] = uses[["last_ns", "until_ns"]].max(axis=1).where(uses["until_ns"].notna())
    uses = uses[uses["newest_ns"] > uses["until_ns"]].astype({"until_ns": "int64"})[["gpu", "until_ns"]]
    if uses.empty:
        return uses.assign(used_bytes=np.nan)
    tail = snapshot.query(f"{_TAIL} SELECT {_GPU} AS gpu, time_ns, used_bytes FROM tail ORDER BY time_ns")
    before = tail.merge(uses, on="gpu").query("time_ns <= until_ns").drop_duplicates("gpu", keep="last")
    return uses.merge(before[["gpu", "used_bytes"]], "left", "gpu").astype({"used_bytes": float})


def _sampled_devices(snapshot: Queryable) -> pd.DataFrame:
    """Return the columns of `devices` from samples and records, without last uses and errors."""
    return snapshot.query(
        "WITH driver AS (SELECT host, device, arg_max(used_bytes_newest, time_ns + last_after_ns) used_bytes, "
        "max(used_bytes_high) used_peak_bytes, max(total_bytes) total_bytes FROM device_tiled GROUP BY ALL), "
        "torch AS (SELECT host, device, max(reserved_peak_bytes) reserved_peak_bytes, "
        "max(allocated_peak_bytes) allocated_peak_bytes, "
        "arg_max(reserved_bytes_newest, time_ns + last_after_ns) reserved_bytes, "
        "list_sort(list(DISTINCT rank) FILTER (rank IS NOT NULL)) ranks FROM device_memory_tiled GROUP BY ALL) "
        f"SELECT *, {_GPU} AS gpu FROM driver FULL JOIN torch USING (host, device) ORDER BY host, device"
    )


def device_lines(snapshot: Queryable, within: Span, gpu: int) -> dict[str, Lines]:
    """Return the memory of a GPU: allocated and reserved of each rank, and used by all processes.

    The last combines the driver's samples and the moments of out-of-memory errors, until the last use by the run.
    """
    any_rank = "$rank IS NULL OR rank = $rank"
    by_column: dict[str, Lines] = {}
    for stream, columns, series, where in (
        ("device_memory", ("allocated_bytes", "reserved_bytes"), "coalesce('rank ' || rank, '')", any_rank),
        ("device", ("used_bytes",), "''", "TRUE"),
    ):
        source, width = bucket_source(snapshot, within, stream, _buckets_per_gpu(snapshot, LINE_BUCKETS))
        by = {"gpu": _GPU, "series": series}
        table = rollup_extremes(snapshot, within, source, columns, where=where, by=by, width=width)
        by_column |= split_lines(table[table["gpu"] == gpu], within, columns)
    by_column["used_bytes"] = _used_line(snapshot, within, gpu, by_column["used_bytes"])
    return {name.removesuffix("_bytes"): lines for name, lines in by_column.items()}


def _used_line(snapshot: Queryable, within: Span, gpu: int, used: Lines) -> Lines:
    """Return the line of the driver's samples with the errors' moments, until the last use of the GPU."""
    if used.points.empty:
        return used
    errors = cuda_errors(snapshot, within)
    errors = errors[(errors["gpu"] == gpu) & errors["used_bytes"].notna()]
    at_errors = errors[["elapsed_seconds", "used_bytes"]].rename(columns={"used_bytes": "value"}).assign(series="")
    points = pd.concat([used.points, at_errors]) if len(at_errors) else used.points
    uses = last_uses(snapshot)
    for until_ns in uses.loc[uses["gpu"] == gpu, "until_ns"]:
        points = points[points["elapsed_seconds"] <= (until_ns - within.origin_ns) / 1e9]
    points = points.sort_values("elapsed_seconds", kind="stable", ignore_index=True)
    return Lines(points=points, samples_count=used.samples_count + len(at_errors))


def device_grid(snapshot: Queryable, within: Span) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the records of each GPU at its highest use in each bucket of time, and the newest.

    Returns:
        Two tables of the same moments, until the last use of a GPU by the run, with `gpu` as in `devices`, `bucket`
        and elapsed_seconds. The first has the `device` columns of an account (process_used_bytes is NaN if the
        allocators held more). The second has a row (pid) for each process with a record by then and without an end,
        with the columns of `device_memory`.
    """
    rows, width = _peak_rows(snapshot, within)
    is_newest, is_driver = ~rows.duplicated("gpu", keep="last"), rows["pid"] == DRIVER_PID
    times = rows.loc[rows["is_moment"] | is_newest, ["gpu", "time_ns"]].drop_duplicates()
    samples = rows.loc[is_driver, ["gpu", "time_ns", *COLUMNS["device"]]].dropna(subset="used_bytes")
    records = rows.loc[~is_driver, ["gpu", "pid", "time_ns", "ended_ns", *COLUMNS["device_memory"]]]
    # Each moment may be that of one sample or of one record: find what all others were then.
    driver = _lower_samples(times, samples)
    allocators = _higher_records(times, records.assign(record_ns=records["time_ns"]))
    held = times.join(allocators.groupby(["gpu", "time_ns"]).sum(), on=["gpu", "time_ns"]).fillna(0)
    driver.loc[driver["process_used_bytes"] < held["reserved_bytes"].to_numpy(), "process_used_bytes"] = np.nan
    peaks = _peak_times(driver, held, within, width)
    driver = driver.dropna(subset="used_bytes")
    return driver.merge(peaks, on=["gpu", "time_ns"]), allocators.merge(peaks, on=["gpu", "time_ns"])


def _peak_rows(snapshot: Queryable, within: Span) -> tuple[pd.DataFrame, int]:
    """Return the samples and records among which are the peaks of each bucket, and the width of a bucket.

    A record has also the time at which its process ended.
    """
    source, width = bucket_source(snapshot, within, "gpu", _buckets_per_gpu(snapshot, GRID_BUCKETS))
    width = max(width, GRID_STEP_NS)
    candidates = f"(FROM {source} WHERE {IN_TIME}{_until_last_use(snapshot)} {_error_samples(snapshot, within)})"
    rows = snapshot.query(
        "WITH ended AS (SELECT host, process_pid AS pid, max(time_ns + last_after_ns) AS ended_ns "
        f"FROM {rollup_view(within, 'process')} WHERE {IN_TIME} AND alive_low = 0 GROUP BY ALL) "
        f"SELECT {_GPU} AS gpu, * EXCLUDE (host, device) FROM ({peak_sql(candidates, width, within.from_ns)}) "
        "LEFT JOIN ended USING (host, pid) ORDER BY time_ns",
        within.bounds,
    )
    return rows, width


def _higher_records(times: pd.DataFrame, records: pd.DataFrame) -> pd.DataFrame:
    """Return each process's record before or after these times, whichever reserved more, until the process ended.

    The allocator takes memory from the driver between two records, and the driver is sampled in between: against
    the earlier record, that memory would count as another process's.
    """
    times_and_pids = times.merge(records[["gpu", "pid"]].drop_duplicates(), on="gpu")
    before, after = _around(times_and_pids, records, by=["gpu", "pid"])
    # The record before decides: the one after may be of a later process with the same pid.
    has_ended = before["ended_ns"].between(before["record_ns"], before["time_ns"], inclusive="left")
    higher = before.mask(after["reserved_bytes"] > before["reserved_bytes"], after)
    return higher[before["record_ns"].notna() & ~has_ended].drop(columns=["ended_ns", "record_ns"])


def _lower_samples(times: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Return the driver's sample before or after these times, whichever is lower; after the last one, the last."""
    before, after = _around(times, samples, by=["gpu"])
    return before.mask(after["used_bytes"] < before["used_bytes"], after)


def _around(times: pd.DataFrame, rows: pd.DataFrame, *, by: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return for each time the newest row up to it, and the first row from it on."""
    before = pd.merge_asof(times, rows, on="time_ns", by=by, direction="backward")
    return before, pd.merge_asof(times, rows, on="time_ns", by=by, direction="forward")


def _peak_times(driver: pd.DataFrame, held: pd.DataFrame, within: Span, width: int) -> pd.DataFrame:
    """Return the moment of each GPU and bucket at which most was in use, and the newest one."""
    table = driver[["gpu", "time_ns"]].assign(bucket=(driver["time_ns"] - within.from_ns) // width)
    table["elapsed_seconds"] = within.elapsed(table["time_ns"])
    taken = np.fmax(driver["used_bytes"], held["reserved_bytes"].to_numpy() + driver["other_used_bytes"].fillna(0))
    # The allocators may hold more at one of two moments with as much taken: that one is the peak.
    order = np.lexsort((held["time_ns"], held["allocated_bytes"], held["reserved_bytes"], taken))
    highest = table.iloc[order].drop_duplicates(["gpu", "bucket"], keep="last")
    last = table.drop_duplicates("gpu", keep="last")
    newest = last.assign(bucket=last["bucket"] + 1)  # in a bucket of its own
    peaks = pd.concat([highest, newest])
    return peaks.drop_duplicates(["gpu", "time_ns"], keep="last")


def _until_last_use(snapshot: Queryable) -> str:
    uses = last_uses(snapshot)
    ends = zip(uses["gpu"], uses["until_ns"], strict=True)
    return "".join(f" AND ({_GPU} <> {gpu} OR time_ns <= {until_ns})" for gpu, until_ns in ends)


def _error_samples(snapshot: Queryable, within: Span) -> str:
    """Return SQL that adds a driver's sample at the moment of each out-of-memory error.

    CUDA reported the free memory then. Other processes, and memory of no listed process, are as in the sample
    before. The moment is that of the record which the allocator made of the error, so that both are one account.
    """
    errors = _errors(snapshot)
    errors = errors[errors["used_bytes"].notna() & errors["time_ns"].between(within.from_ns, within.to_ns)]
    if errors.empty:
        return ""
    errors = _at_own_records(snapshot, errors)
    first_ns, last_ns = int(errors["time_ns"].min()), int(errors["time_ns"].max())
    samples = snapshot.query(
        f"SELECT {_GPU} AS gpu, host, device, time_ns, process_used_bytes::DOUBLE AS process_used_bytes, "
        "other_used_bytes::DOUBLE AS other_used_bytes, used_bytes::DOUBLE AS sample_bytes FROM device "
        f"WHERE time_ns BETWEEN {first_ns - _SAMPLED_WITHIN_NS} AND {last_ns} ORDER BY time_ns"
    )
    errors = errors[["gpu", "host", "device", "time_ns", "used_bytes"]].sort_values("time_ns")
    at_errors = pd.merge_asof(errors, samples.drop(columns=["host", "device"]), on="time_ns", by="gpu")
    unlisted_bytes = at_errors["sample_bytes"] - at_errors["process_used_bytes"] - at_errors["other_used_bytes"]
    at_errors["process_used_bytes"] = (
        at_errors["used_bytes"] - at_errors["other_used_bytes"] - unlisted_bytes
    ).clip(lower=0)
    names = ["host", "device", "time_ns", *COLUMNS["device"]]
    rows = (f"({', '.join(map(_literal, row))})" for row in at_errors[names].itertuples(index=False))
    error = f"(VALUES {', '.join(rows)}) AS error({', '.join(names)})"
    return f"UNION ALL BY NAME SELECT *, {DRIVER_PID} AS pid, 0 AS n, TRUE AS is_moment FROM {error}"


def _literal(value: Any) -> str:
    """Return a name, a whole number or a missing value of a table as an SQL literal."""
    if isinstance(value, str):
        return quote(value)
    return "NULL" if pd.isna(value) else str(int(value))


def _at_own_records(snapshot: Queryable, errors: pd.DataFrame) -> pd.DataFrame:
    """Return the errors at the times of their own records: the next one, if it reserves what CUDA reported."""
    first_ns, last_ns = int(errors["time_ns"].min()), int(errors["time_ns"].max()) + _RECORDED_WITHIN_NS
    records = snapshot.query(
        f"SELECT {_GPU} AS gpu, pid, time_ns, time_ns AS record_ns, reserved_bytes::DOUBLE AS recorded_bytes "
        f"FROM device_memory WHERE time_ns BETWEEN {first_ns} AND {last_ns} ORDER BY time_ns"
    )
    found = pd.merge_asof(
        errors.sort_values("time_ns"),
        records,
        on="time_ns",
        by=["gpu", "pid"],
        direction="forward",
        tolerance=_RECORDED_WITHIN_NS,
    )
    is_own = found["recorded_bytes"] == found["reserved_bytes"]
    return found.assign(time_ns=found["record_ns"].where(is_own, found["time_ns"]).astype("int64"))


def cuda_errors(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return the CUDA out-of-memory errors in a span, each at its own time.

    A GPU without events about them has the errors that its allocators counted, at the record of the step.

    Returns:
        gpu as in `devices`, elapsed_seconds, step, errors_count (since the row before), was_caught (the training
        went on), requested_bytes, free_bytes, used_bytes (by all processes, then), reserved_bytes, limit_bytes
        (the device's memory, or the share that the process may use) and is_of_share (that share was reached).
    """
    errors = _errors(snapshot)
    counted = _count_growth(snapshot, within, "oom_count").rename(columns={"count": "errors_count"})
    counted = counted[~counted["gpu"].isin(errors["gpu"])].assign(was_caught=False, is_of_share=False)
    end_ns = within.to_ns if within.to_ns < within.newest_ns else math.inf  # an error may be all that came after
    errors = errors[errors["time_ns"].between(within.from_ns, end_ns)]
    columns = ["gpu", "elapsed_seconds", "was_caught", "is_of_share", "used_bytes", *_EVENT_FIELDS]
    table = pd.concat([part for part in (errors, counted) if len(part)] or [errors]).sort_values("time_ns")
    table = table.assign(elapsed_seconds=within.elapsed(table["time_ns"])).reindex(columns=columns)
    return table.reset_index(drop=True)


def _errors(snapshot: Queryable) -> pd.DataFrame:
    """Return the newest errors of the whole run that have events, with host, device and time_ns."""
    fields = ", ".join(f"TRY_CAST(body->>'$.{name}' AS BIGINT)::DOUBLE AS {name}" for name in _EVENT_FIELDS)
    table = snapshot.query(
        "SELECT host, pid, TRY_CAST(body->>'$.device' AS SMALLINT) AS device, "
        "coalesce(TRY_CAST(body->>'$.error_time_ns' AS BIGINT), time_ns) AS time_ns, "
        f"coalesce(body->>'$.caught' = 'true', FALSE) AS was_caught, {fields} "
        f"FROM event WHERE kind = 'cuda-oom' ORDER BY event.time_ns DESC LIMIT {_MAX_ERRORS}"
    )
    if table.empty:
        return table.assign(gpu=[], total_bytes=[], used_bytes=[], is_of_share=[])
    if table["device"].isna().any():  # an allocator without observers does not record it
        users = snapshot.query(
            "SELECT host, pid, min(device) AS only_device FROM device_memory_tiled GROUP BY ALL "
            "HAVING count(DISTINCT device) = 1"
        )
        only_device = table.merge(users, how="left", on=["host", "pid"])["only_device"]
        table["device"] = table["device"].astype(float).fillna(only_device)
    table = table.dropna(subset="device").astype({"device": "int64"})
    gpus = _sampled_devices(snapshot)[["gpu", "host", "device", "total_bytes"]].astype({"device": "int64"})
    table = table.merge(gpus, on=["host", "device"])
    table["used_bytes"] = table["total_bytes"].astype(float) - table["free_bytes"]
    table["errors_count"] = table["errors_count"].fillna(1)
    is_above = table["reserved_bytes"] + table["requested_bytes"] > table["limit_bytes"]
    table["is_of_share"] = is_above & (table["free_bytes"] >= table["requested_bytes"])
    return table


def cache_flushes(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return when an allocator flushed its cache to find room.

    Returns:
        gpu as in `devices`, elapsed_seconds and step of the last flush in a bucket of time, and their count.
    """
    table = _count_growth(snapshot, within, "alloc_retry_count").sort_values("time_ns")
    return table.assign(elapsed_seconds=within.elapsed(table["time_ns"]))


def _count_growth(snapshot: Queryable, within: Span, column: str) -> pd.DataFrame:
    """Return the growth of a running count of the allocators in each bucket of the span in which it grew."""
    high = f"{column}_high"
    # Rows from as long before the span give the count at its start. The whole run needs no rows without a count,
    # so they are left out of the sort.
    since = within.from_ns if within.is_whole else 2 * within.from_ns - within.to_ns
    starts_at_first = since <= within.first_ns
    return snapshot.query(
        "SELECT gpu, arg_max(step, at_ns)::BIGINT AS step, max(at_ns) AS time_ns, "
        f"sum(grown)::BIGINT AS count FROM (SELECT {_GPU} AS gpu, time_ns + {high}_after_ns AS at_ns, "
        f"{high}_step AS step, {high} - lag({high}, 1, {0 if starts_at_first else high}) "
        "OVER (PARTITION BY host, device, pid, start_ticks ORDER BY time_ns) AS grown "
        f"FROM {rollup_view(within, 'device_memory')} WHERE time_ns BETWEEN {since} AND $to_ns"
        f"{f' AND {high} > 0' if starts_at_first else ''}) WHERE grown > 0 AND at_ns BETWEEN $from_ns AND $to_ns "
        f"GROUP BY gpu, (at_ns - $from_ns) // {width_ns(within, _MARK_BUCKETS)}",
        within.bounds,
    )


def _buckets_per_gpu(snapshot: Queryable, buckets: int) -> int:
    """Return the buckets of one GPU: many GPUs share `buckets`."""
    return max(_FEWEST_BUCKETS, 2 * buckets // max(2, len(devices(snapshot))))
