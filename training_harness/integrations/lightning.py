"""Tidegauge for Lightning: `Trainer(callbacks=[TidegaugeCallback()])`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from training_harness.integrations import Narrator, fail_open

#: The same framework under its new name and its old one; a Trainer takes the callbacks of its own package alone.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """The base class, of the package that the user has imported or, failing that, that is installed."""
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
        self.narrator.phase(phase, epoch=trainer.current_epoch, step=trainer.global_step)

    return enter


class TidegaugeCallback(_callback()):  # type: ignore[misc]
    """Attaches every process of the Trainer, and tells phases, epochs and hyper-parameters.

    Args:
        name: of the run, if this begins one; the script's name by default.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.narrator = Narrator("lightning", name)

    @fail_open
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything else, in every process: one that was spawned has not made the callback itself."""
        self.narrator.join()
        if stage == "fit" and trainer.is_global_zero:
            names = ("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "world_size")
            told = {name: getattr(trainer, name, None) for name in names}
            self.narrator.hyper_parameters({**told, **pl_module.hparams})

    on_train_epoch_start = _enters("train")
    on_validation_start = _enters("validation")
    on_test_start = _enters("test")
    on_predict_start = _enters("predict")
    teardown = _enters("done")

    @fail_open
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validation has ended; within a fit, training goes on."""
        if trainer.state.fn == "fit":
            self.on_train_epoch_start(trainer, pl_module)
