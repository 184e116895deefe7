"""Callbacks for training frameworks: they attach, and record what no hook can see.

These are the phase (training or validation), the framework's own epoch and step, and the hyper-parameters. All
of them are events, a few per epoch; steps, batches and memory still come from the hooks.
"""

from __future__ import annotations

import enum
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from training_harness import attach, on_risk, session
from training_harness.hooks.patching import Hook
from training_harness.redaction import redact_values

#: Precaution of a callback before memory runs out: save a checkpoint, or save one and end the training.
BeforeOom = Literal["save", "stop"]
#: Steps between two agreements of several ranks on whether to save.
_AGREE_EVERY_STEPS = 10
_VALUES_AT_MOST = 100
_TEXT_CHARACTERS = 200


class TrainingReporter:
    """Reporter of a framework's phases and hyper-parameters, which all callbacks share.

    Raises:
        ValueError: `before_oom` is neither None nor one of `BeforeOom`.
    """

    def __init__(self, framework: str, name: str | None, before_oom: BeforeOom | None = None) -> None:
        if before_oom not in (None, "save", "stop"):
            raise ValueError(f"before_oom is {before_oom!r}; give 'save', 'stop' or None")
        self.hook = Hook(framework)
        self.stops = before_oom == "stop"
        self._saves = before_oom is not None
        self._name = name
        self._is_at_risk = False
        self._joined_pid = 0
        self.join()

    def _note_risk(self, _finding: Mapping[str, Any]) -> None:
        self._is_at_risk = True

    def must_save(self, step: int, agree: Callable[[bool], bool] | None) -> bool:
        """Return whether a checkpoint has to be saved after this step, once for each limit that comes near.

        Ranks learn of it at different steps, and a checkpoint needs them all at the same one: so they agree now and
        then.

        Args:
            step: the framework's own number of the step, equal on all ranks.
            agree: returns whether its argument is true on any rank, called by all of them; None for a single rank.
        """
        if not self._saves:
            return False
        if agree is None:
            must, self._is_at_risk = self._is_at_risk, False
        elif step % _AGREE_EVERY_STEPS:
            return False
        else:
            must = agree(self._is_at_risk)
            self._is_at_risk = self._is_at_risk and not must
        return must

    def join(self) -> None:
        """Attach this process, unless it is attached already, and listen to what the collector foretells."""
        attach(name=self._name)
        if self._saves and self._joined_pid != os.getpid():
            self._joined_pid = os.getpid()
            on_risk(self._note_risk)

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
