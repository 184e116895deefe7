"""The device sampler against the real pynvml, on simulated devices: other processes hold their memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import bare_environment
from tests.cuda_sim import simulator

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing")
GIB = 2**30
#: Holds memory of a device until its stdin ends.
HOLD = """
import ctypes, sys
ctypes.CDLL("libnvidia-ml.so.1").cuda_sim_hold(int(sys.argv[1]), ctypes.c_ulonglong(int(sys.argv[2])))
print(flush=True)
sys.stdin.read()
"""
#: Samples all devices for the pids that it is given, once per line of stdin.
SAMPLE = """
import json, sys
from collector.agent.samplers.devices import NvidiaSampler
sampler = NvidiaSampler()
for line in sys.stdin:
    print(json.dumps([sampler.reason, sampler.sample(set(map(int, line.split())))]), flush=True)
"""

#: Prints what doctor says about the devices; its argument is the /proc to read.
DOCTOR = """
import json, sys
from pathlib import Path
from collector.agent.samplers.devices import NvidiaSampler
from collector.commands.checks import check_devices
check = check_devices(NvidiaSampler(), Path(sys.argv[1]))
print(json.dumps([check.detail, check.remedy]), flush=True)
"""


class Machine:
    """Devices, and processes that use them."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, program: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=self.environ | environ, **pipes)
        self.processes.append(process)
        return process

    def hold(self, device: int, size: int) -> int:
        process = self.start(HOLD, device, size)
        process.stdout.readline()
        return process.pid

    def sampler(self, **environ: str) -> Callable[..., list]:
        process = self.start(SAMPLE, **environ)

        def sample(*pids: int) -> list:
            print(*pids, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        return sample


@pytest.fixture
def machine(tmp_path_factory) -> Iterator[Machine]:
    libraries = simulator.build(tmp_path_factory.getbasetemp() / "nvml")
    environ = simulator.environment(libraries, memory="4G,2G", devices=2, base=bare_environment())
    machine = Machine({name: value for name, value in environ.items() if name != "LD_PRELOAD"})
    yield machine
    for process in machine.processes:
        process.communicate()
    simulator.remove_registry(environ["CUDA_SIM_NAME"])


def test_memory_is_split_into_run_other_processes_and_driver(machine):
    mine, _ = machine.hold(0, GIB), machine.hold(0, GIB // 2)
    reason, (first, second) = machine.sampler()(mine)
    assert reason is None
    assert (first["total_bytes"], second["total_bytes"]) == (4 * GIB, 2 * GIB)
    assert first["used_bytes"] == GIB + GIB // 2 + first["reserved_bytes"]
    assert (first["process_used_bytes"], first["other_used_bytes"]) == (GIB, GIB // 2)
    assert second["used_bytes"] == second["reserved_bytes"] > 0


def test_memory_of_an_exited_process_is_free(machine):
    mine, sample = machine.hold(0, GIB), machine.sampler()
    assert sample(mine)[1][0]["process_used_bytes"] == GIB
    machine.processes[0].communicate()
    assert sample(mine)[1][0]["used_bytes"] == sample(mine)[1][0]["reserved_bytes"]


def test_sampler_reads_only_visible_devices(machine):
    (only,) = machine.sampler(CUDA_VISIBLE_DEVICES="1")()[1]
    assert (only["device"], only["total_bytes"]) == (0, 2 * GIB)


def test_mig_instance_is_selected_by_its_name(machine):
    machine.environ["CUDA_SIM_MIG"] = "1"
    (first,) = machine.sampler()()[1]
    (named,) = machine.sampler(CUDA_VISIBLE_DEVICES="MIG-00000002")()[1]
    assert (first["total_bytes"], named["total_bytes"]) == (4 * GIB, 2 * GIB)


def test_hidden_processes_are_missing_not_zero(machine):
    mine = machine.hold(0, GIB)
    sample = machine.sampler(CUDA_SIM_NO_PROCESSES="1")(mine)[1][0]
    assert (sample["process_used_bytes"], sample["other_used_bytes"]) == (None, None)
    assert sample["used_bytes"] > GIB


def test_samples_of_a_lost_gpu_are_missing_from_then_on(machine, tmp_path):
    sample = machine.sampler(CUDA_SIM_NVML_LOST=str(tmp_path / "lost"))
    assert sample()[1][0]["total_bytes"] == 4 * GIB
    (tmp_path / "lost").touch()
    assert sample()[1][0]["used_bytes"] is None


def test_sampler_gives_a_reason_without_a_driver(machine):
    assert machine.sampler(CUDA_SIM_NO_NVML="1")() == ["none: NVIDIA driver not found", []]


def doctor(machine, proc, **environ):
    return json.loads(machine.start(DOCTOR, proc, **environ).stdout.readline())


def test_doctor_shows_gpus_and_whether_processes_are_named(machine, tmp_path):
    detail, remedy = doctor(machine, "/proc")
    assert "2 GPUs (4 GiB, 2 GiB)" in detail
    assert "no process uses them" in detail
    machine.hold(0, GIB)
    assert "names the processes" in doctor(machine, "/proc")[0]
    detail, remedy = doctor(machine, tmp_path)  # those pids are of another container
    assert "--pid=host" in remedy
    assert "no process uses them now, or" in doctor(machine, "/proc", CUDA_SIM_NO_PROCESSES="1")[0]
