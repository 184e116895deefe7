"""Waits for batches that are made already: for the transfer of the batch, or for the sampler's next indices.

`next()` of a loader with workers takes a batch from the result queue. Then it asks the sampler for the indices of a
later batch. So its time has three parts: starving until a worker has made the batch, the transfer until the batch
comes out of the queue (serialising, shared memory, pinning), and the rest, in which the sampler runs. With
`num_workers=0` a fetch is all of `next()`, sampler included. Where cores are lacking, the time in which the process
waits for one is not the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.diagnosis.loading.core_waits import core_waits
from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.steady_state import starved_ns, without_pauses
from collector.diagnosis.loading.wait_breakdown import TRANSFER_RATE
from collector.diagnosis.run.columns import SECOND_NS, floats, mean
from collector.units import duration, size

#: Seconds to hand one batch from a worker to the loop; 0.3-1 ms measured on small batches.
HAND_OVER_SECONDS = 1e-3
#: Share of a transfer that its bytes must explain. A slower one waits for a core, or for the interpreter lock.
_EXPLAINED_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Waits for steady batches that are made already; means per batch.

    Attributes:
        batches: number of steady batches.
        after_queue_seconds: time in `next()` after the batch left the queue, without waits for a core: sending
            indices, and the sampler.
        transfer_seconds: time until the batch left the queue, after it was made.
        made_ratio: share of the batches that were made before the loop asked for them.
        ready_batches: batches in the result queue, NaN if not known.
        payload_bytes: size of a batch, NaN if not known.
    """

    batches: int
    after_queue_seconds: float
    transfer_seconds: float
    made_ratio: float
    ready_batches: float
    payload_bytes: float

    @property
    def sampler_seconds(self) -> float:
        """Time of the sampler. Sending indices is taken to cost as much as the transfer of a small batch."""
        return self.after_queue_seconds - max(HAND_OVER_SECONDS, self.transfer_seconds - self.copy_seconds)

    @property
    def words(self) -> str:
        """The transfer: bytes, time and rate."""
        rate = size(self.payload_bytes / max(self.transfer_seconds, 1e-9))
        return f"{size(self.payload_bytes)} take {duration(self.transfer_seconds)} after they are made ({rate}/s)"

    @property
    def excess_seconds(self) -> float:
        """Time of the transfer beyond that of a small batch."""
        return self.transfer_seconds - HAND_OVER_SECONDS

    @property
    def copy_seconds(self) -> float:
        """The part of the excess that the bytes take for certain; 0 if they explain too little of it."""
        by_bytes = min(self.excess_seconds, np.nan_to_num(self.payload_bytes) / TRANSFER_RATE)
        return by_bytes if by_bytes >= _EXPLAINED_RATIO * self.excess_seconds else 0.0


def hand_over(loop: Loop) -> HandOver:
    """Measure how the steady batches of a loop came from their workers."""
    with_core = 1 - core_waits(loop).in_loop
    rows = loop.batches[floats(loop.batches, "index") >= loop.ramp]
    waits, times = floats(rows, "wait_ns"), floats(rows, "time_ns")
    starved = starved_ns(loop, rows, times, waits)
    blocked = np.maximum(np.minimum(floats(rows, "blocked_ns"), waits), starved)
    return HandOver(
        batches=len(rows),
        after_queue_seconds=mean(without_pauses(waits - blocked)) / SECOND_NS * with_core,
        transfer_seconds=mean(without_pauses(blocked - starved)) / SECOND_NS,
        made_ratio=mean((starved <= 0).astype(float)),
        ready_batches=mean(floats(rows, "ready_count")),
        payload_bytes=mean(floats(loop.batches, "payload_bytes")),
    )
