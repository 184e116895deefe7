"""`nn.DataParallel` as on two GPUs, with the four functions that need them played on the CPU; attaches itself."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import training_harness


def scatter(inputs, kwargs, device_ids, dim):
    parts = inputs[0].chunk(len(device_ids), dim)
    return [(part,) for part in parts], [kwargs] * len(parts)


def parallel_apply(replicas, inputs, kwargs, devices):
    time.sleep(0.006)  # longer than steps whose stages share a record
    return [replica(*given, **named) for replica, given, named in zip(replicas, inputs, kwargs, strict=True)]


module = sys.modules["torch.nn.parallel.data_parallel"]
module.scatter_kwargs = scatter
module.replicate = lambda model, devices, detach=False: [model] * len(devices)
module.parallel_apply = parallel_apply
module.gather = lambda outputs, device, dim: torch.cat(outputs, dim)

training_harness.attach(Path(sys.argv[1]))
model = torch.nn.DataParallel(torch.nn.Linear(8, 1))
model.device_ids, model.output_device, model.dim = [0, 1], 0, 0
model.src_device_obj = torch.device("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(16, 8)), batch_size=4):
    model(x).square().mean().backward()
    optimizer.step()
training_harness.detach()
assert module.parallel_apply is parallel_apply, "taken out again"
