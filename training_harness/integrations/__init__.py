"""Callbacks for training frameworks: they attach, and tell what no hook can know.

That is the phase (training or validation), the framework's own epoch and step, and the hyper-parameters. All
of them are events, a few per epoch; steps, batches and memory come from the hooks as ever.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from training_harness import attach, session
from training_harness.hooks.patching import Hook
from training_harness.layout import redacted_values

_VALUES_AT_MOST = 100
_TEXT_CHARACTERS = 200


class Narrator:
    """The part that all callbacks share.

    Args:
        framework: its name, as in the event of a failure.
        name: of the run, if this begins one.
    """

    def __init__(self, framework: str, name: str | None) -> None:
        self.hook = Hook(framework)
        self._name = name
        self.join()

    def join(self) -> None:
        """Attach this process, unless it is."""
        attach(name=self._name)

    def phase(self, phase: str, *, epoch: int, step: int) -> None:
        """The framework goes over to another phase of the training."""
        current = session.active
        if current is not None:
            current.events.append("phase", phase=phase, epoch=epoch, step=step)

    def hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """What the training was told to do; secrets, and all but the first 100, are left out."""
        current = session.active
        if current is not None:
            kept = list(redacted_values(values).items())[:_VALUES_AT_MOST]
            body = {str(name): _short(value) for name, value in kept}
            current.events.append("hyper-parameters", framework=self.hook.name, values=body)


def fail_open(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a callback that has a `narrator`: its failure is told once and ends that, not the training."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        hook = self.narrator.hook
        if hook.active:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                hook.fail(error)

    return guarded


def _short(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return value[:_TEXT_CHARACTERS]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Nothing else is asked for its text: nested values may hold secrets, and a CUDA tensor would synchronise.
    return value if value is None or isinstance(value, (int, float)) else type(value).__qualname__
