"""The named queries about GPUs: what allocators and drivers say of each, at which moments.

Each asks for all GPUs at once, and gives what belongs to one of them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from collector.store.fullest import COLUMNS, DRIVER, kept
from collector.store.line_queries import LINE_BUCKETS, Lines, lines_of, tiled_extremes
from collector.store.queries import GRID_BUCKETS, GRID_STEP_NS, Queryable, Span, only, pieces, tiled, width_ns

#: One number for a GPU of a host: with it pandas puts rows together in a fraction of the time.
_GPU = "(hash(host, device) >> 1)::BIGINT"
_IN_SPAN = "time_ns BETWEEN $from_ns AND $to_ns"
_FEWEST_BUCKETS = 200
#: More marks than this would be a line.
_TROUBLE_BUCKETS = 200


def devices(snapshot: Queryable) -> pd.DataFrame:
    """Usage now, peak and capacity (bytes) of each GPU of each host that the run uses, over the whole run.

    Returns:
        gpu (a number for the next two), host, device, used_bytes and used_peak_bytes (the driver's samples, all
        processes), total_bytes, and
        reserved_peak_bytes and allocated_peak_bytes (the allocator's, of the worst rank, between records too), and
        ranks, a list of those that use it, where there are any.

    """
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
    """What the caching allocator of each rank has allocated and reserved, and what the driver says is used."""
    any_rank = "$rank IS NULL OR rank = $rank"
    found: dict[str, Lines] = {}
    for stream, columns, series, where in (
        ("device_memory", ("allocated_bytes", "reserved_bytes"), "coalesce('rank ' || rank, '')", any_rank),
        ("device", ("used_bytes",), "''", "TRUE"),
    ):
        source, width = pieces(snapshot, within, stream, _shared(snapshot, LINE_BUCKETS))
        by = {"gpu": _GPU, "series": series}
        table = tiled_extremes(snapshot, within, source, columns, where=where, by=by, width=width)
        found |= lines_of(table[table["gpu"] == gpu], within, columns)
    return {name.removesuffix("_bytes"): lines for name, lines in found.items()}


def device_grid(snapshot: Queryable, within: Span) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of each GPU when most of it was taken in each bucket of time, and the newest.

    Returns:
        Two tables of the same moments: `gpu` as in `devices`, `bucket`, elapsed_seconds (its begin; the newest its
        own time) and what an account takes of `device` (process_used_bytes NaN if the allocators held more) and, of
        each process that had a record by then and had not ended (pid), of `device_memory`.

    """
    source, width = pieces(snapshot, within, "gpu", _shared(snapshot, GRID_BUCKETS))
    width, asked = max(width, GRID_STEP_NS), f"(FROM {source} WHERE {_IN_SPAN})"
    rows = snapshot.query(
        "WITH ended AS (SELECT host, process_pid AS pid, max(time_ns + last_after_ns) AS ended_ns "
        f"FROM {tiled(within, 'process')} WHERE {_IN_SPAN} AND alive_low = 0 GROUP BY ALL) "
        f"SELECT {_GPU} AS gpu, * EXCLUDE (host, device) FROM ({kept(asked, width, within.from_ns)}) "
        "LEFT JOIN ended USING (host, pid) ORDER BY time_ns",
        only(within.params, "from_ns", "to_ns"),
    )
    is_newest, is_driver = ~rows.duplicated("gpu", keep="last"), rows["pid"] == DRIVER
    times = rows.loc[rows["is_moment"] | is_newest, ["gpu", "time_ns"]].drop_duplicates()
    driver = _lower(times, rows.loc[is_driver, ["gpu", "time_ns", *COLUMNS["device"]]].dropna(subset="used_bytes"))
    records = rows.loc[~is_driver, ["gpu", "pid", "time_ns", "ended_ns", *COLUMNS["device_memory"]]]
    allocators = _nearest(times, records.assign(record_ns=records["time_ns"]))
    held = times.join(allocators.groupby(["gpu", "time_ns"]).sum(), on=["gpu", "time_ns"]).fillna(0)
    driver.loc[driver["process_used_bytes"] < held["reserved_bytes"].to_numpy(), "process_used_bytes"] = np.nan
    chosen = _fullest(driver, held, within, width)
    both = (each.merge(chosen, on=["gpu", "time_ns"]) for each in (driver.dropna(subset="used_bytes"), allocators))
    return next(both), next(both)


def _nearest(times: pd.DataFrame, records: pd.DataFrame) -> pd.DataFrame:
    """Each process's record before or after these times, whichever reserved more, until the process ended.

    Between two records the allocator takes memory from the driver, which is asked in between: against the record
    before, that memory would count as somebody else's.
    """
    of_each = times.merge(records[["gpu", "pid"]].drop_duplicates(), on="gpu")
    before, after = (
        pd.merge_asof(of_each, records, on="time_ns", by=["gpu", "pid"], direction=way)
        for way in ("backward", "forward")
    )
    has_ended = before["ended_ns"].between(before["record_ns"], before["time_ns"], inclusive="left")
    found = before.mask(after["reserved_bytes"] > before["reserved_bytes"], after)  # another may have its pid later
    return found[before["record_ns"].notna() & ~has_ended].drop(columns=["ended_ns", "record_ns"])


def _lower(times: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """The driver's sample at these times, between two of them the lower one; and the last one."""
    newest, later = (
        pd.merge_asof(times, samples, on="time_ns", by="gpu", direction=way) for way in ("backward", "forward")
    )
    return newest.mask(later["used_bytes"] < newest["used_bytes"], later)


def _fullest(driver: pd.DataFrame, held: pd.DataFrame, within: Span, width: int) -> pd.DataFrame:
    """Of each GPU and bucket the moment at which most was taken, as far as was seen, and the newest."""
    table = driver[["gpu", "time_ns"]].assign(bucket=(driver["time_ns"] - within.from_ns) // width)
    table["elapsed_seconds"] = within.elapsed(within.from_ns + table["bucket"] * width)
    taken = np.fmax(driver["used_bytes"], held["reserved_bytes"].to_numpy() + driver["other_used_bytes"].fillna(0))
    order = np.lexsort((held["time_ns"], held["allocated_bytes"], held["reserved_bytes"], taken))
    last = table.drop_duplicates("gpu", keep="last")
    newest = last.assign(bucket=last["bucket"] + 1, elapsed_seconds=within.elapsed(last["time_ns"]))
    chosen = pd.concat([table.iloc[order].drop_duplicates(["gpu", "bucket"], keep="last"), newest])
    return chosen.drop_duplicates(["gpu", "time_ns"], keep="last")


def allocator_trouble(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """When an allocator had to give its cache back, or ran out of memory.

    Returns:
        gpu as in `devices`, elapsed_seconds and step of the last in a stretch of time, and how many of each there
        were then: retries, ooms.

    """
    found = [
        _counted(snapshot, within, column).rename(columns={"count": name})
        for column, name in (("alloc_retry_count", "retries"), ("oom_count", "ooms"))
    ]
    table = pd.concat(found).sort_values("time_ns").fillna({"retries": 0, "ooms": 0})
    return table.assign(elapsed_seconds=within.elapsed(table["time_ns"]))


def _counted(snapshot: Queryable, within: Span, column: str) -> pd.DataFrame:
    """By how much a count of the allocators grew in stretches of the span, where it did."""
    high = f"{column}_high"
    # As much again before it tells what was counted by then; what lies before the first has nothing to sort.
    since = within.from_ns if within.is_whole else 2 * within.from_ns - within.to_ns
    looks_at_all = since <= within.first_ns
    return snapshot.query(
        "SELECT gpu, arg_max(step, at_ns)::BIGINT AS step, max(at_ns) AS time_ns, "
        f"sum(grown)::BIGINT AS count FROM (SELECT {_GPU} AS gpu, time_ns + {high}_after_ns AS at_ns, "
        f"{high}_step AS step, {high} - lag({high}, 1, {0 if looks_at_all else high}) "
        "OVER (PARTITION BY host, device, pid, start_ticks ORDER BY time_ns) AS grown "
        f"FROM {tiled(within, 'device_memory')} WHERE time_ns BETWEEN {since} AND $to_ns"
        f"{f' AND {high} > 0' if looks_at_all else ''}) WHERE grown > 0 AND at_ns BETWEEN $from_ns AND $to_ns "
        f"GROUP BY gpu, (at_ns - $from_ns) // {width_ns(within, _TROUBLE_BUCKETS)}",
        only(within.params, "from_ns", "to_ns"),
    )


def _shared(snapshot: Queryable, buckets: int) -> int:
    """Of so many buckets those of one GPU: many GPUs share them."""
    return max(_FEWEST_BUCKETS, 2 * buckets // max(2, len(devices(snapshot))))
