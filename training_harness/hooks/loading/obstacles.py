"""Reasons why a loader cannot get another setting without a change of results or a failure.

A loader that makes its batches itself is looked at most closely: with workers, its dataset runs in other processes
for the first time.
"""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
from collections import deque
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from training_harness.hooks.loading.loader_ids import LoaderInfo, Setting, is_iterable, start_method_of

#: Number of objects of a dataset that are searched, and of those that one of them refers to.
_OBJECTS_AT_MOST, _PARTS_AT_MOST = 10_000, 1_000
_ERROR_LENGTH = 120
#: Libraries whose objects hold files, connections or decoders that processes may not share after a fork.
_LIBRARIES_OF_HANDLES = frozenset(
    ("av", "cv2", "decord", "h5py", "lmdb", "netCDF4", "psycopg", "psycopg2", "sqlite3")
)
_NO_HANDLES = (type, ModuleType, FunctionType, BuiltinFunctionType)


def obstacle(loader: Any, info: LoaderInfo, setting: Setting) -> str | None:
    """Return why a loader cannot get this setting, in words; None if it can."""
    has_workers = bool(loader.num_workers)
    if is_iterable(loader):
        return "its dataset is iterable, so each worker may have its own part of the samples"
    if not getattr(loader, "in_order", True) and loader.num_workers < 2 <= setting[0]:
        return "it gives batches as they are ready (in_order=False), so their order would change"
    if (not has_workers or is_persistent(loader)) and not _begins_late(loader._index_sampler):
        return f"its sampler, {type(loader._index_sampler).__name__}, would begin once more"
    if is_persistent(loader) and _is_held(loader):
        return "its persistent iterator is still in use"
    if has_workers or not setting[0]:
        return None
    if start_method_of(loader) != "fork":
        return "workers are not forked here, and a script without workers may not be made for that"
    return info.batch_obstacle or _dataset_obstacle(loader.dataset, loader.collate_fn)


def is_persistent(loader: Any) -> bool:
    """Return whether a loader has an iterator that outlives its pass."""
    return bool(loader.persistent_workers and loader.num_workers and loader._iterator is not None)


def batch_obstacle(batch: Any) -> str | None:
    """Return why forked workers cannot make batches such as this one, in words; None if they can.

    With a batch that cannot be pickled, the training would wait for the worker's batch forever.
    """
    check = _BatchCheck()
    try:
        check.dump(batch)
    except Exception as error:
        return f"its batches cannot be pickled: {error_words(error)}"
    return check.obstacle


def error_words(error: BaseException) -> str:
    """Return type and first words of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_LENGTH]


class _BatchCheck(pickle.Pickler):
    """Pickles a batch to nowhere, without the content of its tensors and arrays."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(write=len))
        self.obstacle: str | None = None

    def persistent_id(self, part: Any) -> bool | None:
        """Return None for a part that is to be pickled."""
        if isinstance(part, sys.modules["torch"].Tensor):
            if part.device.type != "cpu":
                self.obstacle = "its batches are made on a device, which forked workers cannot use"
            elif part.requires_grad and not part.is_leaf:
                self.obstacle = "its batches are part of a computation with gradients, which stays in its process"
            return True
        numpy = sys.modules.get("numpy")
        return True if numpy is not None and isinstance(part, numpy.ndarray) and not part.dtype.hasobject else None


def _begins_late(sampler: Any) -> bool:
    """Return whether a sampler does nothing until its first index: an iterator with workers begins it twice."""
    kind = type(sampler)
    return inspect.isgeneratorfunction(kind.__iter__) or kind.__name__ == "SequentialSampler"


def _is_held(loader: Any) -> bool:
    """Return whether something besides a loader refers to its persistent iterator, as a loop does within a pass."""
    alone = SimpleNamespace(_iterator=SimpleNamespace())
    return sys.getrefcount(loader._iterator) > sys.getrefcount(alone._iterator)


def _dataset_obstacle(*roots: Any) -> str | None:
    """Return why forked workers cannot use what a dataset refers to, in words; None if nothing is known against it.

    The search runs no code of the dataset. It is not complete: it looks at a bounded number of objects.
    """
    tensor = sys.modules["torch"].Tensor
    things, seen = list(roots), set[int]()
    for thing in things:  # grows meanwhile
        kind = type(thing)
        library = str(kind.__module__).partition(".")[0]
        if id(thing) in seen or issubclass(kind, _NO_HANDLES) or library == "logging":
            continue
        seen.add(id(thing))
        if hasattr(kind, "fileno") or library in _LIBRARIES_OF_HANDLES:
            return f"its dataset holds an open {kind.__qualname__}, which forked workers cannot share"
        if issubclass(kind, tensor) and thing.device.type != "cpu":
            return "its dataset holds a tensor on a device, which forked workers cannot use"
        if len(things) < _OBJECTS_AT_MOST:
            things += islice(_parts(thing, kind), _PARTS_AT_MOST)
    return None


def _parts(thing: Any, kind: type[Any]) -> Any:
    """Return what an object refers to, without a copy of a large collection."""
    if kind in (list, tuple, set, frozenset, deque):
        return thing
    return chain.from_iterable(thing.items()) if kind is dict else gc.get_referents(thing)
