"""A rank of a DDP training over gloo; it touches MARKER in the middle: two_nodes.py MARKER STEPS."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

MARKER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = TensorDataset(torch.ones(4 * STEPS, 8))
for step, (x,) in enumerate(DataLoader(rows, batch_size=4, num_workers=1)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(0.03)
    if step == STEPS // 2:
        MARKER.touch()
dist.destroy_process_group()
