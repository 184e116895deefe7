"""A loading loop in its steady state, as all stall rules see it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypedDict

import pandas as pd

from collector.diagnosis.loading.loaders import Loop
from collector.diagnosis.loading.names import pid_if_shared
from collector.diagnosis.loading.steady_state import Pace
from collector.diagnosis.run.columns import floats, mean, median
from collector.diagnosis.run.training import step_at
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO, Loss
from collector.findings import Advice, Evidence, Locus, Severity, measurements
from collector.units import counted

#: Epochs that the error of a mean refill needs.
MIN_PASSES = 3


class Facts(TypedDict):
    """Fields of a finding that do not depend on its kind."""

    severity: Severity
    confidence: float
    locus: Locus
    since_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingCase:
    """One loop, and what is the same in all findings on its steady state.

    Attributes:
        loop: the loop since its pace changed.
        waited_seconds: the waits per batch that the findings explain.
        split: the advice to split the data, if the dataset has no samples for some workers, which `loop` lacks.
    """

    loop: Loop
    steady: Pace
    waited_seconds: float
    split: Advice | None = None

    @property
    def waited(self) -> Loss:
        """The loss by these waits."""
        return self.loss(self.waited_seconds)

    @property
    def is_collated_in_place(self) -> bool:
        """True if workers write batches straight into shared memory (torch/utils/data/_utils/collate.py)."""
        return self.loop.setting.get("collate") == "default_collate"

    @property
    def pace_evidence(self) -> tuple[Evidence, ...]:
        """Parts of the loop's time per batch, as far as they are known.

        The transfer is left out where all of the wait counts as starving, the loop's own time where a thread loads
        ahead.
        """
        steady = self.steady
        transfer = {"hand_over_seconds": steady.transfer} if steady.transfer else {}
        own = {"consumer_seconds": steady.consumer} if self.loop.waits == "recorded" else {}
        return self.measured(
            starved_ratio=steady.starved_ratio, data_wait_ratio=steady.wait_ratio, **transfer, **own
        )

    @property
    def waiting_evidence(self) -> tuple[Evidence, ...]:
        """Parts of the loop's time per batch, and what its waits cost the run."""
        return (*self.pace_evidence, *self.waited.evidence())

    def measured(self, **values: float) -> tuple[Evidence, ...]:
        """Return means over the steady batches as evidence."""
        return measurements(self.waited.n, self.waited.window, 6, **values)

    def loss(self, seconds: float) -> Loss:
        """Return the loss by a part of the waits, from its seconds per batch."""
        span_ns = self.steady.first_ns, self.steady.last_ns
        return Loss.of(self.loop.tables, seconds * len(self.loop.batches), self.steady.batches, span_ns)

    def facts(self, role: str | None, loss: Loss | None = None, *, worker: int | None = None) -> Facts:
        """Return the facts of a finding on the steady state; without a loss it is that of all waits.

        A loop that hardly starves loses nothing by its waits.
        """
        starves = self.steady.starved_ratio >= LEAST_LOST_RATIO
        return Facts(
            severity=loss.severity if loss else self.waited.severity if starves else "info",
            confidence=(loss or self.waited).confidence(10),
            locus=dataclasses.replace(loop_locus(self.loop, role), worker=worker),
            since_step=step_at(self.loop.tables, self.loop.main, self.steady.first_ns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarts:
    """Starts of a loop's epochs that cost the run time.

    Attributes:
        passes: the epochs that were measured (`epoch_start.passes`).
        loss: what the starts of all of its epochs cost the run.
    """

    loop: Loop
    passes: pd.DataFrame
    loss: Loss

    @classmethod
    def of(cls, loop: Loop, passes: pd.DataFrame, seconds: float) -> EpochStarts:
        """Return the starts of these epochs, and what all starts cost the run."""
        first_ns = floats(passes, "first_ns")
        loss = Loss.of(loop.tables, seconds, len(passes), (first_ns[0], first_ns[-1]))
        return cls(loop=loop, passes=passes, loss=loss)

    def mean(self, name: str) -> float:
        """Return the mean of a column of the epochs."""
        return mean(floats(self.passes, name))

    @property
    def usual_batches(self) -> float:
        """Median number of batches of an epoch."""
        return median(floats(self.passes, "batches"))

    @property
    def batches_words(self) -> str:
        """The usual number of batches of an epoch in words, such as `50 batches`."""
        return counted(self.usual_batches, "batch")

    def facts(self, role: str) -> Facts:
        """Return the facts of a finding on these starts; its cause is in a process of this role."""
        return Facts(
            severity=self.loss.severity,
            confidence=self.loss.confidence(MIN_PASSES),
            locus=loop_locus(self.loop, role),
            since_step=step_at(self.loop.tables, self.loop.main, floats(self.passes, "first_ns")[0]),
        )


def loop_locus(loop: Loop, role: str | None = None) -> Locus:
    """Return the place of a finding on a loop: its training process, its workers, or the loop."""
    is_main = role == "main"
    return Locus(
        host=loop.main[0],
        rank=loop.rank,
        role=role,
        loader=loop.loader,
        pid=loop.main[1] if is_main else None,
        main_pid=None if is_main else pid_if_shared(loop.tables, loop.main, loop.rank),
    )
