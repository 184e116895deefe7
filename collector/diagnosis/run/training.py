"""The training time of a run: its first and last iteration, the step at each time, the teardown of processes."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import (
    ITERATIONS,
    SECOND_NS,
    between,
    by_process,
    floats,
    of_process,
    resident_bytes,
    sampled,
    seconds,
    whole,
    written,
)
from collector.diagnosis.run.tables import RunTables, once
from collector.diagnosis.statistics.growth import Floats
from collector.store import ProcessKey
from training_harness.records import ROLE_COLLECTOR

#: A teardown gives back at least this share of the memory that a process held.
_TEARDOWN_FALL_RATIO = 0.05
#: It lasts at most this share of the process's life, or `_TEARDOWN_LEAST_NS` if that is longer.
_TEARDOWN_LIFE_RATIO, _TEARDOWN_LEAST_NS = 0.1, 3e9
#: An interpreter frees at least this much per second, also where its objects lie scattered (5 GiB if they do not).
_FREED_BYTES_PER_SECOND = 2.0**29
#: Samples that a process needs for its teardown to be recognised.
_TEARDOWN_POINTS = 4
#: Time without an iteration after which training is over, in units of the longest pause between two iterations.
_OVER_PAUSES = 3.0


def own_steps(tables: RunTables, key: ProcessKey | None) -> pd.DataFrame:
    """Return the steps of a process: those that the run counts, else those by which it alone steps."""
    steps, others = written(tables, "step", key), tables.other_steps
    if key is None or len(steps) or others is None:
        return steps
    return tables.once(("other steps", key), lambda: of_process(others, key))


def step_at(tables: RunTables, key: ProcessKey | None, time_ns: float) -> int | None:
    """Return the step that the process was in at that time; None if it recorded no steps."""
    steps = own_steps(tables, key)
    if steps.empty or not np.isfinite(time_ns):
        return None
    position = int(np.searchsorted(floats(steps, "time_ns"), time_ns))
    return whole(steps["step"].iloc[min(position, len(steps) - 1)])


def step_numbers(tables: RunTables, where: ProcessKey | str, times_seconds: Floats) -> Floats:
    """Return the step that a process, or the host's training, was in at each time, with fractions.

    NaN without steps.
    """
    ends, numbers = _step_ends(tables, where)
    if not len(ends):
        return np.full(len(times_seconds), np.nan)
    steps: Floats = np.interp(times_seconds, ends, numbers)
    return steps


@once
def _step_ends(tables: RunTables, where: ProcessKey | str) -> tuple[Floats, Floats]:
    steps = tables.stream("step")
    rows = steps[steps["host"] == where] if isinstance(where, str) else own_steps(tables, where)
    return seconds(rows), floats(rows, "step")


def steps_within(tables: RunTables, key: ProcessKey | None, begin_ns: float, end_ns: float) -> float:
    """Return how many steps a process (or the run) took between two times, NaN if none is known."""
    steps = own_steps(tables, key)
    times, numbers = floats(steps, "time_ns"), floats(steps, "step")
    inside = numbers[(times >= begin_ns) & (times <= end_ns)]
    return float(np.ptp(inside)) or math.nan if len(inside) else math.nan


def iterations_within(tables: RunTables, key: ProcessKey | None, begin_ns: float, end_ns: float) -> int:
    """Return how many steps, or batches if they are more, a process (or the run) recorded between two times.

    An evaluation has batches, and no steps.
    """
    times = (floats(rows, "time_ns") for rows in _iterations(tables, key))
    return max(int(((of_stream >= begin_ns) & (of_stream <= end_ns)).sum()) for of_stream in times)


def training_start_ns(tables: RunTables, key: ProcessKey | None = None) -> float:
    """Return when the first batch or step of a process (or of the run) was recorded.

    Without any, as for a training that is watched from outside, it is the first sample. NaN if there is none.
    """
    first = [floats(rows, "time_ns")[0] for rows in _iterations(tables, key) if len(rows)]
    if not first:
        samples = tables.stream("process") if key is None else sampled(tables, key)
        first = list(floats(samples, "time_ns")[:1])
    return min(first, default=math.nan)


def iterates(tables: RunTables, key: ProcessKey | None) -> bool:
    """Return whether a process (or any of the run) recorded a batch or a step."""
    return any(map(len, _iterations(tables, key)))


def may_be_loading(tables: RunTables, key: ProcessKey | None = None) -> bool:
    """Return whether a process with hooks, or the run, may still load its data: no iteration of the run was seen.

    Hand-written updates without a module have backward passes, and no iterations to count.
    """
    has_begun = any(map(len, _iteration_times(tables))) or bool(tables.events_of("backward-pass"))
    return not has_begun and bool(tables.events_of("process-attached", by=key))


def _iterations(tables: RunTables, key: ProcessKey | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    return written(tables, "batch", key), own_steps(tables, key)


def _iteration_times(tables: RunTables) -> list[Floats]:
    """Return the times of the batches, of the steps that the run counts, and of steps of another kind, if any."""
    others = [] if tables.other_steps is None else [tables.other_steps]
    return [floats(rows, "time_ns") for rows in (*map(tables.stream, ITERATIONS), *others)]


@once
def training_end_ns(tables: RunTables) -> float:
    """Return when the last batch or step of any process was recorded; NaN if there is no sample either.

    Without any, it is the last sample before the processes gave back their memory (`before_teardown`). While the
    run goes on, it is the collector's next tick, which belongs to the step that is under way.
    """
    ends = [times[-1] for times in _iteration_times(tables) if len(times)]
    if not ends:
        process = tables.stream("process")
        process = process[floats(process, "role") != ROLE_COLLECTOR]
        lives = [before_teardown(rows) for _, rows in by_process(process)]
        ends = [floats(rows, "time_ns")[-1] for rows in lives if len(rows)]
    if not ends or not tables.goes_on:
        return max(ends, default=math.nan)
    ticks = floats(tables.stream("host"), "time_ns")
    return float(ticks[ticks > max(ends)].min(initial=math.inf))


def while_training(tables: RunTables, rows: pd.DataFrame, key: ProcessKey | None = None) -> pd.DataFrame:
    """Return the rows from the first batch or step (of a process, or of the run) to the run's last.

    Memory used before and after belongs to start-up and clean-up. Without batches and steps, return all rows up to
    `training_end_ns`.
    """
    return between(rows, training_start_ns(tables, key), training_end_ns(tables))


def while_running(tables: RunTables, key: ProcessKey) -> pd.DataFrame:
    """Return the samples of a process by which its memory is judged.

    A process that iterates is judged while it trains, any other one to its teardown: from its first sample, or from
    the time when it began to iterate and got no batch. Until then it imported modules and loaded its data.
    """
    rows = sampled(tables, key)
    if iterates(tables, key):
        return while_training(tables, rows, key)
    begun_ns = min((event["time_ns"] for event in tables.events_of("process-start", by=key)), default=0)
    return before_teardown(between(rows, begun_ns, math.inf))


def since_ready(tables: RunTables, key: ProcessKey, samples: pd.DataFrame) -> pd.DataFrame:
    """Return a worker's samples from the time it was ready. A spawned one imports modules before.

    All of them, if workers have no hooks and record nothing.
    """
    ready = {event["kind"]: event["time_ns"] for event in tables.events_of("worker-start", "worker-ready", by=key)}
    if not ready and not tables.events_of("worker-start") and len(tables.stream("batch")):
        return samples
    return between(samples, ready.get("worker-ready", math.inf), math.inf)


@once
def after_training_ns(tables: RunTables) -> tuple[float, float] | None:
    """Return the time of the run's last batch or step, and that of its last sample, if training is over then.

    What follows may be an export, or an evaluation without a DataLoader. None in a run with fewer than two
    iterations, and until the time without one is far longer than the pauses between them.
    """
    times = np.sort(np.concatenate(_iteration_times(tables)))
    samples = floats(tables.stream("process"), "time_ns")
    if len(times) < 2 or not len(samples):
        return None
    begin_ns, end_ns = float(times[-1]), float(samples[-1])
    is_over = end_ns - begin_ns > _OVER_PAUSES * float(np.diff(times).max())
    return (begin_ns, end_ns) if is_over else None


def after_training(tables: RunTables, key: ProcessKey) -> pd.DataFrame:
    """Return the samples of a process after the run's training and before its own teardown, if there are any."""
    rows, span = before_teardown(sampled(tables, key)), after_training_ns(tables)
    return rows[floats(rows, "time_ns") > (math.inf if span is None else span[0])]


def before_teardown(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of one process before it gave back its memory at the very end, if it has ended.

    An interpreter that exits frees its memory object by object, which takes seconds for some GiB. A level that
    falls for longer than that, and than `_TEARDOWN_LIFE_RATIO` of the process's life, is not a teardown.
    """
    samples = samples[floats(samples, "alive") != 0] if len(samples) else samples
    times, resident = floats(samples, "time_ns"), resident_bytes(samples)
    if len(samples) < _TEARDOWN_POINTS or not np.isfinite(resident).all():
        return samples
    rises = np.flatnonzero(np.diff(resident) > 0)
    begin = int(rises[-1]) + 1 if len(rises) else 0
    fall = resident[begin] - resident[-1]
    if fall < _TEARDOWN_FALL_RATIO * resident[begin]:
        return samples
    last_level = int(np.flatnonzero(resident >= resident[begin] - 0.05 * fall)[-1])
    freeing_ns = fall / _FREED_BYTES_PER_SECOND * SECOND_NS
    longest_ns = max(_TEARDOWN_LIFE_RATIO * float(np.ptp(times)), _TEARDOWN_LEAST_NS, freeing_ns)
    return samples.iloc[: last_level + 1] if times[-1] - times[last_level] <= longest_ns else samples
