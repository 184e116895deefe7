"""NVIDIA devices through NVML, read from outside the training process: no CUDA context is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from types import ModuleType
from typing import Any

import pynvml

from collector.agent.samples import Sample


class DeviceSampler:
    """One sample per visible device and tick.

    Devices are numbered as the run's processes see them: `CUDA_VISIBLE_DEVICES` selects and orders.

    Args:
        nvml: the NVML binding.
        environ: where `CUDA_VISIBLE_DEVICES` is looked up.

    Attributes:
        reason: why there is nothing to sample; None if there is.

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
        """What each device has now; `pids` are the run's processes. The names are the stream's."""
        return [self._sample(number, handle, pids) for number, handle in enumerate(self._handles)]

    def close(self) -> None:
        """Let go of NVML; harmless without a driver."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _visible(self, selection: str | None) -> list[Any]:
        nvml = self._nvml
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if selection is None:
            return devices
        chosen = []
        for name in selection.split(","):
            matches = self._matching(name.strip(), devices)
            if not matches:  # CUDA too stops at the first name that is none
                break
            chosen.append(matches[0])
        return chosen

    def _matching(self, name: str, devices: list[Any]) -> list[Any]:
        if name.isdigit():
            return devices[int(name) :][:1]
        if not name:
            return []
        return [device for device in devices if self._nvml.nvmlDeviceGetUUID(device).startswith(name)]

    def _sample(self, number: int, handle: Any, pids: Set[int]) -> Sample:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if memory is None:  # an older driver, which counts its own reserve as used
            memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "device": number,
            "used_bytes": getattr(memory, "used", None),
            "total_bytes": getattr(memory, "total", None),
            "reserved_bytes": getattr(memory, "reserved", None),
            "process_used_bytes": self._process_used_bytes(handle, pids),
            "utilisation_ratio": None if utilisation is None else utilisation / 100,
            "temperature_celsius": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
        }

    def _process_used_bytes(self, handle: Any, pids: Set[int]) -> int | None:
        """Memory of the run's processes; None where the driver hides it, as it does from containers."""
        running = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        used = [process.usedGpuMemory for process in running if process.pid in pids]
        known = [value for value in used if value is not None]
        return sum(known) if known else None

    def _ask(self, question: Callable[[], Any]) -> Any:
        """An answer of the driver; None if this device or driver does not know it."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None


def _reason(nvml: ModuleType | Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "none: NVIDIA driver not found"
    return f"none: NVML does not work here ({error})"
