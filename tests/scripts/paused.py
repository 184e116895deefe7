"""Trains a given number of steps, says so by making a file, and goes on to its end when another file is there."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

done, go_on, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step, (rows,) in enumerate(DataLoader(TensorDataset(torch.ones(4 * steps, 8)), batch_size=4), 1):
    if step == steps:
        time.sleep(0.01)  # so that its end is written at once, and what is held before it too
    model(rows).mean().backward()
    optimizer.step()
done.touch()
deadline = time.monotonic() + 120
while not go_on.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
