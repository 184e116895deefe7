"""Find the victims of SIGBUS that wrote to shared memory when /dev/shm was full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from signal import SIGBUS

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.deaths.host_oom_kill import end_window
from collector.diagnosis.deaths.victims import Victim
from collector.diagnosis.memory.shared_memory import SharedMemory
from collector.diagnosis.run.columns import SECOND_NS, peak
from collector.diagnosis.run.processes import sentence
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, Limit, fact
from collector.units import size


def bus_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims of SIGBUS at whose end /dev/shm was full, as far as the collector's ticks show it.

    Full means: less was free than a batch of each worker, or than twice the largest increase between two ticks,
    since writes come in bursts. Other victims of SIGBUS touched a file that had been cut short, or memory that
    failed.
    """
    return [victim for victim in victims if victim.signal == SIGBUS and _was_full(tables, victim)]


def bus_error(tables: RunTables, victim: Victim) -> Finding:
    """Return the finding on a victim that wrote to shared memory when /dev/shm was full."""
    memory = SharedMemory.of(tables, victim.main[0])
    used, increase = _usage_at_end(tables, victim, memory)
    batch = (fact("batch_payload_peak_bytes", memory.batch, "run"),) if math.isfinite(memory.batch) else ()
    return catalogue.BUS_ERROR.finding(
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(
            fact("shm_used_bytes", used, "around its end"),
            fact("shm_filled_per_tick_bytes", increase, "around its end"),
            fact("signal", "SIGBUS", "of its end"),
            *batch,
            *victim.evidence,
        ),
        limit=Limit(name="/dev/shm", value=memory.total, unit="bytes"),
        went_on=victim.went_on,
        what=sentence(victim.what),
        used=size(used),
        total=size(memory.total),
    )


def _was_full(tables: RunTables, victim: Victim) -> bool:
    memory = SharedMemory.of(tables, victim.main[0])
    used, increase = _usage_at_end(tables, victim, memory)
    batches = memory.batch * memory.workers
    return memory.total - used <= max(2 * increase, batches)  # `max` ignores an unknown (NaN) size here


def _usage_at_end(tables: RunTables, victim: Victim, memory: SharedMemory) -> tuple[float, float]:
    """Return the peak use of /dev/shm around a victim's end, and its largest increase in a tick.

    The victim's part is given back at once, so the tick after its end may show it empty.
    """
    begin, end = end_window(tables, victim)
    times = memory.times * SECOND_NS
    at_end = memory.used[(times >= begin) & (times <= end)]
    return peak(at_end), max(0.0, peak(at_end[1:] - at_end[:-1]))
