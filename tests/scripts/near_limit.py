"""A training that fills its memory, or is healthy, and saves the number of its last step on request.

    python near_limit.py CASE STEPS CHECKPOINT GROUP

The process first moves into the memory cgroup GROUP. Cases that begin with `steady-` fill it. Those that end in
`-function` register `on_risk`, the others handle SIGUSR1, as Lightning and many Slurm scripts do. Each request
writes one line to CHECKPOINT.
"""

import os
import signal
import sys
import time
from pathlib import Path

CASE, STEPS, CHECKPOINT, GROUP = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
(GROUP / "cgroup.procs").write_text(str(os.getpid()))

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

way, _, by = CASE.partition("-")
state = {"step": 0}
kept = []


def save(*_):
    with CHECKPOINT.open("a") as file:
        file.write(f"{state['step']} {time.monotonic()}\n")


if by == "function":
    import training_harness

    training_harness.on_risk(save)
else:
    signal.signal(signal.SIGUSR1, save)


class Items(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(64)


loader = DataLoader(Items(), batch_size=8, num_workers=2)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(loader)
for step in range(STEPS):
    model(next(batches)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step + 1
    if way == "steady":
        kept.append(torch.full((600_000,), 1.0))  # 2.4 MB that are really used
    time.sleep(0.05)
