"""A trial of `tidegauge tune`: the one case in which the arguments of the user's loaders are changed, as was asked.

`TIDEGAUGE_TRIAL_LOADER` is `num_workers,prefetch_factor`, which every DataLoader of the training then has; or
`batch*2`: batches are so many times as large; or `ceiling`: each iterator yields its first batch, made in the
training process, again and again, as if loading cost nothing. If a loader cannot be made so, it is made as the
script says, and what is recorded of it tells.
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
from training_harness.hooks.worker import WORKER_MODULE
from training_harness.layout import BATCH_TIMES, CEILING, TRIAL_LOADER_VARIABLE

#: What torch refuses without workers (torch/utils/data/dataloader.py), or is not meant for them.
_FOR_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def install(module_name: str, loader: str) -> Hook | None:
    """Replace a loader's `__init__`, and for a ceiling the iterators' `__next__`; None if this is no trial.

    Args:
        module_name: where the loader is; torch's comes first, for its iterators are the base of all.
        loader: name of the class. One that does not call `DataLoader.__init__`, as torchdata's, needs its own hook.

    Raises:
        AttributeError: this torch has no such name.
        ValueError: the variable is none of them.
    """
    asked = os.environ.get(TRIAL_LOADER_VARIABLE)
    if not asked:
        return None
    if asked.startswith(BATCH_TIMES):
        change = functools.partial(_change_batches, float(asked.removeprefix(BATCH_TIMES)))
    else:
        workers, prefetch = (0, 0) if asked == CEILING else map(int, asked.split(","))
        change = functools.partial(_change_workers, workers, prefetch)
    module = sys.modules[module_name]
    with Hook("trial") as hook:
        hook.replace(getattr(module, loader), "__init__", lambda original: _init(hook, original, change))
        if asked == CEILING and loader == "DataLoader":
            hook.replace(module._BaseDataLoaderIter, "__next__", _again)
        return hook


def _change_workers(workers: int, prefetch: int, given: dict[str, Any]) -> None:
    given["num_workers"] = workers
    for name in () if workers else _FOR_WORKERS:
        given.pop(name, None)
    if workers:
        given["prefetch_factor"] = prefetch


def _change_batches(factor: float, given: dict[str, Any]) -> None:
    """Of torch's own batch sampler too; another one makes the batches that it likes."""
    sampler = given.get("batch_sampler")
    if sampler is None:
        size = given.get("batch_size", 1)
        if size is None:
            raise ValueError("the dataset makes its batches itself (batch_size=None)")
        given["batch_size"] = max(1, round(size * factor))
        return
    if type(sampler) is not sys.modules["torch.utils.data"].BatchSampler:
        raise ValueError(f"its batch_sampler, {type(sampler).__name__}, makes the batches")
    size = max(1, round(sampler.batch_size * factor))
    given["batch_sampler"] = type(sampler)(sampler.sampler, size, sampler.drop_last)


def _init(hook: Hook, original: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if hook.active and sys.modules[WORKER_MODULE].get_worker_info() is None:
            try:
                given = signature.bind(self, *args, **kwargs)
                change(given.arguments)
                original(*given.args, **given.kwargs)
            except Exception as error:
                if session.active is not None:
                    session.active.events.append(
                        "hook-disabled", hook="trial", error=f"{type(error).__name__}: {error}"
                    )
            else:
                return
        original(self, *args, **kwargs)

    return init


def _again(original: Any) -> Any:
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
    except TypeError:  # an iterable dataset ends when it likes
        return float("inf")
