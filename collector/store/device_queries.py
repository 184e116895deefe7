"""The named queries about GPUs: what allocators and drivers say of each, at which moments.

Each asks for all GPUs at once, and gives what belongs to one of them.
"""

from __future__ import annotations

import math

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
#: Errors that are read, the newest: a program that tries batch sizes makes many.
_MAX_ERRORS = 200
#: How long before an error, or before an allocator's last record, the driver was asked at least once.
_ASKED_NS = 60 * 10**9
#: SQL: the driver's samples since shortly before the last record of an allocator on each GPU.
_TAIL = (
    "WITH torch AS (SELECT host, device, max(time_ns + last_after_ns) AS last_ns FROM device_memory_tiled "
    "GROUP BY ALL), "
    f"tail AS (SELECT * FROM device JOIN torch USING (host, device) WHERE time_ns > last_ns - {_ASKED_NS})"
)
#: SQL: when the last process with an allocator on a GPU was seen alive, NULL while not all of them are gone.
_LEFT = (
    "WITH user AS (SELECT host, device, pid, start_ticks, max(time_ns + last_after_ns) AS last_ns "
    "FROM device_memory_tiled GROUP BY ALL), "
    "life AS (SELECT host, process_pid AS pid, process_start_ticks AS start_ticks, min(alive_low) = 0 AS is_gone "
    "FROM process_tiled GROUP BY ALL), "
    "alive AS (SELECT host, process_pid AS pid, process_start_ticks AS start_ticks, max(time_ns) AS alive_ns "
    "FROM process WHERE alive IS DISTINCT FROM 0 "
    f"AND time_ns > (SELECT max(last_ns) - {_ASKED_NS} FROM user) GROUP BY ALL) "
    f"SELECT {_GPU} AS gpu, CASE WHEN bool_and(coalesce(is_gone, FALSE)) THEN max(alive_ns) END AS alive_ns "
    "FROM user LEFT JOIN life USING (host, pid, start_ticks) LEFT JOIN alive USING (host, pid, start_ticks) "
    "GROUP BY host, device"
)
#: SQL: the GPUs for which the driver has stopped answering: it told nothing the last few times.
_LOST = (
    f"{_TAIL}, late AS (SELECT {_GPU} AS gpu, used_bytes, "
    "row_number() OVER (PARTITION BY host, device ORDER BY time_ns DESC) AS place FROM tail) "
    "SELECT gpu FROM late WHERE place <= 3 GROUP BY gpu HAVING count(*) = 3 AND count(used_bytes) = 0"
)
#: Columns of `cuda_errors` that the event has.
_TOLD = ("step", "requested_bytes", "free_bytes", "limit_bytes", "reserved_bytes", "errors_count")


def devices(snapshot: Queryable) -> pd.DataFrame:
    """Return last usage, peak and capacity (bytes) of each GPU that the run uses, over the whole run.

    Returns:
        gpu (a number for the next two), host, device, used_bytes (the driver's last sample while the run used the
        device; NaN if the driver has stopped answering), used_peak_bytes (the largest one, or at an out-of-memory
        error; all processes), total_bytes, reserved_bytes (last), reserved_peak_bytes and allocated_peak_bytes (the
        allocator's, of the worst rank, between records too), and ranks, a list of those that use it, where there
        are any.

    """
    found = _sampled_devices(snapshot)
    if found.empty:
        return found
    uses = last_uses(snapshot).set_index("gpu")
    found["used_bytes"] = found["gpu"].map(uses["used_bytes"]).fillna(found["used_bytes"])
    found.loc[found["gpu"].isin(snapshot.query(_LOST)["gpu"]), "used_bytes"] = np.nan
    at_errors = _errors(snapshot).groupby("gpu")["used_bytes"].max()
    found["used_peak_bytes"] = np.fmax(found["used_peak_bytes"], found["gpu"].map(at_errors).astype(float))
    return found


def last_uses(snapshot: Queryable) -> pd.DataFrame:
    """Return when the run's processes used each GPU last: of those that they have left, or died on.

    The driver names them where it can. Elsewhere, as in a container, it is when the last process with an allocator
    there was seen alive, once all of them were seen to be gone.

    Returns:
        gpu as in `devices`, until_ns, and used_bytes of the driver's last sample until then, NaN if there is none.

    """
    uses = snapshot.query(
        f"{_TAIL} SELECT {_GPU} AS gpu, host, device, last_ns, max(time_ns) AS newest_ns, "
        "max(time_ns) FILTER (process_used_bytes > 0) AS until_ns FROM tail GROUP BY ALL"
    )
    if uses["until_ns"].isna().any():
        left = snapshot.query(_LEFT)
        uses["until_ns"] = uses["until_ns"].astype(float).fillna(uses.merge(left, "left", "gpu")["alive_ns"])
    uses["until_ns"] = uses[["last_ns", "until_ns"]].max(axis=1).where(uses["until_ns"].notna())
    uses = uses[uses["newest_ns"] > uses["until_ns"]].astype({"until_ns": "int64"})[["gpu", "until_ns"]]
    if uses.empty:
        return uses.assign(used_bytes=np.nan)
    tail = snapshot.query(f"{_TAIL} SELECT {_GPU} AS gpu, time_ns, used_bytes FROM tail ORDER BY time_ns")
    before = tail.merge(uses, on="gpu").query("time_ns <= until_ns").drop_duplicates("gpu", keep="last")
    return uses.merge(before[["gpu", "used_bytes"]], "left", "gpu").astype({"used_bytes": float})


def _sampled_devices(snapshot: Queryable) -> pd.DataFrame:
    """Return the columns of `devices` as they were sampled and recorded."""
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

    The last is of the driver's samples and of the moments of out-of-memory errors, until the last use by the run.
    """
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
    found["used_bytes"] = _of_the_run(snapshot, within, gpu, found["used_bytes"])
    return {name.removesuffix("_bytes"): lines for name, lines in found.items()}


def _of_the_run(snapshot: Queryable, within: Span, gpu: int, used: Lines) -> Lines:
    """Return a line of the driver's samples and of the errors, until the last use of the GPU."""
    if used.points.empty:
        return used
    errors = cuda_errors(snapshot, within)
    errors = errors[(errors["gpu"] == gpu) & errors["used_bytes"].notna()]
    seen = errors[["elapsed_seconds", "used_bytes"]].rename(columns={"used_bytes": "value"}).assign(series="")
    points = pd.concat([used.points, seen]) if len(seen) else used.points
    uses = last_uses(snapshot)
    for until_ns in uses.loc[uses["gpu"] == gpu, "until_ns"]:
        points = points[points["elapsed_seconds"] <= (until_ns - within.origin_ns) / 1e9]
    points = points.sort_values("elapsed_seconds", kind="stable", ignore_index=True)
    return Lines(points=points, samples_count=used.samples_count + len(seen))


def device_grid(snapshot: Queryable, within: Span) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of each GPU when most of it was taken in each bucket of time, and the newest.

    Returns:
        Two tables of the same moments, until the last use of a GPU by the run: `gpu` as in `devices`, `bucket`,
        elapsed_seconds and what an account takes of `device` (process_used_bytes NaN if the allocators held more)
        and, of each process that had a record by then and had not ended (pid), of `device_memory`.

    """
    source, width = pieces(snapshot, within, "gpu", _shared(snapshot, GRID_BUCKETS))
    width = max(width, GRID_STEP_NS)
    asked = f"(FROM {source} WHERE {_IN_SPAN}{_until(snapshot)} {_at_errors(snapshot, within)})"
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
    """Return the moment of each GPU and bucket at which most was in use, and the newest one."""
    table = driver[["gpu", "time_ns"]].assign(bucket=(driver["time_ns"] - within.from_ns) // width)
    table["elapsed_seconds"] = within.elapsed(table["time_ns"])
    taken = np.fmax(driver["used_bytes"], held["reserved_bytes"].to_numpy() + driver["other_used_bytes"].fillna(0))
    order = np.lexsort((held["time_ns"], held["allocated_bytes"], held["reserved_bytes"], taken))
    last = table.drop_duplicates("gpu", keep="last")
    newest = last.assign(bucket=last["bucket"] + 1)
    chosen = pd.concat([table.iloc[order].drop_duplicates(["gpu", "bucket"], keep="last"), newest])
    return chosen.drop_duplicates(["gpu", "time_ns"], keep="last")


def _until(snapshot: Queryable) -> str:
    """Return SQL: and not after the last use of a GPU by the run."""
    uses = last_uses(snapshot)
    ends = zip(uses["gpu"], uses["until_ns"], strict=True)
    return "".join(f" AND ({_GPU} <> {gpu} OR time_ns <= {until_ns})" for gpu, until_ns in ends)


def _at_errors(snapshot: Queryable, within: Span) -> str:
    """Return SQL: with a driver's sample of the moment of each out-of-memory error.

    CUDA told what was free then. Other processes, and what no process is named for, are as in the sample before.
    """
    errors = _errors(snapshot)
    errors = errors[errors["used_bytes"].notna() & errors["time_ns"].between(within.from_ns, within.to_ns)]
    if errors.empty:
        return ""
    first_ns, last_ns = int(errors["time_ns"].min()), int(errors["time_ns"].max())
    samples = snapshot.query(
        f"SELECT {_GPU} AS gpu, host, device, time_ns, process_used_bytes::DOUBLE AS process_used_bytes, "
        "other_used_bytes::DOUBLE AS other_used_bytes, used_bytes::DOUBLE AS sample_bytes FROM device "
        f"WHERE time_ns BETWEEN {first_ns - _ASKED_NS} AND {last_ns} ORDER BY time_ns"
    )
    errors = errors[["gpu", "host", "device", "time_ns", "used_bytes"]].sort_values("time_ns")
    found = pd.merge_asof(errors, samples.drop(columns=["host", "device"]), on="time_ns", by="gpu")
    nobodys = found["sample_bytes"] - found["process_used_bytes"] - found["other_used_bytes"]
    found["process_used_bytes"] = (found["used_bytes"] - found["other_used_bytes"] - nobodys).clip(lower=0)
    found["host"] = "'" + found["host"].str.replace("'", "''") + "'"
    names = ["host", "device", "time_ns", *COLUMNS["device"]]
    rows = found[names].astype(object).where(found[names].notna(), "NULL").itertuples(index=False)
    values = ", ".join(
        f"({', '.join(str(int(value) if isinstance(value, float) else value) for value in row)})" for row in rows
    )
    error = f"(VALUES {values}) AS error({', '.join(names)})"
    return f"UNION ALL BY NAME SELECT *, {DRIVER} AS pid, 0 AS n, TRUE AS is_moment FROM {error}"


def cuda_errors(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return the CUDA out-of-memory errors in a span, each at its own time.

    Of a GPU without events about them, the allocators' counts tell, at the record of a step.

    Returns:
        gpu as in `devices`, elapsed_seconds, step, errors_count (since the last one here), was_caught (the training
        went on), requested_bytes, free_bytes, used_bytes (of all processes, then), reserved_bytes, limit_bytes
        (the device's memory, or the share that the process may use) and is_of_share (that share was met).

    """
    errors = _errors(snapshot)
    counted = _counted(snapshot, within, "oom_count").rename(columns={"count": "errors_count"})
    counted = counted[~counted["gpu"].isin(errors["gpu"])].assign(was_caught=False, is_of_share=False)
    end_ns = within.to_ns if within.to_ns < within.newest_ns else math.inf  # an error may be all that came after
    errors = errors[errors["time_ns"].between(within.from_ns, end_ns)]
    columns = ["gpu", "elapsed_seconds", "was_caught", "is_of_share", "used_bytes", *_TOLD]
    table = pd.concat([each for each in (errors, counted) if len(each)] or [errors]).sort_values("time_ns")
    table = table.assign(elapsed_seconds=within.elapsed(table["time_ns"])).reindex(columns=columns)
    return table.reset_index(drop=True)


def _errors(snapshot: Queryable) -> pd.DataFrame:
    """Return the newest errors of the whole run of which there are events, with host, device and time_ns."""
    told = ", ".join(f"TRY_CAST(body->>'$.{name}' AS BIGINT)::DOUBLE AS {name}" for name in _TOLD)
    found = snapshot.query(
        "SELECT host, pid, TRY_CAST(body->>'$.device' AS SMALLINT) AS device, "
        "coalesce(TRY_CAST(body->>'$.error_time_ns' AS BIGINT), time_ns) AS time_ns, "
        f"coalesce(body->>'$.caught' = 'true', FALSE) AS was_caught, {told} "
        f"FROM event WHERE kind = 'cuda-oom' ORDER BY event.time_ns DESC LIMIT {_MAX_ERRORS}"
    )
    if found.empty:
        return found.assign(gpu=[], total_bytes=[], used_bytes=[], is_of_share=[])
    if found["device"].isna().any():  # an allocator without observers does not tell
        users = snapshot.query(
            "SELECT host, pid, min(device) AS only_device FROM device_memory_tiled GROUP BY ALL "
            "HAVING count(DISTINCT device) = 1"
        )
        alone = found.merge(users, how="left", on=["host", "pid"])["only_device"]
        found["device"] = found["device"].astype(float).fillna(alone)
    found = found.dropna(subset="device").astype({"device": "int64"})
    gpus = _sampled_devices(snapshot)[["gpu", "host", "device", "total_bytes"]].astype({"device": "int64"})
    found = found.merge(gpus, on=["host", "device"])
    found["used_bytes"] = found["total_bytes"].astype(float) - found["free_bytes"]
    found["errors_count"] = found["errors_count"].fillna(1)
    is_above = found["reserved_bytes"] + found["requested_bytes"] > found["limit_bytes"]
    found["is_of_share"] = is_above & (found["free_bytes"] >= found["requested_bytes"])
    return found


def cache_flushes(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Return when an allocator gave its cache back to find room.

    Returns:
        gpu as in `devices`, elapsed_seconds and step of the last in a stretch of time, and their count.

    """
    table = _counted(snapshot, within, "alloc_retry_count").sort_values("time_ns")
    return table.assign(elapsed_seconds=within.elapsed(table["time_ns"]))


def _counted(snapshot: Queryable, within: Span, column: str) -> pd.DataFrame:
    """Return by how much a count of the allocators grew in stretches of the span, where it did."""
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
