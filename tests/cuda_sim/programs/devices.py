"""A training on chosen devices, which writes what PyTorch and NVML report about it.

devices.py DIRECTORY [--use D]… [--parallel | --distributed] [--select] [--touch] [--lose FILE]

Each process writes DIRECTORY/<pid>.json: `steps`, [step, device, allocated bytes, reserved bytes] just before each
optimizer step; `held`, its bytes at the end, by NVML's numbers of devices; `places`, PyTorch's number -> NVML's.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument(
    "--use", type=int, action="append", default=[], help="a device; without any it trains on the CPU"
)
parser.add_argument("--parallel", action="store_true", help="the model is one DataParallel over the devices")
parser.add_argument("--distributed", action="store_true", help="each rank trains on one of them, with DDP")
parser.add_argument("--select", action="store_true", help="each rank lets itself see its own device only")
parser.add_argument("--touch", action="store_true", help="put one tensor on device 0 before the training")
parser.add_argument("--lose", type=Path, help="make this file after half of the steps")
options = parser.parse_args()
STEPS = 40
#: Time for some samples of the collector.
PAUSE_SECONDS = 1.5
rank = int(os.environ.get("RANK", "0"))
if options.select:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)

import pynvml  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

torch.cuda.init()
touched = torch.zeros(1, device="cuda:0") if options.touch else None
used = [options.use[rank]] if options.distributed else options.use
devices = [torch.device("cuda", number) for number in used] or [torch.device("cpu")]
steps = []


def held():
    """Return the bytes of this process on each device that NVML knows."""
    pynvml.nvmlInit()
    return {
        number: process.usedGpuMemory
        for number in range(pynvml.nvmlDeviceGetCount())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(number))
        if process.pid == os.getpid()
    }


def write(*_):
    for device in used:
        statistics = torch.cuda.memory_stats(device)
        now = [statistics[f"{name}_bytes.all.current"] for name in ("allocated", "reserved")]
        steps.append([len(steps) // len(used), device, *now])


if options.distributed:
    torch.distributed.init_process_group("gloo")
models = [nn.Linear(64, 64).to(device) for device in devices]
if options.parallel:
    models = [nn.DataParallel(models[0], used)]
elif options.distributed:
    models = [nn.parallel.DistributedDataParallel(models[0], device_ids=used)]
optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
optimizer.register_step_pre_hook(write)
kept = []
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.zeros(16 * STEPS, 64)), batch_size=16)):
    loss = sum(model(x.to(device)).square().mean().cpu() for model, device in zip(models, devices, strict=False))
    optimizer.zero_grad()
    loss.backward()
    sizes = {number: (1 + number + 8 * rank) << 19 for number in used}
    kept += [torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}") for number, size in sizes.items()]
    optimizer.step()
    if options.lose and step == STEPS // 2:
        time.sleep(PAUSE_SECONDS)
        options.lose.touch()
if options.distributed:
    torch.distributed.barrier()
told = {
    "steps": steps,
    "held": held() if not options.lose else {},
    "places": {n: torch.cuda.get_device_properties(n).pci_bus_id - 1 for n in range(torch.cuda.device_count())},
}
(options.directory / f"{os.getpid()}.json").write_text(json.dumps(told))
time.sleep(PAUSE_SECONDS)
