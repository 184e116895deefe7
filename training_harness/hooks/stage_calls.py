"""Which calls of which libraries are which stage of a pipeline, and what notes their time.

`read` (a file), `decode` (an image), `read+decode` (one call does both), `resize`, `crop`, `augment` (geometry,
blur, blending), `convert` (to another colour space, or to a tensor), `normalise`, `copy` (host to device). Members
of a `Compose` that are none of these go by the name of their class. What a recognised call does inside is its own
affair, except reading and decoding.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from training_harness.hooks import compiler
from training_harness.hooks.patching import Hook
from training_harness.hooks.stages import Pace, Tally, here, recording
from training_harness.layout import STAGES_VARIABLE

#: module -> stage -> its functions and methods.
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
    "torch": {"convert": "from_numpy", "copy": "Tensor.to Tensor.cuda"},
    # What `nn.DataParallel` does around the model on several GPUs; on one, and on the CPU, it does none of this.
    # The times are the host's, and what the backward pass does to reduce the gradients is not among them. The names
    # are those in the module that calls them, so `data_parallel()` and subclasses are seen too.
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
_MEMBERS = {
    "resize": "Resize",
    "crop": "CenterCrop RandomCrop",
    "normalise": "Normalize",
    "convert": "ToTensor ToTensorV2 PILToTensor ToImage ToDtype ConvertImageDtype",
}
_NAMES = {kind: name for name, kinds in _MEMBERS.items() for kind in kinds.split()}
#: Told apart even within another recognised call.
_SPLIT_OUT = frozenset({"read", "decode", "read+decode"})
#: Callables of these packages are not only transforms: what calls them elsewhere is no pipeline.
_GENERAL = frozenset({"builtins", "functools", "torch"})


class _StageHook(Hook):
    def fail(self, error: BaseException) -> None:
        """Stop noting. The replaced functions stay: whoever holds one may yet send it to a worker, by name."""
        undo, self._undo = self._undo, []
        super().fail(error)
        self._undo = undo


def install(module: str, copied: Callable[[int], None] | None = None) -> Hook | None:
    """Recognise the calls of a module that was just imported; None if stages are switched off.

    Args:
        module: a key of `CALLS`, or one of `COMPOSERS`.
        copied: is given how long each copy to a device took, in ns.
    """
    if os.environ.get(STAGES_VARIABLE) == "0":
        return None
    hook = _StageHook(f"stage:{module}")
    if module == "torch":
        recording.hook, recording.is_compiling = hook, compiler.is_compiling()
    for name, paths in CALLS.get(module, {}).items():
        if name != "copy" or not _compared_by_identity(sys.modules[module].Tensor):
            for path in paths.split():
                _recognise(hook, module, path, name, copied if name == "copy" else None)
    if module in COMPOSERS:
        hook.replace(sys.modules[module].Compose, "__call__", lambda original: _composing(original, hook))
    return hook


def install_imported() -> None:
    """Recognise what a spawned worker has imported by now, if nothing waited for those imports."""
    if not recording.hook.active:
        for module in (*CALLS, *COMPOSERS):
            if module in sys.modules:
                install(module)


def _recognise(hook: Hook, module: str, path: str, name: str, told: Callable[[int], None] | None) -> None:
    *owners, attribute = path.split(".")
    owner: Any = sys.modules[module]
    for part in owners:
        owner = getattr(owner, part, None)
    if not hasattr(owner, attribute):
        return
    original = getattr(owner, attribute)
    call = timed(original, name, hook, told)
    if path in _CONDITIONS:
        call = _where(_CONDITIONS[path], call, original)
    # Pickled by name: here that finds the replacement, and in a process without Tidegauge the original.
    call.__module__, call.__qualname__ = module, path
    hook.replace(owner, attribute, lambda _: call)


def timed(
    original: Callable[..., Any], name: str, hook: Hook, told: Callable[[int], None] | None = None
) -> Callable[..., Any]:
    """`original` with its time noted as the stage `name`, and told in ns."""
    pace, split_out = Pace(name), name in _SPLIT_OUT
    compilable = getattr(original, "__module__", "torch") not in (None, "numpy", "PIL.Image")

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo takes `is_compiling` for a constant, so that it compiles the original.
        if (compilable and recording.is_compiling()) or not hook.active:
            return original(*args, **kwargs)
        entered = None
        try:
            tally: Tally = here.tally
            outer = tally.within
            if not outer or (split_out and outer != name):
                entered = tally.enter(pace)
                tally.within = name
        except Exception as error:
            hook.fail(error)
        if entered is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                tally.within = outer
                took_ns = tally.leave(pace, entered)
                if told is not None:
                    told(took_ns)
            except Exception as error:
                hook.fail(error)

    return call


def _where(condition: Callable[..., bool], call: Callable[..., Any], original: Callable[..., Any]) -> Any:
    @functools.wraps(original, updated=())
    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            counts = condition(*args, **kwargs)
        except Exception:
            counts = False
        return call(*args, **kwargs) if counts else original(*args, **kwargs)

    return chosen


def _will_decode(image: Any) -> bool:
    """Pillow calls `ImageFile.load` before every operation; there is something to decode in one of them."""
    return bool(image.tile)


def _leaves_the_host(tensor: Any, target: Any = None, *_: Any, device: Any = None, **__: Any) -> bool:
    """Whether `Tensor.to` or `Tensor.cuda` copies from host memory to a device.

    Parameters and other subclasses are left alone: to ask them anything may run code of theirs.
    """
    if type(tensor) is not sys.modules["torch"].Tensor or not tensor.is_cpu:
        return False
    target = target if device is None else device
    target = getattr(target, "device", target)
    kind: Any = getattr(target, "type", target)
    return isinstance(kind, int) or (isinstance(kind, str) and kind.partition(":")[0] not in ("cpu", "meta"))


_CONDITIONS: dict[str, Callable[..., bool]] = {
    "ImageFile.load": _will_decode,
    "Tensor.to": _leaves_the_host,
    "Tensor.cuda": lambda tensor, *_, **__: _leaves_the_host(tensor, "cuda"),
}


def _compared_by_identity(tensor_class: Any) -> bool:
    """Whether tables of tensor methods were made already, as subclasses with a `__torch_function__` have them.

    What is looked up there is the method as it is called: a replacement would not be found.
    """
    return any(
        "__torch_function__" in vars(kind) and kind.__module__.partition(".")[0] != "torch"
        for kind in tensor_class.__subclasses__()
    )


def _composing(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """`Compose.__call__`, which meets its members here: their classes are not known before."""
    known: set[type] = set()

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.active and not recording.is_compiling():
            try:
                for member in self.transforms if isinstance(self.transforms, (list, tuple)) else ():
                    if type(member) not in known:
                        known.add(type(member))
                        _recognise_member(hook, type(member))
            except Exception as error:
                hook.fail(error)
        return original(self, *args, **kwargs)

    return call


def _recognise_member(hook: Hook, kind: type) -> None:
    if kind.__name__ == "Compose" or kind.__module__.partition(".")[0] in _GENERAL:
        return
    name = _NAMES.get(kind.__name__, kind.__name__)
    try:
        hook.replace(kind, "__call__", lambda original: timed(original, name, hook))
    except TypeError:
        pass  # a class that cannot be changed
