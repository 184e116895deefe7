"""How much of the training is still to come, where its framework told what was planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collector.diagnosis.frames import SECOND_NS, key_of, step_numbers, whole
from collector.diagnosis.tables import RunTables


def steps_left(tables: RunTables) -> float | None:
    """Optimizer steps until the planned end; None unless a callback of the framework told it (docs/events.md).

    The framework's count goes on where that of a checkpoint ended: it is taken where it entered a phase.
    """
    told, phases = tables.events_of("hyper-parameters"), tables.events_of("phase")
    if not told or not phases or (key := key_of(phases[-1])) is None:
        return None
    planned = _planned(told[-1]["values"], phases)
    moments = np.array([phases[-1]["time_ns"], tables.now_ns]) / SECOND_NS
    left = planned - phases[-1]["step"] - float(np.diff(step_numbers(tables, key, moments))[0])
    return max(left, 0.0) if math.isfinite(left) else None


def _planned(values: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> float:
    """Steps by the framework's count, NaN where it did not tell; from its epochs once one is over."""
    steps, epochs = whole(values.get("max_steps")), whole(values.get("max_epochs", values.get("num_train_epochs")))
    if steps is not None and steps > 0:
        return steps
    over = [each for each in phases if each["phase"] == "train" and each["epoch"] > 0]
    return epochs * over[-1]["step"] / over[-1]["epoch"] if epochs is not None and epochs > 0 and over else math.nan
