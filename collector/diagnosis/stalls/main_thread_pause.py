"""Pauses of the training thread: checkpoints, code compiled again, regular long steps, time between epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.loading.child_processes import cpu_spent_ns, living_children
from collector.diagnosis.loading.core_waits import queued_ratio
from collector.diagnosis.loading.uneven_ranks import batches_meanwhile, records_within
from collector.diagnosis.run.columns import (
    ITERATIONS,
    SECOND_NS,
    floats,
    median,
    sampled,
    sampled_on,
    whole,
    written,
)
from collector.diagnosis.run.compilations import recompilations_of
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import step_at
from collector.diagnosis.stalls.cost import Loss
from collector.diagnosis.statistics.growth import Floats, spread
from collector.findings import Finding, Locus, advise, extended, fact, measurements
from collector.store import ProcessKey
from collector.units import count, counted, duration, listed, percent
from training_harness.records import ROLE_WORKER

_PHASES = ("h2d", "forward", "backward", "optimizer", "other")
_FIRST_STEPS = 10  # left out for lazy initialisation, compilation and autotuning
_MIN_PAUSES = 4
_NOISE_SPREADS = 8.0  # a pause takes this many spreads longer than the usual step, and at least half a step
_MOST_PAUSES = 0.2  # share of the steps; pauses are 5 steps apart or more, else they are the usual step
#: Steps of a training among which pauses can be found.
LEAST_STEPS = _FIRST_STEPS + round(_MIN_PAUSES / _MOST_PAUSES)
_LEAST_PAUSE = 0.25  # share of the length from which on pauses take half of the time of all
_REGULAR = 0.8  # share of the distances that must be the median one, give or take a tenth, or a multiple of it
_ONE_PHASE = 0.7  # share of the pauses' excess time that must lie in one phase
_ODD_PHASE = 2.0  # times a phase's share of the usual step: waits for a core fall on all phases alike
_LEAST_LOST = 0.02  # lower than for a wait, since a regular pause stands out from noise
_LESS_SAVING = "Save checkpoints less often, or in the background (torch.distributed.checkpoint.async_save)"
_OVER_RATIO = 0.5  # share of the steps by which the last compilation was, if they are over
_GAVE_UP = "Then torch's limit was met, and calls that no version fits run uncompiled. "
_VARYING_SIZES = (
    "Compile for sizes that vary: torch.compile(…, dynamic=True) or torch._dynamo.mark_dynamic(tensor, dimension); "
    "or pad batches to a few sizes. Torch's reason: {}"
)
_VARYING_VALUE = (
    "Keep the value that changes out of the compiled function, or pass it as a tensor. Torch's reason: {}"
)
_LESS_EVERY = (
    "Look at what the loop does every {distance} steps: garbage collection (gc.freeze() after set-up, and fewer "
    "live objects), logging, plotting, saving a checkpoint, .item() or .cpu() on the device; do it less often, or "
    "in another thread or process"
)
_SEEN_RATIO = 0.8  # share of the time in saves: with less in steps that have an event, most saves have none
_LIKE_SAVES = 0.5, 1.25  # cost of pauses that may be these saves, as multiples of the time that is not seen
_WAITING_RATIO = 0.1  # a thread that computes for less of its pauses waits for something
_MOSTLY_WAITS = 0.7  # share of the samples of a thread within its pauses
_LESS_WAITING = (
    "Find what the training waits for every {distance} steps, such as {what}: `tidegauge run --investigate` names "
    "the line. Begin that work earlier, so that it goes on during the steps"
)
_MIN_BETWEEN = 2  # stretches between epochs
_LEAST_BETWEEN = 0.1  # share of the run from which on they are named
_LESS_BETWEEN = (
    "Look at what the script does between its epochs, such as evaluating, saving, plotting or making the dataset "
    "again: `tidegauge run --investigate -- COMMAND` names the line. Do it less often, or in another process while "
    "the next epoch goes on"
)
#: The same, if another rank gets batches meanwhile.
_SHARE_BETWEEN = (
    "Let all ranks share what one of them does alone between the epochs: for an evaluation, give its loader a "
    "DistributedSampler, and add up the results of the ranks (all_reduce). Or do it less often"
)


def find_pauses(tables: RunTables) -> list[Finding]:
    """Find a `main-thread-pause` of each training process, but not of ranks that only wait for another one's."""
    mains = lifecycle_of(tables).mains
    findings = [finding for main in mains for finding in _pauses(tables, main)]
    pauses = [finding for finding in findings if finding.locus.stage != "backward"] or findings
    without_saves = any(finding.value_of("saving_count") for finding in pauses)
    between = [f for main in mains for f in _between_epochs(tables, main, without_saves=without_saves)]
    # One rank works then, and the others wait for it.
    return [*pauses, *sorted(between, key=lambda finding: -(finding.value_of("pause_cpu_ratio") or 0.0))[:1]]


def _pauses(tables: RunTables, main: ProcessKey) -> list[Finding]:
    """Find pauses of a training process; a save in another thread does not lengthen its step, and is none."""
    recompilations, (steps, work) = _recompilations(tables, main), _timed_steps(tables, main)
    if len(steps) < _MIN_PAUSES / _MOST_PAUSES:
        return recompilations
    events = tables.events_of("checkpoint", by=main)
    saving = np.minimum(_saved_ns(events, steps), np.maximum(work - float(np.median(work)), 0.0))
    seen_seconds = float(saving.sum()) / SECOND_NS
    frequent = _frequent_saves(tables, steps, events, seen_seconds, main)
    saves = frequent or _saves(tables, steps, saving, main)
    rest = steps.assign(other_ns=np.maximum(floats(steps, "other_ns") - saving, 0.0))
    others = _regular_pauses(tables, rest, work - saving, main, has_save=saving > 0)
    if frequent:  # saves without an event may show as pauses of the same cost
        unseen_seconds = (frequent[0].value_of("lost_seconds") or 0.0) - seen_seconds
        low, high = (ratio * unseen_seconds for ratio in _LIKE_SAVES)
        others = [finding for finding in others if not low <= (finding.value_of("lost_seconds") or 0.0) <= high]
    elif saves:
        others = [
            extended(finding, "The time that it saves a checkpoint is not part of that.") for finding in others
        ]
    return [*recompilations, *saves, *others]


def _timed_steps(tables: RunTables, main: ProcessKey) -> tuple[pd.DataFrame, Floats]:
    """Return the steps of a process after its first ones, and the time of each without its wait for data (ns)."""
    steps = written(tables, "step", main).iloc[_FIRST_STEPS:]
    work = floats(steps, "duration_ns") - np.nan_to_num(floats(steps, "data_wait_ns"))
    return steps[np.isfinite(work)], work[np.isfinite(work)]


def _saved_ns(events: Sequence[Mapping[str, Any]], steps: pd.DataFrame) -> Floats:
    """Return how long each step was in `torch.save`: an event counts all files since the event before."""
    spent = [max(event["time_ns"] - event["begun_ns"], event.get("saves_ns") or 0) for event in events]
    return _sums_in(events, spent, steps)


def _frequent_saves(
    tables: RunTables,
    steps: pd.DataFrame,
    saves: Sequence[Mapping[str, Any]],
    seen_seconds: float,
    main: ProcessKey,
) -> list[Finding]:
    """Find the time in `torch.save` of saves that follow each other within a second, at each step, say.

    Then most have no event, and little of their time is `seen_seconds`: steps longer than usual that have one.
    """
    in_steps = _steps_of(saves, steps)[1]  # those between epochs are not a step's
    # The first event may sum up saves from before these steps.
    events = [event for event, is_in in zip(saves, in_steps, strict=True) if is_in][1:]
    n, spent_ns = (sum(event.get(name) or 0 for event in events) for name in ("saves_count", "saves_ns"))
    seconds = spent_ns / SECOND_NS
    if n < max(_MIN_PAUSES, 2 * len(events)) or seen_seconds >= _SEEN_RATIO * seconds:
        return []
    first = min(int(np.searchsorted(floats(steps, "time_ns"), events[0]["time_ns"])), len(steps) - 1)
    what = f"The training saves {count(n)} files with torch.save, {duration(seconds / n)} each on average"
    return _cost_of_saves(tables, steps, what, n, seconds, first, _locus(steps, main, "other"))


def _saves(tables: RunTables, steps: pd.DataFrame, saving: Floats, main: ProcessKey) -> list[Finding]:
    """Find the time of the steps in `torch.save` (ns), at any distance."""
    at = np.flatnonzero(saving)
    if len(at) < _MIN_PAUSES:
        return []
    seconds = float(saving.sum()) / SECOND_NS
    lengths = dict.fromkeys(duration(float(value) / SECOND_NS) for value in (saving[at].min(), saving[at].max()))
    what = f"The training pauses {count(len(at))} times while it saves a checkpoint, for {' to '.join(lengths)}"
    locus = _locus(steps, main, _phase(steps, at, seconds)[0])
    return _cost_of_saves(tables, steps, what, len(at), seconds, int(at[0]), locus)


def _cost_of_saves(
    tables: RunTables, steps: pd.DataFrame, what: str, n: int, seconds: float, first: int, locus: Locus
) -> list[Finding]:
    """Return a finding for `n` saves that took some seconds, from the step at place `first` on, if that matters."""
    times = floats(steps, "time_ns")
    loss = Loss.of(tables, seconds, n, (times[0], times[-1]))
    if loss.ratio < _LEAST_LOST:
        return []
    return [
        Finding(
            kind="main-thread-pause",
            severity=loss.severity,
            confidence=loss.confidence(_MIN_PAUSES),
            summary=f"{what}. {loss.words}",
            locus=locus,
            since_step=whole(steps["step"].iloc[first]),
            evidence=loss.evidence(pause_seconds=seconds / n, saving_count=n),
            advice=advise(text=_LESS_SAVING, expected=f"up to {percent(loss.ratio)} less time"),
        )
    ]


def _recompilations(tables: RunTables, main: ProcessKey) -> list[Finding]:
    """Find the time in which torch.compile compiles functions again, from the end of the first step on."""
    steps = written(tables, "step", main)
    times = floats(steps, "time_ns")
    again = recompilations_of(tables, main, times[0], times[-1]) if len(times) else None
    if again is None:
        return []
    loss = Loss.of(tables, again.seconds, again.count, (times[0], times[-1]))
    # One more size costs a compilation for each part of a function between its graph breaks.
    if again.function_count < _MIN_PAUSES or (loss.ratio < _LEAST_LOST and not again.gave_up):
        return []
    at = np.searchsorted(times, [again.first_ns, again.last_ns])
    first, last = steps["step"].iloc[at]
    is_over = at[1] < _OVER_RATIO * len(times)
    advice = _VARYING_SIZES if "size mismatch" in again.condition else _VARYING_VALUE
    return [
        Finding(
            kind="main-thread-pause",
            severity="info" if is_over else loss.severity,
            confidence=loss.confidence(_MIN_PAUSES),
            summary=f"torch.compile compiles code again and again: {counted(again.count, 'time')}, "
            f"{duration(again.seconds / again.count)} each, last in step {count(last)}; most often, "
            f"{counted(again.function_count, 'time')}, {again.function}. "
            f"{_GAVE_UP if again.gave_up else ''}{loss.words}",
            locus=_locus(steps, main, "forward"),
            since_step=whole(first),
            evidence=(
                *loss.evidence(pause_seconds=again.seconds / again.count, compilation_count=again.count),
                fact("failed_condition", again.condition, loss.window),
            ),
            advice=advise(text=advice.format(again.condition), expected=f"up to {percent(loss.ratio)} less time"),
        )
    ]


def _regular_pauses(
    tables: RunTables, steps: pd.DataFrame, work: Floats, main: ProcessKey, *, has_save: npt.NDArray[np.bool_]
) -> list[Finding]:
    """Find pauses at regular distances; `work` and `other_ns` are without the time of saves.

    They are sought in the whole steps, else in the time outside forward, backward and optimizer alone: steps that
    other programs make longer at random would hide them. That time counts as far as the step is longer with it.
    """
    outside = np.nan_to_num(floats(steps, "other_ns"))
    outside = np.minimum(outside, work - float(np.median(work)) + float(np.median(outside)))
    found = (_pauses_in(tables, steps, work, lengths, main, has_save=has_save) for lengths in (work, outside))
    return next(filter(None, found), [])


def _pauses_in(
    tables: RunTables,
    steps: pd.DataFrame,
    work: Floats,
    lengths: Floats,
    main: ProcessKey,
    *,
    has_save: npt.NDArray[np.bool_],
) -> list[Finding]:
    """Find regular pauses in the steps or in a part of each.

    The CPU time and the samples of a step are those of its save too, and do not show whether the rest waits.
    """
    usual, starts = float(np.median(work)), _has_epoch_start(tables, steps, main)
    at = _long_steps(tables, steps, lengths, 0.5 * usual, main, starts)
    if not _MIN_PAUSES <= len(at) <= _MOST_PAUSES * len(steps):
        return []
    distance = float(np.median(np.diff(at)))
    regular = _regular_ratio(at, distance, starts)
    seconds = float((lengths[at] - np.median(lengths)).sum()) / SECOND_NS
    times = floats(steps, "time_ns")
    loss = Loss.of(tables, seconds, len(at), (times[0], times[-1]))
    phase, share = _phase(steps, at, seconds)
    if regular < _REGULAR or share < _ONE_PHASE or loss.ratio < _LEAST_LOST or distance < 1 / _MOST_PAUSES:
        return []
    usual_share = float(np.median(np.nan_to_num(floats(steps, f"{phase}_ns")))) / max(usual, 1.0)
    queued_ns = queued_ratio(tables, main, times[0], times[-1])[0] * (times[-1] - times[0])
    if queued_ns >= seconds * SECOND_NS and share < _ODD_PHASE * usual_share:
        return []  # the process waited for a core
    pause_seconds, every = seconds / len(at), count(distance)
    shows_waits = phase == "other" and not has_save[at].any()
    cpu_ratio = _cpu_ratio(steps.iloc[at]) if shows_waits else None
    waiting, advice = "", _LESS_EVERY.format(distance=every)
    waits = _waits_in(tables, main, steps.iloc[at]) if shows_waits else np.array([], dtype=bool)
    if cpu_ratio is not None and cpu_ratio < _WAITING_RATIO:
        waiting = f"Its thread waits then: it computes for {percent(cpu_ratio)} of a pause. "
    elif cpu_ratio is None and len(waits) >= _MIN_PAUSES and waits.mean() >= _MOSTLY_WAITS:
        waiting = f"Its thread waits then, in {waits.sum()} of {counted(len(waits), 'sample')}. "
    if waiting:
        has_children = _children_seconds(tables, main, times) >= _WAITING_RATIO * seconds
        what = "its child processes, which compute" if has_children else "a file, the network, a thread, or a sleep"
        advice = _LESS_WAITING.format(distance=every, what=what)
    return [
        Finding(
            kind="main-thread-pause",
            severity=loss.severity,
            confidence=loss.confidence(_MIN_PAUSES),
            summary=f"Every {every} steps training pauses for {duration(pause_seconds)} (phase {phase}; a step "
            f"takes {duration(usual / 1e9)} without data wait). {waiting}{loss.words}",
            locus=_locus(steps, main, phase),
            since_step=whole(steps["step"].iloc[at[0]]),
            evidence=(
                *loss.evidence(pause_seconds=pause_seconds, pause_distance_count=distance),
                *measurements(len(at) - 1, loss.window, regular_ratio=regular),
                *measurements(len(steps) - len(at), loss.window, usual_step_seconds=usual / SECOND_NS),
                *(measurements(len(at), loss.window, pause_cpu_ratio=cpu_ratio) if cpu_ratio is not None else ()),
            ),
            advice=advise(text=advice, expected=f"up to {percent(loss.ratio)} less time"),
        )
    ]


def _between_epochs(tables: RunTables, main: ProcessKey, *, without_saves: bool) -> list[Finding]:
    """Find the time from the last step or batch of an epoch to the start of the next one of any loader.

    The last batch may be at work for as long as a step usually is, and the end of the epoch's workers has a cost of
    its own; so have saves, if they are found. The rest may be an evaluation without a DataLoader, so it is
    information.
    """
    steps, work = _timed_steps(tables, main)
    times = [floats(written(tables, name, main), "time_ns") for name in ITERATIONS]
    times.append(np.array([event["time_ns"] for event in tables.events_of("workers-ended", by=main)], dtype=float))
    known = np.sort(np.concatenate(times))
    ends = _epoch_starts(tables, main)
    ends = ends[ends > known[:1].min(initial=np.inf)]
    if len(steps) < _MIN_PAUSES / _MOST_PAUSES or not len(ends):
        return []
    begins, places = np.unique(known[np.searchsorted(known, ends, side="right") - 1], return_index=True)
    ends, usual = ends[places], float(np.median(work))  # loaders that are iterated together start together
    lengths = ends - begins - usual
    saves = tables.events_of("checkpoint", by=main) if without_saves else []
    stretches = pd.DataFrame({"time_ns": ends, "duration_ns": ends - begins})
    lengths = np.maximum(lengths - (ns_in(saves, stretches) if saves else 0.0), 0.0)
    is_long = lengths >= _LEAST_PAUSE * _most_time(lengths)
    begins, ends, lengths = begins[is_long], ends[is_long], lengths[is_long]
    seconds = float(lengths.sum()) / SECOND_NS
    loss = Loss.of(tables, seconds, len(lengths), (known[0], known[-1]))
    if len(lengths) < _MIN_BETWEEN or loss.ratio < _LEAST_BETWEEN:
        return []
    pause_seconds, cores = median(lengths) / SECOND_NS, _cores_in(sampled(tables, main), begins, ends)
    waiting, advice = "", _LESS_BETWEEN
    if cores is not None and cores < _WAITING_RATIO:
        waits_for_children = _children_cores(tables, main, begins, ends) >= _WAITING_RATIO
        waiting = f"Its process waits then{', while its child processes compute' if waits_for_children else ''}. "
        others = (key for key in lifecycle_of(tables).mains if key != main)
        # A rank that makes more than its last step then has more batches in its epoch.
        is_ahead = all(records_within(written(tables, "step", key), begins + usual, ends).empty for key in others)
        if is_ahead and (busy := batches_meanwhile(tables, main, begins, ends, with_training=False)):
            waiting, advice = f"Its process waits then, and meanwhile {listed(busy)}. ", _SHARE_BETWEEN
    return [
        Finding(
            kind="main-thread-pause",
            severity="info",
            confidence=loss.confidence(_MIN_BETWEEN),
            summary=f"Between its epochs the training makes no step and takes no batch for "
            f"{duration(pause_seconds)}, {count(len(lengths))} times. {waiting}That takes {duration(seconds)}, "
            f"{percent(loss.ratio)} of the run.",
            locus=_locus(steps, main, "other"),
            since_step=step_at(tables, main, begins[0]),
            evidence=(
                *loss.evidence(pause_seconds=pause_seconds, usual_step_seconds=usual / SECOND_NS),
                *(measurements(len(lengths), loss.window, pause_cpu_ratio=cores) if cores is not None else ()),
            ),
            advice=advise(text=advice, expected=f"up to {percent(loss.ratio)} less time"),
        )
    ]


def _children_cores(tables: RunTables, main: ProcessKey, begins: Floats, ends: Floats) -> float:
    """Return the cores that the child processes of a training which load no batches used in these stretches."""
    rows = sampled_on(tables, main[0])
    rows = rows[rows["process_pid"].isin(living_children(tables, main[0], main[1]))]
    spent_ns = sum(cpu_spent_ns(rows, begin, end) for begin, end in zip(begins, ends, strict=True))
    return spent_ns / float((ends - begins).sum())


def _epoch_starts(tables: RunTables, main: ProcessKey) -> Floats:
    """Return when each epoch of any loader started (ns): its iterator, or without workers the wait for a batch."""
    batches = written(tables, "batch", main)
    firsts = batches[floats(batches, "index") == 0]
    starts = {
        (event["loader"], event["epoch"]): float(event["begun_ns"])
        for event in tables.events_of("epoch-start", by=main)
        if event.get("begun_ns") is not None
    }
    asked = floats(firsts, "time_ns") - floats(firsts, "wait_ns")
    epochs = zip(firsts["loader"], firsts["epoch"], asked, strict=True)
    return np.sort(np.array([starts.get((loader, epoch), at) for loader, epoch, at in epochs], dtype=np.float64))


def _cores_in(samples: pd.DataFrame, begins: Floats, ends: Floats) -> float | None:
    """Return the cores that a process used in these stretches, by the samples around their bounds, if known."""
    times, cpu = floats(samples, "time_ns"), floats(samples, "cpu_ns")
    known = np.isfinite(cpu)
    if known.sum() < 2 or median(ends - begins) < 2 * float(np.median(np.diff(times[known]))):
        return None
    at_begins, at_ends = (np.interp(bounds, times[known], cpu[known]) for bounds in (begins, ends))
    return float((at_ends - at_begins).sum() / (ends - begins).sum())


def _cpu_ratio(pauses: pd.DataFrame) -> float | None:
    """Return the share of the time outside forward, backward and optimizer that the thread computed, if known."""
    outside, cpu = floats(pauses, "other_ns"), floats(pauses, "outside_cpu_ns")
    known = np.isfinite(cpu)
    return float(cpu[known].sum() / max(outside[known].sum(), 1.0)) if known.any() else None


def _waits_in(tables: RunTables, main: ProcessKey, pauses: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return for each sample of the training thread within these pauses whether it waited, by its wait channel."""
    samples, ends = sampled(tables, main), floats(pauses, "time_ns")
    begins, times = ends - floats(pauses, "duration_ns"), floats(samples, "time_ns")
    place = np.searchsorted(begins, times, side="right") - 1
    inside = (place >= 0) & (times < (begins + floats(pauses, "other_ns"))[place])
    waits: npt.NDArray[np.bool_] = samples.loc[inside, "wait_channel"].notna().to_numpy()
    return waits


def _children_seconds(tables: RunTables, main: ProcessKey, times: Floats) -> float:
    """Return the CPU time of the process's children that load no batches, while it made these steps."""
    rows = sampled_on(tables, main[0])
    rows = rows[(floats(rows, "parent_pid") == main[1]) & (floats(rows, "role") != ROLE_WORKER)]
    return cpu_spent_ns(rows, times[0], times[-1]) / SECOND_NS


def _locus(steps: pd.DataFrame, main: ProcessKey, phase: str) -> Locus:
    return Locus(host=main[0], rank=whole(steps["rank"].iloc[-1]), role="main", pid=main[1], stage=phase)


def _regular_ratio(at: npt.NDArray[np.intp], distance: float, is_left_out: npt.NDArray[np.bool_]) -> float:
    """Return the share of the distances that are the usual one, or a multiple with steps left out in between."""
    gaps, left_out = np.diff(at), np.diff(np.cumsum(is_left_out)[at])
    multiples = np.maximum(np.rint(gaps / distance), 1.0)
    is_regular = (np.abs(gaps - multiples * distance) <= max(0.1 * distance, 1.0)) & (multiples <= 1 + left_out)
    return float(np.mean(is_regular))


def _long_steps(
    tables: RunTables,
    steps: pd.DataFrame,
    lengths: Floats,
    least_excess: float,
    main: ProcessKey,
    is_left_out: npt.NDArray[np.bool_],
) -> npt.NDArray[np.intp]:
    """Return the places of steps of which this part takes far longer than usual, for no reason that is known."""
    usual = float(np.median(lengths))
    is_pause = lengths > usual + max(_NOISE_SPREADS * spread(lengths), least_excess)
    # More passes of the model than usual are a rollout or an evaluation, and no pause.
    passes = floats(steps, "passes_count")
    is_pause &= ~(is_left_out | (passes > np.nan_to_num(median(passes), nan=np.inf)))
    again = [event for event in tables.events_of("compilation", by=main) if event["reason"] is not None]
    is_pause &= ns_in(again, steps) == 0
    at = np.flatnonzero(is_pause)
    excess = lengths[at] - usual
    while len(at) >= _MIN_PAUSES:
        is_long = excess >= _LEAST_PAUSE * _most_time(excess)  # others are somewhat longer by chance
        if is_long.sum() >= _MIN_PAUSES:
            return at[is_long]
        at, excess = at[~is_long], excess[~is_long]  # a few that are far longer still have another cause
    return at[:0]


def _most_time(lengths: Floats) -> float:
    """Return the length from which on the longest take half of the time of all."""
    descending = np.sort(lengths)[::-1]
    return float(descending[np.searchsorted(np.cumsum(descending), descending.sum() / 2)])


def _phase(steps: pd.DataFrame, at: npt.NDArray[np.intp], seconds: float) -> tuple[str, float]:
    """Return the phase in which most of the pauses' excess time lies, and its share of that."""
    excess = {}
    for name in _PHASES:
        values = np.nan_to_num(floats(steps, f"{name}_ns"))
        excess[name] = float((values[at] - np.median(values)).sum()) / SECOND_NS
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase] / max(seconds, 1e-9)


def ns_in(events: Sequence[Mapping[str, Any]], steps: pd.DataFrame) -> Floats:
    """Return how long each step spent in what these events record with its begin, shape `(steps,)`."""
    return _sums_in(events, [event["time_ns"] - event["begun_ns"] for event in events], steps)


def _sums_in(events: Sequence[Mapping[str, Any]], values: Sequence[float], steps: pd.DataFrame) -> Floats:
    """Return the sum of the values of the events that begin in each step, shape `(steps,)`."""
    at, is_inside = _steps_of(events, steps)
    weights = np.array(values, dtype=float)[is_inside]
    return np.bincount(at[is_inside], weights=weights, minlength=len(steps)).astype(np.float64)


def _steps_of(
    events: Sequence[Mapping[str, Any]], steps: pd.DataFrame
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return for each event the first step that ends after its begin, and whether that step had begun by then."""
    ends = floats(steps, "time_ns")
    starts = ends - floats(steps, "duration_ns")
    begun = np.array([event["begun_ns"] for event in events], dtype=float)
    at = np.searchsorted(ends, begun)
    return at, (at < len(ends)) & (begun >= np.append(starts, np.inf)[at])


def _has_epoch_start(tables: RunTables, steps: pd.DataFrame, main: ProcessKey) -> npt.NDArray[np.bool_]:
    """Return which steps have the start of an epoch of any loader: starting workers, or validation, is no pause."""
    batches = written(tables, "batch", main)
    begins = np.sort(floats(batches[floats(batches, "index") == 0], "time_ns"))
    ends = floats(steps, "time_ns")
    starts = ends - floats(steps, "duration_ns")
    has_start: npt.NDArray[np.bool_] = np.searchsorted(begins, ends) > np.searchsorted(begins, starts)
    return has_start
