"""PyTorch's interface to the accelerator that a process computes on.

ROCm builds of PyTorch keep the names of CUDA ("HIP (ROCm) semantics" in PyTorch's notes), and `torch.xpu` has them
too, for Intel's GPUs (torch/xpu/__init__.py, torch/xpu/memory.py). So one interface serves all three: that of
`torch.cuda`. What another backend lacks is asked for here.
"""

from __future__ import annotations

from typing import Any

_BACKENDS = ("cuda", "xpu")


def in_use(torch: Any) -> Any:
    """Return `torch.cuda` or `torch.xpu`, whichever is initialised; None before, and without an accelerator."""
    for name in _BACKENDS:
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            return backend
    return None


def built_for(torch: Any) -> str:
    """Return the accelerator that a torch is built for, with its version: `CUDA 12.6`, `ROCm 6.3`, or nothing."""
    version = getattr(torch, "version", None)
    for name, attribute in (("ROCm", "hip"), ("CUDA", "cuda"), ("XPU", "xpu")):
        if number := getattr(version, attribute, None):
            return f"{name} {number}"
    return ""


def is_capturing(backend: Any) -> bool:
    """Return whether the current stream is captured into a graph, which no other call may join."""
    is_captured = getattr(backend, "is_current_stream_capturing", None)
    return is_captured is not None and bool(is_captured())


def has_own_allocator(backend: Any) -> bool:
    """Return whether PyTorch's own caching allocator serves, not the driver's (`cudaMallocAsync`)."""
    name_of = getattr(backend, "get_allocator_backend", None)
    return name_of is None or name_of() == "native"
