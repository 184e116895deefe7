"""Figures in PyTorch's own message that CUDA memory ran out.

They have two decimals of a binary unit (c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp,
`format_size`).
"""

from __future__ import annotations

import re

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
    """Return the figures that the message holds, in bytes.

    Returns:
        requested, total (of the device), free, process_used, allowed (where a fraction is set), allocated and
        unallocated (reserved, and no tensor uses it), each with `_bytes`.

    """
    found = {}
    for name, patterns in _FIGURES.items():
        matches = (re.search(pattern, message) for pattern in patterns)
        match = next((match for match in matches if match), None)
        if match:
            found[name] = float(match["value"]) * _UNITS[match["unit"]]
    return found


def first_sentences(message: str) -> str:
    """Return the message up to its general advice."""
    return message.partition(" If reserved but unallocated memory")[0].strip()
