"""The input of the rules: one run, read at one moment, as plain tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.store import (
    ProcessGrowth,
    ProcessKey as ProcessKey,
    Run,
    Snapshot,
    command_and_collector,
    living_processes,
    read,
    read_growths,
)
from collector.store.queries import Queryable, Reach
from training_harness.events import EventKind
from training_harness.records import IDENTITY, STREAMS, UNIT_BATCH, UNIT_OPTIMIZER

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
#: Approximate number of rows of each stream that the rules read at most: it bounds the cost of a verdict.
ROWS_PER_STREAM = 100_000
#: Events that shape a run: they are few, and none is ever left out.
STRUCTURAL_EVENTS = (
    "process-start",
    "process-exit",
    "process-attached",
    "backward-pass",
    "process-seen",
    "left-running",
    "loader",
    "loads-ahead",
    "exception",
    "worker-died",
    "loader-error",
    "cuda-oom",
    "cuda-device",
    "command-exit",
    "collector-start",
    "collector-stop",
    "hook-disabled",
    "records-lost",
)
#: Length of the last part of a run, in ns, which is never thinned: the cause of a death shows there.
UNTHINNED_NS = 300_000_000_000
#: Streams that are thinned over the whole run, since its beginning shows growth and peaks -> the columns that
#: identify one series of samples, and SQL for the memory by which its samples are compared.
_THINNED = {
    # PSS is read only now and then, and says more than the RSS of other ticks: any sample with it counts as larger.
    "process": (
        ("host", "process_pid", "process_start_ticks"),
        "coalesce(pss_bytes + (1::BIGINT << 50), rss_bytes, 0)",
    ),
    "host": (
        ("host",),
        "coalesce(cgroup_anon_bytes + coalesce(cgroup_shmem_bytes, 0), "
        "memory_total_bytes - memory_available_bytes, 0)",
    ),
    "heap": (("host", "pid", "start_ticks"), "in_use_bytes"),
}
#: SQL for the unit that ended a step, as `step_units` computes it.
_UNIT = f"coalesce(unit, CASE WHEN optimizer_ns IS NULL THEN {UNIT_BATCH} ELSE {UNIT_OPTIMIZER} END)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """One run.

    Attributes:
        events: every event, in order of time; each has time_ns, kind, host, pid, start_ticks, rank.
        streams: a table per stream of `records.STREAMS`, each with the stream's columns and those of
            `records.IDENTITY`, in order of time; missing values are NA. An absent stream is an empty
            table with the right columns. A long run is not there in full: see `load_tables`.
        living: the processes named in the manifest and the events that were alive at the moment of
            reading; None where that can't be known (the run is of another host or another boot).
        now_ns: CLOCK_MONOTONIC at the moment of reading; for a run of another boot, its last record.
        lost_count: records that writers could not write.
        totals: the rows of each stream over the whole run.
        other_steps: time and number of the newest steps of a lower unit than those of the stream, such as the
            forward passes of an actor while a learner steps an optimizer; None without any.
        grown: allocations that processes made between two moments and still hold, by source line.
        problems: one line of text for each thing that could not be read; the tables lack it.
    """

    manifest: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    streams: Mapping[str, pd.DataFrame]
    living: frozenset[ProcessKey] | None
    now_ns: int
    lost_count: int = field(default=0)
    totals: Mapping[str, Reach] = field(default_factory=dict)
    other_steps: pd.DataFrame | None = None
    grown: Sequence[ProcessGrowth] = ()
    problems: tuple[str, ...] = ()
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def goes_on(self) -> bool:
        """Return whether a process of the training was alive and part of the run; the collector outlives it."""
        collector = command_and_collector({"collector": self.manifest.get("collector")})
        detached = {writer_of(event) for event in self.events_of("process-exit") if event.get("detached")}
        return bool(self.living and self.living - collector - detached)

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return a result that several rules need, computed when the first of them asks."""
        if key not in self._cache:
            self._cache[key] = compute()
        result: _Result = self._cache[key]
        return result

    def stream(self, name: str) -> pd.DataFrame:
        """Return the table of one stream."""
        return self.streams[name]

    def rows_count(self, name: str) -> int:
        """Return the number of rows of a stream over the whole run, including rows that its table lacks."""
        return self.totals[name].rows_count if name in self.totals else len(self.streams[name])

    def first_ns(self, name: str) -> float | None:
        """Return the time of a stream's first row over the whole run, None without rows."""
        if name in self.totals:
            return self.totals[name].first_ns
        return next(iter(self.streams[name]["time_ns"]), None)

    def events_of(self, *kinds: EventKind, by: ProcessKey | None = None) -> list[Mapping[str, Any]]:
        """Return the events of these kinds, in order of time; only those that one process wrote, if it is given."""
        events = (event for event in self.events if event["kind"] in kinds)
        return [event for event in events if by is None or writer_of(event) == by]


def once(
    compute: Callable[Concatenate[RunTables, _Arguments], _Result],
) -> Callable[Concatenate[RunTables, _Arguments], _Result]:
    """Make a function of a run's tables compute each result once, since several rules ask for it."""

    @functools.wraps(compute)
    def cached(tables: RunTables, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return tables.once((compute, args, *kwargs.items()), lambda: compute(tables, *args, **kwargs))

    return cached


def load_tables(run: Run) -> RunTables:
    """Read the tables of a run as it is now, in one read session.

    A table has the last `ROWS_PER_STREAM` rows of its stream. But `process`, `host` and `heap` cover the whole run:
    where there are more rows they are thinned by time, and every process's end stays. No structural event is left
    out.

    Raises:
        TidegaugeError: the run cannot be read.
    """
    manifest = run.manifest
    with read(run) as snapshot:
        events = _events(snapshot)
        totals = totals_of(snapshot, STREAMS)
        streams = {name: _stream(snapshot, name, totals[name]) for name in STREAMS if name != "step"}
        streams["step"], totals["step"], other_steps = _counted_steps(snapshot, totals["step"])
        now_ns, lost_count, problems = snapshot.now_ns, snapshot.lost_count, snapshot.problems
    grown, damaged = read_growths(run, events)
    left = {
        (event["host"], process["pid"], process["start_ticks"])
        for event in events
        if event["kind"] == "left-running"
        for process in event["processes"]
    }
    return RunTables(
        manifest=manifest,
        events=events,
        streams=streams,
        living=living_processes(run, command_and_collector(manifest).union(map(writer_of, events), left)),
        now_ns=now_ns,
        lost_count=lost_count,
        totals=totals,
        other_steps=other_steps,
        grown=grown,
        problems=(*problems, *damaged),
    )


def _counted_steps(snapshot: Snapshot, total: Reach) -> tuple[pd.DataFrame, Reach, pd.DataFrame | None]:
    """Return the steps of the highest unit (`records.STEP_UNITS`) in the run, their total, and the other ones.

    The others are not steps of the run: a process that only evaluates ends its steps by batches, while another one
    steps an optimizer.
    """
    units = snapshot.query(
        f"SELECT {_UNIT} AS unit, count(*) AS n, min(time_ns) AS first_ns, max(time_ns) AS last_ns "
        'FROM "step" GROUP BY 1 ORDER BY 1 DESC'
    )
    if len(units) < 2:
        return _stream(snapshot, "step", total), total, None
    unit, n, first_ns, last_ns = map(int, units.iloc[0])
    few = ", ".join(f'"{column.name}"' for column in IDENTITY) + ", time_ns, step"
    newest = f'FROM "step" WHERE {_UNIT} {{}} {unit} ORDER BY time_ns DESC LIMIT {ROWS_PER_STREAM}'
    rows, others = (
        snapshot.query(f"SELECT {names} FROM ({newest.format(sign)}) ORDER BY time_ns")
        for names, sign in ((columns_sql("step"), "="), (few, "<"))
    )
    return rows, Reach(rows_count=n, first_ns=first_ns, last_ns=last_ns), others


def step_units(steps: pd.DataFrame) -> npt.NDArray[np.float64]:
    """Return the unit that ended each step, a place in `records.STEP_UNITS`.

    Older runs did not record it: there a step ended with the optimizer's step if the optimizer took time in it.
    """
    units = pd.to_numeric(steps["unit"]).to_numpy(dtype=np.float64, na_value=np.nan)
    optimized = pd.to_numeric(steps["optimizer_ns"]).notna().to_numpy()
    return np.where(np.isfinite(units), units, np.where(optimized, UNIT_OPTIMIZER, UNIT_BATCH))


def totals_of(snapshot: Queryable, names: Iterable[str]) -> dict[str, Reach]:
    """Return the totals of some streams over the whole run."""
    parts = [f"SELECT '{name}' AS name, n, first_ns, last_ns FROM {name}_reach" for name in names]
    totals = snapshot.query(" UNION ALL ".join(parts))
    return {
        str(name): Reach(rows_count=int(n), first_ns=_optional_int(first_ns), last_ns=_optional_int(last_ns))
        for name, n, first_ns, last_ns in totals.itertuples(index=False)
    }


def _stream(snapshot: Snapshot, name: str, total: Reach) -> pd.DataFrame:
    if total.rows_count <= ROWS_PER_STREAM:
        source = f'"{name}"'
    elif name in _THINNED:
        source = f"({_thinned(snapshot, name, total)})"
    else:
        source = f'(FROM "{name}" WHERE time_ns >= {newest_since_ns(snapshot, name, total, ROWS_PER_STREAM)})'
    return snapshot.query(f"SELECT {columns_sql(name)} FROM {source} ORDER BY time_ns")


def columns_sql(name: str) -> str:
    """Return SQL for the columns of a stream, with those that identify the process that wrote a record."""
    return ", ".join(f'"{column.name}"' for column in (*STREAMS[name].columns, *IDENTITY))


def newest_since_ns(snapshot: Queryable, name: str, total: Reach, most: int) -> int:
    """Return the time of the oldest of the `most` newest rows.

    The search begins at the end of the stream and goes further back while there are too few rows. It reads times
    alone: sorting whole rows costs four times as much, and the rest of the stream is not read.
    """
    if total.rows_count <= most:
        return total.first_ns or 0
    for begin_ns in look_backs(total, most):
        newest = f'SELECT time_ns FROM "{name}" WHERE time_ns >= {begin_ns} ORDER BY time_ns DESC'
        oldest = snapshot.query(f"SELECT count(*) AS n, min(time_ns) AS ns FROM ({newest} LIMIT {most})").iloc[0]
        if oldest["n"] == most:
            break
    return int(oldest["ns"])


def look_backs(total: Reach, most: int, *, from_ns: int | None = None) -> Iterator[int]:
    """Yield begins of the searches for the `most` newest rows, each further back, the last one at the first row."""
    stream_begin_ns, last_ns = total.first_ns or 0, total.last_ns or 0
    first_ns = stream_begin_ns if from_ns is None else max(from_ns, stream_begin_ns)
    back_ns = max(1, 2 * (last_ns - stream_begin_ns) * most // max(total.rows_count, 1))
    while last_ns - back_ns > first_ns:
        yield last_ns - back_ns
        back_ns *= 4
    yield first_ns


def _thinned(snapshot: Snapshot, name: str, total: Reach) -> str:
    """Return SQL for a subset of the rows that preserves the shape of a stream.

    The subset has the largest sample of each series in each bucket of time. For `process`, it also has one tick per
    bucket and host: among the ticks of these largest samples, the one with the highest sum over the processes.
    Summing all ticks would take memory in proportion to the run. The ends of processes stay too, and the last part
    of the run.
    """
    series_columns, use = _THINNED[name]
    series = ", ".join(series_columns)
    tick_ns = snapshot.query(
        "SELECT sum(span) / sum(n) AS ns FROM (SELECT max(time_ns) - min(time_ns) AS span, "
        f'approx_count_distinct(time_ns) AS n FROM "{name}" GROUP BY host)'
    )["ns"][0]
    bucket_ns = max(1, int(4 * tick_ns * total.rows_count / ROWS_PER_STREAM))
    largest = (
        f'SELECT {series}, arg_max(time_ns, {use}) AS time_ns FROM "{name}" '
        f"GROUP BY {series}, time_ns // {bucket_ns}"
    )
    end_ns = (total.last_ns or 0) - UNTHINNED_NS
    condition = f"time_ns >= {end_ns} OR {_among('FROM largest', *series_columns, 'time_ns')}"
    if name == "process":
        fullest_ticks = (
            "SELECT host, arg_max(time_ns, used) AS time_ns "
            "FROM (SELECT host, time_ns, coalesce(sum(pss_bytes), 0) AS used FROM process "
            f"WHERE {_among('FROM largest', 'host', 'time_ns')} GROUP BY host, time_ns) "
            f"GROUP BY host, time_ns // {bucket_ns}"
        )
        condition += f" OR {_among(fullest_ticks, 'host', 'time_ns')} OR alive = 0"
    return f'WITH largest AS MATERIALIZED ({largest}) FROM "{name}" WHERE {condition}'


def _among(query: str, *columns: str) -> str:
    """Return SQL that is true for rows that equal a row of the query in these columns.

    It compares hashes, since tuples take several times as long. A collision would let one more row through.
    """
    key = f"hash({', '.join(columns)})"
    return f"{key} IN (SELECT {key} FROM ({query}))"


def _events(snapshot: Snapshot) -> list[dict[str, Any]]:
    structural = f"kind IN {STRUCTURAL_EVENTS}"
    return as_events(
        snapshot.query(
            f"FROM (FROM event WHERE {structural} UNION ALL FROM (FROM event WHERE NOT {structural} "
            f"ORDER BY time_ns DESC LIMIT {ROWS_PER_STREAM})) ORDER BY time_ns"
        )
    )


def as_events(events: pd.DataFrame) -> list[dict[str, Any]]:
    """Return events as rules take them, from rows of the table `event`."""
    rows: list[dict[str, Any]] = events.to_dict("records")  # type: ignore[assignment]
    return [{**json.loads(row.pop("body")), **row, "rank": _optional_int(row["rank"])} for row in rows]


def _optional_int(value: float) -> int | None:
    return None if pd.isna(value) else int(value)


def writer_of(event: Mapping[str, Any]) -> ProcessKey:
    """Return the process that wrote an event; a line of a log without it is damaged, and no event."""
    return event["host"], event["pid"], event["start_ticks"]
