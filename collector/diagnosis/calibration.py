"""What the replay needs, taken from a recorded loop: what its batches cost, free of waiting for a core."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS, floats, key_of, sampled
from collector.diagnosis.limits import cores_per_rank
from collector.diagnosis.loops import Loop
from collector.diagnosis.overheads import assumed, overheads
from collector.diagnosis.pace import without_pauses
from collector.diagnosis.replay import Setting, Trace, slowdown, throughputs
from collector.diagnosis.sharing import Sharing, sharing
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats

#: The recent part of a run that is replayed.
_WINDOW_BATCHES = 1500
_MIN_BATCHES = 30
_BLOCKED = 0.5  # of the fetches: only then can a thing that they share be what counts
_COMPUTES = 0.1  # of a fetch, waiting for a core included: less changes a prediction by no more than that
_UNEXPLAINED = 1.15  # slower than the run's own threads make each other: somebody else uses the cores too
_CORE_SHARES = np.linspace(1.0, 0.2, 17)
_ROUNDS = 4  # until the replay gives the throughput that was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A stretch of a loop as the replay sees it, and what was measured of it; rates per second.

    Attributes:
        trace: its costs.
        otherwise: the same if the workers share what they wait for, where the run leaves that open; if each waits
            for itself, where they share (only other settings tell how much of their waiting is their own).
        keys: epoch and index of each batch of it.
        setting: with which it ran.
        sharing: how far its workers wait for one thing in common; None where they do not mostly wait.
        slower: how many times longer computing took there, in workers and in the loop (`slowdown`).
        batches_per_second, wait_ratio: measured.
        samples_per_batch: NaN if unknown.
        payload_bytes: of one batch, the largest seen; NaN if unknown.

    """

    trace: Trace
    otherwise: Trace | None
    keys: pd.DataFrame
    setting: Setting
    sharing: Sharing | None
    slower: Floats
    batches_per_second: float
    wait_ratio: float
    samples_per_batch: float
    payload_bytes: float

    @property
    def common(self) -> Sharing | None:
        """How it shows that the workers wait for one thing in common; None where it does not."""
        return self.sharing if self.sharing is not None and self.sharing.is_shared else None


def calibrate(tables: RunTables, loop: Loop) -> Calibrated | str:
    """The recent stretch of a loop; or what is missing for it, in words."""
    rows, recurs = _stretch(loop)
    if len(rows) < _MIN_BATCHES:
        return f"it needs {_MIN_BATCHES} recorded batches, this run has {len(rows)}"
    # What is told of a loop and of its stages mostly looks at one stretch.
    told = (loop.num_workers, loop.prefetch_factor, loop.in_order, recurs, rows.to_numpy(np.float64).tobytes())
    return tables.once(("calibrated", loop.main, *told), lambda: _calibrated(tables, loop, rows, recurs))


def _calibrated(tables: RunTables, loop: Loop, rows: pd.DataFrame, recurs: bool) -> Calibrated | str:
    dispatched = rows.sort_values(["epoch", "index"])
    costs = _fetch_costs(dispatched)
    cpu, blocked, slowed = costs.cpu, costs.blocked, costs.slowed
    cores = cores_per_rank(tables, loop.main[0])
    if cpu.sum() >= _COMPUTES * (cpu + blocked).sum() and not math.isfinite(cores):
        return "how many cores its workers have was not sampled"
    took = rows["loop_ns"].to_numpy() / SECOND_NS
    if not np.isfinite(took).any():
        return "each of its epochs has one batch, so what the loop takes from one to the next is not known"
    waited = rows["wait_ns"].to_numpy() / SECOND_NS
    first = rows["first"].to_numpy()
    if not recurs:
        waited[0] = 0.0
    creation = _creation(tables, loop)
    total = float(waited.sum() + np.nansum(took)) + recurs * creation * loop.num_workers * first.sum()
    usual = float(np.nanmean(took))
    computing = _computing_ratio(tables, loop, rows) * total / len(rows) - (0 if loop.num_workers else cpu.mean())
    share = min(1.0, max(0.0, computing * slowed / max(usual, 1e-9)))
    alone = 1 - share * (1 - 1 / slowed)  # what is left of the loop's time when it need not wait for cores
    found = _sharing(loop, dispatched, blocked)
    computing_ratio = float(cpu.sum() / max((cpu + blocked).sum(), 1e-9))
    passing = assumed(computing_ratio)
    if loop.num_workers:
        passing = overheads(rows, prefetch_factor=loop.prefetch_factor, computing_ratio=computing_ratio)
    start, start_each = _starts(loop, rows)
    trace = Trace(
        cpu=cpu,
        blocked=blocked,
        loop=np.where(np.isfinite(took), took, usual) * alone,
        threads=costs.threads,
        loop_cpu_ratio=share / slowed / alone,
        loop_threads=max(1.0, computing * slowed / max(usual, 1e-9)),
        gap=passing.gap / slowed,
        dispatch=passing.dispatch / slowed,
        transfer=passing.transfer / slowed,
        hand_over=passing.hand_over / slowed,
        busy_hand_over=passing.busy_hand_over,
        epochs=tuple(np.diff([*np.flatnonzero(first), len(rows)]).tolist()) if recurs else (),
        creation=creation,
        start=start,
        start_each=start_each,
    )
    prefetch_factor = max(loop.prefetch_factor, 1)
    setting = Setting(num_workers=loop.num_workers, prefetch_factor=prefetch_factor, in_order=loop.in_order)
    if costs.has_children and math.isfinite(cores):
        trace = _without_queueing(dataclasses.replace(trace, cores=cores), setting, costs.wall)
    cores, slower = _cores(trace, setting, cores, slowed)
    samples, payload = floats(rows, "samples_count"), floats(rows, "payload_bytes")
    measured = (len(rows) - (not recurs)) / total
    trace = dataclasses.replace(trace, cores=cores)
    shared = _shared(trace, found, setting, measured)
    guess, otherwise = trace, shared
    if shared is not None and found is not None and found.is_shared:
        guess, otherwise = shared, trace
    return Calibrated(
        trace=guess,
        otherwise=otherwise,
        keys=dispatched[["epoch", "index"]],
        setting=setting,
        sharing=found,
        slower=slower,
        batches_per_second=measured,
        wait_ratio=float(waited.sum()) / total,
        samples_per_batch=float(np.nanmean(samples)) if np.isfinite(samples).any() else math.nan,
        payload_bytes=float(np.nanmax(payload)) if np.isfinite(payload).any() else math.nan,
    )


def _stretch(loop: Loop) -> tuple[pd.DataFrame, bool]:
    """The recent batches with their fetches, and whether epochs begin anew in it so often that it counts.

    Times of the loop: `asked_ns`, `yield_ns`, `wait_ns`, `loop_ns` (until the next batch is asked for, pauses cut;
    NaN at the end of an epoch).
    """
    yields = floats(loop.batches, "time_ns")
    newest = np.argsort(yields, kind="stable")[-_WINDOW_BATCHES:]
    is_cut, taken = len(yields) > len(newest), loop.batches.iloc[newest]
    taken = taken[["epoch", "index", "payload_bytes", "samples_count"]].assign(
        yield_ns=yields[newest], wait_ns=floats(taken, "wait_ns")
    )
    taken["asked_ns"] = taken["yield_ns"] - taken["wait_ns"]
    fetches = loop.fetches  # of which the rest are none of these batches
    fetches = fetches[fetches["epoch"].isin(taken["epoch"]) & (fetches["index"] >= taken["index"].min())]
    spent = ["cpu_ns", "process_cpu_ns", "children_cpu_ns", "run_queue_ns", "idle_ns"]
    made = fetches.assign(
        made_ns=floats(fetches, "time_ns"),
        fetch_ns=floats(fetches, "getitem_ns") + np.nan_to_num(floats(fetches, "collate_ns")),
        **{name: floats(fetches, name) for name in spent},
    ).drop_duplicates(["epoch", "index"])
    made = made[["epoch", "index", "worker", "made_ns", "fetch_ns", *spent]]
    rows = taken.merge(made, on=["epoch", "index"])
    rows = rows[np.isfinite(rows["fetch_ns"])].reset_index(drop=True)
    rows["first"] = rows["epoch"] != rows["epoch"].shift()
    rows.loc[:0, "first"] &= not is_cut
    loops = rows["asked_ns"].shift(-1) - rows["yield_ns"]
    loops[rows["epoch"].shift(-1) != rows["epoch"]] = np.nan
    rows["loop_ns"] = without_pauses(np.maximum(loops.to_numpy(dtype=float), 0.0))
    begins = np.flatnonzero(rows["first"])
    if len(begins) >= 2:
        return rows.iloc[begins[int(len(begins) > 2)] :].reset_index(drop=True), True
    last = rows[rows["epoch"] == rows["epoch"].iloc[-1]] if len(rows) else rows
    return last[floats(last, "index") >= loop.ramp].reset_index(drop=True), False


@dataclass(frozen=True, slots=True)
class _Costs:
    """The time of each fetch by its parts, in seconds, and the effect of too few cores on it.

    Attributes:
        wall: from begin to end.
        cpu, blocked: of which computing, in the thread or in a child that it waits for, and waiting.
        threads: that compute at a time while a fetch computes, children included.
        slowed: how many times longer computing took, as far as the kernel tells: it counts no wait of children.
        has_children: whether children are a part of what computes.

    """

    wall: Floats
    cpu: Floats
    blocked: Floats
    threads: float
    slowed: float
    has_children: bool


def _fetch_costs(rows: pd.DataFrame) -> _Costs:
    """Split the fetches into computing, waiting for a core and being blocked."""
    wall, own, queued = (floats(rows, name) for name in ("fetch_ns", "cpu_ns", "run_queue_ns"))
    children = np.nan_to_num(floats(rows, "children_cpu_ns"))
    known = np.isfinite(own) & np.isfinite(queued)
    if not known.any():
        return _Costs(wall / SECOND_NS, np.zeros_like(wall), wall / SECOND_NS, 1.0, 1.0, False)
    total = float(wall[known].sum())
    own_share, waiting = float(own[known].sum()) / total, float(queued[known].sum()) / total
    children_share = float(children[known].sum()) / total
    computes = own_share + children_share + waiting >= _COMPUTES
    waiting = waiting if computes else 0.0
    queued = np.where(known & computes, queued, wall * waiting)
    own = np.minimum(np.where(known, own, wall * own_share), wall)
    children_inside = np.clip(np.where(known, children, wall * children_share), 0.0, wall - own - queued)
    cpu = own + np.maximum(children_inside, 0.0)
    spent = float(np.nansum(floats(rows, "process_cpu_ns")) + children.sum())
    return _Costs(
        wall=wall / SECOND_NS,
        cpu=cpu / SECOND_NS,
        blocked=np.maximum(wall - cpu - queued, 0.0) / SECOND_NS,
        threads=max(1.0, spent / max(float(cpu[known].sum()), 1.0)) if computes else 1.0,
        slowed=1 + float(queued[known].sum()) / max(float(cpu[known].sum()), 1e-9),
        has_children=children_share >= _COMPUTES,
    )


def _without_queueing(trace: Trace, setting: Setting, wall: Floats) -> Trace:
    """Take from the blocked time what children must have waited for a core, which nothing measures.

    It is as much as the replay says that threads slow each other down at the setting of the run.
    """
    blocked = trace.blocked
    for _ in range(_ROUNDS):
        slower = slowdown(dataclasses.replace(trace, blocked=blocked), [setting], np.array([trace.cores]))
        blocked = np.clip(wall - trace.cpu * slower[0], 0.0, trace.blocked)
    return dataclasses.replace(trace, blocked=blocked)


def _sharing(loop: Loop, rows: pd.DataFrame, blocked: Floats) -> Sharing | None:
    """Whether several workers that mostly wait do so for one thing in common."""
    ends, took = rows["made_ns"].to_numpy() / SECOND_NS, rows["fetch_ns"].to_numpy() / SECOND_NS
    queued = floats(rows, "run_queue_ns") / SECOND_NS
    known = np.isfinite(floats(rows, "cpu_ns")) & np.isfinite(queued)
    if loop.num_workers < 2 or not known.all() or blocked.sum() < _BLOCKED * took.sum():
        return None
    workers, places = (floats(rows, name).astype(np.intp) for name in ("worker", "index"))
    return sharing(ends - took, ends, blocked, workers, places, float(queued.sum() / took.sum()))


def _shared(trace: Trace, found: Sharing | None, setting: Setting, measured: float) -> Trace | None:
    """Return the trace if the workers share what they wait for; None if they do not, or hardly wait.

    What they share then makes the measured batches per second. Counting the fetches in progress takes those for
    waiting that compute, so the share of each comes out too small. With fewer than two workers all of the waiting
    may be for it.
    """
    if setting.num_workers < 2:
        mostly_waits = trace.blocked.sum() >= _BLOCKED * (trace.cpu + trace.blocked).sum()
        return dataclasses.replace(trace, in_turn=True) if mostly_waits else None
    if found is None or found.is_apart:
        return None
    service = found.service
    for _ in range(_ROUNDS):
        shared = dataclasses.replace(trace, blocked=service, in_turn=True)
        (rate,) = throughputs(shared, [setting])
        service = np.minimum(trace.blocked, service * rate / measured)
    return dataclasses.replace(shared, blocked=service)


def _computing_ratio(tables: RunTables, loop: Loop, rows: pd.DataFrame) -> float:
    """CPU time of the training process per second of the stretch, 0 if it was not sampled."""
    samples = sampled(tables, loop.main)
    times, cpu = floats(samples, "time_ns"), floats(samples, "cpu_ns")
    inside = np.isfinite(cpu) & (times >= rows["asked_ns"].iloc[0]) & (times <= rows["yield_ns"].iloc[-1])
    if inside.sum() < 2:
        return 0.0
    times, cpu = times[inside], cpu[inside]
    return float((cpu[-1] - cpu[0]) / max(times[-1] - times[0], 1.0))


def _creation(tables: RunTables, loop: Loop) -> float:
    """Return the seconds that creating one worker takes at the beginning of an epoch; 0 if workers stay."""
    took = [
        event["time_ns"] - event["begun_ns"]
        for event in tables.events_of("epoch-start")
        if key_of(event) == loop.main and event.get("loader") == loop.loader and event.get("begun_ns") is not None
    ]
    recurring = np.array(took[1:], dtype=float)  # the first epoch starts workers in any case
    return float(np.median(recurring)) / max(loop.num_workers, 1) / SECOND_NS if len(recurring) else 0.0


def _starts(loop: Loop, rows: pd.DataFrame) -> tuple[float, float]:
    """When the first worker of an epoch begins its first fetch, and how much later each further one does."""
    if not loop.num_workers:
        return 0.0, 0.0
    begun = (rows["made_ns"] - rows["fetch_ns"]).groupby([rows["epoch"], rows["worker"]]).min().groupby("epoch")
    first, last = begun.min(), begun.max()
    asked = rows[rows["first"]].set_index("epoch")["asked_ns"]
    lead = float((first - asked).median())
    return max(0.0, lead) / SECOND_NS, float((last - first).median()) / max(loop.num_workers - 1, 1) / SECOND_NS


def _cores(trace: Trace, setting: Setting, cores: float, slowed: float) -> tuple[float, Floats]:
    """The cores that the run had, and how that slowed it.

    They are fewer than it may use if its threads waited longer than for each other.
    """
    if not math.isfinite(cores):
        return math.inf, np.ones(2)
    shares = cores * _CORE_SHARES
    modelled = slowdown(trace, [setting] * len(shares), shares)
    enough = modelled[0] * _UNEXPLAINED >= slowed
    at = int(enough.argmax()) if enough.any() else len(shares) - 1
    return float(shares[at]), modelled[:, at]
