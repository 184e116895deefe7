"""Find the victims of SIGBUS that wrote to shared memory when /dev/shm was full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import SIGBUS

import numpy as np

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.deaths.host_oom_kill import end_window
from collector.diagnosis.deaths.victims import Victim
from collector.diagnosis.memory.shared_memory import SharedMemory
from collector.diagnosis.run.columns import MIB, SECOND_NS, early_samples, finite, floats, peak, sampled
from collector.diagnosis.run.processes import sentence
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats
from collector.findings import Finding, Limit, fact
from collector.store import ProcessKey
from collector.units import size

#: Growth of the mapped files in memory, at the ticks, above which a process reads mapped files.
_READS_FILES_BYTES = 4 * MIB


def bus_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims of SIGBUS at whose end /dev/shm was full, as far as the collector's samples show it.

    Full means: less was free than a batch of each worker, or than twice the largest increase between two samples,
    since writes come in bursts. Other victims of SIGBUS touched a file that had been cut short, or memory that
    failed.
    """
    return [victim for victim in victims if victim.signal == SIGBUS and _Filling.of(tables, victim).fills]


def bus_error(tables: RunTables, victim: Victim) -> Finding:
    """Return the finding on a victim that wrote to shared memory when /dev/shm was full."""
    filling = _Filling.of(tables, victim)
    memory = filling.memory
    batch = (fact("batch_payload_peak_bytes", memory.batch, "run"),) if math.isfinite(memory.batch) else ()
    mapped = (fact("mapped_rise_bytes", filling.mapped, "since the last sample"),) if filling.mapped else ()
    death = catalogue.BUS_ERROR_BETWEEN_SAMPLES if filling.mapped else catalogue.BUS_ERROR
    return replace(death, advice=memory.advice).finding(
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(
            fact("shm_used_bytes", filling.used, "around its end"),
            fact("shm_filled_per_tick_bytes", filling.increase, "around its end"),
            *mapped,
            fact("signal", "SIGBUS", "of its end"),
            *batch,
            *victim.evidence,
        ),
        limit=Limit(name="/dev/shm", value=memory.total, unit="bytes"),
        went_on=victim.went_on,
        what=sentence(victim.what),
        used=size(filling.used),
        total=size(memory.total),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """The use of /dev/shm around a victim's end, in bytes.

    Attributes:
        memory: /dev/shm.
        used: its highest use. The victim's part is given back at once, so the tick after its end may show it empty.
        increase: its largest increase between two samples.
        mapped: part of `used` that the victim mapped after the last tick before its end; 0 if the ticks suffice.
    """

    memory: SharedMemory
    used: float
    increase: float
    mapped: float = 0.0

    @property
    def fills(self) -> bool:
        """True if /dev/shm was as good as full."""
        batches = self.memory.batch * self.memory.workers
        room = max(2 * self.increase, batches)  # `max` ignores an unknown (NaN) size here
        return self.memory.total - self.used <= room

    @classmethod
    def of(cls, tables: RunTables, victim: Victim) -> _Filling:
        """Return it by the ticks, or if they do not show it full, with the samples between them."""
        memory = SharedMemory.of(tables, victim.main[0])
        begin, end = end_window(tables, victim)
        times = memory.times * SECOND_NS
        used = memory.used[(times >= begin) & (times <= end)]
        by_ticks = cls(memory=memory, used=peak(used), increase=max(0.0, peak(np.diff(used))))
        if by_ticks.fills or victim.key is None or not (times < victim.last_seen_ns).any():
            return by_ticks
        last_tick = int(np.flatnonzero(times < victim.last_seen_ns)[-1])
        rises = _mapped_rises(tables, victim.key, float(times[last_tick]))
        mapped = float(rises.sum())
        between = cls(
            memory=memory, used=float(memory.used[last_tick]) + mapped, increase=peak(rises), mapped=round(mapped)
        )
        return between if mapped > 0 and between.fills else by_ticks


def _mapped_rises(tables: RunTables, key: ProcessKey, since_ns: float) -> Floats:
    """Return the rises of a process's mapped memory, shared or of files, in its samples between ticks since then.

    None in a process that read mapped files before.
    """
    early, file_bytes = early_samples(tables, key), finite(floats(sampled(tables, key), "file_bytes"))
    if len(early) < 2 or not len(file_bytes) or file_bytes[-1] - np.median(file_bytes) > _READS_FILES_BYTES:
        return np.zeros(1)
    times, mapped = floats(early, "time_ns"), floats(early, "rss_bytes") - floats(early, "anon_bytes")
    at_tick = np.interp(since_ns, times, mapped)
    return np.maximum(0.0, np.diff(mapped[times > since_ns], prepend=at_tick))
