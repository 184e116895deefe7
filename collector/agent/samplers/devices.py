"""NVIDIA devices through NVML, read from outside the training process: no CUDA context is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from functools import partial
from types import ModuleType
from typing import Any

import pynvml

from collector.agent.samplers.samples import Sample


class DeviceSampler:
    """A sampler of the visible devices: one sample per device and tick.

    Devices are numbered as the run's processes see them: `CUDA_VISIBLE_DEVICES` selects and orders.

    Attributes:
        reason: why there is nothing to sample; None if there are devices.
    """

    def __init__(self, nvml: ModuleType | Any = pynvml, environ: Mapping[str, str] = os.environ) -> None:
        self.reason: str | None = None
        self._nvml = nvml
        self._handles: list[Any] = []
        try:
            nvml.nvmlInit()
            self._handles = self._visible(environ.get("CUDA_VISIBLE_DEVICES"))
        except nvml.NVMLError as error:
            self.reason = _reason(nvml, error)
            return
        if not self._handles:
            self.reason = "none: no NVIDIA device is visible"

    def sample(self, pids: Set[int]) -> list[Sample]:
        """Return one sample of the `device` stream per device; `pids` are the run's processes."""
        return [self._sample(number, handle, pids) for number, handle in enumerate(self._handles)]

    def user_pids(self) -> set[int]:
        """Return the pids of processes that use a device: in a container perhaps none, or those of the host."""
        nvml = self._nvml
        lists = [self._ask(partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle)) for handle in self._handles]
        return {process.pid for processes in lists for process in processes or []}

    def close(self) -> None:
        """Shut NVML down; harmless without a driver."""
        if self._handles:
            self._handles = []
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

    def _sample(self, number: int, handle: Any, pids: Set[int]) -> Sample:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if memory is None:  # An older driver, which counts its own reserve as used.
            memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "device": number,
            "used_bytes": None if memory is None else memory.used + getattr(memory, "reserved", 0),
            "total_bytes": getattr(memory, "total", None),
            "reserved_bytes": getattr(memory, "reserved", None),
            **self._by_process(handle, pids),
            "utilisation_ratio": None if utilisation is None else utilisation / 100,
            "temperature_celsius": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
        }

    def _by_process(self, handle: Any, pids: Set[int]) -> Sample:
        """Return the memory of the run's processes and of all others.

        In a container the driver may show no pids, or the host's: then both are missing.
        """
        processes = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        measured = [process for process in processes if process.usedGpuMemory is not None]
        of_run = [process.usedGpuMemory for process in measured if process.pid in pids]
        of_others = [process.usedGpuMemory for process in measured if process.pid not in pids]
        return {
            "process_used_bytes": sum(of_run) if of_run else None,
            "other_used_bytes": sum(of_others) if of_run else None,
        }

    def _ask(self, query: Callable[[], Any]) -> Any:
        """Return the driver's answer; None if this device or driver does not support the query."""
        try:
            return query()
        except self._nvml.NVMLError:
            return None


def _reason(nvml: ModuleType | Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "none: NVIDIA driver not found"
    return f"none: NVML does not work here ({error})"
