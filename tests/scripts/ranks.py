"""A rank of a torchrun job that fails once, and is late the second time: ranks.py MARKER.

The first attempt trains with DDP until rank 1 is killed. In the second, rank 1 does not start before rank 0 has
seen batches; then both train with FSDP2.
"""

import os
import signal
import sys
import time
from pathlib import Path

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
MARKER = Path(sys.argv[1])
while ATTEMPT == 1 and RANK == 1 and not MARKER.exists():
    time.sleep(0.02)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

torch.manual_seed(0)
rows = TensorDataset(torch.ones(24, 8))
if ATTEMPT == 1 and RANK == 0:
    list(DataLoader(rows, batch_size=24))
    MARKER.touch()

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
if ATTEMPT == 0:
    model = DistributedDataParallel(model)
else:
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x,) in enumerate(DataLoader(rows, batch_size=4)):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)  # no record is held back when the kill comes
    if ATTEMPT == 0 and step == 2:
        dist.barrier()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
