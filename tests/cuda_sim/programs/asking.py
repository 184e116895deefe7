"""A training that keeps a tensor for each step, and asks for snapshots of itself by commands meanwhile.

asking.py FILE COMMAND…

It trains until all commands have ended, and 50 steps more; {run} in them stands for the run's directory. It writes
the output of each and, for each step, what PyTorch says is allocated and reserved when it ends, and how many
tensors are kept.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(256, 256).cuda()  # MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps, outputs, kept = [], [], []
commands = [shlex.split(each.format(run=os.environ["TIDEGAUGE_RUN_DIR"])) for each in sys.argv[2:]]
running, steps_left = None, 50
while steps_left:
    for (x,) in DataLoader(TensorDataset(torch.zeros(32 * 200, 256)), batch_size=32):
        optimizer.zero_grad()
        model(x.cuda()).square().mean().backward()
        kept.append(torch.empty(16 << 10, dtype=torch.uint8, device="cuda"))  # KEPT
        optimizer.step()
        steps.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(kept)])
        if running and running.poll() is not None:
            outputs.append(running.stdout.read())
            running = None
        if commands and not running:
            running = subprocess.Popen(commands.pop(0), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        steps_left -= not running
        if not steps_left:
            break
        time.sleep(0.02)
Path(sys.argv[1]).write_text(json.dumps({"steps": steps, "outputs": outputs}))
