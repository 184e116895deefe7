"""What to do about a loop that waits for its data, with the effect that the measured pace predicts."""

from __future__ import annotations

import math

from collector.diagnosis.findings import Advice
from collector.diagnosis.limits import WorkerLimit
from collector.diagnosis.loops import Loop
from collector.diagnosis.pace import Pace

#: What it costs to hand one batch from a worker to the loop; 0.3-1 ms measured on small batches.
HAND_OVER_SECONDS = 1e-3
_MARGIN = 0.2
_LESS_WORK = Advice(
    text="Do less work per sample: decode at the training size, cache or precompute what does not "
    "change, batch the transforms",
    expected="loading throughput rises in proportion to the CPU time that is saved",
)


def advise_inline(steady: Pace, limit: WorkerLimit, cores: float) -> tuple[bool, tuple[Advice, ...]]:
    """Whether a batch is too cheap for workers, and what to do."""
    if steady.fetch_mean < HAND_OVER_SECONDS:
        return True, (
            Advice(
                text="Keep num_workers=0 and make the batch cheaper: hold the data as one tensor and "
                "index whole batches "
                "(`__getitems__` or your own slicing), or use a larger batch",
                expected=f"up to {steady.wait_ratio:.0%} less time per step; workers would add about "
                f"{HAND_OVER_SECONDS * 1e3:.0f} ms to each batch of {steady.fetch_mean * 1e3:.2f} ms",
            ),
        )
    wanted = max(1, math.ceil((1 + _MARGIN) * steady.fetch_mean / max(steady.consumer, HAND_OVER_SECONDS)))
    if limit.by == "cpu" and cores < 2:
        return False, (_LESS_WORK,)
    workers = min(wanted, max(1, int(cores) - 1)) if limit.by == "cpu" and math.isfinite(cores) else wanted
    pace = max(steady.consumer + HAND_OVER_SECONDS, steady.fetch_mean / workers)
    advice = Advice(
        text=f"Set num_workers={workers} (and persistent_workers=True if there are several epochs)",
        expected=f"loading overlaps with computing: about {1 / pace:.1f} batches/s instead of "
        f"{1 / steady.interval:.1f}",
    )
    return False, (advice, _LESS_WORK) if workers < wanted else (advice,)


def advise_too_slow(loop: Loop, steady: Pace, limit: WorkerLimit, cores: float) -> tuple[Advice, ...]:
    """More workers while there are cores for them, else less work per sample."""
    wanted = max(
        loop.num_workers + 1, math.ceil((1 + _MARGIN) * steady.fetch_mean / max(steady.consumer, HAND_OVER_SECONDS))
    )
    if limit.by == "oversubscribed":
        fewer = max(1, int(cores)) if math.isfinite(cores) else max(1, loop.num_workers // 2)
        return (
            _LESS_WORK,
            Advice(
                text="Use no more workers and threads than cores: "
                f"num_workers={min(fewer, loop.num_workers)}, and one thread "
                "per worker (cv2.setNumThreads(0), OMP_NUM_THREADS=1)",
                expected="about the same throughput with less memory: the cores are full already",
            ),
        )
    if limit.by == "affinity":
        return (
            Advice(
                text="Let the workers use all cores: reset the CPU affinity in worker_init_fn "
                "(os.sched_setaffinity(0, range(os.cpu_count())))",
                expected=f"the workers share {cores:.0f} cores instead of queueing for a few",
            ),
        )
    if limit.by == "cpu" and math.isfinite(cores):
        room = max(1, int(cores) - 1)
        if loop.num_workers >= room:
            return (_LESS_WORK,)
        advice = _more_workers(steady, min(wanted, room))
        return (advice, _LESS_WORK) if wanted > room else (advice,)
    if limit.by == "io":
        return (
            _more_workers(steady, wanted),
            Advice(
                text="Read less, or from nearer: a local copy or page cache, fewer and larger files, "
                "sequential shards",
                expected="if the storage is the limit, more workers only lengthen each read and this is what helps",
            ),
        )
    return (_more_workers(steady, wanted), _LESS_WORK)


def advise_slow_worker(loop: Loop, steady: Pace, worker: int, usual_seconds: float) -> tuple[Advice, ...]:
    """Heal the worker, or let the others overtake it."""
    pace = max(steady.consumer, usual_seconds / loop.num_workers)
    healed = f"about {1 / max(pace, 1e-6):.1f} batches/s instead of {1 / steady.interval:.1f}"
    return (
        Advice(
            text=f"Look at what worker {worker} alone does: its shard or files, its mount, its CPU "
            "affinity, code that "
            "depends on get_worker_info().id",
            expected=f"{healed} when it is as fast as the others",
        ),
        Advice(
            text="If the order of batches does not matter, set in_order=False (torch >= 2.7)",
            expected="the others no longer wait for it: throughput follows the sum of the workers, not the slowest",
        ),
        Advice(text="Do not add workers for this", expected="the slowest worker sets the pace at any num_workers"),
    )


def advise_tail(loop: Loop, steady: Pace) -> tuple[Advice, ...]:
    """Deeper prefetch absorbs a tail; so does making the samples alike."""
    slots = max(loop.num_workers, 1)
    depth = max(
        loop.prefetch_factor + 1, math.ceil(steady.fetch_p99 / (slots * max(steady.consumer, HAND_OVER_SECONDS)))
    )
    return (
        Advice(
            text=f"Set prefetch_factor={depth}",
            expected=f"a batch may then take {depth * slots * steady.consumer * 1e3:.0f} ms before the loop waits "
            f"(now {loop.prefetch_factor * slots * steady.consumer * 1e3:.0f} ms); host memory holds up to "
            f"{depth * slots + 1} batches",
        ),
        Advice(
            text="Find the slow samples (large files, long sequences) and precompute, crop or bucket them",
            expected=f"up to {steady.tail_wait_ratio:.0%} of the waiting goes",
        ),
    )


def _more_workers(steady: Pace, workers: int) -> Advice:
    pace = max(steady.consumer, steady.fetch_mean / workers)
    return Advice(
        text=f"Set num_workers={workers}",
        expected=f"about {1 / max(pace, 1e-6):.1f} batches/s instead of {1 / steady.interval:.1f}",
    )
