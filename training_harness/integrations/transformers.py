"""Tidegauge for transformers: `Trainer(callbacks=[TidegaugeCallback()])`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from training_harness.integrations import Narrator, fail_open

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("transformers is not installed: pip install 'tidegauge[integrations]'") from None


class TidegaugeCallback(TrainerCallback):
    """Attaches every process of the Trainer, and tells phases, epochs and hyper-parameters.

    Args:
        name: of the run, if this begins one; the script's name by default.
    """

    def __init__(self, name: str | None = None) -> None:
        self.narrator = Narrator("transformers", name)
        self._phase = self._outside = "done"

    @fail_open
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What differs from the defaults of `TrainingArguments` is told."""
        self._outside = "train"
        if state.is_world_process_zero:
            self.narrator.hyper_parameters(dict(_chosen(args)))

    @fail_open
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch of training begins."""
        self._enter("train", state)

    @fail_open
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One batch of an evaluation or a prediction is done; the Trainer does not say when these begin."""
        if self._phase != "validation":
            self._enter("validation", state)

    @fail_open
    def on_evaluate(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """An evaluation or a prediction has ended, within a training or alone."""
        self._enter(self._outside, state)

    on_predict = on_evaluate

    @fail_open
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training has ended."""
        self._outside = "done"
        self._enter("done", state)

    def _enter(self, phase: str, state: Any) -> None:
        self._phase = phase
        self.narrator.phase(phase, epoch=int(state.epoch or 0), step=state.global_step)


def _chosen(args: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != default:
            yield field.name, value
