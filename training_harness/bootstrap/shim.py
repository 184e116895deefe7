"""Waits in a training process until modules are imported that have hooks, and watches for uncaught exceptions.

Run at start-up by `sitecustomize` beside it, or by `tidegauge.pth` where Tidegauge is installed; once per process.
It imports nothing of Tidegauge until then, and costs one dictionary look-up per import.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

#: `training_harness.attach.TRIGGERS`, which this may not import yet.
_TRIGGERS = {
    "torch.utils.data.dataloader",
    "torch.optim.optimizer",
    "torch.autograd",
    "torch.nn.modules.module",
    "torch.compiler",
    "torch._dynamo.eval_frame",
    "torch.nn.parallel.data_parallel",
    "cv2",
    "numpy",
    "PIL.Image",
    "PIL.ImageFile",
    "torchvision.io.image",
    "torchvision.transforms.transforms",
    "torchvision.transforms.v2._container",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "albumentations.core.composition",
    "fastai.optimizer",
}


class _AfterImport:
    """A meta path finder that calls the harness once a trigger module has been executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _TRIGGERS:
            return None
        _TRIGGERS.discard(name)
        try:
            import importlib.util

            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = _Notifying(spec.loader, name)  # type: ignore[assignment]
        except Exception:
            return None
        return spec


class _Notifying:
    """Loads a module as its own loader does, then tells the harness."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            from training_harness.attach import imported

            imported(self._name)
        except Exception:
            pass

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)


def _watch_exceptions() -> None:
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            from training_harness.session import record_exception

            record_exception(kind, error, trace)
        except Exception:
            pass
        previous(kind, error, trace)

    sys.excepthook = excepthook


if os.environ.get("TIDEGAUGE_RUN_DIR") and os.environ.get("TIDEGAUGE_DISABLED") != "1":
    sys.meta_path.insert(0, _AfterImport)
    _watch_exceptions()
