"""The named queries about GPUs: what allocators and drivers say of each, at which moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from collector.store.engine import quoted
from collector.store.queries import GRID_BUCKETS, GRID_STEP_NS, Lines, Queryable, Span, lines, only, width_ns

_OF_DEVICE = "time_ns BETWEEN $from_ns AND $to_ns AND host = $host AND device = $device"
_ASKED = f"{_OF_DEVICE} AND used_bytes IS NOT NULL"
_BUCKET = "(time_ns - $from_ns) // $width AS bucket"


def devices(snapshot: Queryable) -> pd.DataFrame:
    """Usage now, peak and capacity (bytes) of each GPU of each host that the run uses, over the whole run.

    Returns:
        host, device, used_bytes and used_peak_bytes (the driver's samples, all processes), total_bytes, and
        reserved_peak_bytes and allocated_peak_bytes (the allocator's, of the worst rank, between records too).

    """
    return snapshot.query(
        "WITH driver AS (SELECT host, device, arg_max(used_bytes, time_ns) used_bytes, "
        "max(used_bytes) used_peak_bytes, max(total_bytes) total_bytes FROM device GROUP BY ALL), "
        "torch AS (SELECT host, device, max(greatest(reserved_bytes, reserved_peak_bytes)) reserved_peak_bytes, "
        "max(greatest(allocated_bytes, allocated_peak_bytes)) allocated_peak_bytes, "
        "arg_max(reserved_bytes, time_ns) reserved_bytes FROM device_memory GROUP BY ALL) "
        "SELECT * FROM driver FULL JOIN torch USING (host, device) ORDER BY host, device"
    )


def device_lines(snapshot: Queryable, within: Span, host: str, device: int) -> dict[str, Lines]:
    """What the caching allocator of each rank has allocated and reserved, and what the driver says is used."""
    of_device = f"host = {quoted(host)} AND device = {device:d}"
    of_rank = f"{of_device} AND ($rank IS NULL OR rank = $rank)"
    by_rank = "coalesce('rank ' || rank, '')"
    allocator = {name: f"{name}_bytes" for name in ("allocated", "reserved")}
    return {
        **lines(snapshot, within, "device_memory", allocator, series=by_rank, where=of_rank),
        **lines(snapshot, within, "device", {"used": "used_bytes"}, where=of_device),
    }


def device_grid(snapshot: Queryable, within: Span, host: str, device: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of a GPU when most of it was taken in each bucket of time, and the newest.

    Returns:
        Two tables of the same moments: `bucket`, elapsed_seconds (its begin; the newest its own time) and what an
        account takes of `device` (process_used_bytes NaN if the allocators held more) and, by pid, `device_memory`.

    """
    width = max(width_ns(within, GRID_BUCKETS), GRID_STEP_NS)
    params = {**only(within.params, "from_ns", "to_ns"), "host": host, "device": device, "width": width}
    largest = snapshot.query(
        f"SELECT {_BUCKET}, arg_max(time_ns, used_bytes) at_ns FROM device WHERE {_ASKED} GROUP BY bucket", params
    )["at_ns"]
    records = _allocator_records(snapshot, {**params, "largest_ns": largest.tolist()})
    driver = _driver_at(snapshot, params, np.union1d(largest, records.pop("at_ns")))
    of_each = [pd.merge_asof(driver[["time_ns"]], mine, on="time_ns") for _, mine in records.groupby("pid")]
    allocators = pd.concat([records[:0], *of_each]).dropna(subset="pid")
    held = driver[["time_ns"]].join(allocators.groupby("time_ns").sum(), on="time_ns").fillna(0)
    driver.loc[driver["process_used_bytes"] < held["reserved_bytes"], "process_used_bytes"] = np.nan
    chosen = _fullest(driver, held, within, width)
    return driver.dropna(subset="used_bytes").merge(chosen, on="time_ns"), allocators.merge(chosen, on="time_ns")


def _allocator_records(snapshot: Queryable, params: dict[str, Any]) -> pd.DataFrame:
    """Each process's newest record when one, or the driver, had most in a bucket, and at its end (at_ns)."""
    # A tensor out of the cache adds nothing to what is reserved: of equal records the one of most allocated.
    most = "reserved_bytes / 512.0 + allocated_bytes / (reserved_bytes + 1.0)"
    return snapshot.query(
        f"WITH torch AS (SELECT {_BUCKET}, pid, time_ns, allocated_bytes, reserved_bytes, inactive_split_bytes "
        f"FROM device_memory WHERE {_OF_DEVICE}), moment AS (SELECT bucket, "
        f"unnest([arg_max(time_ns, {most}), max(time_ns)]) at_ns FROM torch GROUP BY bucket, pid "
        f"UNION SELECT {_BUCKET}, time_ns FROM (SELECT unnest($largest_ns::BIGINT[]) AS time_ns)) "
        "SELECT * EXCLUDE (bucket) FROM (SELECT at_ns, unnest(arg_max(torch, time_ns), recursive := true) "
        "FROM torch JOIN moment USING (bucket) WHERE time_ns <= at_ns GROUP BY at_ns, pid) ORDER BY time_ns",
        params,
    )


def _driver_at(snapshot: Queryable, params: dict[str, Any], times_ns: np.ndarray[Any, Any]) -> pd.DataFrame:
    """The driver's sample at these times, between two of them the lower one; and the last one."""
    samples = snapshot.query(  # not by ASOF JOIN, which takes seconds
        f"WITH asked AS (SELECT {_BUCKET}, time_ns, used_bytes, process_used_bytes, other_used_bytes FROM device "
        f"WHERE {_ASKED}), moment AS (SELECT {_BUCKET}, time_ns AS at_ns FROM "
        "(SELECT unnest($times_ns::BIGINT[]) AS time_ns)) SELECT DISTINCT * EXCLUDE (bucket) FROM (SELECT unnest(["
        "min(asked), max(asked), arg_max(asked, time_ns) FILTER (time_ns <= at_ns), "
        "arg_min(asked, time_ns) FILTER (time_ns >= at_ns)], recursive := true) "
        "FROM asked LEFT JOIN moment USING (bucket) GROUP BY bucket, at_ns) WHERE time_ns > 0 ORDER BY time_ns",
        {**params, "times_ns": times_ns.tolist()},
    )
    times = pd.DataFrame({"time_ns": np.union1d(times_ns, samples["time_ns"][-1:])})
    newest, later = (pd.merge_asof(times, samples, on="time_ns", direction=way) for way in ("backward", "forward"))
    return newest.mask(later["used_bytes"] < newest["used_bytes"], later)


def _fullest(driver: pd.DataFrame, held: pd.DataFrame, within: Span, width: int) -> pd.DataFrame:
    """Of each bucket the moment at which most was taken, as far as was seen, and the newest."""
    table = driver[["time_ns"]].assign(bucket=(driver["time_ns"] - within.from_ns) // width)
    table["elapsed_seconds"] = within.elapsed(within.from_ns + table["bucket"] * width)
    taken = np.fmax(driver["used_bytes"], held["reserved_bytes"] + driver["other_used_bytes"].fillna(0))
    order = np.lexsort((held["time_ns"], held["allocated_bytes"], held["reserved_bytes"], taken))
    newest = table[-1:].assign(bucket=table["bucket"] + 1, elapsed_seconds=within.elapsed(table["time_ns"]))
    chosen = pd.concat([table.iloc[order].drop_duplicates("bucket", keep="last"), newest])
    return chosen.drop_duplicates("time_ns", keep="last")


def allocator_trouble(snapshot: Queryable, within: Span, host: str, device: int) -> pd.DataFrame:
    """The steps in which an allocator had to give its cache back, or ran out of memory.

    Returns:
        elapsed_seconds, rank, step, retries, ooms: how many of each since the step before.

    """
    table = snapshot.query(
        "SELECT time_ns, rank, step, retries, ooms FROM (SELECT time_ns, rank, step, "
        "alloc_retry_count - lag(alloc_retry_count, 1, 0) OVER w retries, "
        "oom_count - lag(oom_count, 1, 0) OVER w ooms FROM device_memory WHERE host = $host AND device = $device "
        "AND (alloc_retry_count > 0 OR oom_count > 0) "  # what lies before the first has nothing to sort
        "WINDOW w AS (PARTITION BY pid, start_ticks ORDER BY time_ns)) "
        "WHERE (retries > 0 OR ooms > 0) AND time_ns BETWEEN $from_ns AND $to_ns ORDER BY time_ns",
        {**only(within.params, "from_ns", "to_ns"), "host": host, "device": device},
    )
    return table.assign(elapsed_seconds=within.elapsed(table["time_ns"]))
