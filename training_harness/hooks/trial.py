"""A trial of `tidegauge tune`: the one case in which the arguments of the user's loaders are changed, as was asked.

`TIDEGAUGE_TRIAL_LOADER` is `num_workers,prefetch_factor`, which every DataLoader of the training then has, or
`ceiling`: each iterator yields its first batch, made in the training process, again and again, as if loading cost
nothing. If a loader cannot be made so, it is made as the script says, and what is recorded of it tells.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook
from training_harness.hooks.worker import WORKER_MODULE
from training_harness.layout import CEILING, TRIAL_LOADER_VARIABLE

#: What torch refuses without workers (torch/utils/data/dataloader.py), or is not meant for them.
_FOR_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def install(module_name: str, loader: str) -> Hook | None:
    """Replace a loader's `__init__`, and for a ceiling the iterators' `__next__`; None if this is no trial.

    Args:
        module_name: where the loader is; torch's comes first, for its iterators are the base of all.
        loader: name of the class. One that does not call `DataLoader.__init__`, as torchdata's, needs its own hook.

    Raises:
        AttributeError: this torch has no such name.
        ValueError: the variable is not two numbers.
    """
    asked = os.environ.get(TRIAL_LOADER_VARIABLE)
    if not asked:
        return None
    workers, prefetch = (0, 0) if asked == CEILING else map(int, asked.split(","))
    module = sys.modules[module_name]
    with Hook("trial") as hook:
        hook.replace(getattr(module, loader), "__init__", lambda original: _init(hook, original, workers, prefetch))
        if asked == CEILING and loader == "DataLoader":
            hook.replace(module._BaseDataLoaderIter, "__next__", _again)
        return hook


def _init(hook: Hook, original: Any, workers: int, prefetch: int) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if hook.active and sys.modules[WORKER_MODULE].get_worker_info() is None:
            try:
                given = signature.bind(self, *args, **kwargs)
                given.arguments["num_workers"] = workers
                for name in () if workers else _FOR_WORKERS:
                    given.arguments.pop(name, None)
                if workers:
                    given.arguments["prefetch_factor"] = prefetch
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
