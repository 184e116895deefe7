"""Which stage must get faster, and by how much, before the training no longer waits for its data.

Shortening a stage that the loop waits for lets it wait for another one instead, so the exposed stall alone does not
say what is gained. The replay of the run with shorter stages does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.diagnosis.calibration import calibrate
from collector.diagnosis.exposed import Exposed, exposed_stall
from collector.diagnosis.frames import SECOND_NS
from collector.diagnosis.replay import variants
from collector.diagnosis.tables import RunTables
from collector.diagnosis.tuning import OWN_ERROR

#: A loop that waits less of its time is kept busy. Taking a batch that is ready may cost as much again.
KEPT_BUSY = 0.05
_LEFT = np.linspace(0.95, 0.0, 20)  # of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """What a faster stage would do; seconds are per batch.

    Attributes:
        batch_seconds: what it takes.
        enough_seconds: what it may take so that the loop hardly waits, None if even 0 is not enough.
        free_wait_ratio: of its time, what the loop would still wait if the stage took nothing.

    """

    batch_seconds: float
    enough_seconds: float | None
    free_wait_ratio: float


def speed_ups(tables: RunTables, seen: Exposed) -> dict[str, SpeedUp]:
    """Of each stage of the fetches; empty where the replay does not give what was measured."""
    measured = calibrate(tables, seen.loop)
    if isinstance(measured, str):
        return {}
    spent = seen.fetches[["epoch", "index"]].join(seen.stages).drop_duplicates(["epoch", "index"])
    rows = measured.keys.merge(spent, how="left", on=["epoch", "index"]).fillna(0.0)
    names = [str(name) for name in seen.stages]
    costs = rows[names].to_numpy()
    shares = costs / np.fmax(costs.sum(axis=1, keepdims=True), 1.0)
    shorter = 1 - shares[:, :, np.newaxis] * (1 - _LEFT)
    ratios = np.column_stack([np.ones(len(rows)), np.zeros(len(rows)), shorter.reshape(len(rows), -1)])
    rates, waits = variants(measured.trace, measured.setting, measured.slower, ratios)
    if abs(math.log(rates[0] / measured.batches_per_second)) > OWN_ERROR:
        return {}
    unavoidable = waits[1]
    busy = waits[2:].reshape(len(names), -1) <= unavoidable + KEPT_BUSY
    busy &= unavoidable <= KEPT_BUSY
    each = costs.mean(axis=0) / SECOND_NS
    return {
        name: SpeedUp(
            batch_seconds=float(each[at]),
            enough_seconds=float(_LEFT[busy[at].argmax()] * each[at]) if busy[at].any() else None,
            free_wait_ratio=float(waits[2:].reshape(len(names), -1)[at, -1]),
        )
        for at, name in enumerate(names)
    }


def exposed_summary(tables: RunTables) -> list[dict[str, Any]]:
    """The exposed stall of each loop in plain values, the longest first."""
    return [in_short(tables, seen) for seen in sorted(exposed_stall(tables), key=lambda each: -each.wait_seconds)]


def in_short(tables: RunTables, seen: Exposed) -> dict[str, Any]:
    """The exposed stall of one loop in plain values, as the report has it; with speed-ups where it counts."""
    gains = speed_ups(tables, seen) if seen.wait_ratio >= KEPT_BUSY else {}
    return {
        "rank": seen.loop.rank,
        "loader": seen.loop.loader,
        "batches": len(seen.waits),
        "wait_seconds": seen.wait_seconds,
        "wait_ratio": seen.wait_ratio,
        "head_of_line_seconds": seen.head_of_line_seconds,
        "stages": [
            {"stage": name, "seconds": seconds, **_gain(gains.get(name))} for name, seconds in seen.by_part.items()
        ],
    }


def _gain(gain: SpeedUp | None) -> dict[str, float | None]:
    names = ("batch_seconds", "enough_seconds", "free_wait_ratio")
    return {name: None if gain is None else getattr(gain, name) for name in names}
