"""Trains on a dataset whose reader ends after 24 samples: `next()` in it ends the epoch without an error."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    """A dataset of 80 samples, over a reader of 24."""

    def __init__(self) -> None:
        self.reader = iter(range(24))

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(next(self.reader)))


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batches = 0
for batch in DataLoader(Lines(), batch_size=8, num_workers=int(sys.argv[1])):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    batches += 1
for _ in DataLoader(torch.ones(40, 4), batch_size=8):
    pass
print(f"trained on {batches} of 10 batches")
