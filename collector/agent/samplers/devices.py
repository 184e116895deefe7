"""GPUs through the library of their driver, read from outside the training process: no context is made.

NVIDIA's are read through NVML, AMD's through AMD SMI (amdsmi, which comes with ROCm). Intel's are known by the
statistics of PyTorch alone.
"""

from __future__ import annotations

import importlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import redirect_stdout, suppress
from functools import partial
from types import ModuleType
from typing import Any

import pynvml

from collector.agent.samplers.samples import Sample
from training_harness.layout import visible_devices

_MIB = 1 << 20
#: Device of AMD's compute driver.
_AMD_DRIVER = "/dev/kfd"


class DeviceSampler(ABC):
    """A sampler of the visible devices: one sample per device and tick.

    Devices are numbered as the run's processes see them: `layout.visible_devices` selects and orders.

    Attributes:
        library: name of the library that is asked.
        reason: why there is nothing to sample; None if there are devices.
    """

    library: str

    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        self.reason: str | None = None
        self._errors = errors
        self._handles: list[Any] = []

    def sample(self, pids: Set[int], recording_pids: Set[int] = frozenset()) -> list[Sample]:
        """Return one sample of the `device` stream per device.

        Args:
            pids: the run's processes.
            recording_pids: those of them that record their PyTorch allocator.
        """
        return [
            {"device": number, **self._sample(handle), **_by_process(self._processes(handle), pids, recording_pids)}
            for number, handle in enumerate(self._handles)
        ]

    def user_pids(self) -> set[int]:
        """Return the pids of processes that use a device: in a container perhaps none, or those of the host."""
        return {pid for handle in self._handles for pid, _ in self._processes(handle)}

    def close(self) -> None:
        """Shut the library down; harmless without a driver."""
        if self._handles:
            self._handles = []
            self._shut_down()

    def _ask(self, query: Callable[[], Any]) -> Any:
        """Return the driver's answer; None if this device, driver or version does not support the query."""
        try:
            return query()
        except self._errors:
            return None

    @abstractmethod
    def _shut_down(self) -> None: ...

    @abstractmethod
    def _sample(self, handle: Any) -> Sample:
        """Return what the driver tells of a device, without its processes."""

    @abstractmethod
    def _processes(self, handle: Any) -> list[tuple[int, int | None]]:
        """Return pid and bytes of the processes that use a device."""


def find_devices() -> DeviceSampler:
    """Return a sampler of this machine's GPUs: NVIDIA's if there are any, else AMD's."""
    nvidia = NvidiaSampler()
    if nvidia.reason is None:
        return nvidia
    if os.path.exists(_AMD_DRIVER):
        # At its import it looks for its library, prints that there is none, and raises one of these.
        with suppress(ImportError, OSError, KeyError), redirect_stdout(io.StringIO()):
            amd = AmdSampler(importlib.import_module("amdsmi"))
            if amd.reason is None:
                return amd
    return nvidia


class NvidiaSampler(DeviceSampler):
    """A sampler through NVML."""

    library = "NVML"

    def __init__(self, nvml: ModuleType | Any = pynvml, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__((nvml.NVMLError,))
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handles = self._visible(environ.get("CUDA_VISIBLE_DEVICES"))
        except nvml.NVMLError as error:
            missing = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            has_no_driver = getattr(error, "value", None) in missing
            why = "NVIDIA driver not found" if has_no_driver else f"NVML does not work here ({error})"
            self.reason = f"none: {why}"
            return
        if not self._handles:
            self.reason = "none: no NVIDIA device is visible"

    def _shut_down(self) -> None:
        self._nvml.nvmlShutdown()

    def _visible(self, selection: str | None) -> list[Any]:
        nvml = self._nvml
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpu_instances = [(gpu, self._instances(gpu)) for gpu in gpus]
        if selection is None:
            return [instance for _, instances in gpu_instances for instance in instances[:1]]
        handles = []
        for name in selection.split(","):
            matches = self._matching(name.strip(), gpu_instances)
            if not matches:  # CUDA too stops at the first invalid name.
                break
            handles.append(matches[0])
        return handles

    def _instances(self, gpu: Any) -> list[Any]:
        """Return the MIG instances of a divided GPU, else the GPU: CUDA sees the first unless another is named."""
        nvml = self._nvml
        mode = self._ask(lambda: nvml.nvmlDeviceGetMigMode(gpu))
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [gpu]
        count = self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) or 0
        handles = [self._ask(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, i)) for i in range(count)]
        return [handle for handle in handles if handle is not None]

    def _matching(self, name: str, gpu_instances: list[tuple[Any, list[Any]]]) -> list[Any]:
        if name.isdigit():
            return [instance for _, instances in gpu_instances[int(name) :][:1] for instance in instances]
        if not name:
            return []
        for gpu, instances in gpu_instances:
            if instances and self._has_uuid(name, gpu):
                return instances
            if handles := [instance for instance in instances if self._has_uuid(name, instance)]:
                return handles
        return []

    def _has_uuid(self, prefix: str, handle: Any) -> bool:
        return str(self._nvml.nvmlDeviceGetUUID(handle)).startswith(prefix)

    def _sample(self, handle: Any) -> Sample:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if memory is None:  # An older driver, which counts its own reserve as used.
            memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "used_bytes": None if memory is None else memory.used + getattr(memory, "reserved", 0),
            "total_bytes": getattr(memory, "total", None),
            "reserved_bytes": getattr(memory, "reserved", None),
            "utilisation_ratio": None if utilisation is None else utilisation / 100,
            "temperature_celsius": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
        }

    def _processes(self, handle: Any) -> list[tuple[int, int | None]]:
        processes = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        return [(process.pid, process.usedGpuMemory) for process in processes]


class AmdSampler(DeviceSampler):
    """A sampler through AMD SMI ("AMD SMI Python API reference", ROCm 6.4 or later).

    Args:
        smi: the module `amdsmi`.
        environ: the environment of the run's command. `HIP_VISIBLE_DEVICES` selects and orders.
    """

    library = "AMD SMI"

    def __init__(self, smi: ModuleType | Any, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__((smi.AmdSmiException, AttributeError))
        self._smi = smi
        try:
            smi.amdsmi_init()
            self._handles = self._visible(environ.get("HIP_VISIBLE_DEVICES", visible_devices(environ)))
        except smi.AmdSmiException as error:
            self.reason = f"none: AMD SMI does not work here ({error})"
            return
        if not self._handles:
            self.reason = "none: no AMD device is visible"

    def _shut_down(self) -> None:
        self._smi.amdsmi_shut_down()

    def _visible(self, selection: str | None) -> list[Any]:
        smi = self._smi
        handles = smi.amdsmi_get_processor_handles()
        # HIP has an order of its own, which is in general not that of the bus.
        places = [self._ask(partial(smi.amdsmi_get_gpu_enumeration_info, handle)) or {} for handle in handles]
        numbers = [_number(place.get("hip_id")) for place in places]
        known = {number: handle for number, handle in zip(numbers, handles, strict=True) if number is not None}
        numbered = known if len(known) == len(handles) else dict(enumerate(handles))
        if selection is None:
            return [numbered[number] for number in sorted(numbered)]
        chosen = []
        for name in selection.split(","):
            if not name.strip().isdigit() or int(name) not in numbered:  # HIP too stops at the first invalid number
                break
            chosen.append(numbered[int(name)])
        return chosen

    def _sample(self, handle: Any) -> Sample:
        smi = self._smi
        memory = self._ask(lambda: smi.amdsmi_get_gpu_vram_usage(handle)) or {}
        used_mib, total_mib = _number(memory.get("vram_used")), _number(memory.get("vram_total"))
        percent = _number((self._ask(lambda: smi.amdsmi_get_gpu_activity(handle)) or {}).get("gfx_activity"))
        power = self._ask(lambda: smi.amdsmi_get_power_info(handle)) or {}
        watts = (_number(power.get(f"{kind}socket_power")) for kind in ("", "current_", "average_"))
        return {
            "used_bytes": None if used_mib is None else used_mib * _MIB,
            "total_bytes": None if total_mib is None else total_mib * _MIB,
            "utilisation_ratio": None if percent is None else percent / 100,
            "temperature_celsius": self._temperature(handle),
            "power_watts": next((value for value in watts if value is not None), None),
        }

    def _processes(self, handle: Any) -> list[tuple[int, int | None]]:
        processes = self._ask(lambda: self._smi.amdsmi_get_gpu_process_list(handle)) or []
        return [
            (int(process["pid"]), _number((process.get("memory_usage") or {}).get("vram_mem")))
            for process in processes
        ]

    def _temperature(self, handle: Any) -> int | None:
        """Return the temperature of the edge, or of the hottest spot where a device has no sensor there."""
        smi, now = self._smi, self._smi.AmdSmiTemperatureMetric.CURRENT
        sensors = (smi.AmdSmiTemperatureType.EDGE, smi.AmdSmiTemperatureType.HOTSPOT)
        readings = (_number(self._ask(partial(smi.amdsmi_get_temp_metric, handle, each, now))) for each in sensors)
        return next((celsius for celsius in readings if celsius is not None), None)


def _number(value: Any) -> int | None:
    """Return a figure of AMD SMI; None for its "N/A"."""
    return int(value) if isinstance(value, int | float) else None


def _by_process(processes: Iterable[tuple[int, int | None]], pids: Set[int], recording_pids: Set[int]) -> Sample:
    """Return the memory of the run's processes and of all others, from pid and bytes of each.

    In a container the driver may show no pids, or the host's: then both are missing.
    """
    measured = [(pid, used_bytes) for pid, used_bytes in processes if used_bytes is not None]
    of_run = [used_bytes for pid, used_bytes in measured if pid in pids]
    recorded = [used_bytes for pid, used_bytes in measured if pid in pids and pid in recording_pids]
    of_others = [used_bytes for pid, used_bytes in measured if pid not in pids]
    return {
        "process_used_bytes": sum(of_run) if of_run else None,
        "recorded_used_bytes": sum(recorded) if of_run else None,
        "other_used_bytes": sum(of_others) if of_run else None,
    }
