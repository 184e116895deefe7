"""A rank that the others wait for: its own work takes longer, and the others wait in their backward pass.

Ranks meet where gradients are summed, within the backward pass; those that share the weights (FSDP) gather them in
the forward pass as well. A late rank spends more time outside of these and less in them than the others. So no
clocks of different hosts are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.loading.core_waits import spent_ratio
from collector.diagnosis.run.columns import SECOND_NS, between, finite, floats, sampled, whole, written
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss
from collector.diagnosis.stalls.main_thread_pause import ns_in
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Advice, Finding, Locus
from collector.store import ProcessKey
from collector.units import count, counted, duration, percent

_FIRST_STEPS = 10
_RECENT_STEPS = 1000
_BLOCK_STEPS = 10  # steps whose means are taken to be independent
_MIN_STEPS = 5 * _BLOCK_STEPS
_MIN_SAMPLES = 3
_MATCHED_RATIO = 0.5  # share of the lateness that the others must wait, or that explains it by one phase
_MOST_RATIO = 0.8  # share of the lateness that is most of it
_FEW_RATIO = 0.1  # share of the steps that are few
#: Phases of a step outside the backward pass, and the reason if they make a rank late.
_PHASES = {
    "data_wait": "It waits for its data",
    "h2d": "Its copies to the device take longer",
    "forward": "Its forward pass takes longer",
    "optimizer": "Its optimizer takes longer",
    "other": "It does something between its phases",
}
#: Phases in which ranks meet, and what they do there.
_MEETINGS = {
    ("backward",): "backward pass, where gradients are summed",
    ("forward", "backward"): "forward and backward pass, where weights are gathered and gradients summed",
}
_HOST_PHASES = ("data_wait", "h2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """Time of one rank above the median of the others, with its standard error; seconds per step."""

    seconds: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Shares of the time by which a rank is late in which it computes, and in which it waits for a core."""

    cpu: float
    run_queue: float

    @property
    def name(self) -> str:
        """Name of what it does for most of that time."""
        if self.cpu + self.run_queue < _MATCHED_RATIO:
            return "idle"
        return "no core" if self.cpu < _MATCHED_RATIO * self.run_queue else "computing"

    @property
    def words(self) -> str:
        """Its use of that time, as the end of a sentence."""
        if self.name == "idle":
            return (
                ". Most of that time it neither computes nor waits for a core: it sleeps, or waits for a file, the "
                "network or a lock"
            )
        run_queue = percent(self.run_queue)
        return f": it computes for {percent(self.cpu)} of this time and waits for a core for {run_queue}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Few:
    """Few steps with most of the time by which a rank is late: their number, mean excess, and whether it saves."""

    count: int
    seconds: float
    is_saving: bool

    def words(self, of_count: int) -> str:
        """Return these steps, of this many, as a sentence."""
        saving = ", most of them with a checkpoint that it saves" if self.is_saving else ""
        each = f"{counted(self.count, 'step')} of {count(of_count)}, {duration(self.seconds)} each"
        return f"Most of that falls on {each}{saving}. "


def find_rank_straggler(tables: RunTables) -> list[Finding]:
    """Find `rank-straggler`: the one rank that holds up the others, if there is one."""
    hosts = _common_steps(tables, "step")
    # Ranks with GPUs meet on the device, while the host runs ahead.
    all_steps = _common_steps(tables, "device_time") or hosts
    if not all_steps:
        return []
    # The forward pass of a rank without batches of its own includes its wait for those that another one broadcasts.
    meetings = [met for met in _MEETINGS if "forward" not in met or _load_alike(hosts)]
    found = (_straggler(tables, all_steps, hosts, met) for met in meetings)
    first = next((finding for finding in found if finding is not None), None)
    return [] if first is None else [first]


def _load_alike(hosts: dict[ProcessKey, pd.DataFrame]) -> bool:
    """Return whether all ranks took batches from a loader in these steps, or none did."""
    return len({bool(np.nansum(floats(rows, "batches_count"))) for rows in hosts.values()}) <= 1


def _straggler(
    tables: RunTables,
    all_steps: dict[ProcessKey, pd.DataFrame],
    hosts: dict[ProcessKey, pd.DataFrame],
    met: tuple[str, ...],
) -> Finding | None:
    """Return the finding on the rank that holds up the others, which meet in these phases; None without one."""
    meet_on_host = all_steps is hosts
    all_steps = {key: _with_meetings(rows, met) for key, rows in all_steps.items()}
    steps, hosts = ({key: rows.iloc[-_RECENT_STEPS:] for key, rows in each.items()} for each in (all_steps, hosts))
    straggler = max(steps, key=lambda key: float(np.mean(floats(steps[key], "outside_ns"))))
    lateness, waits = _lateness(steps, straggler)
    rows = steps[straggler]
    times, count_all = floats(rows, "time_ns"), len(all_steps[straggler])
    lost = min(excess.seconds for excess in _lateness(all_steps, straggler)) * count_all
    loss = Loss.of(tables, max(lost, 0.0), len(rows), (times[0], times[-1]))
    certain = lateness.seconds > 3 * lateness.error and waits.seconds > 3 * waits.error
    if not certain or waits.seconds < _MATCHED_RATIO * lateness.seconds or loss.ratio < LEAST_LOST_RATIO:
        return None
    phase, phase_seconds = _late_phase(steps, hosts, straggler, lateness.seconds, met)
    retries = _retries(tables, steps)
    by, why = ("data" if phase == "data_wait" else "compute"), _PHASES[phase]
    flushes = retries.pop(straggler)
    if by == "compute" and all(flushes > other for other in retries.values()):
        by, why = "memory", f"{why}, while its allocator flushed its cache {count(flushes)} times"
    use, few = None, _few_steps(tables, steps, straggler)
    if by == "compute" and meet_on_host:
        use = _use_of_time(tables, steps, straggler, lateness.seconds)
    doing = "saving" if few is not None and few.is_saving else by if use is None else use.name
    rank = whole(rows["rank"].iloc[-1])
    return Finding(
        kind="rank-straggler",
        severity=loss.severity,
        confidence=loss.confidence(_BLOCK_STEPS),
        summary=f"The other ranks wait for rank {rank}: it takes {duration(lateness.seconds)} longer per step, "
        f"and they wait {duration(waits.seconds)} longer in their {_MEETINGS[met]}. "
        f"{few.words(len(rows)) if few else ''}{why}{use.words if use else ''}. {loss.words}",
        locus=Locus(host=straggler[0], rank=rank, role="main", pid=straggler[1], stage=phase),
        since_step=whole(rows["step"].iloc[0]) if len(rows) == count_all else None,
        evidence=loss.evidence(
            own_time_excess_seconds=lateness.seconds,
            **{
                f"others_{'_and_'.join(met)}_excess_seconds": waits.seconds,
                f"{phase}_excess_seconds": phase_seconds,
            },
            **({} if math.isnan(flushes) else {"alloc_retry_count": flushes}),
            **({} if use is None else {"cpu_excess_ratio": use.cpu, "run_queue_excess_ratio": use.run_queue}),
        ),
        advice=(_advice(doing, rank, lateness.seconds),),
        limited_by=by,
    )


def _few_steps(tables: RunTables, steps: dict[ProcessKey, pd.DataFrame], straggler: ProcessKey) -> _Few | None:
    """Return the few steps on which most of a rank's lateness falls; None if it falls on many."""
    excess = _excess_ns(steps, straggler, "outside_ns")
    longest = np.argsort(excess, kind="stable")[::-1]
    few_count = 1 + int(np.searchsorted(np.cumsum(excess[longest]), _MOST_RATIO * excess.sum()))
    if few_count > _FEW_RATIO * len(excess):
        return None
    few = steps[straggler].iloc[np.sort(longest[:few_count])]
    saving_ns = ns_in(tables.events_of("checkpoint", by=straggler), few)
    return _Few(
        count=few_count,
        seconds=float(excess[longest[:few_count]].mean()) / SECOND_NS,
        is_saving=int(np.count_nonzero(saving_ns)) >= _MATCHED_RATIO * few_count,
    )


def _late_phase(
    steps: dict[ProcessKey, pd.DataFrame],
    hosts: dict[ProcessKey, pd.DataFrame],
    straggler: ProcessKey,
    late_seconds: float,
    met: tuple[str, ...],
) -> tuple[str, float]:
    """Return the phase in which a rank is late, and by how many seconds per step."""
    names = [name for name in _PHASES if name not in met]
    by_phase = {name: hosts if name in _HOST_PHASES and straggler in hosts else steps for name in names}
    phases = {name: _excess(by_rank, straggler, f"{name}_ns").seconds for name, by_rank in by_phase.items()}
    phase = max(phases, key=lambda name: phases[name])
    if phases["data_wait"] >= _MATCHED_RATIO * late_seconds:
        phase = "data_wait"  # on the device, a wait for data is a gap between two steps
    return phase, phases[phase]


def _use_of_time(
    tables: RunTables, steps: dict[ProcessKey, pd.DataFrame], straggler: ProcessKey, late_seconds: float
) -> _Use | None:
    """Return how a rank uses the time by which it is late, from the samples of its process; None if too few.

    Only where the ranks meet on the host: one that waits for its device may compute all the while.
    """
    shares = []
    for column in ("cpu_ns", "run_queue_ns"):
        per_step = {}
        for key, rows in steps.items():
            times = floats(rows, "time_ns")
            samples = between(sampled(tables, key), times[0], times[-1])
            ratio, count_all = spent_ratio(samples, column, _MIN_SAMPLES)
            if not count_all:
                return None
            per_step[key] = ratio * float(np.diff(times).mean())
        others = float(np.median([value for key, value in per_step.items() if key != straggler]))
        shares.append((per_step[straggler] - others) / SECOND_NS / late_seconds)
    cpu, run_queue = (float(np.clip(share, 0.0, 1.0)) for share in shares)
    return _Use(cpu=cpu, run_queue=min(run_queue, 1.0 - cpu))


def _advice(by: str, rank: int | None, seconds: float) -> Advice:
    text = {
        "saving": f"Let rank {rank} save less often or in the background, or let all ranks save their part "
        "(torch.distributed.checkpoint, async_save)",
        "data": f"Speed up the loading of rank {rank} (its own findings show what is slow there), or its shard, "
        "disk or cores",
        "memory": f"Give rank {rank} a smaller batch or shorter samples, or free what it keeps on the device: each "
        "flush of the allocator's cache stops the device",
        "computing": f"Look at what rank {rank} alone computes in that phase (logging, evaluation, longer "
        "samples): `tidegauge stacks` names its line",
        "no core": f"Give rank {rank} a core: end other programs, and check its affinity and OMP_NUM_THREADS",
        "idle": f"Look for what rank {rank} alone waits for in that phase, a sleep, file, request or lock: "
        "`tidegauge stacks` names its line",
        "compute": f"Look at what rank {rank} alone does in that phase (logging, evaluation, longer "
        "samples), and at its device and cores: clocks, temperature, other programs",
    }[by]
    return Advice(text=text, expected=f"about {duration(seconds)} less per step, on every rank")


def _common_steps(tables: RunTables, stream: str) -> dict[ProcessKey, pd.DataFrame]:
    """Return the steps that all ranks made, by training process; empty if there are too few to compare."""
    steps = {main: written(tables, stream, main) for main in lifecycle_of(tables).mains}
    steps = {
        key: rows[np.isfinite(floats(rows, "backward_ns")) & np.isfinite(floats(rows, "rank"))]
        for key, rows in steps.items()
    }
    steps = {
        key: rows.set_index(rows["step"].astype("int64"), drop=False) for key, rows in steps.items() if len(rows)
    }
    if len(steps) < 2:
        return {}
    common = pd.Index(sorted(set.intersection(*(set(rows.index) for rows in steps.values()))))
    common = common[_FIRST_STEPS:]
    if len(common) < _MIN_STEPS:
        return {}
    return {key: rows[~rows.index.duplicated()].loc[common] for key, rows in steps.items()}


def _with_meetings(rows: pd.DataFrame, met: tuple[str, ...]) -> pd.DataFrame:
    """Return the steps of a rank with their time within the phases in which ranks meet, and outside of them."""
    within = np.sum([np.nan_to_num(floats(rows, f"{phase}_ns")) for phase in met], axis=0)
    return rows.assign(within_ns=within, outside_ns=floats(rows, "duration_ns") - within)


def _lateness(steps: dict[ProcessKey, pd.DataFrame], rank: ProcessKey) -> tuple[_Excess, _Excess]:
    """Return how much longer a rank is outside of its meetings than the others, and how much less within them."""
    within = _excess(steps, rank, "within_ns")
    return _excess(steps, rank, "outside_ns"), replace(within, seconds=-within.seconds)


def _excess_ns(steps: dict[ProcessKey, pd.DataFrame], rank: ProcessKey, column: str) -> Floats:
    """Return how far one rank is above the median of the others in each step.

    A phase without a time took none; a step whose duration is not known makes the result unknown.
    """
    values = {key: floats(rows, column) for key, rows in steps.items()}
    if column != "outside_ns":
        values = {key: np.nan_to_num(series) for key, series in values.items()}
    own = values.pop(rank)
    excess: Floats = own - np.median(np.array([*values.values()]), axis=0)
    return excess


def _excess(steps: dict[ProcessKey, pd.DataFrame], rank: ProcessKey, column: str) -> _Excess:
    """Return how far one rank is above the median of the others; the error comes from blocks of steps."""
    excess = _excess_ns(steps, rank, column) / SECOND_NS
    blocks = excess[: len(excess) // _BLOCK_STEPS * _BLOCK_STEPS].reshape(-1, _BLOCK_STEPS).mean(axis=1)
    return _Excess(seconds=float(excess.mean()), error=float(blocks.std(ddof=1)) / math.sqrt(len(blocks)))


def _retries(tables: RunTables, steps: dict[ProcessKey, pd.DataFrame]) -> dict[ProcessKey, float]:
    """Return how often each rank's allocator flushed its cache within the steps; NaN where it is not known."""
    retries = {}
    for key, rows in steps.items():
        memory = between(written(tables, "device_memory", key), floats(rows, "time_ns")[0], math.inf)
        counts = finite(floats(memory, "alloc_retry_count"))
        retries[key] = float(counts[-1] - counts[0]) if len(counts) else math.nan
    return retries
