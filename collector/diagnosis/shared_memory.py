"""/dev/shm, in which workers hand their batches over: what fills it, and whom that kills.

A page of shared memory is taken when it is first written. If none is left the writer gets no error, but SIGBUS;
newer torch asks for the pages of a batch beforehand, and raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from collector.diagnosis.findings import Advice, Evidence, Finding, Limit, Locus
from collector.diagnosis.forecast import Course, exhaustion
from collector.diagnosis.frames import (
    SECOND_NS,
    floats,
    last,
    peak,
    sampled_on,
    step_numbers,
    while_training,
)
from collector.diagnosis.loops import loader_settings
from collector.diagnosis.oom import around
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats, Growth, growth
from collector.diagnosis.victims import Victim, fact, last_step
from collector.diagnosis.witnesses import Leak, leak_finding, negligible_bytes, witness_of
from collector.quantities import size

_SIGBUS = 7
_UNKNOWN = " No process of the run, its cgroup nor the kernel's own count shows as much: what it is is not known."
_NOBODY_MAPS = " The kernel's own count confirms it; no process of the run maps it, so it may be another program's."
_ROOM_ADVICE = (
    Advice(
        text="Give /dev/shm more room (docker: --shm-size=8g, Kubernetes: an emptyDir of medium Memory there)",
        expected="room for the batches that are under way",
    ),
    Advice(
        text="Lower num_workers, prefetch_factor or the size of a batch",
        expected="num_workers * prefetch_factor batches are there at a time",
    ),
)
_LEAK_ADVICE = (
    Advice(
        text="See with `ls -l /dev/shm` and `lsof +L1 /dev/shm` what lies there and who holds it: segments want "
        "close() and unlink(), batches from workers are to be kept as .clone()",
        expected="what is in use stays where it is",
    ),
)


def find_shared_memory(tables: RunTables) -> list[Finding]:
    """`shm-leak` and `shm-exhaustion-risk`, of each host."""
    samples = tables.stream("host")
    return [found for host in pd.unique(samples["host"]) for found in _on_host(tables, str(host))]


def _on_host(tables: RunTables, host: str) -> list[Finding]:
    samples = while_training(tables, _samples(tables, host))
    times, used, total = _usage(samples)
    if not np.isfinite(used).any() or not total > 0:
        return []
    grown = growth(times, used, negligible=negligible_bytes(used), steps=step_numbers(tables, host, times))
    if grown is None:
        return _by_level(tables, host, peak(used), total, len(used))
    mapped = _mapped(tables, host)
    own, everyones = _witnesses(samples, mapped, grown)
    witnesses, besides = (*own, *everyones), ""
    leak = Leak.of(grown, "shm_used", witnesses, float(times[-1]), "bytes")
    part = None if own else _part(tables, samples, mapped)
    if part is not None:
        leak, besides = part, " Other programs fill it too."
    elif not own:
        besides = _NOBODY_MAPS if witnesses else _UNKNOWN
    limit = Limit(name="/dev/shm", value=total, unit="bytes")
    charged = np.isfinite(floats(samples, "cgroup_shmem_bytes")).any()
    is_own, found = bool(own or part), []
    if is_own or not (witnesses and charged):  # what the run's cgroup is charged with is known: it is another job's
        found = [_leak(tables, host, leak, 0.9 if is_own else 0.75, besides)]
    course = Course(what="/dev/shm", grown=grown, times=times, values=used, limit=limit)
    if witnesses and course.is_relevant:
        advice = (*_LEAK_ADVICE, *_ROOM_ADVICE[:1])
        locus = Locus(host=host)
        found.append(
            exhaustion(tables, "shm-exhaustion-risk", course, locus=locus, witnesses=witnesses, advice=advice)
        )
    return found


def _leak(tables: RunTables, host: str, leak: Leak, confidence: float, besides: str) -> Finding:
    rise, slope = leak.growth.rise, leak.growth.slope
    summary = f"/dev/shm keeps filling: {size(rise)} so far, {size(slope * 60)} per minute.{besides}"
    locus = Locus(host=host)
    return leak_finding(
        tables, "shm-leak", leak, summary=summary, locus=locus, advice=_LEAK_ADVICE, confidence=confidence
    )


def _witnesses(
    samples: pd.DataFrame, mapped: tuple[Floats, Floats], grown: Growth
) -> tuple[list[Evidence], list[Evidence]]:
    """What confirms that it is the run that fills /dev/shm, and what that it fills."""
    times = floats(samples, "time_ns") / SECOND_NS
    own = (
        witness_of("cgroup_shmem_rise_bytes", times, floats(samples, "cgroup_shmem_bytes"), grown),
        witness_of("process_shm_rise_bytes", *mapped, grown),
    )
    everyones = (witness_of("host_shmem_rise_bytes", times, floats(samples, "memory_shmem_bytes"), grown),)
    return [each for each in own if each is not None], [each for each in everyones if each is not None]


def _mapped(tables: RunTables, host: str) -> tuple[Floats, Floats]:
    """Times (seconds) and the shared memory that the run's processes map, together."""
    rows = while_training(tables, sampled_on(tables, host))
    mapped = rows.groupby("time_ns")["shm_bytes"].sum(min_count=1)
    return mapped.index.to_numpy(dtype=float) / SECOND_NS, mapped.to_numpy(dtype=float)


def _part(tables: RunTables, samples: pd.DataFrame, mapped: tuple[Floats, Floats]) -> Leak | None:
    """What the run itself adds where others add more: a growth of what its processes map, if /dev/shm shows it."""
    times, values = mapped
    steps = step_numbers(tables, str(samples["host"].iloc[0]), times)
    grown = growth(times, values, negligible=negligible_bytes(values), steps=steps)
    if grown is None:
        return None
    at, used, _ = _usage(samples)
    shown = witness_of("shm_used_rise_bytes", at, used, grown)
    return Leak.of(grown, "process_shm", (shown,), float(times[-1]), "bytes") if shown is not None else None


def _by_level(tables: RunTables, host: str, highest: float, total: float, n: int) -> list[Finding]:
    """Nothing grows, but the workers' next batches find no room."""
    batch, workers = largest_batch_bytes(tables, host), _workers_count(tables, host)
    free = total - highest
    if not free < batch * workers:
        return []
    return [
        Finding(
            kind="shm-exhaustion-risk",
            severity="critical" if free < batch else "warning",
            confidence=0.9,
            summary=(
                f"/dev/shm had {size(free)} left of {size(total)} at the peak, and each of {workers} "
                f"workers hands over batches of {size(batch)}: who finds no room fails, or dies of SIGBUS."
            ),
            locus=Locus(host=host),
            evidence=(
                Evidence(name="shm_free_low_bytes", value=free, unit="bytes", n=n, window="run"),
                fact("batch_payload_peak_bytes", batch, "run", unit="bytes"),
                fact("workers_count", workers, "of the loaders of each process the most"),
            ),
            limit=Limit(name="/dev/shm", value=total, unit="bytes"),
            advice=_ROOM_ADVICE,
        )
    ]


def largest_batch_bytes(tables: RunTables, host: str) -> float:
    """The largest batch that a worker handed over, NaN if none is known."""
    batch = tables.stream("batch")
    return peak(floats(batch[(batch["host"] == host) & (floats(batch, "worker") >= 0)], "payload_bytes"))


def _workers_count(tables: RunTables, host: str) -> int:
    """How many workers may write at once: of each training process the most that one loader has."""
    most: dict[object, int] = {}
    for (main, _), setting in loader_settings(tables).items():
        if main is not None and main[0] == host:
            most[main] = max(most.get(main, 0), int(setting.get("num_workers") or 0))
    return sum(most.values())


def bus_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """The victims of SIGBUS at whose end /dev/shm was full, as far as the ticks of the collector can tell.

    That is: less was free than a batch of each worker, or than twice what it had filled by from one tick to the
    next, since what is written between two ticks comes in bursts.
    Other victims of SIGBUS touched a file that had been cut short, or memory that failed.
    """
    return [victim for victim in victims if victim.signal == _SIGBUS and _was_full(tables, victim)]


def bus_error(tables: RunTables, victim: Victim) -> Finding:
    """A victim that wrote to shared memory when /dev/shm was full."""
    host = victim.main[0]
    used, filling, total = _used_then(tables, victim)
    batch = largest_batch_bytes(tables, host)
    return Finding(
        kind="shm-bus-error",
        severity="critical",
        confidence=0.95,
        summary=(
            f"{victim.what[0].upper()}{victim.what[1:]} was killed by SIGBUS when /dev/shm was full: "
            f"{size(used)} of {size(total)} were in use at the tick before."
        ),
        locus=victim.locus,
        since_step=last_step(tables, victim.main),
        evidence=(
            fact("shm_used_bytes", used, "around its end", unit="bytes"),
            fact("shm_filled_per_tick_bytes", filling, "around its end", unit="bytes"),
            fact("signal", "SIGBUS", "of its end", unit="text"),
            *((fact("batch_payload_peak_bytes", batch, "run", unit="bytes"),) if math.isfinite(batch) else ()),
            *victim.evidence,
        ),
        limit=Limit(name="/dev/shm", value=total, unit="bytes"),
        advice=_ROOM_ADVICE,
    )


def _was_full(tables: RunTables, victim: Victim) -> bool:
    used, filling, total = _used_then(tables, victim)
    room = largest_batch_bytes(tables, victim.main[0]) * _workers_count(tables, victim.main[0])
    return total - used <= max(2 * filling, room)  # a batch whose size is not known counts for nothing


def _used_then(tables: RunTables, victim: Victim) -> tuple[float, float, float]:
    """The most of /dev/shm that was in use around a victim's end, by how much it filled in a tick, and its size.

    The victim's part is given back at once, so the tick after its end may show it empty.
    """
    times, used, total = _usage(_samples(tables, victim.main[0]))
    begin, end = around(tables, victim)
    then = used[(times * SECOND_NS >= begin) & (times * SECOND_NS <= end)]
    return peak(then), max(0.0, peak(np.diff(then))), total


def _samples(tables: RunTables, host: str) -> pd.DataFrame:
    samples = tables.stream("host")
    return samples[samples["host"] == host]


def _usage(samples: pd.DataFrame) -> tuple[Floats, Floats, float]:
    """Times (seconds), what is in use of /dev/shm, and its size."""
    times, used = floats(samples, "time_ns") / SECOND_NS, floats(samples, "shm_used_bytes")
    return times, used, last(floats(samples, "shm_total_bytes"))
