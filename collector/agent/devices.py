"""NVIDIA devices through NVML, read from outside the training process: no CUDA context is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from functools import partial
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

    def users(self) -> set[int]:
        """Return the pids that the driver names: in a container perhaps none, or those of the host."""
        nvml = self._nvml
        lists = [self._ask(partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle)) for handle in self._handles]
        return {process.pid for processes in lists for process in processes or []}

    def close(self) -> None:
        """Let go of NVML; harmless without a driver."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _visible(self, selection: str | None) -> list[Any]:
        nvml = self._nvml
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        divided = [(gpu, self._instances(gpu)) for gpu in gpus]
        if selection is None:
            return [instance for _, instances in divided for instance in instances[:1]]
        chosen = []
        for name in selection.split(","):
            matches = self._matching(name.strip(), divided)
            if not matches:  # CUDA too stops at the first name that is none
                break
            chosen.append(matches[0])
        return chosen

    def _instances(self, gpu: Any) -> list[Any]:
        """The parts of a GPU that is divided (MIG), else the GPU: CUDA sees the first unless another is named."""
        nvml = self._nvml
        mode = self._ask(lambda: nvml.nvmlDeviceGetMigMode(gpu))
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [gpu]
        places = range(self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) or 0)
        found = [self._ask(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, at)) for at in places]
        return [instance for instance in found if instance is not None]

    def _matching(self, name: str, divided: list[tuple[Any, list[Any]]]) -> list[Any]:
        if name.isdigit():
            return [instance for _, instances in divided[int(name) :][:1] for instance in instances]
        if not name:
            return []
        for gpu, instances in divided:
            named = instances if self._is(name, gpu) else [part for part in instances if self._is(name, part)]
            if named:
                return named
        return []

    def _is(self, name: str, handle: Any) -> bool:
        return str(self._nvml.nvmlDeviceGetUUID(handle)).startswith(name)

    def _sample(self, number: int, handle: Any, pids: Set[int]) -> Sample:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if memory is None:  # an older driver, which does not tell its own reserve from what else is used
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
        """Memory of the run's processes and of all others, where the driver tells of the run's.

        In a container it may show no pids, or the host's: then both are missing.
        """
        running = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        known = [process for process in running if process.usedGpuMemory is not None]
        own = [process.usedGpuMemory for process in known if process.pid in pids]
        others = [process.usedGpuMemory for process in known if process.pid not in pids]
        return {
            "process_used_bytes": sum(own) if own else None,
            "other_used_bytes": sum(others) if own else None,
        }

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
