"""Stages recognised by calls of known libraries, and the wrappers that time these calls.

`read` (a file), `decode` (an image), `read+decode` (one call does both), `resize`, `crop`, `augment` (geometry,
blur, blending), `convert` (to another colour space, or to a tensor), `normalise`, `copy` (host to device). Members
of a `Compose` that are none of these get the name of their class. Within a recognised call only reading and
decoding are recognised again.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from training_harness.hooks import compiler
from training_harness.hooks.patching import Hook
from training_harness.hooks.stages.stages import StageTimer, Tally, local, recording
from training_harness.layout import STAGES_VARIABLE

#: module -> stage -> names of its functions and methods.
CALLS: dict[str, dict[str, str]] = {
    "cv2": {
        "read+decode": "imread imreadmulti",
        "decode": "imdecode",
        "resize": "resize pyrDown pyrUp",
        "convert": "cvtColor",
        "augment": "flip rotate warpAffine warpPerspective remap copyMakeBorder blur GaussianBlur medianBlur "
        "filter2D addWeighted LUT equalizeHist",
        "normalise": "normalize",
    },
    "numpy": {"read": "load fromfile lib.npyio.NpzFile.__getitem__"},
    "PIL.Image": {
        "read": "open",
        "convert": "Image.convert",
        "resize": "Image.resize Image.thumbnail Image.reduce",
        "crop": "Image.crop",
        "augment": "Image.rotate Image.transpose Image.transform Image.filter",
    },
    "PIL.ImageFile": {"decode": "ImageFile.load"},
    "torchvision.io.image": {"read": "read_file", "decode": "decode_image decode_jpeg decode_png"},
    "torch": {"copy": "Tensor.to Tensor.cuda"},
    # Work of `nn.DataParallel` around the model on several GPUs; on one GPU and on the CPU there is none. The times
    # are the host's, without the reduction of gradients in the backward pass. The names are the ones in the calling
    # module, so `data_parallel()` and subclasses are seen too.
    "torch.nn.parallel.data_parallel": {
        "scatter": "scatter_kwargs",
        "replicate": "replicate",
        "parallel_apply": "parallel_apply",
        "gather": "gather",
    },
}
#: Modules with a `Compose`, whose instances call their `transforms` one after the other.
COMPOSERS = (
    "torchvision.transforms.transforms",
    "torchvision.transforms.v2._container",
    "albumentations.core.composition",
)
_STAGE_MEMBERS = {
    "resize": "Resize",
    "crop": "CenterCrop RandomCrop",
    "normalise": "Normalize",
    "convert": "ToTensor ToTensorV2 PILToTensor ToImage ToDtype ConvertImageDtype",
}
_MEMBER_STAGES = {kind: name for name, kinds in _STAGE_MEMBERS.items() for kind in kinds.split()}
#: Stages that are timed separately even within another recognised call.
_SPLIT_OUT = frozenset({"read", "decode", "read+decode"})
#: Packages whose callables are not only transforms: other callers of them are no pipeline.
_GENERAL_PACKAGES = frozenset({"builtins", "functools", "torch"})


class _StageHook(Hook):
    def fail(self, error: BaseException) -> None:
        """Stop timing. The replaced functions stay: code that holds one may still send it to a worker, by name."""
        undo, self._undo = self._undo, []
        super().fail(error)
        self._undo = undo


def install(module: str, on_copy: Callable[[int], None] | None = None) -> Hook | None:
    """Recognise the calls of a module that was just imported; None if stages are switched off.

    Args:
        module: a key of `CALLS`, or one of `COMPOSERS`.
        on_copy: called with the duration of each copy to a device, in ns.
    """
    if os.environ.get(STAGES_VARIABLE) == "0":
        return None
    hook = _StageHook(f"stage:{module}")
    if module == "torch":
        recording.hook, recording.is_compiling = hook, compiler.is_compiling()
    for name, paths in CALLS.get(module, {}).items():
        if name != "copy" or not _has_method_tables(sys.modules[module].Tensor):
            for path in paths.split():
                _recognise(hook, module, path, name, on_copy if name == "copy" else None)
    if module in COMPOSERS:
        hook.replace(sys.modules[module].Compose, "__call__", lambda original: _recognising_members(original, hook))
    return hook


def install_imported() -> None:
    """Recognise the modules that a spawned worker has imported, if no import hook has done so."""
    if not recording.hook.active:
        for module in (*CALLS, *COMPOSERS):
            if module in sys.modules:
                install(module)


def _recognise(hook: Hook, module: str, path: str, name: str, report: Callable[[int], None] | None) -> None:
    *owners, attribute = path.split(".")
    owner: Any = sys.modules[module]
    for part in owners:
        owner = getattr(owner, part, None)
    if not hasattr(owner, attribute):
        return
    original = getattr(owner, attribute)
    call = time_calls(original, name, hook, report)
    if path in _CONDITIONS:
        call = _timed_if(_CONDITIONS[path], call, original)
    # Pickled by name: that finds the replacement here, and the original in a process without Tidegauge.
    call.__module__, call.__qualname__ = module, path
    hook.replace(owner, attribute, lambda _: call)


def time_calls(
    original: Callable[..., Any], name: str, hook: Hook, report: Callable[[int], None] | None = None
) -> Callable[..., Any]:
    """Wrap `original` to add its time to the stage `name`, and to report its duration in ns."""
    timer, split_out = StageTimer(name), name in _SPLIT_OUT
    compilable = getattr(original, "__module__", "torch") not in (None, "numpy", "PIL.Image")

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo treats `is_compiling` as a constant, so it compiles the original.
        if (compilable and recording.is_compiling()) or not hook.active:
            return original(*args, **kwargs)
        entered = None
        try:
            tally: Tally = local.tally
            outer = tally.call_stage
            if not outer or (split_out and outer != name):
                entered = tally.enter(timer)
                tally.call_stage = name
        except Exception as error:
            hook.fail(error)
        if entered is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                tally.call_stage = outer
                duration_ns = tally.leave(timer, entered)
                if report is not None:
                    report(duration_ns)
            except Exception as error:
                hook.fail(error)

    return call


def _timed_if(condition: Callable[..., bool], call: Callable[..., Any], original: Callable[..., Any]) -> Any:
    @functools.wraps(original, updated=())
    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            matches = condition(*args, **kwargs)
        except Exception:
            matches = False
        return call(*args, **kwargs) if matches else original(*args, **kwargs)

    return chosen


def _will_decode(image: Any) -> bool:
    # Pillow calls `ImageFile.load` before every operation; only one of these calls decodes something.
    return bool(image.tile)


def _copies_to_device(tensor: Any, target: Any = None, *_: Any, device: Any = None, **__: Any) -> bool:
    """Return whether `Tensor.to` or `Tensor.cuda` copies from host memory to a device.

    Parameters and other subclasses are left alone: reading their attributes may run code of theirs.
    """
    if type(tensor) is not sys.modules["torch"].Tensor or not tensor.is_cpu:
        return False
    target = target if device is None else device
    target = getattr(target, "device", target)
    kind: Any = getattr(target, "type", target)
    return isinstance(kind, int) or (isinstance(kind, str) and kind.partition(":")[0] not in ("cpu", "meta"))


_CONDITIONS: dict[str, Callable[..., bool]] = {
    "ImageFile.load": _will_decode,
    "Tensor.to": _copies_to_device,
    "Tensor.cuda": lambda tensor, *_, **__: _copies_to_device(tensor, "cuda"),
}


def _has_method_tables(tensor_class: Any) -> bool:
    """Return whether a subclass of Tensor outside torch has a `__torch_function__`.

    Such classes have tables of tensor methods, which they look up by identity: a replacement would not be found.
    """
    return any(
        "__torch_function__" in vars(kind) and kind.__module__.partition(".")[0] != "torch"
        for kind in tensor_class.__subclasses__()
    )


def _recognising_members(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Wrap `Compose.__call__` to recognise the classes of its members, which are not known before."""
    classes: set[type] = set()

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.active and not recording.is_compiling():
            try:
                for member in self.transforms if isinstance(self.transforms, (list, tuple)) else ():
                    if type(member) not in classes:
                        classes.add(type(member))
                        _recognise_member(hook, type(member))
            except Exception as error:
                hook.fail(error)
        return original(self, *args, **kwargs)

    return call


def _recognise_member(hook: Hook, kind: type) -> None:
    if kind.__name__ == "Compose" or kind.__module__.partition(".")[0] in _GENERAL_PACKAGES:
        return
    name = _MEMBER_STAGES.get(kind.__name__, kind.__name__)
    try:
        hook.replace(kind, "__call__", lambda original: time_calls(original, name, hook))
    except TypeError:
        pass  # a class that cannot be changed
