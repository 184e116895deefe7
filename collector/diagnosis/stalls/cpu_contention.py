"""A training process that waits for a core, which its own workers or other processes on the host use.

The kernel counts for each thread how long it was ready to run but had no core (`/proc/PID/schedstat`). For the main
thread of a training process that time is lost: the training does nothing else meanwhile.
"""

from __future__ import annotations

import numpy as np

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import Pace
from collector.diagnosis.loading.worker_limit import CORES_FILLED, cores_used, usable_cores, worker_limit
from collector.diagnosis.run.columns import floats, origin_ns, sampled, step_at, window_text
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.advice import advise_crowded
from collector.diagnosis.stalls.cost import (
    LEAST_LOST_RATIO,
    Loss,
    confidence,
    lost_ratio,
    measurement,
    recorded_seconds,
)
from collector.findings import Advice, Finding, Locus
from collector.store import ProcessKey
from collector.units import duration, number, percent

_MIN_SAMPLES = 3


def find_contention(tables: RunTables, loop: Loop, steady: Pace, *, keeps_up: bool) -> list[Finding]:
    """Find a training process that loses time by waiting for a core.

    It is `workers-too-slow (oversubscribed)` if the run itself fills the cores and its fetches wait for them too;
    else `compute-bound (oversubscribed)`, as information. `keeps_up` is true if no other time is lost.
    """
    main, begin_ns, end_ns = loop.main, steady.first_ns, steady.last_ns
    share, n = queued_ratio(tables, main, begin_ns, end_ns)
    seconds = share * recorded_seconds(tables, main)
    ratio = lost_ratio(tables, seconds)
    if ratio < LEAST_LOST_RATIO:
        return []
    used, cores = cores_used(tables, main[0], begin_ns, end_ns), usable_cores(tables, main[0])
    limit, others = worker_limit(tables, loop), used < CORES_FILLED * cores
    crowd_out = loop.num_workers > 0 and limit.by == "oversubscribed" and not others
    window = window_text(begin_ns, end_ns, origin_ns(tables))
    loss = Loss(ratio=ratio, seconds=seconds, n=n, window=window)
    contention = Finding(
        kind="workers-too-slow" if crowd_out else "compute-bound",
        # No warning if there are cores enough: nothing in the training is wrong, and it may last only for a while.
        severity=loss.severity if crowd_out else "info",
        confidence=confidence(n, _MIN_SAMPLES),
        summary=f"The training process waits for a core {percent(share)} of its time: {duration(seconds)}. "
        + (_crowded_out(used, cores) if crowd_out else _crowded(used, cores, others))
        + (" Data loading keeps up." if keeps_up and not crowd_out else ""),
        locus=Locus(host=main[0], rank=loop.rank, role="main", loader=loop.loader, pid=main[1]),
        since_step=step_at(tables, main, begin_ns),
        evidence=(
            *loss.evidence,
            measurement("training_run_queue_ratio", share, "ratio", n, window),
            measurement("cores_used_count", used, "count", n, window),
            measurement("starved_ratio", steady.starved_ratio, "ratio", steady.batches, window),
            *limit.evidence,
        ),
        advice=advise_crowded(loop.num_workers, cores) if crowd_out else (_advice(others, share),),
        limited_by="oversubscribed",
    )
    return [contention]


def is_contention(finding: Finding) -> bool:
    """Return whether `find_contention` made the finding."""
    return finding.value_of("training_run_queue_ratio") is not None


def _crowded_out(used: float, cores: float) -> str:
    return f"The workers take it: the run's own processes use {number(used)} of {number(cores)} usable cores."


def _crowded(used: float, cores: float, others: bool) -> str:
    rest = "others use the rest" if others else "its own processes use them"
    return f"The run's processes get {number(used)} of {number(cores)} usable cores; {rest}."


def queued_ratio(tables: RunTables, main: ProcessKey, begin_ns: float, end_ns: float) -> tuple[float, int]:
    """Return (share of the window that a main thread waited for a core, number of samples); (0, 0) if unknown."""
    samples = sampled(tables, main)
    times, queued = floats(samples, "time_ns"), floats(samples, "run_queue_ns")
    inside = np.isfinite(queued) & (times >= begin_ns) & (times <= end_ns)
    if inside.sum() < _MIN_SAMPLES:
        return 0.0, 0
    times, queued = times[inside], queued[inside]
    return float((queued[-1] - queued[0]) / (times[-1] - times[0])), len(times)


def _advice(others: bool, share: float) -> Advice:
    expected = f"up to {percent(share)} less time per step"
    if others:
        text = "Find what else uses the cores of this host (`top`), and stop it, or give this job its own"
    else:
        text = "Use fewer workers, or fewer threads in them (cv2.setNumThreads(0), OMP_NUM_THREADS=1)"
    return Advice(text=text, expected=expected)
