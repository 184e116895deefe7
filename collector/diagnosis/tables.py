"""What the rules look at: one run, read at one moment, as plain tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.store.queries import Queryable
from collector.store.reader import Snapshot, read
from collector.store.runs import ProcessKey as ProcessKey
from collector.store.runs import Run, command_and_collector, living_processes
from collector.store.snapshots import Grown, grown_lines
from training_harness.records import IDENTITY, STREAMS, UNIT_BATCH, UNIT_OPTIMIZER

Found = TypeVar("Found")
#: The rules look at no more than about so many rows of each stream, so a verdict has a bounded cost.
ROWS_PER_STREAM = 100_000
#: What a run is made of: these events are few, and none is ever left out.
STRUCTURAL_EVENTS = (
    "process-start",
    "process-exit",
    "process-attached",
    "process-seen",
    "left-running",
    "loader",
    "exception",
    "worker-died",
    "cuda-oom",
    "cuda-device",
    "command-exit",
    "collector-start",
    "collector-stop",
    "hook-disabled",
    "records-lost",
)
#: The last part of a run is never thinned: what killed it shows there.
WHOLE_NS = 300_000_000_000
#: Streams that are thinned over the whole run, since its beginning tells of growth and of peaks: what one
#: series of samples is of, and what its largest sample is the largest of.
_THINNED = {
    # The proportional memory is read now and then, and tells more than the resident set of other ticks.
    "process": (
        ("host", "process_pid", "process_start_ticks"),
        "coalesce(pss_bytes + (1::BIGINT << 50), rss_bytes, 0)",
    ),
    "host": (
        ("host",),
        "coalesce(cgroup_anon_bytes + coalesce(cgroup_shmem_bytes, 0), "
        "memory_total_bytes - memory_available_bytes, 0)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """How many rows a stream has over the whole run, and the times of its first and last one (ns)."""

    rows_count: int
    first_ns: int | None
    last_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """One run.

    Attributes:
        manifest: run.json.
        events: every event, in order of time; each has time_ns, kind, host, pid, start_ticks, rank.
        streams: a table per stream of `records.STREAMS`, each with the stream's columns and those of
            `records.IDENTITY`, in order of time; missing values are NA. An absent stream is an empty
            table with the right columns. A long run is not there in full: see `load_tables`.
        living: the processes named in the manifest and the events that were alive at the moment of
            reading; None where that can't be known (the run is of another host or another boot).
        now_ns: CLOCK_MONOTONIC at the moment of reading; for a run of another boot, its last record.
        lost_count: records that writers could not write.
        totals: what the whole run holds of each stream.
        grown: what processes kept between two moments, by the lines that made it.
        problems: one line for each thing that could not be read; the tables lack it.

    """

    manifest: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    streams: Mapping[str, pd.DataFrame]
    living: frozenset[ProcessKey] | None
    now_ns: int
    lost_count: int = field(default=0)
    totals: Mapping[str, Total] = field(default_factory=dict)
    grown: Sequence[Grown] = ()
    problems: tuple[str, ...] = ()
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def goes_on(self) -> bool:
        """Return whether a process of the training was alive and part of the run; the collector outlives it."""
        collector = command_and_collector({"collector": self.manifest.get("collector")})
        detached = {_writer(event) for event in self.events_of("process-exit") if event.get("detached")}
        return bool(self.living and self.living - collector - detached)

    def once(self, what: Hashable, find: Callable[[], Found]) -> Found:
        """What many rules want of whole tables, looked for when the first of them asks."""
        if what not in self._found:
            self._found[what] = find()
        found: Found = self._found[what]
        return found

    def stream(self, name: str) -> pd.DataFrame:
        """The table of one stream."""
        return self.streams[name]

    def rows_count(self, name: str) -> int:
        """How many rows a stream has over the whole run, also where its table is not there in full."""
        return self.totals[name].rows_count if name in self.totals else len(self.streams[name])

    def events_of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The events of these kinds, in order of time."""
        return [event for event in self.events if event["kind"] in kinds]


def load_tables(run: Run) -> RunTables:
    """The tables of a run at this moment, from one snapshot.

    Of each stream there are the last `ROWS_PER_STREAM` rows. But `process` and `host` cover the whole run,
    thinned by time where there are more, with every process's end; and no structural event is left out.

    Raises:
        TidegaugeError: the run cannot be read.

    """
    manifest = run.manifest
    with read(run) as snapshot:
        events = _events(snapshot)
        totals = totals_of(snapshot, STREAMS)
        streams = {name: _stream(snapshot, name, totals[name]) for name in STREAMS if name != "step"}
        streams["step"], totals["step"] = _counted_steps(snapshot, totals["step"])
        now_ns, lost_count, problems = snapshot.now_ns, snapshot.lost_count, snapshot.problems
    grown, damaged = grown_lines(run, events)
    return RunTables(
        manifest=manifest,
        events=events,
        streams=streams,
        living=living_processes(run, command_and_collector(manifest).union(map(_writer, events), _left(events))),
        now_ns=now_ns,
        lost_count=lost_count,
        totals=totals,
        grown=grown,
        problems=(*problems, *damaged),
    )


def _counted_steps(snapshot: Snapshot, total: Total) -> tuple[pd.DataFrame, Total]:
    """Return the steps of the highest unit (`records.STEP_UNITS`) that the run has; the others are no steps of it.

    A process that only evaluates ends its steps by batches, beside one that steps an optimizer.
    """
    units = snapshot.query(
        f"SELECT {_UNIT} AS unit, count(*) AS n, min(time_ns) AS first_ns, max(time_ns) AS last_ns "
        'FROM "step" GROUP BY 1 ORDER BY 1 DESC'
    )
    if len(units) < 2:
        return _stream(snapshot, "step", total), total
    unit, n, first_ns, last_ns = map(int, units.iloc[0])
    columns = ", ".join(f'"{column.name}"' for column in (*STREAMS["step"].columns, *IDENTITY))
    newest = f'SELECT {columns} FROM "step" WHERE {_UNIT} = {unit} ORDER BY time_ns DESC LIMIT {ROWS_PER_STREAM}'
    rows = snapshot.query(f"FROM ({newest}) ORDER BY time_ns")
    return rows, Total(rows_count=n, first_ns=first_ns, last_ns=last_ns)


#: SQL for what ended a step, as `step_units` has it.
_UNIT = f"coalesce(unit, CASE WHEN optimizer_ns IS NULL THEN {UNIT_BATCH} ELSE {UNIT_OPTIMIZER} END)"


def step_units(steps: pd.DataFrame) -> npt.NDArray[np.float64]:
    """Return what ended each step; runs that do not say so ended it by an optimizer if one took time in it."""
    units = pd.to_numeric(steps["unit"]).to_numpy(dtype=np.float64, na_value=np.nan)
    optimized = pd.to_numeric(steps["optimizer_ns"]).notna().to_numpy()
    return np.where(np.isfinite(units), units, np.where(optimized, UNIT_OPTIMIZER, UNIT_BATCH))


def totals_of(snapshot: Queryable, names: Iterable[str]) -> dict[str, Total]:
    """What the whole run holds of some streams."""
    parts = [f"SELECT '{name}' AS name, n, first_ns, last_ns FROM {name}_reach" for name in names]
    found = snapshot.query(" UNION ALL ".join(parts))
    return {
        str(name): Total(rows_count=int(n), first_ns=_optional_int(lo), last_ns=_optional_int(hi))
        for name, n, lo, hi in found.itertuples(index=False)
    }


def _stream(snapshot: Snapshot, name: str, total: Total) -> pd.DataFrame:
    columns = ", ".join(f'"{column.name}"' for column in (*STREAMS[name].columns, *IDENTITY))
    if total.rows_count <= ROWS_PER_STREAM:
        source = f'"{name}"'
    elif name in _THINNED:
        source = f"({_thinned(snapshot, name, total)})"
    else:
        source = f'(FROM "{name}" WHERE time_ns >= {newest_since_ns(snapshot, name, total, ROWS_PER_STREAM)})'
    return snapshot.query(f"SELECT {columns} FROM {source} ORDER BY time_ns")


def newest_since_ns(snapshot: Queryable, name: str, total: Total, most: int) -> int:
    """The time of the oldest of the newest rows: looked for at the end, and further back while there are too few.

    Found by their times alone: sorting whole rows costs four times as much, and the rest of the stream is not read.
    """
    if total.rows_count <= most:
        return total.first_ns or 0
    for begin_ns in look_backs(total, most):
        newest = f'SELECT time_ns FROM "{name}" WHERE time_ns >= {begin_ns} ORDER BY time_ns DESC'
        found = snapshot.query(f"SELECT count(*) AS n, min(time_ns) AS ns FROM ({newest} LIMIT {most})").iloc[0]
        if found["n"] == most:
            break
    return int(found["ns"])


def look_backs(total: Total, most: int, *, from_ns: int | None = None) -> Iterator[int]:
    """From when on to look for so many of the newest rows: each time further back, at last to the first of all."""
    begun_ns, last_ns = total.first_ns or 0, total.last_ns or 0
    first_ns = begun_ns if from_ns is None else max(from_ns, begun_ns)
    back_ns = max(1, 2 * (last_ns - begun_ns) * most // max(total.rows_count, 1))
    while last_ns - back_ns > first_ns:
        yield last_ns - back_ns
        back_ns *= 4
    yield first_ns


def _thinned(snapshot: Snapshot, name: str, total: Total) -> str:
    """SQL for the part of a stream that keeps its shape.

    Of each series and piece of time, the largest sample stays. Of each piece of time, so does the tick in which
    the run's processes are largest together, of those in which one of them is at its largest: summing up all
    ticks would take memory in proportion to the run. And so do their ends, and the last part of the run.
    """
    of_series, use = _THINNED[name]
    series = ", ".join(of_series)
    tick_ns = snapshot.query(
        "SELECT sum(span) / sum(n) AS ns FROM (SELECT max(time_ns) - min(time_ns) AS span, "
        f'approx_count_distinct(time_ns) AS n FROM "{name}" GROUP BY host)'
    )["ns"][0]
    piece_ns = max(1, int(4 * tick_ns * total.rows_count / ROWS_PER_STREAM))
    largest = (
        f'SELECT {series}, arg_max(time_ns, {use}) AS time_ns FROM "{name}" '
        f"GROUP BY {series}, time_ns // {piece_ns}"
    )
    kept = f"time_ns >= {(total.last_ns or 0) - WHOLE_NS} OR {_among('FROM largest', *of_series, 'time_ns')}"
    if name == "process":
        together = (
            "SELECT host, arg_max(time_ns, used) AS time_ns "
            "FROM (SELECT host, time_ns, coalesce(sum(pss_bytes), 0) AS used FROM process "
            f"WHERE {_among('FROM largest', 'host', 'time_ns')} GROUP BY host, time_ns) "
            f"GROUP BY host, time_ns // {piece_ns}"
        )
        kept += f" OR {_among(together, 'host', 'time_ns')} OR alive = 0"
    return f'WITH largest AS MATERIALIZED ({largest}) FROM "{name}" WHERE {kept}'


def _among(found: str, *columns: str) -> str:
    """SQL: whether a row is among the found in these columns; as tuples they take several times as long to compare.

    Two with the same hash would keep a row too many.
    """
    key = f"hash({', '.join(columns)})"
    return f"{key} IN (SELECT {key} FROM ({found}))"


def _events(snapshot: Snapshot) -> list[dict[str, Any]]:
    structural = f"kind IN {STRUCTURAL_EVENTS}"
    found: list[dict[str, Any]] = snapshot.query(
        f"FROM (FROM event WHERE {structural} UNION ALL FROM (FROM event WHERE NOT {structural} "
        f"ORDER BY time_ns DESC LIMIT {ROWS_PER_STREAM})) ORDER BY time_ns"
    ).to_dict("records")  # type: ignore[assignment]
    return [{**json.loads(row.pop("body")), **row, "rank": _optional_int(row["rank"])} for row in found]


def _optional_int(value: float) -> int | None:
    return None if pd.isna(value) else int(value)


def _left(events: Iterable[Mapping[str, Any]]) -> Iterator[ProcessKey]:
    """Name the processes that the command left running."""
    for event in events:
        if event["kind"] == "left-running":
            for process in event["processes"]:
                yield event["host"], process["pid"], process["start_ticks"]


def _writer(event: Mapping[str, Any]) -> ProcessKey:
    return event["host"], event["pid"], event["start_ticks"]
