"""Which victims the kernel killed for lack of memory, by its own count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.findings import Advice, Evidence, Finding, Limit
from collector.diagnosis.frames import floats, peak
from collector.diagnosis.host_memory import binding_limit, demand_series
from collector.diagnosis.lifecycle import SIGKILL
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import Victim, last_bytes, last_step
from collector.quantities import size

_MARGIN_TICKS = 5  # the counter and the end of a process are read in different ticks
_SHORT_RATIO = 0.85  # of the limit; the peak that kills may fall between two ticks


def oom_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """The victims that the kernel's own count of out-of-memory kills at their end explains, largest first."""
    killed = [v for v in victims if v.signal == SIGKILL or (v.signal is None and v.exit_code is None)]
    held = {id(victim): last_bytes(tables, victim.key) for victim in killed}
    killed.sort(key=lambda victim: -held[id(victim)])
    explained: list[Victim] = []
    for victim in killed:
        kills = max(_oom_kills(tables, victim).values(), default=0)
        rivals = [other for other in explained if _together(tables, other, victim)]
        if kills > len(rivals):
            explained.append(victim)
    return explained


def _together(tables: RunTables, one: Victim, other: Victim) -> bool:
    """Whether they may have ended at the same time, so that one kill may explain either."""
    if one.main[0] != other.main[0]:
        return False
    begin, end = around(tables, one)
    return begin <= other.gone_ns and other.last_seen_ns <= end


def around(tables: RunTables, victim: Victim) -> tuple[float, float]:
    """The time in which the counter may show the victim's end, ns."""
    samples = tables.stream("host")
    times = floats(samples[samples["host"] == victim.main[0]], "time_ns")
    margin = _MARGIN_TICKS * float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    return victim.last_seen_ns - margin, victim.gone_ns + margin


def _oom_kills(tables: RunTables, victim: Victim) -> dict[str, int]:
    """Increase of each kill counter around the victim's end, between samples of the same cgroup.

    The command may join its cgroup after the first sample and leave it before the last. The cgroup's counter speaks
    of this job; the host's may mean anybody, so it counts only if memory was short then.
    """
    host = victim.main[0]
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    times = floats(samples, "time_ns")
    if len(times) < 2:
        return {}
    begin, end = around(tables, victim)
    near = (times[1:] >= begin) & (times[:-1] <= end)
    same = np.diff(np.nan_to_num(floats(samples, "cgroup_limit_bytes"), nan=-1.0)) == 0
    cgroup, whole_host = (
        np.maximum(np.nan_to_num(np.diff(floats(samples, column))), 0.0)
        for column in ("cgroup_oom_kill_count", "host_oom_kill_count")
    )
    kills = {"cgroup_oom_kill_count": int(cgroup[same & near].sum())}
    if _memory_was_short(tables, host, (times >= begin) & (times <= end)):
        kills["host_oom_kill_count"] = int(whole_host[near].sum())
    return kills


def _memory_was_short(tables: RunTables, host: str, then: npt.NDArray[np.bool_]) -> bool:
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    limit = binding_limit(tables, host)[1]
    demand = peak(demand_series(tables, host)[1][then])
    scarcity = peak(-floats(samples, "memory_available_bytes")[then] / floats(samples, "memory_total_bytes")[then])
    return demand >= _SHORT_RATIO * limit or -scarcity <= 1 - _SHORT_RATIO


def oom_kill(tables: RunTables, victim: Victim) -> Finding:
    """A victim that the kernel killed, with the counters that say so, what it held and the limit."""
    host = victim.main[0]
    samples = tables.stream("host")
    samples = samples[samples["host"] == host]
    kills = _oom_kills(tables, victim)
    in_cgroup = kills.get("cgroup_oom_kill_count", 0) > 0
    name, limit = binding_limit(tables, host)
    held = last_bytes(tables, victim.key)
    is_worker = victim.locus.role == "worker"
    less = (
        Advice(
            text="Lower num_workers or prefetch_factor, or hold the dataset in tensors or memory-mapped arrays",
            expected="each worker less saves what it held" + (f" (this one {size(held)})" if held else ""),
        )
        if is_worker
        else Advice(
            text="Hold less in the training process: look at the leak findings and the largest containers",
            expected="demand stays below the limit",
        )
    )
    return Finding(
        kind="host-oom-kill",
        severity="critical",
        confidence=0.97 if in_cgroup else 0.85,
        summary=(
            f"The kernel killed {victim.what} for lack of memory"
            + (f"; it last held {size(held)}" if held else "")
            + (f", the limit is {size(limit)}." if math.isfinite(limit) else ".")
        ),
        locus=victim.locus,
        since_step=last_step(tables, victim.main),
        evidence=(
            *(
                Evidence(name=name, value=count, unit="count", n=len(samples), window="around its end")
                for name, count in kills.items()
                if count
            ),
            *victim.evidence,
            *_pressure(samples),
        ),
        limit=Limit(name=name, value=limit, unit="bytes") if math.isfinite(limit) else None,
        advice=(less, Advice(text="Raise the memory limit of the job", expected="room for the demand above")),
    )


def _pressure(samples: pd.DataFrame) -> tuple[Evidence, ...]:
    anon = peak(floats(samples, "cgroup_anon_bytes"))
    available = floats(samples, "memory_available_bytes")
    found = []
    if math.isfinite(anon):
        found.append(
            Evidence(name="cgroup_anon_peak_bytes", value=anon, unit="bytes", n=len(samples), window="run")
        )
    if np.isfinite(available).any():
        low = float(np.nanmin(available))
        found.append(
            Evidence(name="memory_available_low_bytes", value=low, unit="bytes", n=len(samples), window="run")
        )
    return tuple(found)
