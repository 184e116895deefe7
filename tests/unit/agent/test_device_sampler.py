# ruff: noqa: N802 - the names are those of NVML
from types import SimpleNamespace

import pynvml
import pytest

from collector.agent.samplers.devices import NvidiaSampler
from collector.agent.samplers.samples import record_values
from training_harness.records import DEVICE, MISSING_INT64

GIB = 2**30


class Nvml:
    """A driver with devices whose answers are laid out by hand; an answer may be an error."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self, *devices, fails_with=None):
        self.devices = devices
        self.fails_with = fails_with

    def nvmlInit(self):
        if self.fails_with is not None:
            raise pynvml.NVMLError(self.fails_with)

    def nvmlShutdown(self):
        self.devices = ()

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.devices[index]

    def nvmlDeviceGetMigMode(self, device):
        if not device.instances:
            raise UNSUPPORTED
        return [pynvml.NVML_DEVICE_MIG_ENABLE] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        return answer([*device.instances, *[UNSUPPORTED] * 7][index])

    def nvmlDeviceGetUUID(self, device):
        return device.uuid

    def nvmlDeviceGetMemoryInfo(self, device, version=None):
        return answer(device.memory if version is None else device.memory_v2)

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=answer(device.percent))

    def nvmlDeviceGetPowerUsage(self, device):
        return answer(device.milliwatts)

    def nvmlDeviceGetTemperature(self, device, sensor):
        return answer(device.celsius)

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return answer(device.processes)


def answer(value):
    if isinstance(value, Exception):
        raise value
    return value


UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def device(uuid="GPU-aa", **changes):
    answers = {
        "uuid": uuid,
        "instances": [],
        "memory": SimpleNamespace(used=3 * GIB, total=80 * GIB),
        "memory_v2": SimpleNamespace(used=2 * GIB, total=80 * GIB, reserved=GIB),
        "percent": 50,
        "milliwatts": 300_500,
        "celsius": 61,
        "processes": [
            SimpleNamespace(pid=7, usedGpuMemory=GIB),
            SimpleNamespace(pid=8, usedGpuMemory=GIB // 2),
            SimpleNamespace(pid=9, usedGpuMemory=5 * GIB),
        ],
    }
    return SimpleNamespace(**{**answers, **changes})


def test_sample_has_every_gauge_of_a_device():
    sampler = NvidiaSampler(Nvml(device()), environ={})

    assert sampler.reason is None
    assert sampler.sample({7, 8}, {7, 9}) == [
        {
            "device": 0,
            "used_bytes": 3 * GIB,
            "total_bytes": 80 * GIB,
            "reserved_bytes": GIB,
            "process_used_bytes": GIB + GIB // 2,
            "recorded_used_bytes": GIB,
            "other_used_bytes": 5 * GIB,
            "utilisation_ratio": 0.5,
            "temperature_celsius": 61,
            "power_watts": 300.5,
        }
    ]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_sampler_has_a_reason_and_no_sample_without_a_driver(code):
    sampler = NvidiaSampler(Nvml(device(), fails_with=code), environ={})

    assert sampler.reason == "none: NVIDIA driver not found"
    assert sampler.sample({7}) == []


def test_reason_names_the_drivers_error():
    sampler = NvidiaSampler(Nvml(fails_with=pynvml.NVML_ERROR_NO_PERMISSION), environ={})

    assert "Permission" in sampler.reason


def test_reason_says_that_there_is_no_device():
    assert "no NVIDIA device" in NvidiaSampler(Nvml(), environ={}).reason


def test_unsupported_gauges_are_missing():
    mute = device(
        memory_v2=UNSUPPORTED,
        memory=UNSUPPORTED,
        percent=UNSUPPORTED,
        milliwatts=UNSUPPORTED,
        celsius=UNSUPPORTED,
        processes=UNSUPPORTED,
    )

    [sample] = NvidiaSampler(Nvml(mute), environ={}).sample({7})

    assert sample.pop("device") == 0
    assert set(sample.values()) == {None}
    assert record_values(DEVICE, 1, sample)[2] == MISSING_INT64


def test_older_driver_has_memory_without_reserved_bytes():
    [sample] = NvidiaSampler(Nvml(device(memory_v2=UNSUPPORTED)), environ={}).sample(set())

    assert (sample["used_bytes"], sample["total_bytes"], sample["reserved_bytes"]) == (3 * GIB, 80 * GIB, None)


def test_process_memory_hidden_by_the_driver_is_missing():
    hidden = device(processes=[SimpleNamespace(pid=7, usedGpuMemory=None)])

    [sample] = NvidiaSampler(Nvml(hidden), environ={}).sample({7})

    assert sample["process_used_bytes"] is None


def test_process_memory_is_missing_for_pids_of_another_namespace():
    [sample] = NvidiaSampler(Nvml(device()), environ={}).sample({70, 80})

    assert sample["process_used_bytes"] is sample["other_used_bytes"] is None


@pytest.mark.parametrize(
    ("selection", "total_gib"),
    [(None, [10, 80]), ("0", [10]), ("MIG-b", [20]), ("GPU-aa", [10]), ("MIG-b,1", [20, 80]), ("MIG-c", [])],
)
def test_only_visible_mig_instances_are_sampled(selection, total_gib):
    parts = [
        device(uuid, memory_v2=SimpleNamespace(used=GIB, total=gib * GIB, reserved=0), percent=UNSUPPORTED)
        for uuid, gib in (("MIG-a", 10), ("MIG-b", 20))
    ]
    environ = {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}

    samples = NvidiaSampler(Nvml(device(instances=parts), device("GPU-bb")), environ=environ).sample(set())

    assert [one["total_bytes"] / GIB for one in samples] == total_gib


@pytest.mark.parametrize(
    ("selection", "celsius"),
    [("1", [2]), ("2,0", [3, 1]), ("GPU-bb", [2]), ("0,9,1", [1]), ("", []), ("-1", [])],
)
def test_devices_are_numbered_in_the_order_of_the_training(selection, celsius):
    nvml = Nvml(device("GPU-aa", celsius=1), device("GPU-bb", celsius=2), device("GPU-cc", celsius=3))

    samples = NvidiaSampler(nvml, environ={"CUDA_VISIBLE_DEVICES": selection}).sample(set())

    assert [one["temperature_celsius"] for one in samples] == celsius
    assert [one["device"] for one in samples] == list(range(len(celsius)))
