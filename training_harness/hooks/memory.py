"""CUDA allocator gauges: one `device_memory` record per step and device in use.

The allocator's nested statistics are read once per device; torch's flattened getters build and sort 122 keys
per call. Nothing here initialises CUDA, synchronises or resets a counter (torch/csrc/cuda/Module.cpp,
c10/cuda/CUDACachingAllocator.cpp: the statistics are copied under the allocator's lock).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from training_harness import session
from training_harness.hooks.numbering import number_in_run
from training_harness.records import MISSING_INT64

#: Devices that come into use later are looked for once in so many steps.
_LOOK_AGAIN_STEPS = 64
#: All that the driver's own pool tells: its other statistics are always 0 (c10/cuda/CUDAMallocAsyncAllocator.cpp).
_TOLD_BY_MALLOC_ASYNC = ("allocated_bytes", "active_bytes", "reserved_bytes")
_NO_GAUGE = {"current": MISSING_INT64, "peak": MISSING_INT64}
_NO_POOLS = {"all": _NO_GAUGE}


class DeviceGauges:
    """Reads the allocator of every device that this process uses.

    Args:
        torch: the module, where it is not the one that the process has imported.
    """

    def __init__(self, torch: Any = None) -> None:
        self._torch = torch
        self._devices: list[int] = []
        self._numbers: dict[int, int] = {}
        self._look_at_step = 0
        self._is_native = True
        self._capacities: dict[int, tuple[int, float | None]] = {}
        self._handed_out: dict[int, int] = {}
        self._working: set[int] | None = None

    def has_worked(self, device: int) -> bool:
        """Return whether a device had a part in the step whose record was written last; True if that is not known.

        A step that computes on a device takes memory there, or replays a CUDA graph that has its own.
        """
        return self._working is None or device in self._working

    def record(self, current: session.Session, step: int) -> None:
        """Write one record per device in use; nothing at all before CUDA is initialised."""
        cuda = (self._torch or sys.modules["torch"]).cuda
        if not cuda.is_initialized():
            return
        stats_of = cuda.memory_stats_as_nested_dict
        if step >= self._look_at_step:
            self._look_at_step = step + _LOOK_AGAIN_STEPS
            self._is_native = cuda.get_allocator_backend() == "native"
            self._devices = [
                device for device in range(cuda.device_count()) if any(_reserved(stats_of(device)).values())
            ]
            self._numbers = {device: number_in_run(device) for device in self._devices}
            for device in self._devices:
                self._tell_capacity(current, cuda, device)
        self._working = working = set[int]()
        if not self._devices:
            return
        pinned_stats = getattr(cuda, "host_memory_stats_as_nested_dict", None)
        pinned = pinned_stats() if pinned_stats is not None else {}
        records = []
        for device in self._devices:
            stats = stats_of(device)
            if not self._is_native:
                stats = {name: stats[name] for name in _TOLD_BY_MALLOC_ASYNC}
            if self._takes_part(device, stats):
                working.add(device)
            records.append((time.monotonic_ns(), step, self._numbers[device], *gauges(stats, pinned)))
        current.device_memory(records)

    def _takes_part(self, device: int, stats: Mapping[str, Any]) -> bool:
        """Return whether memory was handed out since the record before; True if that is not known."""
        pools = stats.get("reserved_bytes_by_private_pools")
        handed_out = stats["allocated_bytes"]["all"]["allocated"]
        before, self._handed_out[device] = self._handed_out.get(device), handed_out
        return handed_out != before or pools is None or any(pool["all"]["current"] for pool in pools.values())

    def _tell_capacity(self, current: session.Session, cuda: Any, device: int) -> None:
        """Write a `cuda-device` event with the device's memory and the share that the process may use, once."""
        share_of = getattr(cuda, "get_per_process_memory_fraction", None)  # torch >= 2.6
        allowed_ratio = share_of(device) if share_of is not None and self._is_native else None
        capacity = cuda.get_device_properties(device).total_memory, allowed_ratio
        if self._capacities.get(device) != capacity:
            self._capacities[device] = capacity
            current.events.append(
                "cuda-device",
                device=number_in_run(device),
                total_bytes=capacity[0],
                allowed_ratio=allowed_ratio,
            )


def gauges(stats: Mapping[str, Any], pinned: Mapping[str, Any]) -> tuple[int, ...]:
    """The gauges of the `device_memory` stream, in its order, after step and device.

    Args:
        stats: what `memory_stats_as_nested_dict` returned; what an older torch or another allocator does not
            tell is missing.
        pinned: what `host_memory_stats_as_nested_dict` returned, or an empty mapping.
    """
    of = stats.get
    allocated, reserved = of("allocated_bytes", _NO_POOLS)["all"], _reserved(stats)
    pools = of("reserved_bytes_by_private_pools")
    return (
        allocated["current"],
        of("requested_bytes", _NO_POOLS)["all"]["current"],
        of("active_bytes", _NO_POOLS)["all"]["current"],
        reserved["current"],
        of("inactive_split_bytes", _NO_POOLS)["all"]["current"],
        allocated["peak"],
        reserved["peak"],
        of("allocation", _NO_POOLS)["all"]["current"],
        of("segment", _NO_POOLS)["all"]["current"],
        of("num_alloc_retries", MISSING_INT64),
        of("num_ooms", MISSING_INT64),
        of("num_device_alloc", MISSING_INT64),
        of("num_device_free", MISSING_INT64),
        MISSING_INT64 if pools is None else sum(pool["all"]["current"] for pool in pools.values()),
        pinned.get("allocated_bytes", _NO_GAUGE)["current"],
        pinned.get("active_bytes", _NO_GAUGE)["current"],
    )


def _reserved(stats: Mapping[str, Any]) -> dict[str, int]:
    """Not the segments: there are none with expandable segments, nor with cudaMallocAsync."""
    reserved: dict[str, int] = stats.get("reserved_bytes", _NO_POOLS)["all"]
    return reserved
