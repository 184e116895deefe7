"""AMD devices through AMD SMI: units, order, selection, and answers that are not there.

There is no ROCm here: the functions give what the reference of AMD SMI's Python API documents for each of them
(ROCm 6.4): sizes in MiB, memory of processes in bytes, "N/A" for what a device does not report.
"""

from types import SimpleNamespace

import pytest

from collector.agent.samplers.devices import AmdSampler

MIB = 2**20


class AmdSmiException(Exception):  # noqa: N818 - AMD's name
    pass


def gpu(hip_id, *, used=1024, processes=(), **more):
    return SimpleNamespace(hip_id=hip_id, used=used, processes=processes, edge=45, power=300, activity=80, **more)


class Smi:
    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = SimpleNamespace(EDGE="edge", HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    def __init__(self, *devices, works=True):
        self.devices, self.works = devices, works

    def amdsmi_init(self):
        if not self.works:
            raise AmdSmiException("driver not loaded")

    def amdsmi_shut_down(self):
        self.devices = ()

    def amdsmi_get_processor_handles(self):
        return list(self.devices)

    def amdsmi_get_gpu_enumeration_info(self, device):
        return {"drm_card": 1, "hip_id": device.hip_id}

    def amdsmi_get_gpu_vram_usage(self, device):
        if device.used is None:
            raise AmdSmiException("not supported")
        return {"vram_total": 196_592, "vram_used": device.used}

    def amdsmi_get_gpu_activity(self, device):
        return {"gfx_activity": device.activity, "umc_activity": 3, "mm_activity": "N/A"}

    def amdsmi_get_power_info(self, device):
        return {"socket_power": "N/A", "current_socket_power": device.power, "average_socket_power": "N/A"}

    def amdsmi_get_temp_metric(self, device, sensor, metric):
        return device.edge if sensor == "edge" else 61

    def amdsmi_get_gpu_process_list(self, device):
        return [
            {"name": "python", "pid": pid, "memory_usage": {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": mib * MIB}}
            for pid, mib in device.processes
        ]


def test_sample_is_in_the_units_of_the_stream():
    sampler = AmdSampler(Smi(gpu(0, used=2048, processes=[(7, 1500), (8, 300)])), environ={})
    assert sampler.reason is None
    assert sampler.sample({7}, {7}) == [
        {
            "device": 0,
            "used_bytes": 2048 * MIB,
            "total_bytes": 196_592 * MIB,
            "process_used_bytes": 1500 * MIB,
            "recorded_used_bytes": 1500 * MIB,
            "other_used_bytes": 300 * MIB,
            "utilisation_ratio": 0.8,
            "temperature_celsius": 45,
            "power_watts": 300,
        }
    ]
    assert sampler.user_pids() == {7, 8}


def test_what_a_device_does_not_report_is_missing():
    silent = gpu(0, used=None)
    silent.edge = silent.power = silent.activity = "N/A"
    [sample] = AmdSampler(Smi(silent), environ={}).sample({7})
    assert sample["temperature_celsius"] == 61, "the hottest spot, where there is no sensor at the edge"
    assert {name for name, value in sample.items() if value is None} == {
        "used_bytes",
        "total_bytes",
        "process_used_bytes",
        "recorded_used_bytes",
        "other_used_bytes",
        "utilisation_ratio",
        "power_watts",
    }


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, [10, 11, 12]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [12, 10]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [11]),
        ({"HIP_VISIBLE_DEVICES": "1,7,0"}, [11]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_devices_are_numbered_as_hip_does(environ, seen):
    smi = Smi(gpu(1, used=11), gpu(2, used=12), gpu(0, used=10))  # by the bus
    sampler = AmdSampler(smi, environ=environ)
    assert [sample["used_bytes"] // MIB for sample in sampler.sample(set())] == seen
    assert (sampler.reason is None) == bool(seen)


def test_machine_without_a_working_driver_has_a_reason_and_no_samples():
    sampler = AmdSampler(Smi(works=False), environ={})
    assert "driver not loaded" in sampler.reason
    assert sampler.sample(set()) == []
    sampler.close()
