"""States that `Module.load_state_dict` copied into a module while their own tensors are on a device.

A checkpoint that is read with its tensors on the GPU takes as much memory as the model, until the program lets go
of it. Nothing else tells it from the model when memory runs out.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from training_harness.hooks.accelerators import in_use
from training_harness.hooks.patching import Hook


class LoadedStates(Hook):
    """Hook that notes, by weak references, the tensors that were copied and share no memory with their module."""

    def __init__(self) -> None:
        super().__init__("loaded_state")
        self._tensors: dict[int, weakref.ref[Any]] = {}

    def note(self, module: Any, state: Any) -> None:
        """Note the tensors of a state that a module has just loaded."""
        torch = sys.modules["torch"]
        if in_use(torch) is None or not isinstance(state, Mapping):
            return

        def on_device(values: Iterable[Any]) -> Iterator[Any]:
            # A subclass may run code of its own when it is asked for its memory.
            plain_types = torch.Tensor, torch.nn.Parameter
            return (
                value
                for value in values
                if type(value) in plain_types
                and value.device.type in ("cuda", "xpu")
                and value.layout is torch.strided
            )

        own = {
            tensor.untyped_storage().data_ptr()
            for tensor in on_device(itertools.chain(module.parameters(), module.buffers()))
        }
        tensors = (each for each in on_device(state.values()) if each.untyped_storage().data_ptr() not in own)
        self._tensors = {id(tensor): weakref.ref(tensor) for tensor in (*self._living(), *tensors)}

    def bytes_on(self, device: int) -> int:
        """Return the memory on a device that tensors of loaded states still hold."""
        storages = [tensor.untyped_storage() for tensor in self._living() if tensor.device.index == device]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def _living(self) -> Iterator[Any]:
        return (tensor for reference in self._tensors.values() if (tensor := reference()) is not None)


def install() -> LoadedStates:
    """Replace `Module.load_state_dict`."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, state_dict, *args, **kwargs)
            hook.attempt(hook.note, module, state_dict)
            return result

        return load_state_dict

    with LoadedStates() as hook:
        hook.replace(sys.modules["torch.nn.modules.module"].Module, "load_state_dict", make)
        return hook
