"""States that `Module.load_state_dict` copied into a module while their own tensors are on a device.

A checkpoint that is read with its tensors on the GPU takes as much memory as the model, until the program lets go
of it. Nothing else tells it from the model when memory runs out.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from training_harness.hooks.patching import Hook

#: Types of the devices whose memory is judged.
DEVICE_TYPES = ("cuda", "xpu")
#: Number of loads that are all noted; later only every load of this number is. A loop that copies a network again
#: and again, as reinforcement learning does, would pay for each.
_LOADS = 100


class LoadedStates(Hook):
    """Hook that notes, by weak references, the tensors that were copied and share no memory with their module."""

    def __init__(self, use_count: Callable[[int], int]) -> None:
        super().__init__("loaded_state")
        self._use_count = use_count
        self._tensors: dict[int, Callable[[], Any]] = {}
        self._loads = 0

    def note(self, module: Any, state: Any) -> None:
        """Note the tensors of a state that a module has just loaded."""
        self._loads += 1
        if (self._loads > _LOADS and self._loads % _LOADS) or not isinstance(state, Mapping):
            return
        torch = sys.modules["torch"]

        def on_device(values: Iterable[Any]) -> Iterator[Any]:
            # A subclass may run code of its own when it is asked for its memory.
            plain_types = torch.Tensor, torch.nn.Parameter
            return (
                value
                for value in values
                if type(value) in plain_types
                and value.device.type in DEVICE_TYPES
                and value.layout is torch.strided
            )

        # A parameter belongs to a model, which may be another one that is in use.
        loaded = [each for each in on_device(state.values()) if type(each) is torch.Tensor]
        if not loaded:
            return
        # Storages are compared by their addresses: asking for that of their data would copy it if it is shared
        # until someone writes to it.
        own = {
            tensor.untyped_storage()._cdata
            for tensor in on_device(itertools.chain(module.parameters(), module.buffers()))
        }
        copied = (each for each in loaded if each.untyped_storage()._cdata not in own)
        reference = torch.utils.weak.TensorWeakRef
        self._tensors = {id(tensor): reference(tensor) for tensor in (*self._living(), *copied)}

    def bytes_on(self, device: int) -> int:
        """Return the memory on a device that tensors of loaded states, and nothing else, still hold."""
        noted: Counter[int] = Counter()
        sizes: dict[int, tuple[int, int]] = {}
        for tensor in self._living():
            if tensor.device.index == device:
                storage = tensor.untyped_storage()
                address = storage._cdata
                noted[address] += 1
                sizes[address] = self._use_count(address) - 1, storage.nbytes()  # `storage` is a use too
        return sum(size for address, (uses, size) in sizes.items() if uses == noted[address])

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

    with LoadedStates(sys.modules["torch"]._C._storage_Use_Count) as hook:
        hook.replace(sys.modules["torch.nn.modules.module"].Module, "load_state_dict", make)
        return hook
