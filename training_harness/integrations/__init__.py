"""Callbacks for training frameworks: they attach, and record what no hook can see.

These are the phase (training or validation), the framework's own epoch and step, and the hyper-parameters. All
of them are events, a few per epoch; steps, batches and memory still come from the hooks.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from training_harness import attach, session
from training_harness.hooks.patching import Hook
from training_harness.redaction import redact_values

_VALUES_AT_MOST = 100
_TEXT_CHARACTERS = 200


class TrainingReporter:
    """Reporter of a framework's phases and hyper-parameters, which all callbacks share."""

    def __init__(self, framework: str, name: str | None) -> None:
        self.hook = Hook(framework)
        self._name = name
        self.join()

    def join(self) -> None:
        """Attach this process, unless it is attached already."""
        attach(name=self._name)

    def phase(self, phase: str, *, epoch: int, step: int) -> None:
        """Record that the framework enters another phase of the training."""
        current = session.active
        if current is not None:
            current.events.append("phase", phase=phase, epoch=epoch, step=step)

    def hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Record the hyper-parameters, without secrets and all but the first 100."""
        current = session.active
        if current is not None:
            items = list(redact_values(values).items())[:_VALUES_AT_MOST]
            body = {str(name): _short(value) for name, value in items}
            current.events.append("hyper-parameters", framework=self.hook.name, values=body)


def fail_open(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of a callback with a `reporter`: a failure is recorded once and ends only the reports."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        self.reporter.hook.attempt(method, self, *args, **kwargs)

    return guarded


def _short(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return value[:_TEXT_CHARACTERS]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # No other value is turned into text: nested values may hold secrets, and a CUDA tensor would synchronise.
    return value if value is None or isinstance(value, (int, float)) else type(value).__qualname__
