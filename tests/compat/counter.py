"""Count what a training does, in the training's own processes and without Tidegauge.

Python imports this at start-up through `counter.pth`, which `run.py` puts into the environment of the programs, so
every process of a program has it: ranks, children and workers alike, bare and attached. Once `torch` is imported,
each optimizer step, each batch that a DataLoader's iterator returns and each forward pass of an outermost module
appends one line to a file of the process in `$COMPAT_COUNTS`. `truth.py` reads these files.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import threading
import time
import weakref
from importlib.machinery import ModuleSpec
from typing import Any

DIRECTORY = os.environ["COMPAT_COUNTS"]


class Log:
    """Appends events to a file of its own in every process, forked ones included."""

    def __init__(self) -> None:
        self._pid = 0
        self._descriptor = -1

    def write(self, kind: str, thing: int, workers: int = 0) -> None:
        """Append one event: its kind, its time, the number of the thing, the world size, and workers of a batch."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = os.path.join(DIRECTORY, f"{self._pid}.jsonl")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        event = [kind, time.monotonic_ns(), thing, world_size(), workers]
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")


class Numbers:
    """Numbers objects in the order in which they are met."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any]] = {}
        self._count = 0

    def of(self, thing: Any) -> int:
        """Return the number of this object; an object that took a dead one's address gets a new number."""
        number, reference = self._known.get(id(thing), (-1, None))
        if number < 0 or (reference is not None and reference() is not thing):
            number, self._count = self._count, self._count + 1
            try:
                reference = weakref.ref(thing)
            except TypeError:  # a list, say, has no weak references
                reference = None
            self._known[id(thing)] = number, reference
        return number


class Depth(threading.local):
    """Depth of the thread in calls of one kind."""

    value = 0


log, optimizers, stepping = Log(), Numbers(), Depth()


def world_size() -> int:
    """Return the number of ranks of the process group, 1 without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def count_steps(torch: Any) -> None:
    """Wrap the `step` of every optimizer class when its first optimizer is made."""
    wrapped: set[type] = set()
    initialise = torch.optim.Optimizer.__init__

    @functools.wraps(initialise)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if type(self) not in wrapped:
            wrapped.add(type(self))
            count_steps_of(type(self))

    torch.optim.Optimizer.__init__ = made


def count_steps_of(kind: Any) -> None:
    """Wrap the `step` of this class; a program calls it whose optimizer is not one of torch's."""
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        stepping.value += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            stepping.value -= 1
        if stepping.value == 0:  # not a step that a derived class's step calls
            log.write("step", optimizers.of(self))
        return result

    kind.step = step


def count_batches(torch: Any) -> None:
    """Wrap `__next__` of the class from which every DataLoader iterator is derived."""
    numbers, base = Numbers(), torch.utils.data.dataloader._BaseDataLoaderIter
    original = base.__next__

    @functools.wraps(original)
    def following(self: Any) -> Any:
        batch = original(self)
        log.write("batch", numbers.of(self._dataset), self._num_workers)
        return batch

    base.__next__ = following


def count_forwards(torch: Any) -> None:
    """Wrap the call of modules; only an outermost module that has parameters counts, so no loss does."""
    numbers, depth, original = Numbers(), Depth(), torch.nn.Module.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth.value += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            depth.value -= 1
            if depth.value == 0 and next(self.parameters(), None) is not None:
                log.write("forward", numbers.of(self))

    torch.nn.Module.__call__ = call


class AfterTorch:
    """A meta path finder that puts the counters in once `torch` has been executed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return torch's own spec with a loader that puts the counters in afterwards."""
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_count(module: Any) -> None:
                execute(module)
                count_steps(module)
                count_batches(module)
                count_forwards(module)

            spec.loader.exec_module = execute_and_count
        return spec


sys.meta_path.insert(0, AfterTorch)
