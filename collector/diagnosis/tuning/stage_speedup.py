"""Speed-ups of stages: how much faster a stage must get until the training no longer waits for its data.

The waits for a stage do not show what a faster stage gains, since the loop may then wait for another stage instead.
The replay of the run with shorter stages does.
"""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np

from collector.diagnosis.loading.wait_breakdown import WaitBreakdown, wait_breakdowns
from collector.diagnosis.run.columns import SECOND_NS
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.tuning.calibration import calibrate
from collector.diagnosis.tuning.replay import replay_shorter_fetches
from collector.diagnosis.tuning.what_if import CURRENT_ERROR

#: Share of its time that a loop may wait and still be busy. Taking a batch that is ready may cost as much again.
HEALTHY_WAIT_RATIO = 0.05
_REMAINDERS = np.linspace(0.95, 0.0, 20)  # shares of a stage's time that are left after a speed-up


class SpeedUp(TypedDict):
    """Effect of a faster stage; seconds are per batch, None where they are not known.

    Attributes:
        batch_seconds: time of the stage now.
        enough_seconds: time of the stage at which the loop hardly waits, None if even 0 is not enough.
        free_wait_ratio: share of its time that the loop would still wait if the stage took no time.
    """

    batch_seconds: float | None
    enough_seconds: float | None
    free_wait_ratio: float | None


class WaitedStage(SpeedUp):
    """A stage that a loop waited for, seconds of the wait, and what a faster stage would do."""

    stage: str
    seconds: float


_UNKNOWN = SpeedUp(batch_seconds=None, enough_seconds=None, free_wait_ratio=None)


class WaitSummary(TypedDict):
    """The waits of one loop: an entry of the report's `exposed_stall`."""

    rank: int | None
    loader: int
    batches: int
    wait_seconds: float
    wait_ratio: float
    head_of_line_seconds: float
    stages: list[WaitedStage]


def speed_ups(breakdown: WaitBreakdown) -> dict[str, SpeedUp]:
    """Return the speed-up of each stage of the fetches.

    There is none where the replay does not match the measured rate, or where instant fetches would gain nothing.
    """
    calibration = calibrate(breakdown.loop)
    if isinstance(calibration, str):
        return {}
    spent = breakdown.fetches[["epoch", "index"]].join(breakdown.stages).drop_duplicates(["epoch", "index"])
    rows = calibration.batches.merge(spent, how="left", on=["epoch", "index"]).fillna(0.0)
    names = [str(name) for name in breakdown.stages]
    costs = rows[names].to_numpy()
    shares = costs / np.fmax(costs.sum(axis=1, keepdims=True), 1.0)
    shorter = 1 - shares[:, :, np.newaxis] * (1 - _REMAINDERS)
    ratios = np.column_stack([np.ones(len(rows)), np.zeros(len(rows)), shorter.reshape(len(rows), -1)])
    rates, waits = replay_shorter_fetches(calibration.trace, calibration.setting, calibration.slowdowns, ratios)
    now, unavoidable = waits[:2]
    error = abs(math.log(rates[0] / calibration.batches_per_second))
    if error > CURRENT_ERROR or now <= unavoidable + HEALTHY_WAIT_RATIO:
        return {}
    shorter_waits = waits[2:].reshape(len(names), -1)
    busy = (shorter_waits <= unavoidable + HEALTHY_WAIT_RATIO) & (unavoidable <= HEALTHY_WAIT_RATIO)
    seconds = costs.mean(axis=0) / SECOND_NS
    return {
        name: SpeedUp(
            batch_seconds=float(seconds[at]),
            enough_seconds=float(_REMAINDERS[busy[at].argmax()] * seconds[at]) if busy[at].any() else None,
            free_wait_ratio=float(shorter_waits[at, -1]),
        )
        for at, name in enumerate(names)
    }


def wait_summaries(tables: RunTables) -> list[WaitSummary]:
    """Return the waits of each loop in plain values, the loop that waited longest first.

    Loops whose waits are not known are left out.
    """
    breakdowns = [one for one in wait_breakdowns(tables) if one.loop.waits != "unknown"]
    breakdowns.sort(key=lambda breakdown: -breakdown.wait_seconds)
    return [summarize_waits(breakdown) for breakdown in breakdowns]


def summarize_waits(breakdown: WaitBreakdown) -> WaitSummary:
    """Return the waits of one loop in plain values for the report, with speed-ups if the loop waits much."""
    gains = speed_ups(breakdown) if breakdown.wait_ratio >= HEALTHY_WAIT_RATIO else {}
    return {
        "rank": breakdown.loop.rank,
        "loader": breakdown.loop.loader,
        "batches": len(breakdown.waits),
        "wait_seconds": breakdown.wait_seconds,
        "wait_ratio": breakdown.wait_ratio,
        "head_of_line_seconds": breakdown.head_of_line_seconds,
        "stages": [
            {"stage": name, "seconds": seconds, **gains.get(name, _UNKNOWN)}
            for name, seconds in breakdown.by_part.items()
        ],
    }
