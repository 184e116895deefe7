"""Calibration of the replay on a recorded loop: the costs of its batches, without waits for a core."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.core_waits import spent_ratio
from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import fetch_ns, without_pauses
from collector.diagnosis.loading.worker_limit import cores_per_rank, worker_limit
from collector.diagnosis.run.columns import SECOND_NS, between, floats, mean, sampled
from collector.diagnosis.statistics.growth import Floats
from collector.diagnosis.tuning.overheads import Overheads, assumed_overheads, overheads
from collector.diagnosis.tuning.replay import Setting, Trace, slowdown, throughputs
from collector.diagnosis.tuning.shared_resource import Sharing, measure_sharing

#: Newest batches, which are replayed.
_WINDOW_BATCHES = 1500
_MIN_BATCHES = 30
#: Share of the fetch time that must be blocked if a shared resource is to matter.
_BLOCKED_RATIO = 0.5
#: Share of a fetch that computes or waits for a core, below which it is ignored; predictions change by no more.
_COMPUTES_RATIO = 0.1
#: Slowdown over the one by the run's own threads, above which other processes use the cores too.
_UNEXPLAINED = 1.15
_CORE_SHARES = np.linspace(1.0, 0.2, 17)
_ROUNDS = 4  # of the search for the measured throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A stretch of a loop as the replay needs it, with the measured rates.

    Attributes:
        trace: costs of its batches.
        alternative: costs for the other answer on sharing. If the run leaves open whether the workers wait for a
            shared resource, `trace` assumes that they do not. If they do, `alternative` assumes that each waits by
            itself, since only other settings show how much of the waiting is a worker's own. Else None.
        batches: epoch and index of each batch.
        sharing: tests for a shared resource; None where the workers do not mostly wait.
        slowdowns: times longer that computing took in workers and in the loop (`slowdown`).
        batches_per_second, wait_ratio: measured rate, and measured share of the time that the loop waited.
        samples_per_batch: mean, NaN if unknown.
    """

    trace: Trace
    alternative: Trace | None
    batches: pd.DataFrame
    setting: Setting
    sharing: Sharing | None
    slowdowns: Floats
    batches_per_second: float
    wait_ratio: float
    samples_per_batch: float

    @property
    def shared(self) -> Sharing | None:
        """Tests for a shared resource, if they find one."""
        return self.sharing if self.sharing is not None and self.sharing.is_shared else None


def calibrate(loop: Loop) -> Calibration | str:
    """Calibrate the replay on the recent stretch of a loop, or return what is missing for it, in words."""
    if loop.waits != "recorded":
        return (
            "a thread of its own loads ahead, so the time that the training itself takes for a batch is not known"
        )
    rows, recurs = _stretch(loop)
    if len(rows) < _MIN_BATCHES:
        return f"it needs {_MIN_BATCHES} recorded batches, this run has {len(rows)}"
    # The forecast of a loop and the speed-ups of its stages mostly use the same stretch.
    key = (loop.num_workers, loop.prefetch_factor, loop.in_order, recurs, rows.to_numpy(np.float64).tobytes())
    return loop.tables.once(("calibrated", loop.main, *key), lambda: _calibrate(loop, rows, recurs))


def setting_of(loop: Loop) -> Setting:
    """Return the settings that a loop ran with."""
    return Setting(
        num_workers=loop.num_workers, prefetch_factor=max(loop.prefetch_factor, 1), in_order=loop.in_order
    )


def _calibrate(loop: Loop, rows: pd.DataFrame, recurs: bool) -> Calibration | str:
    dispatched = rows.sort_values(["epoch", "index"])
    costs, cores = _fetch_costs(dispatched), cores_per_rank(loop.tables, loop.main[0])
    if costs.cpu.sum() >= _COMPUTES_RATIO * (costs.cpu + costs.blocked).sum() and not math.isfinite(cores):
        return "the number of cores of its workers was not sampled"
    if not np.isfinite(rows["loop_ns"]).any():
        return "each of its epochs has one batch, so the loop's own time per batch is not known"
    waited = rows["wait_ns"].to_numpy() / SECOND_NS
    if not recurs:
        waited[0] = 0.0
    creation = _creation(loop)
    total = float(waited.sum() + np.nansum(rows["loop_ns"].to_numpy() / SECOND_NS))
    total += recurs * creation * loop.num_workers * rows["first"].sum()
    rate = (len(rows) - (not recurs)) / total
    setting = setting_of(loop)
    epochs = tuple(np.diff([*np.flatnonzero(rows["first"]), len(rows)]).tolist()) if recurs else ()
    trace = _trace(loop, rows, costs, total)
    trace = dataclasses.replace(trace, epochs=epochs, creation=creation)
    if costs.has_children and math.isfinite(cores):
        trace = _without_queueing(dataclasses.replace(trace, cores=cores), setting, costs.wall)
    cores, slowdowns = _cores(trace, setting, cores, costs.slowdown)
    trace = dataclasses.replace(trace, cores=cores)
    # Children that outlive a fetch may serve all workers, as a pool does. Others compute for one fetch, and wait
    # for cores, which also makes the fetches alike.
    served = costs.children if loop.fetches["children_outlive"].any() else np.zeros_like(costs.children)
    in_children = worker_limit(loop).children_ratio >= _BLOCKED_RATIO and not served.any()
    sharing = None if in_children else _sharing(loop, dispatched, costs.blocked + served)
    waiting = dataclasses.replace(trace, cpu=trace.cpu - served, blocked=trace.blocked + served)
    alternative = _shared_trace(waiting, sharing, setting, rate)
    if alternative is not None and sharing is not None and sharing.is_shared:
        trace, alternative = alternative, trace
    return Calibration(
        trace=trace,
        alternative=alternative,
        batches=dispatched[["epoch", "index"]],
        setting=setting,
        sharing=sharing,
        slowdowns=slowdowns,
        batches_per_second=rate,
        wait_ratio=float(waited.sum()) / total,
        samples_per_batch=mean(floats(rows, "samples_count")),
    )


def _trace(loop: Loop, rows: pd.DataFrame, costs: _FetchCosts, seconds: float) -> Trace:
    """Return the costs of a stretch, which took `seconds`, as if every thread had a core."""
    cpu, blocked, slow = costs.cpu, costs.blocked, costs.slowdown
    took = rows["loop_ns"].to_numpy() / SECOND_NS
    usual = float(np.nanmean(took))
    samples = between(sampled(loop.tables, loop.main), rows["asked_ns"].iloc[0], rows["yield_ns"].iloc[-1])
    computing = spent_ratio(samples, "cpu_ns", 2)[0] * seconds / len(rows)
    computing -= 0 if loop.num_workers else cpu.mean()
    share = min(1.0, max(0.0, computing * slow / max(usual, 1e-9)))
    unslowed = 1 - share * (1 - 1 / slow)  # share of the loop's time that is left without waits for a core
    computing_ratio = float(cpu.sum() / max((cpu + blocked).sum(), 1e-9))
    passing = assumed_overheads(computing_ratio)
    if loop.num_workers:
        passing = overheads(rows, prefetch_factor=loop.prefetch_factor, computing_ratio=computing_ratio)
    start, start_each = _starts(loop, rows)
    return Trace(
        cpu=cpu,
        blocked=blocked,
        loop=np.where(np.isfinite(took), took, usual) * unslowed,
        threads=costs.threads,
        loop_cpu_ratio=share / slow / unslowed,
        loop_threads=max(1.0, computing * slow / max(usual, 1e-9)),
        overheads=Overheads(
            gap=passing.gap / slow,
            dispatch=passing.dispatch / slow,
            transfer=passing.transfer / slow,
            hand_over=passing.hand_over / slow,
            busy_hand_over=passing.busy_hand_over,
        ),
        start=start,
        start_each=start_each,
    )


def _stretch(loop: Loop) -> tuple[pd.DataFrame, bool]:
    """Return the recent batches with their fetches, and whether at least two epochs begin among them.

    Times of the loop are `asked_ns`, `yield_ns`, `wait_ns` and `loop_ns` (until the next batch is asked for, pauses
    cut; NaN at the end of an epoch). If epochs begin, the stretch starts at a begin; else it is the steady state of
    the last epoch.
    """
    yields = floats(loop.batches, "time_ns")
    newest = np.argsort(yields, kind="stable")[-_WINDOW_BATCHES:]
    is_cut, batches = len(yields) > len(newest), loop.batches.iloc[newest]
    batches = batches[["epoch", "index", "samples_count"]].assign(
        yield_ns=yields[newest], wait_ns=floats(batches, "wait_ns")
    )
    batches["asked_ns"] = batches["yield_ns"] - batches["wait_ns"]
    fetches = loop.fetches
    fetches = fetches[fetches["epoch"].isin(batches["epoch"]) & (fetches["index"] >= batches["index"].min())]
    spent = ["cpu_ns", "process_cpu_ns", "children_cpu_ns", "run_queue_ns", "idle_ns"]
    made = fetches.assign(
        made_ns=floats(fetches, "time_ns"),
        fetch_ns=fetch_ns(fetches),
        **{name: floats(fetches, name) for name in spent},
    ).drop_duplicates(["epoch", "index"])
    made = made[["epoch", "index", "worker", "made_ns", "fetch_ns", *spent]]
    rows = batches.merge(made, on=["epoch", "index"])
    rows = rows[np.isfinite(rows["fetch_ns"])].reset_index(drop=True)
    rows["first"] = rows["epoch"] != rows["epoch"].shift()
    rows.loc[:0, "first"] &= not is_cut
    loop_ns = rows["asked_ns"].shift(-1) - rows["yield_ns"]
    loop_ns[rows["epoch"].shift(-1) != rows["epoch"]] = np.nan
    rows["loop_ns"] = without_pauses(np.maximum(loop_ns.to_numpy(dtype=float), 0.0))
    begins = np.flatnonzero(rows["first"])
    if len(begins) >= 2:
        return rows.iloc[begins[int(len(begins) > 2)] :].reset_index(drop=True), True
    last = rows[rows["epoch"] == rows["epoch"].iloc[-1]] if len(rows) else rows
    return last[floats(last, "index") >= loop.ramp].reset_index(drop=True), False


@dataclass(frozen=True, slots=True)
class _FetchCosts:
    """The time of each fetch by its parts, in seconds, and the effect of too few cores on it.

    Attributes:
        wall: time from begin to end.
        cpu: time of computing, in the thread or in a child that the thread waits for.
        children: the part of `cpu` in children.
        blocked: time of waiting for other things than a core.
        threads: threads that compute at a time while a fetch computes, children included.
        slowdown: times longer that computing took for lack of cores, without the waits of children, which the
            kernel does not count.
        has_children: whether children do a part of the computing.
    """

    wall: Floats
    cpu: Floats
    children: Floats
    blocked: Floats
    threads: float
    slowdown: float
    has_children: bool


def _fetch_costs(rows: pd.DataFrame) -> _FetchCosts:
    """Split the fetches into computing, waiting for a core and being blocked."""
    wall, thread, queued = (floats(rows, name) for name in ("fetch_ns", "cpu_ns", "run_queue_ns"))
    children = np.nan_to_num(floats(rows, "children_cpu_ns"))
    known = np.isfinite(thread) & np.isfinite(queued)
    if not known.any():
        zeros, seconds = np.zeros_like(wall), wall / SECOND_NS
        return _FetchCosts(seconds, zeros, zeros, seconds, 1.0, 1.0, False)
    total = float(wall[known].sum())
    thread_share, queued_share = float(thread[known].sum()) / total, float(queued[known].sum()) / total
    children_share = float(children[known].sum()) / total
    # A fetch that hardly computes waits for a core as it wakes up, however little it computes then.
    computes = thread_share + children_share >= _COMPUTES_RATIO * (1 - queued_share)
    queued_share = queued_share if computes else 0.0
    queued = np.where(known & computes, queued, wall * queued_share)
    thread = np.minimum(np.where(known, thread, wall * thread_share), wall)
    children_inside = np.where(known, children, wall * children_share)
    children_inside = np.maximum(np.minimum(children_inside, wall - thread - queued), 0.0)
    cpu = thread + children_inside
    spent = float(np.nansum(floats(rows, "process_cpu_ns")) + children.sum())
    return _FetchCosts(
        wall=wall / SECOND_NS,
        cpu=cpu / SECOND_NS,
        children=children_inside / SECOND_NS,
        blocked=np.maximum(wall - cpu - queued, 0.0) / SECOND_NS,
        threads=max(1.0, spent / max(float(cpu[known].sum()), 1.0)) if computes else 1.0,
        slowdown=1 + float(queued[known].sum()) / max(float(cpu[known].sum()), 1e-9),
        has_children=children_share >= _COMPUTES_RATIO,
    )


def _without_queueing(trace: Trace, setting: Setting, wall: Floats) -> Trace:
    """Remove the waits of children for a core from the blocked time.

    The kernel does not measure them. They are as long as the replay's slowdown at the setting of the run.
    """
    blocked = trace.blocked
    for _ in range(_ROUNDS):
        slower = slowdown(dataclasses.replace(trace, blocked=blocked), [setting], np.array([trace.cores]))
        before, blocked = blocked, np.clip(wall - trace.cpu * slower[0], 0.0, trace.blocked)
        if np.array_equal(blocked, before):
            break
    return dataclasses.replace(trace, blocked=blocked)


def _sharing(loop: Loop, rows: pd.DataFrame, blocked: Floats) -> Sharing | None:
    """Test whether the workers wait for a shared resource, if there are several and they mostly wait."""
    ends, took = rows["made_ns"].to_numpy() / SECOND_NS, rows["fetch_ns"].to_numpy() / SECOND_NS
    queued = floats(rows, "run_queue_ns") / SECOND_NS
    known = np.isfinite(floats(rows, "cpu_ns")) & np.isfinite(queued)
    if loop.num_workers < 2 or not known.all() or blocked.sum() < _BLOCKED_RATIO * took.sum():
        return None
    workers, places = (floats(rows, name).astype(np.intp) for name in ("worker", "index"))
    return measure_sharing(ends - took, ends, blocked, workers, places, float(queued.sum() / took.sum()))


def _shared_trace(trace: Trace, sharing: Sharing | None, setting: Setting, rate: float) -> Trace | None:
    """Return the trace for workers that wait for a shared resource; None if they do not, or hardly wait.

    The service times of the resource are scaled until the replay gives the measured `rate` in batches/s. They come
    out too small otherwise, since the count of fetches in progress includes those that compute. With fewer than two
    workers, all of the waiting may be for the resource.
    """
    if setting.num_workers < 2:
        mostly_waits = trace.blocked.sum() >= _BLOCKED_RATIO * (trace.cpu + trace.blocked).sum()
        return dataclasses.replace(trace, in_turn=True) if mostly_waits else None
    if sharing is None or sharing.is_apart:
        return None
    service = sharing.service
    for _ in range(_ROUNDS):
        shared = dataclasses.replace(trace, blocked=service, in_turn=True)
        (replayed,) = throughputs(shared, [setting])
        service = np.minimum(trace.blocked, service * replayed / rate)
    return dataclasses.replace(shared, blocked=service)


def _creation(loop: Loop) -> float:
    """Return the seconds that creating one worker takes at the beginning of an epoch; 0 if workers stay."""
    took = [
        event["time_ns"] - event["begun_ns"]
        for event in loop.tables.events_of("epoch-start", by=loop.main)
        if event.get("loader") == loop.loader and event.get("begun_ns") is not None
    ]
    recurring = np.array(took[1:], dtype=float)  # the first epoch always starts workers
    return float(np.median(recurring)) / max(loop.num_workers, 1) / SECOND_NS if len(recurring) else 0.0


def _starts(loop: Loop, rows: pd.DataFrame) -> tuple[float, float]:
    """Return the seconds until the first worker of an epoch begins to fetch, and until each further one does."""
    if not loop.num_workers:
        return 0.0, 0.0
    begun = (rows["made_ns"] - rows["fetch_ns"]).groupby([rows["epoch"], rows["worker"]]).min().groupby("epoch")
    first, last = begun.min(), begun.max()
    asked = rows[rows["first"]].set_index("epoch")["asked_ns"]
    lead = float((first - asked).median())
    return max(0.0, lead) / SECOND_NS, float((last - first).median()) / max(loop.num_workers - 1, 1) / SECOND_NS


def _cores(trace: Trace, setting: Setting, cores: float, measured: float) -> tuple[float, Floats]:
    """Return the cores that the run had, and the slowdowns that follow.

    They are fewer than it may use if its threads waited longer than for each other: its `measured` slowdown is
    larger than the modelled one.
    """
    if not math.isfinite(cores):
        return math.inf, np.ones(2)
    shares = cores * _CORE_SHARES
    modelled = slowdown(trace, [setting] * len(shares), shares)
    enough = modelled[0] * _UNEXPLAINED >= measured
    at = int(enough.argmax()) if enough.any() else len(shares) - 1
    return float(shares[at]), modelled[:, at]
