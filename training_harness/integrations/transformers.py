"""Tidegauge for transformers: `Trainer(callbacks=[TidegaugeCallback()])`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from training_harness.integrations import BeforeOom, TrainingReporter, fail_open

try:
    import torch
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ImportError("transformers is not installed: pip install 'tidegauge[integrations]'") from None


class TidegaugeCallback(TrainerCallback):
    """Callback that attaches every process of the Trainer, and records phases, epochs and hyper-parameters.

    Args:
        name: name of the run, if this begins one; the script's name by default.
        before_oom: "save" saves a checkpoint, as the Trainer does, before memory runs out; "stop" also ends the
            training.
    """

    def __init__(self, name: str | None = None, before_oom: BeforeOom | None = None) -> None:
        self.reporter = TrainingReporter("transformers", name, before_oom)
        self._phase = self._outer_phase = "done"

    @fail_open
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the values that differ from the defaults of `TrainingArguments`."""
        self._outer_phase = "train"
        if state.is_world_process_zero:
            self.reporter.hyper_parameters(dict(_changed_arguments(args)))

    @fail_open
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an epoch of training."""
        self._enter("train", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the Trainer save a checkpoint before memory runs out, if that was asked for."""

        def agree(due: bool) -> bool:
            flag = torch.tensor(float(due), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            return bool(flag.item())

        if self.reporter.must_save(state.global_step, agree if args.world_size > 1 else None):
            control.should_save = True
            control.should_training_stop = control.should_training_stop or self.reporter.stops

    @fail_open
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an evaluation or a prediction at its first batch; the Trainer has no event for its start."""
        if self._phase != "validation":
            self._enter("validation", state)

    @fail_open
    def on_evaluate(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """End an evaluation or a prediction, within a training or alone."""
        self._enter(self._outer_phase, state)

    on_predict = on_evaluate

    @fail_open
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training."""
        self._outer_phase = "done"
        self._enter("done", state)

    def _enter(self, phase: str, state: Any) -> None:
        self._phase = phase
        self.reporter.phase(phase, epoch=int(state.epoch or 0), step=state.global_step)


def _changed_arguments(args: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != default:
            yield field.name, value
