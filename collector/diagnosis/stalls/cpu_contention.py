"""A training process that waits for a core, which its own workers or other processes on the host use.

The kernel counts for each thread how long it was ready to run but had no core (`/proc/PID/schedstat`). For the main
thread of a training process that time is lost: the training does nothing else meanwhile.
"""

from __future__ import annotations

from collector.diagnosis.loading.core_waits import queued_ratio
from collector.diagnosis.loading.worker_limit import (
    CORES_FILLED,
    cores_are_free,
    cores_used,
    usable_cores,
    worker_limit,
)
from collector.diagnosis.stalls.advice import FREE_CORES, advise_crowded
from collector.diagnosis.stalls.case import LoadingCase
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss, recorded_seconds
from collector.findings import Finding, advise
from collector.units import duration, number, percent

_MIN_SAMPLES = 3
_FEWER_THREADS = "Use fewer workers, or fewer threads in them (cv2.setNumThreads(0), OMP_NUM_THREADS=1)"


def find_contention(case: LoadingCase, *, keeps_up: bool) -> list[Finding]:
    """Find a training process that loses time by waiting for a core.

    It is `workers-too-slow (oversubscribed)` if the run itself fills the cores and its fetches wait for them too;
    else `compute-bound (oversubscribed)`, as information. `keeps_up` is true if no other time is lost.
    """
    tables, loop, span_ns = case.loop.tables, case.loop, (case.steady.first_ns, case.steady.last_ns)
    share, n = queued_ratio(tables, loop.main, *span_ns)
    loss = Loss.of(tables, share * recorded_seconds(tables, loop.main), n, span_ns)
    if loss.ratio < LEAST_LOST_RATIO:
        return []
    used, cores = cores_used(tables, loop.main[0], *span_ns), usable_cores(tables, loop.main[0])
    limit, others = worker_limit(loop), used < CORES_FILLED * cores
    if others and cores_are_free(tables, loop.main[0], *span_ns):
        return []  # it is woken late, as a thread is that sleeps often: no other process takes its core
    by_workers = loop.num_workers > 0 and limit.by == "oversubscribed" and not others
    facts, in_use = case.facts("main", loss), f"{number(round(used, 2))} of {number(cores)} usable cores"
    facts["confidence"] = loss.confidence(_MIN_SAMPLES)
    rank = facts["locus"].rank
    who = "The training process" if rank is None else f"Rank {rank}"
    if by_workers:
        how = f"The workers take the cores: the run's processes use {in_use}."
        advice = advise_crowded(case, limit, cores)
    else:
        facts["severity"] = "info"  # Nothing in the training is wrong, and it may last only for a while.
        rest = "other processes use the rest" if others else "its own processes use them"
        how = f"The run's processes get {in_use}; {rest}." + (
            f" Loader {loop.loader} keeps up." if keeps_up else ""
        )
        text = FREE_CORES if others else _FEWER_THREADS
        advice = advise(text=text, expected=f"up to {percent(share)} less time per step")
    return [
        Finding(
            kind="workers-too-slow" if by_workers else "compute-bound",
            summary=f"{who} waits for a core {percent(share)} of its time: {duration(loss.seconds)}. {how}",
            evidence=(
                *loss.evidence(training_run_queue_ratio=share, cores_used_count=used),
                *case.measured(starved_ratio=case.steady.starved_ratio),
                *limit.evidence,
            ),
            advice=advice,
            limited_by="oversubscribed",
            fault="this machine" if others else "your settings",
            **facts,
        )
    ]


def is_contention(finding: Finding) -> bool:
    """Return whether `find_contention` made the finding."""
    return finding.value_of("training_run_queue_ratio") is not None
