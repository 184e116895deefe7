"""Tidegauge for Lightning: `Trainer(callbacks=[TidegaugeCallback()])`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_harness.integrations import BeforeOom, TrainingReporter, fail_open

#: The framework's new name and its old one; a Trainer accepts only callbacks of its own package.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """Return the base class from the package that the user has imported, else from one that is installed."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(package).Callback
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
    raise ImportError("neither lightning nor pytorch_lightning is installed: pip install 'tidegauge[integrations]'")


def _enters(phase: str) -> Callable[..., None]:
    @fail_open
    def enter(self: Any, trainer: Any, *_: Any, **__: Any) -> None:
        self.reporter.phase(phase, epoch=trainer.current_epoch, step=trainer.global_step)

    return enter


class TidegaugeCallback(_callback()):  # type: ignore[misc]
    """Callback that attaches every process of the Trainer, and records phases, epochs and hyper-parameters.

    Args:
        name: name of the run, if this begins one; the script's name by default.
        before_oom: "save" saves `tidegauge-step=N.ckpt` in the Trainer's `default_root_dir` before memory runs out;
            "stop" also ends the training.
    """

    def __init__(self, name: str | None = None, before_oom: BeforeOom | None = None) -> None:
        super().__init__()
        self.reporter = TrainingReporter("lightning", name, before_oom)
        self._saved_at = -1

    @fail_open
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach first of all, in every process: a spawned one has not made the callback itself."""
        self.reporter.join()
        if stage == "fit" and trainer.is_global_zero:
            names = ("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "world_size")
            settings = {name: getattr(trainer, name, None) for name in names}
            self.reporter.hyper_parameters({**settings, **pl_module.hparams})

    on_train_epoch_start = _enters("train")
    on_validation_start = _enters("validation")
    on_test_start = _enters("test")
    on_predict_start = _enters("predict")
    teardown = _enters("done")

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Save a checkpoint before memory runs out, if that was asked for."""
        step = trainer.global_step
        if step == self._saved_at:  # a further batch of the same optimizer step
            return
        self._saved_at = step
        agree = (
            None
            if trainer.world_size == 1
            else lambda due: trainer.strategy.reduce_boolean_decision(due, all=False)
        )
        if self.reporter.must_save(step, agree):
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"tidegauge-step={step}.ckpt")
            trainer.should_stop = trainer.should_stop or self.reporter.stops

    @fail_open
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the validation phase; within a fit, training goes on."""
        if trainer.state.fn == "fit":
            self.on_train_epoch_start(trainer, pl_module)
