"""A training on the GPU, attached in its middle and detached before its end.

attached.py FILE

It writes what PyTorch says is allocated just before each optimizer step while attached, the run's directory, and in
which of these steps it asked for more memory than there is.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import training_harness

ATTACHED, ASKS_TOO_MUCH = range(20, 60), 50
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
allocated, kept, run_dir = [], [], None


def write(*_):
    if step in ATTACHED:
        allocated.append(torch.cuda.memory_allocated())


optimizer.register_step_pre_hook(write)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.zeros(32 * 80, 256)), batch_size=32)):
    if step == ATTACHED.start:
        run_dir = training_harness.attach()
    if step == ATTACHED.stop:
        training_harness.detach()
    kept.append(torch.empty(1 << 18, dtype=torch.uint8, device="cuda"))
    if step == ASKS_TOO_MUCH:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    optimizer.zero_grad()
    model(x.cuda()).square().mean().backward()
    optimizer.step()
said = {"allocated_bytes": allocated, "run_dir": str(run_dir), "oom_step": ASKS_TOO_MUCH - ATTACHED.start}
Path(sys.argv[1]).write_text(json.dumps(said))
