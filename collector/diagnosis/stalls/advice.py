"""Advice for a loop that waits for its data, with the effect that the measured pace predicts."""

from __future__ import annotations

import math

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import Pace
from collector.diagnosis.loading.worker_limit import WorkerLimit
from collector.diagnosis.tuning.what_if import Forecast, Option, option_text
from collector.findings import Advice
from collector.units import duration, number, percent, size

#: Seconds to hand one batch from a worker to the loop; 0.3-1 ms measured on small batches.
HAND_OVER_SECONDS = 1e-3
#: Condition of more workers, where one at most has iterated the dataset so far.
SHARING_OUT = ", if the dataset shares its samples out by get_worker_info(): else each worker yields all of them"
_HEALTHY_WAIT_RATIO = 0.05  # share of its time that a loop waits although its workers keep up
_LEAST_PART = 0.1  # share of a fetch below which a part is not worth advice
_LESS_COMPUTING = (
    "Do less work per sample: decode at the training size, cache or precompute what does not change, batch the "
    "transforms"
)
#: Advice by what a worker waits for (keys of `worker_limit.WAITS`).
_LESS_WAITING = {
    "storage": "Read less, or from nearer: a local copy or page cache, fewer and larger files, sequential shards",
    "pipe": "Make what fills the pipe faster, or let each worker read for itself",
    "network": "Ask for more at once, keep connections open, or read from nearer: a local copy, a cache",
    "lock": "Hold the lock for less, or give each worker a file, connection or cache of its own",
    "sleep": "Find what sleeps in the fetch (time.sleep, a rate limit, a retry with a pause) and shorten it",
    "child": "Start fewer child processes: one that stays and serves many samples, or a library call instead",
    "service": "Ask for more at once, and keep connections or child processes open between samples",
}
#: Effect of more workers where all may wait for one thing, by what a worker waits for.
_WAITS_IN_COMMON = {
    "lock": "workers that wait for one lock only wait longer if there are more of them",
    "pipe": "workers that read one pipe share what it gives; only a pipe of its own gives each worker more",
}
_LESS_WAITING_FOR_ANYTHING = (
    "See what a worker waits for, with `py-spy dump --pid PID` of a worker, and shorten that"
)


def advise_inline(
    steady: Pace, limit: WorkerLimit, cores: float, outlook: Forecast | str, *, condition: str
) -> tuple[bool, tuple[Advice, ...]]:
    """Return (batch is too cheap for workers, advice)."""
    if steady.fetch_mean < HAND_OVER_SECONDS:
        return True, (
            Advice(
                text="Keep num_workers=0 and make the batch cheaper: hold the data as one tensor and "
                "index whole batches "
                "(`__getitems__` or your own slicing), or use a larger batch",
                expected=f"up to {percent(steady.wait_ratio)} less time per step; workers would add about "
                f"{duration(HAND_OVER_SECONDS)} to each batch of {duration(steady.fetch_mean)}",
            ),
        )
    if limit.by in ("oversubscribed", "affinity"):
        return False, _advise_cores(limit, 0, cores)
    if limit.by == "cpu" and cores < 2:
        return False, less_per_fetch(limit)
    also = " (and persistent_workers=True if there are several epochs)"
    return False, _by_replay(outlook, less_per_fetch(limit), also=also + condition)


def advise_too_slow(
    loop: Loop, limit: WorkerLimit, cores: float, outlook: Forecast | str, *, condition: str
) -> tuple[Advice, ...]:
    """Return the setting that the replay recommends, and advice to shorten a fetch, by its cause."""
    if limit.by in ("oversubscribed", "affinity"):
        return _advise_cores(limit, loop.num_workers, cores)
    if isinstance(outlook, Forecast) and outlook.measured.shared:
        rate = outlook.measured.batches_per_second
        measure = Advice(
            text="Measure more workers: `tidegauge tune -- COMMAND`",
            expected="they help if a part of the waiting is each worker's own, which one setting does not rule out",
        )
        return (
            *(_by_replay(outlook, less_per_fetch(limit), also=condition) if outlook.best else ()),
            Advice(
                text="Ask less of what the workers share: read less or from nearer (a local copy, page cache, "
                "fewer and larger files), hold a lock for less, give each worker a connection of its own",
                expected=f"more workers only lengthen the wait for it: it gives all of them about "
                f"{number(rate)} batches/s",
            ),
            measure,
        )
    if limit.waits_for in _WAITS_IN_COMMON:
        measure = Advice(
            text="Measure other settings before you add workers: `tidegauge tune -- COMMAND`",
            expected=_WAITS_IN_COMMON[limit.waits_for],
        )
        return (*less_per_fetch(limit), measure)
    return _by_replay(outlook, less_per_fetch(limit), also=condition)


def less_per_fetch(limit: WorkerLimit) -> tuple[Advice, ...]:
    """Return advice to shorten the measured parts of a fetch, the largest part first."""
    waiting = _LESS_WAITING_FOR_ANYTHING if limit.waits_for is None else _LESS_WAITING[limit.waits_for]
    parts = (
        (limit.cpu_ratio, _LESS_COMPUTING, "a fetch computes {share} of its time, and is shorter by what is saved"),
        (
            limit.children_ratio,
            _LESS_WAITING["child"],
            "child processes take {share} of a fetch, which is shorter by what is saved",
        ),
        (limit.blocked_ratio, waiting, "a fetch waits {share} of its time, and is shorter by what is saved"),
    )
    parts_by_size = sorted((part for part in parts if part[0] >= _LEAST_PART), key=lambda part: -part[0])
    if not parts_by_size:
        return (Advice(text=_LESS_WAITING_FOR_ANYTHING, expected="the time of a fetch was not taken apart"),)
    return tuple(
        Advice(text=text, expected=words.format(share=percent(share))) for share, text, words in parts_by_size
    )


def _advise_cores(limit: WorkerLimit, num_workers: int, cores: float) -> tuple[Advice, ...]:
    """Return advice for fetches that wait for a core; more workers would only wait with them."""
    if limit.by == "affinity":
        return (
            Advice(
                text="Let the workers use all cores: reset the CPU affinity in worker_init_fn "
                "(os.sched_setaffinity(0, range(os.cpu_count())))",
                expected=f"the workers share {number(cores)} cores instead of queueing for a few",
            ),
        )
    if limit.others:
        return (
            Advice(
                text="Find what else uses the cores of this host (`top`), and stop it, or give this job its own",
                expected="fetches no longer wait for a core; other numbers of workers change little until then",
            ),
        )
    return advise_crowded(num_workers, cores)


def advise_crowded(num_workers: int, cores: float) -> tuple[Advice, ...]:
    """Return advice where the run's own threads fill the cores: less work, or no more threads than cores."""
    fewer = max(1, int(cores)) if math.isfinite(cores) else max(1, num_workers // 2)
    threads = "cv2.setNumThreads(0), OMP_NUM_THREADS=1"
    return (
        Advice(
            text=_LESS_COMPUTING, expected="the cores are full, so throughput rises by the CPU time that is saved"
        ),
        Advice(
            text=f"Use no more workers and threads than cores: num_workers={min(fewer, num_workers)}, and one "
            f"thread per worker ({threads})"
            if num_workers
            else f"Use no more threads than cores: one in libraries that the dataset calls ({threads})",
            expected="about the same throughput with less memory: the cores are full already"
            if num_workers
            else "a fetch no longer waits for the cores that its own threads fill",
        ),
    )


def _by_replay(outlook: Forecast | str, less: tuple[Advice, ...], *, also: str = "") -> tuple[Advice, ...]:
    """Return the setting that the replay recommends, and `less` work per fetch if that is not enough."""
    if isinstance(outlook, str):
        measure = Advice(
            text="Measure other settings: `tidegauge tune -- COMMAND`", expected=f"no prediction yet: {outlook}"
        )
        return measure, *less
    best = outlook.best
    if best is None:
        return less
    setting = best.setting
    advice = Advice(
        text=f"Set num_workers={setting.num_workers}, prefetch_factor={setting.prefetch_factor}{also}",
        expected=_expected(outlook, best),
    )
    return (advice,) if best.wait_ratio < _HEALTHY_WAIT_RATIO else (advice, *less)


def _expected(outlook: Forecast, option: Option) -> str:
    words = (
        f"{option_text(option)}; now {number(outlook.measured.batches_per_second)}. "
        f"Waiting for data: {percent(option.wait_ratio)} of the time"
    )
    now = outlook.current.memory_bytes
    if math.isfinite(option.memory_bytes):
        most = f"up to {size(option.most_bytes)} with full queues"
        return f"{words}; host memory about {size(option.memory_bytes)} ({most}) instead of {size(now)}"
    if math.isfinite(now):
        return f"{words}; host memory {size(now)} and what each worker takes, which is not known yet"
    return words


def advise_slow_worker(loop: Loop, steady: Pace, worker: int, usual_seconds: float) -> tuple[Advice, ...]:
    """Return advice to speed up the slow worker, or to let the others overtake it."""
    interval = max(steady.consumer, usual_seconds / loop.num_workers)
    rates = f"about {number(1 / max(interval, 1e-6))} batches/s instead of {number(1 / steady.interval)}"
    return (
        Advice(
            text=f"Look at what worker {worker} alone does: its shard or files, its mount, its CPU "
            "affinity, code that "
            "depends on get_worker_info().id",
            expected=f"{rates} when it is as fast as the others",
        ),
        Advice(
            text="If the order of batches does not matter, set in_order=False (torch >= 2.7)",
            expected="the others no longer wait for it: throughput follows the sum of the workers, not the slowest",
        ),
        Advice(text="Do not add workers for this", expected="the slowest worker sets the pace at any num_workers"),
    )


def advise_tail(loop: Loop, steady: Pace) -> tuple[Advice, ...]:
    """Return advice against a tail of slow batches: deeper prefetch, or more even samples."""
    slots = max(loop.num_workers, 1)
    depth = max(
        loop.prefetch_factor + 1, math.ceil(steady.fetch_p99 / (slots * max(steady.consumer, HAND_OVER_SECONDS)))
    )
    return (
        Advice(
            text=f"Set prefetch_factor={depth}",
            expected=f"a batch may then take {duration(depth * slots * steady.consumer)} before the loop waits "
            f"(now {duration(loop.prefetch_factor * slots * steady.consumer)}); host memory holds up to "
            f"{depth * slots + 1} batches",
        ),
        Advice(
            text="Find the slow samples (large files, long sequences) and precompute, crop or bucket them",
            expected=f"up to {percent(steady.tail_wait_ratio)} of the waiting goes",
        ),
    )
