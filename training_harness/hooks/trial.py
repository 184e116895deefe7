"""Trial of `tidegauge tune`: the one case in which the arguments of the user's loaders are changed, on request.

`TIDEGAUGE_TRIAL_LOADER` is `num_workers,prefetch_factor`, which every DataLoader of the training then gets; or
`batch*2`, which multiplies every batch size; or `ceiling`: each iterator yields its first batch, made in the
training process, again and again, as if loading cost nothing. A loader that cannot be made so is made as the
script says, and its `loader` event shows it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker
from training_harness.layout import BATCH_TIMES, CEILING, TRIAL_LOADER_VARIABLE

#: Options that torch refuses without workers (torch/utils/data/dataloader.py), or that only matter with them.
_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def install(module_name: str, loader: str) -> Hook | None:
    """Replace a loader's `__init__`, and for a ceiling the iterators' `__next__`; return None if this is no trial.

    Args:
        module_name: module of the loader; torch's comes first, since its iterators are the base of all others.
        loader: name of the class. One that does not call `DataLoader.__init__` (torchdata's) needs its own hook.

    Raises:
        ValueError: the variable has none of the forms above.
    """
    setting = os.environ.get(TRIAL_LOADER_VARIABLE)
    if not setting:
        return None
    if setting.startswith(BATCH_TIMES):
        change = functools.partial(_change_batches, float(setting.removeprefix(BATCH_TIMES)))
    else:
        workers, prefetch = (0, 0) if setting == CEILING else map(int, setting.split(","))
        change = functools.partial(_change_workers, workers, prefetch)
    module = sys.modules[module_name]
    with Hook("trial") as hook:
        hook.replace(getattr(module, loader), "__init__", lambda original: _init(hook, original, change))
        if setting == CEILING and loader == "DataLoader":
            hook.replace(module._BaseDataLoaderIter, "__next__", _repeat_first_batch)
        return hook


def _change_workers(workers: int, prefetch: int, arguments: dict[str, Any]) -> None:
    arguments["num_workers"] = workers
    for name in () if workers else _WORKER_OPTIONS:
        arguments.pop(name, None)
    if workers:
        arguments["prefetch_factor"] = prefetch


def _change_batches(factor: float, arguments: dict[str, Any]) -> None:
    """Multiply the batch size, also the one of torch's own batch sampler; the size of another one is not known."""
    sampler = arguments.get("batch_sampler")
    if sampler is None:
        size = arguments.get("batch_size", 1)
        if size is None:
            raise ValueError("the dataset makes its batches itself (batch_size=None)")
        arguments["batch_size"] = max(1, round(size * factor))
        return
    if type(sampler) is not sys.modules["torch.utils.data"].BatchSampler:
        raise ValueError(f"its batch_sampler, {type(sampler).__name__}, makes the batches")
    size = max(1, round(sampler.batch_size * factor))
    arguments["batch_sampler"] = type(sampler)(sampler.sampler, size, sampler.drop_last)


def _init(hook: Hook, original: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if hook.active and not is_worker():
            try:
                bound = signature.bind(self, *args, **kwargs)
                change(bound.arguments)
                original(*bound.args, **bound.kwargs)
            except Exception as error:
                if session.active is not None:
                    session.active.events.append(
                        "hook-disabled", hook="trial", error=f"{type(error).__name__}: {error}"
                    )
            else:
                return
        original(self, *args, **kwargs)

    return init


def _repeat_first_batch(original: Any) -> Any:
    def advance(self: Any) -> Any:
        yielded = self.__dict__.get("_tidegauge_yielded", 0)
        if yielded == 0:
            self._tidegauge_batch = original(self)
        elif yielded >= _length(self):
            raise StopIteration
        self._tidegauge_yielded = yielded + 1
        return self._tidegauge_batch

    return advance


def _length(iterator: Any) -> float:
    try:
        return len(iterator)
    except TypeError:  # an iterable dataset has no length
        return float("inf")
