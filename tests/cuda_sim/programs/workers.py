"""A training whose DataLoader workers compute on the GPU, until memory runs out in worker 1."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Computed(Dataset):
    """Rows that are made on the device; each worker keeps something for each, worker 1 most."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.1)  # the collector reads the devices once a second
        size = (4 << 20) if index % 2 else (64 << 10)
        self.kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        return torch.zeros(64, device="cuda").cpu()


if __name__ == "__main__":
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(Computed(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    for x in rows:
        optimizer.zero_grad()
        model(x.cuda()).square().mean().backward()
        optimizer.step()
