"""Advice for a loop whose fetches take too long: another setting by the replay, or less time per fetch."""

from __future__ import annotations

import math
from dataclasses import replace

from collector.diagnosis.loading.loaders import Loop, is_made_again
from collector.diagnosis.loading.steady_state import Pace
from collector.diagnosis.loading.worker_limit import WorkerLimit, cores_per_rank, worker_limit
from collector.diagnosis.stalls.case import LoadingCase
from collector.diagnosis.tuning.what_if import Forecast, Option, forecast, option_text
from collector.findings import Advice, Fault, Finding, advise
from collector.units import duration, number, percent, size

#: Advice where processes outside the run use the cores.
FREE_CORES = "Find what else uses the cores of this host (`top`), and stop it, or give this job its own"
#: Condition of more workers, where at most one has iterated the dataset so far.
_SHARING_OUT = ", if the dataset shares its samples out by get_worker_info(): else each worker yields all of them"
#: Further advice for a loader whose workers should stay, but which the script creates again.
MAKE_ONCE = ", and make the DataLoader once, not in each epoch"
_HEALTHY_WAIT_RATIO = 0.05  # share of its time that a loop waits although its workers keep up
_LEAST_PART = 0.1  # share of a fetch below which a part is not worth advice
_CHEAPER_COLLATE = (
    "Make collate_fn cheaper: pad no further than the longest sample of the batch, bucket samples of like length, "
    "convert in __getitem__ or ahead of time, call torch.stack once instead of loops over samples"
)
_SMALLER_SAMPLES = (
    "Make the samples smaller, since default_collate copies each byte of them into the batch: smaller dtypes "
    "(uint8 images), cropped samples, scaled on the device"
)
_ONE_THREAD = "cv2.setNumThreads(0), OMP_NUM_THREADS=1"
_COLLATE_RATIO = 0.5  # share of a fetch from which collate_fn is what computes
_LESS_COMPUTING = Advice(
    text="Do less work per sample: decode at the training size, cache or precompute what does not change, batch "
    "the transforms",
    expected="a fetch computes {share} of its time, and gets shorter by the time saved",
    effect="changes results",
)
#: Advice by what a worker waits for (keys of `worker_limit.WAITS`).
_LESS_WAITING = {
    "storage": "Read less, or from nearer: a local copy or page cache, fewer and larger files, sequential shards",
    "pipe": "Make what fills the pipe faster, or let each worker read for itself",
    "queue": "Make what fills the queue faster, or let each worker read for itself",
    "network": "Request more at once, keep connections open, or read from nearer: a local copy, a cache",
    "lock": "Hold the lock for a shorter time, or give each worker a file, connection or cache of its own",
    "sleep": "Find what sleeps in the fetch (time.sleep, a rate limit, a retry with a pause) and shorten it",
    "child": "Leave less to child processes: start fewer, let each serve many samples, or call a library instead",
    "service": "Request more at once, and keep connections or child processes open between samples",
}
#: Effect of more workers where all may wait for one thing, by what a worker waits for.
_WAITS_IN_COMMON = {
    "lock": "workers that wait for one lock only wait longer if there are more of them",
    "pipe": "workers that read one pipe share what it gives; only a pipe of its own gives each worker more",
    "queue": "workers that read one queue share what it gives; more of them only wait for their turn",
}
#: Questions to ask where all workers wait at the same times, by what they wait for.
_STOPS = {
    "storage": "what the disk or file server is busy with at these times (`iostat -x 1`, `nfsiostat 1`)",
    "network": "what the server that they read from, or the network, is busy with at these times",
    "lock": "what holds the lock at these times",
    "sleep": "why all workers sleep at these times: a rate limit, or retries after errors of a server",
    "pipe": "why what fills the pipe stops at these times",
    "queue": "why what fills the queue stops at these times",
    "child": "what the child processes wait for at these times",
    "service": "why the process or service that they ask does not answer at these times",
}
_STOPS_ANYWHERE = (
    "what is busy at these times: the disk or file server (`iostat -x 1`), a database, the network, or the cores "
    "(`top`)"
)
_LESS_WAITING_FOR_ANYTHING = "Find what a fetch waits for with `tidegauge stacks`, and shorten it"


def advise_fetches(case: LoadingCase, limit: WorkerLimit, outlook: Forecast | str) -> tuple[Advice, ...]:
    """Return the setting that the replay recommends, and advice to shorten a fetch, by its cause."""
    loop, less, cores = case.loop, _less_per_fetch(limit), cores_per_rank(case.loop.tables, case.loop.main[0])
    condition = _SHARING_OUT if case.loop.setting.get("iterable") and loop.num_workers <= 1 else ""
    if limit.by in ("oversubscribed", "affinity"):
        return _advise_cores(case, limit, cores)
    if not loop.num_workers:
        also = ", persistent_workers=True" if loop.batches["epoch"].nunique() > 1 else ""
        also += MAKE_ONCE if is_made_again(loop) else ""
        return less if limit.by == "cpu" and cores < 2 else _by_replay(case, outlook, less, also=also + condition)
    if isinstance(outlook, Forecast) and outlook.measured.shared:
        return (
            *(_by_replay(case, outlook, less, also=condition) if outlook.best else ()),
            Advice(
                text="Use less of what the workers share: read less or from nearer (a local copy, page cache, "
                "fewer and larger files), hold a lock for less, give each worker a connection of its own",
                expected=f"more workers only lengthen the wait for it: it gives all of them about "
                f"{number(outlook.measured.batches_per_second)} batches/s",
            ),
            Advice(
                text="Measure more workers: `tidegauge tune -- COMMAND`",
                expected="more workers help if a part of the waiting is each worker's own; one setting does not "
                "rule that out",
            ),
        )
    if limit.waits_for in _WAITS_IN_COMMON:
        measure = Advice(
            text="Measure other settings before you add workers: `tidegauge tune -- COMMAND`",
            expected=_WAITS_IN_COMMON[limit.waits_for],
        )
        return (*less, measure)
    return _by_replay(case, outlook, less, also=condition)


def fault_of_fetches(limit: WorkerLimit, outlook: Forecast | str) -> Fault | None:
    """Return where the cause of slow fetches lies: in the settings if another one lets the workers keep up.

    No setting brings back cores that others use.
    """
    if limit.by == "oversubscribed":
        return limit.fault
    best = outlook.best if isinstance(outlook, Forecast) else None
    return "your settings" if best and best.wait_ratio < _HEALTHY_WAIT_RATIO else limit.fault


def advise_stragglers(case: LoadingCase) -> tuple[Advice, ...]:
    """Return the setting that the replay recommends for a few slow batches, and advice on these themselves."""
    alike = Advice(
        text="Find the slow samples (large files, long sequences) and precompute, crop or bucket them",
        expected=f"up to {percent(case.steady.tail_wait_ratio)} of the waiting disappears",
        effect="changes results",
    )
    return _by_replay(case, forecast(case.loop), (alike,))


def advise_spells(case: LoadingCase, limit: WorkerLimit, waiting_ratio: float) -> tuple[Advice, ...]:
    """Return advice for workers that are all slow at the same times, by what they wait for then.

    These spells cause a share `waiting_ratio` of the loop's waiting.
    """
    expected = f"up to {percent(waiting_ratio)} of the waiting disappears"
    find_out = Advice(text=f"Find out {_STOPS.get(limit.waits_for or '', _STOPS_ANYWHERE)}", expected=expected)
    outlook = forecast(case.loop)
    if isinstance(outlook, Forecast) and outlook.best and outlook.best.low > outlook.measured.batches_per_second:
        return _by_replay(case, outlook, (find_out,))
    return (find_out,)  # batches that are made ahead do not outlast the spells for certain


def advise_ended(finding: Finding, loop: Loop, *, is_first: bool) -> tuple[Advice, ...]:
    """Return what to do about a cause of waits that has ended, found in this part of a loop.

    Other settings are no advice for a loop that keeps up by now. `is_first`: this part is the first epoch.
    """
    if finding.kind == "slow-worker":
        return finding.advice[:1]
    if finding.kind not in ("workers-too-slow", "inline-loading"):
        return finding.advice
    text = f"Find out {_STOPS.get(worker_limit(loop).waits_for or '', _STOPS_ANYWHERE)}"
    if is_first:
        text = "If you start this training often, do once what its first epoch does: keep a local copy or a cache "
        text += "on disk"
    lost = duration(finding.value_of("lost_seconds") or 0.0)
    return advise(text=text, expected=f"up to {lost} of such a run disappear")


def advise_inline(steady: Pace, instead_of: str, transfer_seconds: float) -> tuple[Advice, ...]:
    """Return the advice to do without workers, if making a batch takes less time than its transfer."""
    if not steady.fetch_mean < transfer_seconds:
        return ()
    expected = f"about {duration(steady.fetch_mean)} per batch instead of {instead_of}"
    return advise(text="Set num_workers=0", expected=expected)


def _less_per_fetch(limit: WorkerLimit) -> tuple[Advice, ...]:
    """Return advice to shorten the measured parts of a fetch, the largest part first."""
    waiting = _LESS_WAITING_FOR_ANYTHING if limit.waits_for is None else _LESS_WAITING[limit.waits_for]
    fewer_children = "child processes take {share} of a fetch, which gets shorter by the time saved"
    less_waiting = "a fetch waits {share} of its time, and gets shorter by the time saved"
    parts = (
        (limit.cpu_ratio, _LESS_COMPUTING),
        (limit.children_ratio, Advice(text=_LESS_WAITING["child"], expected=fewer_children)),
        (limit.blocked_ratio, Advice(text=waiting, expected=less_waiting)),
    )
    parts_by_size = sorted((part for part in parts if part[0] >= _LEAST_PART), key=lambda part: -part[0])
    if not parts_by_size:
        return advise(text=_LESS_WAITING_FOR_ANYTHING, expected="the parts of a fetch were not measured")
    return tuple(
        replace(advice, expected=advice.expected.format(share=percent(share))) for share, advice in parts_by_size
    )


def _advise_cores(case: LoadingCase, limit: WorkerLimit, cores: float) -> tuple[Advice, ...]:
    """Return advice for fetches that wait for a core; more workers would only wait with them."""
    if limit.by == "affinity":
        return advise(
            text="Let the workers use all cores: reset the CPU affinity in worker_init_fn "
            "(os.sched_setaffinity(0, range(os.cpu_count())))",
            expected=f"the workers share {number(cores)} cores instead of queueing for a few",
        )
    if limit.others:
        free = Advice(
            text=FREE_CORES,
            expected="fetches no longer wait for a core; other numbers of workers change little until then",
        )
        computing = limit.cpu_ratio + limit.children_ratio
        slow = f"a fetch computes {percent(computing)} of its time: too long for the loop even on a core of its own"
        less = (replace(_LESS_COMPUTING, expected=slow),) if computing * case.steady.capacity_ratio > 1 else ()
        fills = (
            case.loop.num_workers * (1 - limit.blocked_ratio) > cores
        )  # the workers would, without other programs
        return (free, *less, *(_fewer_threads(case.loop.num_workers, limit, cores) if fills else ()))
    return advise_crowded(case, limit, cores)


def advise_crowded(case: LoadingCase, limit: WorkerLimit, cores: float) -> tuple[Advice, ...]:
    """Return advice where the run's own threads fill the cores: less work, and no more threads than cores."""
    num_workers, collate_ratio = case.loop.num_workers, case.steady.collate_mean / case.steady.fetch_mean
    saved = "the cores are full, so throughput rises by the CPU time that is saved"
    less = replace(_LESS_COMPUTING, expected=saved)
    if collate_ratio >= _COLLATE_RATIO:
        saved = f"collate_fn takes {percent(collate_ratio)} of a fetch; {saved}"
        less = replace(less, text=cheaper_collate(case), expected=saved)
    return less, *_fewer_threads(num_workers, limit, cores)


def _fewer_threads(num_workers: int, limit: WorkerLimit, cores: float) -> tuple[Advice, ...]:
    """Return the advice to use no more workers, and threads in them, than cores."""
    fewer = max(1, int(cores)) if math.isfinite(cores) else max(1, num_workers // 2)
    if num_workers > fewer:
        text = "Use no more workers and threads than cores: "
        text += f"num_workers={fewer}, and one thread per worker ({_ONE_THREAD})"
        expected = "about the same throughput with less memory: more threads only wait for the cores"
        return advise(text=text, expected=expected)
    if not limit.has_threads:
        return ()
    where = "per worker" if num_workers else "in libraries that the dataset calls"
    expected = "a fetch no longer waits for the cores that its own threads fill"
    return advise(text=f"Use one thread {where} ({_ONE_THREAD})", expected=expected)


def cheaper_collate(case: LoadingCase) -> str:
    """Return how the batches of a loop are put together at less cost."""
    return _SMALLER_SAMPLES if case.is_collated_in_place else _CHEAPER_COLLATE


def _by_replay(
    case: LoadingCase, outlook: Forecast | str, less: tuple[Advice, ...], *, also: str = ""
) -> tuple[Advice, ...]:
    """Return the setting that the replay recommends, and `less` work per fetch if that is not enough.

    A setting that may gain nothing, by its interval, comes last. Where more workers would get no samples, the
    advice is to split the data for those that are there.
    """
    if isinstance(outlook, str):
        measure = Advice(
            text="Measure other settings: `tidegauge tune -- COMMAND`", expected=f"no prediction yet: {outlook}"
        )
        return measure, *less
    best = outlook.best
    if best is None:
        return less
    setting = best.setting
    if case.split is not None and setting.num_workers > case.loop.num_workers:
        return case.split, *less
    advice = Advice(
        text=f"Set num_workers={setting.num_workers}, prefetch_factor={setting.prefetch_factor}{also}",
        expected=_expected(outlook, best),
        effect="safe" if math.isfinite(best.most_bytes) else "changes memory",  # the replay's setting fits
    )
    if best.wait_ratio < _HEALTHY_WAIT_RATIO:
        return (advice,)
    return (*less, advice) if best.low <= outlook.measured.batches_per_second else (advice, *less)


def _expected(outlook: Forecast, option: Option) -> str:
    words = (
        f"now {number(outlook.measured.batches_per_second)}, then {option_text(option)}. "
        f"Waiting for data: {percent(option.wait_ratio)} of the time"
    )
    now = outlook.current.memory_bytes
    if math.isfinite(option.memory_bytes):
        usual, most = size(option.memory_bytes), size(option.most_bytes)
        full = f", {most} with full queues" if most != usual else ""
        return f"{words}. Host memory: now {size(now)}, then about {usual}{full}"
    if math.isfinite(now):
        return f"{words}. Host memory: {size(now)} plus that of each worker, which is not known yet"
    return words
