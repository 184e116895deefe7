"""Pauses of the training thread: steps that take far longer than usual, at a regular distance, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from collector.diagnosis.contention import queued_ratio
from collector.diagnosis.costs import confidence, costly, lost_ratio, measured
from collector.diagnosis.findings import Advice, Finding, Locus
from collector.diagnosis.frames import SECOND_NS, floats, median, origin_ns, whole, window_text, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.quantities import count, duration, percent
from collector.store.runs import ProcessKey

_PHASES = ("h2d", "forward", "backward", "optimizer", "other")
_FIRST_STEPS = 10  # lazy initialisation, compilation, autotuning
_MIN_PAUSES = 4
_NOISE = 8.0  # times the spread of the usual steps, and half a step more: no machine's noise comes regularly
_RARE = 0.2  # of the steps: what comes more often is the usual step, so pauses are 5 steps apart or more
_ALIKE = 0.25  # of what most pauses take, at least
_REGULAR = 0.8  # of the distances are the usual one, give or take a tenth
_ONE_PHASE = 0.7  # of what the pauses take over the usual lies in one phase
_TELL = 0.02  # a pause that comes by the clock stands out from noise at less than a wait does


def find_pauses(tables: RunTables) -> list[Finding]:
    """`main-thread-pause`, for each training process; where ranks only wait for one that pauses, for that one."""
    found = [finding for main in Lifecycle(tables).mains for finding in _pauses(tables, main)]
    own = [finding for finding in found if finding.locus.stage != "backward"]
    return own or found


def _pauses(tables: RunTables, main: ProcessKey) -> list[Finding]:
    steps = written(tables, "step", main).iloc[_FIRST_STEPS:]
    work = floats(steps, "duration_ns") - np.nan_to_num(floats(steps, "data_wait_ns"))
    steps, work = steps[np.isfinite(work)], work[np.isfinite(work)]
    if len(steps) < _MIN_PAUSES / _RARE:
        return []
    usual = float(np.median(work))
    spread = 1.4826 * float(np.median(np.abs(work - usual)))
    long = work > usual + max(_NOISE * spread, 0.5 * usual)
    passes = floats(
        steps, "passes_count"
    )  # of the model: more of them are a rollout or an evaluation, and no pause
    long &= ~(_beside_an_epoch(tables, steps, main) | (passes > np.nan_to_num(median(passes), nan=np.inf)))
    at = np.flatnonzero(long)
    if len(at):  # a single step that is somewhat longer, by chance, is not one of them
        at = at[work[at] - usual >= _ALIKE * np.quantile(work[at] - usual, 0.75)]
    if not _MIN_PAUSES <= len(at) <= _RARE * len(steps):
        return []
    distance = float(np.median(np.diff(at)))
    regular = float(np.mean(np.abs(np.diff(at) - distance) <= max(0.1 * distance, 1.0)))
    seconds = float((work[at] - usual).sum()) / SECOND_NS
    ratio = lost_ratio(tables, seconds)
    phase, share = _phase(steps, at, seconds)
    if regular < _REGULAR or share < _ONE_PHASE or ratio < _TELL or distance < 1 / _RARE:
        return []
    times = floats(steps, "time_ns")
    if queued_ratio(tables, main, times[0], times[-1])[0] * (times[-1] - times[0]) >= seconds * SECOND_NS:
        return []  # it had no core meanwhile
    window = window_text(times[0], times[-1], origin_ns(tables))
    each = seconds / len(at)
    return [
        costly(
            "main-thread-pause",
            ratio,
            seconds,
            n=len(at),
            window=window,
            certainty=confidence(len(at), _MIN_PAUSES),
            summary=(
                f"Every {count(distance)} steps the training pauses for {duration(each)} ({phase} phase; a step "
                f"takes {duration(usual / 1e9)} besides waiting): {duration(seconds)}, {percent(ratio)} of the run."
            ),
            locus=Locus(host=main[0], rank=whole(steps["rank"].iloc[-1]), role="main", pid=main[1], stage=phase),
            since_step=whole(steps["step"].iloc[at[0]]),
            evidence=(
                measured("pause_seconds", each, "seconds", len(at), window),
                measured("pause_distance_count", distance, "count", len(at), window),
                measured("regular_ratio", regular, "ratio", len(at) - 1, window),
                measured("usual_step_seconds", usual / SECOND_NS, "seconds", len(steps) - len(at), window),
            ),
            advice=(
                Advice(
                    text=f"Look at what the loop does every {count(distance)} steps: garbage collection "
                    "(gc.freeze() after set-up, and fewer live objects), logging, saving a checkpoint, "
                    ".item() or .cpu() on the device; do it less often, or in another thread or process",
                    expected=f"up to {percent(ratio)} less time",
                ),
            ),
        )
    ]


def _phase(steps: pd.DataFrame, at: np.ndarray[Any, Any], seconds: float) -> tuple[str, float]:
    """The phase in which the long steps take longer, and its share of that."""
    more = {}
    for name in _PHASES:
        values = np.nan_to_num(floats(steps, f"{name}_ns"))
        more[name] = float((values[at] - np.median(values)).sum()) / SECOND_NS
    phase = max(more, key=lambda name: more[name])
    return phase, more[phase] / max(seconds, 1e-9)


def _beside_an_epoch(tables: RunTables, steps: pd.DataFrame, main: ProcessKey) -> np.ndarray[Any, Any]:
    """Steps in which an epoch of any loader began: starting workers, or validation, is no pause."""
    batches = written(tables, "batch", main)
    begins = np.sort(floats(batches[floats(batches, "index") == 0], "time_ns"))
    ends = floats(steps, "time_ns")
    starts = ends - floats(steps, "duration_ns")
    beside: np.ndarray[Any, Any] = np.searchsorted(begins, ends) > np.searchsorted(begins, starts)
    return beside
