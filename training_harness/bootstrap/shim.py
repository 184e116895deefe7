"""Shim in a training process that waits for the import of modules with hooks, and watches for uncaught exceptions.

It runs at start-up, once per process, from the `sitecustomize` in this folder, or from `tidegauge.pth` where
Tidegauge is installed. It imports nothing of Tidegauge until a module with hooks is imported, and costs one
dictionary look-up per import. Of the standard library it imports built-in modules alone, and `os`, which every
interpreter has loaded. Where the kernel restricts ptrace(2), it lets the collector read this process, before any
other code can name another reader.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import spec_from_file_location

TYPE_CHECKING = False  # a module that is imported here would be missing where the script has its own of that name
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

#: Same modules as `training_harness.installation.TRIGGERS`, which this file must not import yet.
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
            finders = [finder for finder in sys.meta_path if finder is not _AfterImport]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
            if spec is not None and spec.loader is not None:
                spec.loader = _NotifyingLoader(spec.loader, name)  # type: ignore[assignment]
        except Exception:
            return None
        return spec


class _NotifyingLoader:
    """Loader that loads a module with its original loader, then notifies the harness."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            from training_harness.standard_library import StandardLibraryFirst

            with StandardLibraryFirst():
                from training_harness.installation import on_import

                on_import(self._name)
        except Exception:
            pass

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)


def _watch_exceptions() -> None:
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            from training_harness.standard_library import StandardLibraryFirst

            with StandardLibraryFirst():
                from training_harness.session import record_exception

            record_exception(kind, error, trace)
        except Exception:
            pass
        previous(kind, error, trace)

    sys.excepthook = excepthook


def _allow_collector() -> None:
    """Run `ptracer.py` without the package, whose import takes milliseconds."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location("_tidegauge_ptracer", os.path.join(package, "ptracer.py"))
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.allow_collector()


if os.environ.get("TIDEGAUGE_RUN_DIR") and os.environ.get("TIDEGAUGE_DISABLED") != "1":
    sys.meta_path.insert(0, _AfterImport)
    _watch_exceptions()
    if os.path.exists("/proc/sys/kernel/yama"):
        _allow_collector()
