"""Memory of the optimizers: the gradients of their parameters, and their state.

Gradients and state grow without a leak: those of a layer that is unfrozen late appear with its first step, and
LBFGS keeps a history of gradients (torch/optim/lbfgs.py). The reader tells that growth from a leak.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from training_harness import session
from training_harness.hooks.heap import next_due_ns
from training_harness.hooks.training.devices import number_in_run
from training_harness.records import HOST_DEVICE

#: Nanoseconds between two readings, at least. A reading visits each tensor, which takes some 1 µs.
_EVERY_NS = 1_000_000_000
_GRADIENTS, _STATE = range(2)


class OptimizerGauge:
    """Reads the memory of the optimizers that step.

    One that has not stepped since a new one began to is no longer in use, like that of an earlier trial or fold. If
    the program keeps it, that is its memory to judge.

    Attributes:
        due_ns: when the next reading is due.
    """

    def __init__(self) -> None:
        self.due_ns = 0
        self._optimizers: dict[int, Callable[[], Any]] = {}
        self._stepping: set[int] = set()

    def see(self, optimizer: Callable[[], Any]) -> None:
        """Note an optimizer, by a weak reference, that steps."""
        key = id(optimizer)
        if key not in self._optimizers:
            self._optimizers[key] = optimizer
            self._stepping.clear()
        self._stepping.add(key)

    def record(self, current: session.Session) -> None:
        """Write one record for each device that holds such memory.

        It is called after a step or at a CUDA out-of-memory error.
        """
        begun_cpu_ns, torch = time.thread_time_ns(), sys.modules["torch"]
        living = {key: found for key, optimizer in self._optimizers.items() if (found := optimizer()) is not None}
        self._optimizers = {key: self._optimizers[key] for key in living}
        self._stepping &= living.keys()
        plain_types = torch.Tensor, torch.nn.Parameter
        totals: dict[tuple[str, int | None], list[int]] = {}
        for optimizer in map(living.__getitem__, self._stepping):
            for part, tensor in _tensors(optimizer):
                # A subclass may run code of its own when it is asked for its size.
                if type(tensor) in plain_types and tensor.layout is torch.strided:
                    place = tensor.device
                    total = totals.setdefault((place.type, place.index), [0, 0])
                    total[part] += tensor.numel() * tensor.element_size()
        now_ns = time.monotonic_ns()
        for (kind, index), total in totals.items():
            if kind in ("cpu", "cuda", "xpu"):
                current.optimizer(now_ns, HOST_DEVICE if kind == "cpu" else number_in_run(index or 0), *total)
        self.due_ns = next_due_ns(now_ns, begun_cpu_ns, _EVERY_NS)


def _tensors(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield gradients and state of an optimizer, each with what it is."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield _GRADIENTS, parameter.grad
    for value in list(optimizer.state.values()):
        yield from ((_STATE, tensor) for tensor in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
