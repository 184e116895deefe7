"""A rank that the others wait for: what it does by itself takes longer, and their backward pass holds the wait.

Ranks meet where gradients are summed, within the backward pass. Who comes late spends more time outside of it and
less in it; the others the other way round. So no clocks of different hosts are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.costs import TELL, confidence, costly, lost_ratio, measured
from collector.diagnosis.findings import Advice, Finding, Locus
from collector.diagnosis.frames import SECOND_NS, floats, origin_ns, whole, window_text, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats
from collector.quantities import count, duration, percent
from collector.store.runs import ProcessKey

_FIRST_STEPS = 10
_RECENT_STEPS = 1000
_BLOCK_STEPS = 10  # means of so many are taken for independent
_MIN_STEPS = 5 * _BLOCK_STEPS
_WAITS = 0.5  # of what it is late, the others must be seen waiting
_OWN = {
    "data_wait_ns": "it waits for its data",
    "h2d_ns": "its copies to the device take longer",
    "forward_ns": "its forward pass takes longer",
    "optimizer_ns": "its optimizer takes longer",
    "other_ns": "it does something between its phases",
}
_HOST_ONLY = ("data_wait_ns", "h2d_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """By how much one rank's time in a phase is above the usual one of the others, seconds per step."""

    seconds: float
    error: float


def find_rank_straggler(tables: RunTables) -> list[Finding]:
    """`rank-straggler`: the one rank that holds up the others, if there is one."""
    hosts = _common_steps(tables, "step")
    # Ranks with GPUs meet on the device, while the host runs ahead.
    steps = _common_steps(tables, "device_time") or hosts
    if not steps:
        return []
    own = {key: floats(rows, "duration_ns") - floats(rows, "backward_ns") for key, rows in steps.items()}
    straggler = max(own, key=lambda key: float(np.mean(own[key])))
    rows = steps[straggler]
    late = _late(own, straggler)
    early = _late({key: -floats(each, "backward_ns") for key, each in steps.items()}, straggler)
    lost = min(late.seconds, early.seconds) * len(written(tables, "step", straggler))
    ratio = lost_ratio(tables, max(lost, 0.0))
    certain = late.seconds > 3 * late.error and early.seconds > 3 * early.error
    if not certain or early.seconds < _WAITS * late.seconds or ratio < TELL:
        return []
    seen = {name: hosts if name in _HOST_ONLY and straggler in hosts else steps for name in _OWN}
    phases = {
        name: _late({key: np.nan_to_num(floats(each, name)) for key, each in by_rank.items()}, straggler)
        for name, by_rank in seen.items()
    }
    phase = max(phases, key=lambda name: phases[name].seconds)
    if phases["data_wait_ns"].seconds >= _WAITS * late.seconds:
        phase = "data_wait_ns"  # on the device it is but a gap between two steps
    retries = _retries(tables, steps)
    by, why = ("data" if phase == "data_wait_ns" else "compute"), _OWN[phase]
    if by == "compute" and retries[straggler] > max(count for key, count in retries.items() if key != straggler):
        by, why = "memory", f"{why}, while its allocator flushed its cache {count(retries[straggler])} times"
    times = floats(rows, "time_ns")
    window = window_text(times[0], times[-1], origin_ns(tables))
    rank = whole(rows["rank"].iloc[-1])
    return [
        costly(
            "rank-straggler",
            ratio,
            lost,
            n=len(rows),
            window=window,
            certainty=confidence(len(rows), _BLOCK_STEPS),
            summary=(
                f"The other ranks wait for rank {rank}: by itself it takes {duration(late.seconds)} longer "
                f"per step, and they wait {duration(early.seconds)} longer in their backward pass, where "
                f"gradients are summed; {why}. That costs {duration(lost)}, {percent(ratio)} of the run."
            ),
            locus=Locus(
                host=straggler[0], rank=rank, role="main", pid=straggler[1], stage=phase.removesuffix("_ns")
            ),
            since_step=whole(rows["step"].iloc[0]),
            evidence=(
                measured("own_time_excess_seconds", late.seconds, "seconds", len(rows), window),
                measured("others_backward_excess_seconds", early.seconds, "seconds", len(rows), window),
                measured(f"{phase[:-3]}_excess_seconds", phases[phase].seconds, "seconds", len(rows), window),
                measured("alloc_retry_count", retries[straggler], "count", len(rows), window),
            ),
            advice=(_advice(by, rank, late.seconds),),
            limited_by=by,
        )
    ]


def _advice(by: str, rank: int | None, seconds: float) -> Advice:
    text = {
        "data": f"Mend the loading of rank {rank} (its own findings say what is slow there), or its shard, "
        "disk or cores",
        "memory": f"Give rank {rank} a smaller batch or shorter samples, or free what it keeps on the device: each "
        "flush of the allocator's cache stops the device",
        "compute": f"Look at what rank {rank} alone does in that phase (logging, evaluation, longer "
        "samples), and at its device and cores: clocks, temperature, other programs",
    }[by]
    return Advice(text=text, expected=f"about {duration(seconds)} less per step, on every rank")


def _common_steps(tables: RunTables, stream: str) -> dict[ProcessKey, pd.DataFrame]:
    """The recent steps that all ranks made, by training process; empty where there are too few to compare."""
    mine = {main: written(tables, stream, main) for main in Lifecycle(tables).mains}
    mine = {
        key: rows[np.isfinite(floats(rows, "backward_ns")) & np.isfinite(floats(rows, "rank"))]
        for key, rows in mine.items()
    }
    mine = {
        key: rows.set_index(rows["step"].astype("int64"), drop=False) for key, rows in mine.items() if len(rows)
    }
    if len(mine) < 2:
        return {}
    common = pd.Index(sorted(set.intersection(*(set(rows.index) for rows in mine.values()))))
    common = common[_FIRST_STEPS:][-_RECENT_STEPS:]
    if len(common) < _MIN_STEPS:
        return {}
    return {key: rows[~rows.index.duplicated()].loc[common] for key, rows in mine.items()}


def _late(values: dict[ProcessKey, Floats], who: ProcessKey) -> _Late:
    """How far one rank is above the median of the others, with its standard error from blocks of steps."""
    others = np.median(np.array([series for key, series in values.items() if key != who]), axis=0)
    more = (values[who] - others) / SECOND_NS
    blocks = more[: len(more) // _BLOCK_STEPS * _BLOCK_STEPS].reshape(-1, _BLOCK_STEPS).mean(axis=1)
    return _Late(seconds=float(more.mean()), error=float(blocks.std(ddof=1)) / math.sqrt(len(blocks)))


def _retries(tables: RunTables, steps: dict[ProcessKey, pd.DataFrame]) -> dict[ProcessKey, float]:
    """How often each rank's allocator flushed its cache within the steps; 0 where it is not known."""
    found = {}
    for key, rows in steps.items():
        memory = written(tables, "device_memory", key)
        times = floats(memory, "time_ns")
        known = floats(memory, "alloc_retry_count")[(times >= floats(rows, "time_ns")[0])]
        known = known[np.isfinite(known)]
        found[key] = float(known[-1] - known[0]) if len(known) else 0.0
    return found
