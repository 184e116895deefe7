"""Several devices: each process's memory is that of the device that it uses, and no other device is touched."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from collector.store.lake.reader import read
from collector.store.queries.gpu_memory import devices
from tests.cuda_sim.conftest import PROGRAMS

#: Options for samples in quick succession: the programs are short.
OFTEN = ("--interval", "0.2")


@pytest.fixture
def train(watched, tmp_path):
    """Run `devices.py`; return the run, and pid -> what that process wrote."""

    def start(*arguments, launcher=(), **environ):
        directory = tmp_path / "said"
        directory.mkdir()
        program = ["devices.py"] if not launcher else [*launcher, str(PROGRAMS / "devices.py")]
        run = watched(*program, str(directory), *arguments, options=OFTEN, **environ)
        assert run.done.returncode == 0, run.done.stderr
        said = {int(path.stem): SimpleNamespace(**json.loads(path.read_text())) for path in directory.iterdir()}
        return run, said

    return start


def records(run, pid):
    """Return what was recorded of a process: [step, device, allocated bytes, reserved bytes]."""
    table = run.table("device_memory")
    mine = table[table["pid"] == pid].sort_values(["step", "device"])
    return mine[["step", "device", "allocated_bytes", "reserved_bytes"]].values.tolist()


def peak_by_device(run):
    """Return device -> the most that NVML said the run's processes hold."""
    held = run.table("device").groupby("device")["process_used_bytes"].max().dropna()
    return {int(device): int(size) for device, size in held.items()}


def held_by_device(said):
    """Return PyTorch's number -> bytes that NVML says the processes held, of all processes."""
    sizes = {}
    for one in said.values():
        for device, place in one.places.items():
            if str(place) in one.held:
                sizes[int(device)] = sizes.get(int(device), 0) + one.held[str(place)]
    return sizes


def test_one_process_with_eight_devices_is_recorded(train):
    each = [word for number in range(8) for word in ("--use", str(number))]
    run, said = train(*each, memory="1G", count=8)
    ((pid, one),) = said.items()
    assert records(run, pid) == one.steps
    assert peak_by_device(run) == held_by_device(said)
    assert len(set(held_by_device(said).values())) > 1, "devices differ in what they hold"


def test_unused_device_is_not_touched(train):
    """The current device is another one than that of the model."""
    run, said = train("--use", "1", count=2)
    ((pid, one),) = said.items()
    assert records(run, pid) == one.steps
    assert set(one.held) == {"1"}
    assert set(peak_by_device(run)) == {1}
    assert run.table("device_time").empty


@pytest.mark.parametrize("selection", ["2,0", "GPU-00000003,GPU-00000001"])
def test_renumbered_devices_are_mapped_to_the_drivers_numbers(train, selection):
    run, said = train("--use", "0", memory="1G,2G,3G", count=3, CUDA_VISIBLE_DEVICES=selection)
    ((pid, one),) = said.items()
    assert one.places == {"0": 2, "1": 0}
    assert records(run, pid) == one.steps
    assert peak_by_device(run) == held_by_device(said)
    totals = run.table("device").groupby("device")["total_bytes"].max()
    assert totals.to_dict() == {0: 3 << 30, 1: 1 << 30}
    assert set(run.table("device_time")["device"]) == {0}


def test_data_parallel_records_both_devices(train):
    run, said = train("--use", "0", "--use", "1", "--parallel", count=2)
    ((pid, one),) = said.items()
    assert records(run, pid) == one.steps
    assert peak_by_device(run) == held_by_device(said)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
#: Name -> the device of each rank.
RANKS = {"two devices": ("0", "1"), "one device": ("0", "0")}


@pytest.mark.parametrize("where", RANKS)
def test_two_ranks_are_recorded_with_their_devices(train, where):
    first, second = RANKS[where]
    run, said = train("--distributed", "--use", first, "--use", second, launcher=TORCHRUN, count=2)
    assert len(said) == 2
    for pid, one in said.items():
        assert records(run, pid) == one.steps
    assert peak_by_device(run) == held_by_device(said)
    of_ranks = run.table("device_memory").groupby("rank")["device"].unique()
    assert {int(rank): list(map(str, used)) for rank, used in of_ranks.items()} == {0: [first], 1: [second]}
    held = run.table("device").dropna(subset="process_used_bytes").sort_values("process_used_bytes")
    assert (held.groupby("device")["other_used_bytes"].last() == 0).all()


def test_ranks_that_select_their_own_device_are_on_two_gpus(train):
    """Each sees its device as number 0."""
    run, said = train("--distributed", "--select", "--use", "0", "--use", "0", launcher=TORCHRUN, count=2)
    assert sorted(one.places["0"] for one in said.values()) == [0, 1]
    with read(run.run) as session:
        gpus = devices(session)
    assert sorted(list(ranks) for ranks in gpus["ranks"]) == [[0], [1]]


@pytest.mark.parametrize("options", [(), ("--touch",)], ids=["nothing", "a tensor"])
def test_cpu_training_has_no_device_times_with_a_cuda_context(train, options):
    run, said = train(*options)
    (one,) = said.values()
    assert peak_by_device(run) == held_by_device(said)
    assert set(one.held) == ({"0"} if options else set()), "a context takes memory"
    assert len(run.table("step")) > 0
    assert run.table("device_time").empty, "they would be times of the host"
