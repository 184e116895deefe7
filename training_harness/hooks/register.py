"""Which DataLoader is which: their numbers, and what is said of them once.

Many scripts, and Lightning, Accelerate and transformers under them, make the same DataLoader anew for each epoch or
evaluation. A loader that is set up like one that is gone takes over its number, and its passes are counted on.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from training_harness import session
from training_harness.hooks.loader_sites import site_of

#: A loop that makes a new DataLoader in each step must not turn rare events into a stream.
_DESCRIBED_LOADERS = 1000
#: Among so many of the last loaders that look alike, one that is gone is looked for.
_ALIKE_LOADERS = 8
#: A loader of another length in each step must not fill the memory.
_CONFIGURATIONS = 256


class LoaderInfo:
    """A DataLoader that was iterated, or several, each made like the one before when that was gone.

    Attributes:
        number: in the order of first use.
        epochs: how many passes were begun.
        loader: weak, the newest of them.
        iterator: weak, its newest iterator, which may outlive it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.epochs = 0
        self.loader: Callable[[], Any] = _nobody
        self.iterator: Callable[[], Any] = _nobody

    def gone(self) -> bool:
        """Nobody uses it any more."""
        return self.loader() is None and self.iterator() is None


def _nobody() -> None:
    """Stands for a weak reference to nothing."""


class Register:
    """The DataLoaders that were iterated in a session; a forked child has a session of its own."""

    def __init__(self, current: session.Session) -> None:
        self.session = current
        self._loaders: dict[int, LoaderInfo] = {}
        self._alike: dict[str, deque[LoaderInfo]] = defaultdict(lambda: deque(maxlen=_ALIKE_LOADERS))
        self._numbers = 0

    def info(self, loader: Any, iterator: Any) -> LoaderInfo:
        """What is known of a loader that an iterator is being created for; a new one is described in an event."""
        key = id(loader)
        info = self._loaders.get(key)
        if info is None or info.loader() is not loader:
            info = self._loaders[key] = self._new(loader)
            info.loader = weakref.ref(loader, lambda _: self._loaders.pop(key, None))
        info.iterator = weakref.ref(iterator)
        return info

    def _new(self, loader: Any) -> LoaderInfo:
        configuration = _configuration(loader)
        if len(self._alike) > _CONFIGURATIONS:
            self._alike.clear()
        alike = self._alike[str(configuration)]
        info = next((info for info in alike if info.gone()), None)
        if info is None:
            info = LoaderInfo(self._numbers)
            self._numbers += 1
            alike.append(info)
            if info.number < _DESCRIBED_LOADERS:
                self.session.events.append("loader", loader=info.number, **configuration, **site_of(loader))
        return info


def _configuration(loader: Any) -> dict[str, Any]:
    context = getattr(loader, "multiprocessing_context", None) or sys.modules.get("multiprocessing")
    return {
        "num_workers": loader.num_workers,
        "prefetch_factor": getattr(loader, "prefetch_factor", None),
        "batch_size": getattr(loader, "batch_size", None),
        "pin_memory": bool(getattr(loader, "pin_memory", False)),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "in_order": getattr(loader, "in_order", True),
        "start_method": _start_method(context),
        "dataset": type(getattr(loader, "dataset", None)).__qualname__,
        "dataset_length": _length(getattr(loader, "sampler", None)),
        "sampler": type(getattr(loader, "sampler", None)).__qualname__,
        "collate": getattr(getattr(loader, "collate_fn", None), "__name__", None),
        "iterable": is_iterable(loader),
    }


def is_iterable(loader: Any) -> bool:
    """Its dataset is an IterableDataset."""
    return bool(getattr(loader, "_dataset_kind", 0) == 1)  # `_DatasetKind.Iterable`


def _start_method(context: Any) -> str | None:
    """The start method that holds, without fixing it: `set_start_method` must work after us."""
    if context is None:
        return None
    try:
        chosen: str | None = context.get_start_method(allow_none=True)
        return chosen or str(context.get_all_start_methods()[0])
    except Exception:  # a context of the user's own
        return None


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:
        return None
