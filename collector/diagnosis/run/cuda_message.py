"""PyTorch's message on memory that ran out, whose figures have two decimals of a binary unit.

`format_size` in c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp writes them.
"""

from __future__ import annotations

import re

#: Precision of the figures: 0.01 GiB.
ROUNDED_BYTES = 0.01 * (1 << 30)
_SENTENCE = re.compile(r"(CUDA|HIP|XPU)( error:)? out of memory")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(?P<value>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)"
_FIGURES = {
    "requested_bytes": (rf"Tried to allocate {_SIZE}", rf"Requested\s*: {_SIZE}"),
    "total_bytes": (rf"total capacity of {_SIZE}", rf"Device limit\s*: {_SIZE}"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"Free \(according to CUDA\)\s*: {_SIZE}"),
    "process_used_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed;", rf"memory fraction\)\s*: {_SIZE}"),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"Currently allocated\s*: {_SIZE}"),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
}


def message_figures(message: str) -> dict[str, float]:
    """Return the figures in PyTorch's message, in bytes.

    Returns:
        requested, total (of the device), free, process_used, allowed (where a fraction is set), allocated and
        unallocated (reserved, and no tensor uses it), each with `_bytes`.
    """
    figures = {}
    for name, patterns in _FIGURES.items():
        matches = (re.search(pattern, message) for pattern in patterns)
        match = next((match for match in matches if match), None)
        if match:
            figures[name] = float(match["value"]) * _UNITS[match["unit"]]
    return figures


def tells_out_of_memory(message: str) -> bool:
    """Return whether a message says that memory of the device ran out."""
    return _SENTENCE.search(message) is not None


def first_sentences(message: str) -> str:
    """Return the message up to its general advice, without the traceback before it that a worker's has."""
    message = message[max((found.start() for found in _SENTENCE.finditer(message)), default=0) :]
    return message.partition(" If reserved but unallocated memory")[0].strip()
