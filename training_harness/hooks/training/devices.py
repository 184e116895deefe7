"""GPUs in a training step: gauges of the allocator, and the time of each phase on the device.

One `device_memory` record per step and device in use, and one `device_time` record per sampled step. The host
only launches kernels, so its clock does not show when they ran. CUDA events from a pool are recorded between the
phases, on the stream in use, and read some steps later, when they are complete: nothing ever waits for the device
(torch/cuda/streams.py; CUDA C++ Programming Guide, "Events").

A rank that sets `CUDA_VISIBLE_DEVICES` to its own GPU numbers that one 0, and so does every other rank. The
collector queries the driver from outside, with the numbers of the run's command, so devices are recorded under
those (CUDA C++ Programming Guide, "Environment Variables").
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from training_harness import session
from training_harness.hooks.accelerators import has_own_allocator, in_use, is_capturing
from training_harness.layout import ALL_DEVICES, RUN_DEVICES_VARIABLE, visible_devices
from training_harness.records import MISSING_INT64

#: Number of readings between two searches for devices that came into use.
_RESCAN_READINGS = 64
#: Statistics of the driver's own pool; its other ones are always 0 (c10/cuda/CUDAMallocAsyncAllocator.cpp).
_MALLOC_ASYNC_STATS = ("allocated_bytes", "active_bytes", "reserved_bytes")
_NO_GAUGE = {"current": MISSING_INT64, "peak": MISSING_INT64}
_NO_POOLS = {"all": _NO_GAUGE}
#: Nanoseconds between two sampled steps: recording the five events of one costs some 20 µs.
SAMPLE_EVERY_NS = 20_000_000
#: Number of steps whose events may be incomplete; on a device that is further behind no step is sampled.
_PENDING_STEPS = 16
#: Number of events above which a step, one with endless backward passes say, is not sampled.
_MARKS_AT_MOST = 256
#: Phases of a step, in the order of their columns in the `step` stream, and those that are timed on the device.
WAIT, COPY, FORWARD, BACKWARD, OPTIMIZE, OTHER = range(6)
PHASES = range(FORWARD, OTHER + 1)
_START = -1


class Reading(NamedTuple):
    """PyTorch's figures of its allocators at one moment.

    Attributes:
        of_devices: (time, device, statistics) of each device in use.
        pinned: statistics of pinned host memory; empty in an older torch.
    """

    of_devices: list[tuple[int, int, Mapping[str, Any]]]
    pinned: Mapping[str, Any]


class DeviceGauges:
    """Reader of the allocator of every device that this process uses."""

    def __init__(self, torch: Any = None) -> None:
        self._torch = torch
        self._devices: list[int] = []
        self._numbers: dict[int, int] = {}
        self._readings_count = 0
        self._is_native = True
        self._are_capacities_due = False
        self._capacities: dict[int, tuple[int, float | None]] = {}
        self._allocated_totals: dict[int, int] = {}
        self._active_devices: set[int] | None = None

    def has_worked(self, device: int) -> bool:
        """Return whether the step recorded last used a device; True if that is not known.

        A step that computes on a device allocates memory there, or replays a CUDA graph that has its own.
        """
        return self._active_devices is None or device in self._active_devices

    def read(self) -> Reading | None:
        """Read the statistics now; None before an accelerator is initialised."""
        accelerator = in_use(self._torch or sys.modules["torch"])
        if accelerator is None:
            return None
        stats_of = accelerator.memory_stats_as_nested_dict
        if self._readings_count % _RESCAN_READINGS == 0:
            self._is_native = has_own_allocator(accelerator)
            self._devices = [
                device for device in range(accelerator.device_count()) if any(_reserved(stats_of(device)).values())
            ]
            # A reading that is written later may hold a device whose memory has been given back since.
            self._numbers |= {device: number_in_run(device) for device in self._devices}
            self._are_capacities_due = True
        self._readings_count += 1
        pinned_stats = getattr(accelerator, "host_memory_stats_as_nested_dict", None) if self._devices else None
        pinned = pinned_stats() if pinned_stats is not None else {}
        return Reading([(time.monotonic_ns(), device, stats_of(device)) for device in self._devices], pinned)

    def write(self, current: session.Session, step: int, reading: Reading) -> None:
        """Write one record per device in use."""
        if self._are_capacities_due:
            self._are_capacities_due = False
            for device in self._devices:
                self._report_capacity(current, in_use(self._torch or sys.modules["torch"]), device)
        self._active_devices = active_devices = set[int]()
        records = []
        for time_ns, device, stats in reading.of_devices:
            if not self._is_native:
                stats = {name: stats[name] for name in _MALLOC_ASYNC_STATS}
            if self._was_used(device, stats):
                active_devices.add(device)
            records.append((time_ns, step, self._numbers[device], *gauges(stats, reading.pinned)))
        if records:
            current.device_memory(records)

    def _was_used(self, device: int, stats: Mapping[str, Any]) -> bool:
        """Return whether memory was allocated since the last record; True if that is not known."""
        pools = stats.get("reserved_bytes_by_private_pools")
        allocated_total = stats["allocated_bytes"]["all"]["allocated"]
        before, self._allocated_totals[device] = self._allocated_totals.get(device), allocated_total
        return allocated_total != before or pools is None or any(pool["all"]["current"] for pool in pools.values())

    def _report_capacity(self, current: session.Session, accelerator: Any, device: int) -> None:
        """Write a `cuda-device` event with the device's memory and the share that the process may use, once."""
        share_of = getattr(accelerator, "get_per_process_memory_fraction", None)  # torch >= 2.6
        allowed_ratio = share_of(device) if share_of is not None and self._is_native else None
        capacity = accelerator.get_device_properties(device).total_memory, allowed_ratio
        if self._capacities.get(device) != capacity:
            self._capacities[device] = capacity
            current.events.append(
                "cuda-device", device=number_in_run(device), total_bytes=capacity[0], allowed_ratio=allowed_ratio
            )


def gauges(stats: Mapping[str, Any], pinned: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the gauges of the `device_memory` stream, in its order, after step and device.

    Args:
        stats: result of `memory_stats_as_nested_dict`. Statistics that an older torch or another allocator lacks
            become missing values.
        pinned: result of `host_memory_stats_as_nested_dict`, or an empty mapping.
    """
    get = stats.get
    allocated, reserved = get("allocated_bytes", _NO_POOLS)["all"], _reserved(stats)
    pools = get("reserved_bytes_by_private_pools")
    # torch 2.11 adds to the bytes in use and never subtracts: above what the allocator owns they mean nothing.
    owned, in_use = (pinned.get(name, _NO_GAUGE)["current"] for name in ("allocated_bytes", "active_bytes"))
    return (
        allocated["current"],
        get("requested_bytes", _NO_POOLS)["all"]["current"],
        get("active_bytes", _NO_POOLS)["all"]["current"],
        reserved["current"],
        get("inactive_split_bytes", _NO_POOLS)["all"]["current"],
        allocated["peak"],
        reserved["peak"],
        get("allocation", _NO_POOLS)["all"]["current"],
        get("segment", _NO_POOLS)["all"]["current"],
        get("num_alloc_retries", MISSING_INT64),
        get("num_ooms", MISSING_INT64),
        get("num_device_alloc", MISSING_INT64),
        get("num_device_free", MISSING_INT64),
        MISSING_INT64 if pools is None else sum(pool["all"]["current"] for pool in pools.values()),
        owned,
        in_use if in_use <= owned else MISSING_INT64,
    )


def _reserved(stats: Mapping[str, Any]) -> dict[str, int]:
    # Segments would not do: there are none with expandable segments or with cudaMallocAsync.
    reserved: dict[str, int] = stats.get("reserved_bytes", _NO_POOLS)["all"]
    return reserved


def number_in_run(device: int) -> int:
    """Return the run's number of a device that this process calls `device`; right only once it is in use."""
    return renumber(device, visible_devices(os.environ), os.environ.get(RUN_DEVICES_VARIABLE))


def renumber(device: int, visible: str | None, run_devices: str | None) -> int:
    """Return the run's number of a device; the process's own number where the two selections can't be compared.

    Args:
        device: number of the device in the process.
        visible: devices that the process may see, None if all.
        run_devices: those of the run's command, `ALL_DEVICES` if it sees all; None if no command
            began the run.
    """
    if run_devices is None or visible == run_devices:
        return device
    name = str(device) if visible is None else "".join(visible.split(",")[device : device + 1]).strip()
    if run_devices == ALL_DEVICES:
        return int(name) if name.isdigit() else device
    names = [entry.strip() for entry in run_devices.split(",")]
    return names.index(name) if name in names else device


class _StepSample(NamedTuple):
    step: int
    device: int
    marks: list[tuple[int, Any]]


class DeviceTimes:
    """Sampler of step times on the process's current device, if the process computes there.

    An event on an idle device would show the host's time, and the first one makes a context there.

    Args:
        has_worked: function that says whether the step that ends used a device, by its number.

    Attributes:
        sampling: whether the current step is sampled, so that its phases must be marked.
    """

    def __init__(self, has_worked: Callable[[int], bool]) -> None:
        self.sampling = False
        self._has_worked = has_worked
        self._last_sample_ns = 0
        self._device = -1
        self._marks: list[tuple[int, Any]] = []
        self._pending: deque[_StepSample] = deque()
        self._pool: list[Any] = []

    def mark(self, phase: int) -> None:
        """Record an event at the end of a phase, one of `PHASES`, of the step."""
        accelerator = in_use(sys.modules["torch"])
        if (
            is_capturing(accelerator)  # an event would become part of the graph
            or accelerator.current_device() != self._device  # two devices share no clock
            or len(self._marks) >= _MARKS_AT_MOST
        ):
            self.sampling = False
            return
        event = self._pool.pop() if self._pool else accelerator.Event(enable_timing=True)
        event.record()
        self._marks.append((phase if phase in PHASES else OTHER, event))

    def end_step(self, current: session.Session, step: int, now_ns: int) -> None:
        """End the sample of this step, write the complete ones, and begin another if one is due."""
        if self.sampling:
            self.mark(OTHER)
        if self.sampling and self._has_worked(self._device):
            self._pending.append(_StepSample(step, self._device, self._marks))
        self._marks = []
        self.sampling = False
        self.begin_if_due(current, now_ns)

    def begin_if_due(self, current: session.Session, now_ns: int) -> None:
        """Write the complete samples, and begin another if one is due, between two steps."""
        accelerator = in_use(sys.modules["torch"])
        if is_capturing(accelerator):  # querying an event would spoil the graph
            return
        while self._pending and self._pending[0].marks[-1][1].query():
            self._write(current, self._pending.popleft(), now_ns)
        if now_ns - self._last_sample_ns < SAMPLE_EVERY_NS or len(self._pending) >= _PENDING_STEPS:
            return
        self._last_sample_ns = now_ns
        self._device = accelerator.current_device()
        self.sampling = self._has_worked(self._device)
        if self.sampling:
            self.mark(_START)

    def _write(self, current: session.Session, sample: _StepSample, now_ns: int) -> None:
        phase_ns = dict.fromkeys(PHASES, 0)
        before = sample.marks[0][1]
        for phase, event in sample.marks[1:]:
            phase_ns[phase] += round(before.elapsed_time(event) * 1e6)
            before = event
        duration_ns = round(sample.marks[0][1].elapsed_time(before) * 1e6)
        current.device_time(now_ns, sample.step, number_in_run(sample.device), duration_ns, *phase_ns.values())
        self._pool += [event for _, event in sample.marks]
