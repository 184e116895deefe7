"""Find the victims that the kernel killed for lack of memory, by its own count, and those of Slurm's own limit.

Where no control group holds the limit of a Slurm job (`OverMemoryKill`), Slurm adds up the resident memory of the
job's processes every few seconds, and kills all of them, the collector too. No kernel counts such a kill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from signal import SIGKILL

import numpy as np
import numpy.typing as npt

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.deaths.victims import Victim
from collector.diagnosis.run.columns import (
    MIB,
    SECOND_NS,
    between,
    floats,
    held_bytes,
    host_samples,
    peak,
    sampled,
    written,
)
from collector.diagnosis.run.host_memory import binding_limit, demand_series
from collector.diagnosis.run.limit_owner import SLURM_REMEDY, limit_owner
from collector.diagnosis.run.processes import last_bytes
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.run.training import iterates, own_steps, training_start_ns
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Advice, Finding, Limit, fact
from collector.units import size

#: Ticks by which the reading of the kill counter may differ from that of a process's end.
MARGIN_TICKS = 5
#: Share of the limit from which memory counts as short: the peak that kills may fall between two ticks.
_SHORT_RATIO = 0.85
#: Share of the limit that the last samples have to show: the peak that kills may fall after them.
_SLURM_RATIO = 0.9
#: Share of a victim's memory that it took after its first step, from which it is called grown.
_GROWN_RATIO = 0.25
#: Share of that growth after the last step or batch, from which it is called a growth at once, or an evaluation's;
#: and the samples before, of which a growth from step to step would show more than the rest.
_AT_ONCE_RATIO, _FEW_SAMPLES = 0.5, 4
#: Seconds before the victim's last sign of life of which samples count.
_LAST_SECONDS = 5.0


def oom_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims whose end the kernel's count of out-of-memory kills explains, largest first."""
    candidates = [v for v in victims if v.signal == SIGKILL or (v.signal is None and v.exit_code is None)]
    sizes = {id(victim): last_bytes(tables, victim.key) for victim in candidates}
    candidates.sort(key=lambda victim: -sizes[id(victim)])
    result: list[Victim] = []
    for victim in candidates:
        kills = max(_oom_kills(tables, victim).values(), default=0)
        windows = (end_window(tables, other) for other in result if other.main[0] == victim.main[0])
        # One kill may explain either of two victims that may have ended at the same time.
        rivals = sum(begin <= victim.gone_ns and victim.last_seen_ns <= end for begin, end in windows)
        if kills > rivals:
            result.append(victim)
    return result


def end_window(tables: RunTables, victim: Victim) -> tuple[float, float]:
    """Return the window, in ns, in which samples of the host may show the victim's end."""
    times = floats(host_samples(tables, victim.main[0]), "time_ns")
    margin = MARGIN_TICKS * float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    return victim.last_seen_ns - margin, victim.gone_ns + margin


def _oom_kills(tables: RunTables, victim: Victim) -> dict[str, int]:
    """Return the increase of each kill counter around the victim's end, between samples of the same cgroup.

    The command may join its cgroup after the first sample and leave it before the last. The cgroup's counter covers
    this job. The host's covers all programs, so it counts only if memory was short then.
    """
    host = victim.main[0]
    times = floats(host_samples(tables, host), "time_ns")
    if len(times) < 2:
        return {}
    begin, end = end_window(tables, victim)
    is_near = (times[1:] >= begin) & (times[:-1] <= end)
    cgroup, whole_host = kills_between_samples(tables, host)
    kills = {"cgroup_oom_kill_count": int(cgroup[is_near].sum())}
    if memory_was_short(tables, host, (times >= begin) & (times <= end)):
        kills["host_oom_kill_count"] = int(whole_host[is_near].sum())
    return kills


def kills_between_samples(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Return the increases of the cgroup's and of the host's kill counter between two samples each.

    The kernel counts each kill in its victim's cgroup, so one that the host alone counts was in another cgroup.
    A cgroup that is gone with its last process counts no longer.
    """
    samples = host_samples(tables, host)
    limits = np.diff(floats(samples, "cgroup_limit_bytes"))
    counted, whole_host = (
        np.maximum(np.diff(floats(samples, f"{name}_oom_kill_count")), 0.0) for name in ("cgroup", "host")
    )
    has_limit = np.isfinite(floats(samples, "cgroup_limit_bytes"))
    is_same = (limits == 0) | ~(has_limit[1:] | has_limit[:-1])
    cgroup, whole_host = np.where(is_same, np.nan_to_num(counted), 0.0), np.nan_to_num(whole_host)
    is_counted = np.isfinite(counted) & (limits == 0)
    return cgroup, np.where(is_counted, np.minimum(whole_host, cgroup), whole_host)


def memory_was_short(tables: RunTables, host: str, in_window: npt.NDArray[np.bool_]) -> bool:
    """Return whether most of a host's memory, or of the limit that binds, was in use in some of its samples."""
    samples = host_samples(tables, host)
    limit = binding_limit(tables, host)[1]
    demand = peak(demand_series(tables, host)[1][in_window])
    available = floats(samples, "memory_available_bytes") / floats(samples, "memory_total_bytes")
    least_available_ratio = -peak(-available[in_window])
    return demand >= _SHORT_RATIO * limit or least_available_ratio <= 1 - _SHORT_RATIO


def oom_kill(tables: RunTables, victim: Victim) -> Finding:
    """Return the finding on a victim that the kernel killed: the kill counters, its memory and the limit."""
    host = victim.main[0]
    samples = host_samples(tables, host)
    kills = {name: count for name, count in _oom_kills(tables, victim).items() if count}
    name, limit = binding_limit(tables, host)
    held = last_bytes(tables, victim.key)
    memory = {
        "cgroup_anon_peak_bytes": peak(floats(samples, "cgroup_anon_bytes")),
        "memory_available_low_bytes": -peak(-floats(samples, "memory_available_bytes")),
    }
    death = catalogue.OOM_KILL_OF_WORKER if victim.locus.role == "worker" else catalogue.OOM_KILL
    owner = limit_owner(tables, host) if name == "cgroup" and "cgroup_oom_kill_count" in kills else None
    owned = f" ({owner.words})" if owner else ""
    grown, advice = _growth(tables, victim) or ("", None)
    if advice is not None:
        death = replace(
            death, advice=(advice, *(death.advice if victim.locus.role == "worker" else death.advice[1:]))
        )
    finding = death.finding(
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(
            *(fact(name, count, "around its end", n=len(samples)) for name, count in kills.items()),
            *victim.evidence,
            *(fact(name, value, "run", n=len(samples)) for name, value in memory.items() if math.isfinite(value)),
        ),
        limit=Limit(name=name, value=limit, unit="bytes") if math.isfinite(limit) else None,
        confidence=0.97 if "cgroup_oom_kill_count" in kills else 0.85,
        went_on=victim.went_on,
        what=victim.what,
        last_held=f"; it last held {size(held)}{grown}" if held else "",
        the_limit=f", the limit is {size(limit)}{owned}" if math.isfinite(limit) else "",
        this_one=f" (this one {size(held)})" if held else "",
    )
    return finding if owner is None or owner.remedy is None else _with_remedy(finding, owner.remedy)


def _growth(tables: RunTables, victim: Victim) -> tuple[str, Advice] | None:
    """Return how much a process grew after it began to iterate, and what to do; None if that is little."""
    key, is_worker = victim.key, victim.locus.role == "worker"
    if key is None or not (is_worker or (victim.locus.role == "main" and iterates(tables, key))):
        return None
    rows, fetches = sampled(tables, key), floats(written(tables, "fetch", key), "time_ns")
    begin = fetches.min(initial=math.inf) if is_worker else training_start_ns(tables, key)
    times, held = floats(rows, "time_ns"), held_bytes(rows)
    is_known = np.isfinite(held) & (times >= begin)
    times, held = times[is_known], held[is_known]
    if not len(held) or held[-1] - held[0] < _GROWN_RATIO * held[-1]:
        return None
    grown = held[-1] - held[0]
    if is_worker:
        return f", {size(grown)} of it since its first batch", catalogue.FIND_CACHE
    # Other ranks may have batches for longer than this one.
    step_ns, batch_ns = (
        peak(floats(stream, "time_ns")) for stream in (own_steps(tables, key), written(tables, "batch", key))
    )
    for end_ns, when, advice in (
        (peak(np.array([step_ns, batch_ns])), "after the last step or batch", catalogue.TAKE_LESS_AT_ONCE),
        (step_ns, "with the batches after the last step", catalogue.FIND_OUTPUTS),
    ):
        before = held[times <= end_ns]
        if len(before) >= _FEW_SAMPLES and held[-1] - before[-1] >= _AT_ONCE_RATIO * grown:
            return f", {size(held[-1] - before[-1])} of it {when}", advice
    return f", {size(grown)} of it since training began", catalogue.FIND_KEPT


def _with_remedy(finding: Finding, remedy: str) -> Finding:
    """Return the finding with the way in which its limit is raised in place of the general advice."""
    general = catalogue.RAISE_LIMIT
    advice = (replace(general, text=remedy) if item == general else item for item in finding.advice)
    return replace(finding, advice=tuple(advice))


def slurm_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """Return the killed training processes whose Slurm job had met its limit of memory."""
    return [
        victim
        for victim in victims
        if victim.signal in (None, SIGKILL)
        and victim.exit_code is None
        and victim.locus.role != "worker"
        and _used_bytes(tables, victim) >= _SLURM_RATIO * (slurm_limit_bytes(tables, victim.main[0]) or math.inf)
    ]


def slurm_limit_bytes(tables: RunTables, host: str) -> int | None:
    """Return the job's limit on the host that made the run; None without one, or if a control group holds it."""
    slurm = tables.manifest.get("slurm") or {}
    if host != tables.manifest.get("host") or binding_limit(tables, host)[0] == "cgroup":
        return None
    per_node, per_core, cores = (
        int(text) if (text := str(slurm.get(f"SLURM_{name}", ""))).isdecimal() else 0
        for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
    )
    return (per_node or per_core * cores) * MIB or None


def slurm_kill(tables: RunTables, victim: Victim) -> Finding:
    """Return the finding on a victim of Slurm's limit."""
    used, limit = _used_bytes(tables, victim), slurm_limit_bytes(tables, victim.main[0]) or 0
    finding = catalogue.SLURM_KILL.finding(
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(
            fact("job_rss_bytes", used, f"peak of the last {_LAST_SECONDS:.0f} s, all processes and the collector"),
            *victim.evidence,
        ),
        limit=Limit(name="Slurm", value=float(limit), unit="bytes"),
        what=victim.what,
        job=tables.manifest["slurm"].get("SLURM_JOB_ID", "?"),
        used=size(used),
        limit_size=size(limit),
    )
    return _with_remedy(finding, SLURM_REMEDY)


def _used_bytes(tables: RunTables, victim: Victim) -> float:
    """Return the largest sum of resident memory at one moment of the victim's last seconds, the collector's too."""
    process = tables.stream("process")
    rows = process[(process["host"] == victim.main[0]).to_numpy()]
    rows = between(rows, victim.last_seen_ns - _LAST_SECONDS * SECOND_NS, victim.gone_ns)
    sums = rows.assign(rss_bytes=floats(rows, "rss_bytes")).groupby("time_ns")["rss_bytes"].sum()
    return float(sums.max()) if len(sums) else 0.0
