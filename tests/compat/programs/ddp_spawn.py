"""DDP: ranks started by `torch.multiprocessing.spawn`, so that no RANK is in the environment."""

import os

import torch
import torch.distributed
import torch.multiprocessing
from generated import Digits, seed, small_net, tell
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

RANKS = 2


def train(rank, store):
    """Train as one rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    seed()
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = Digits()
    sampler = DistributedSampler(dataset, RANKS, rank, seed=0)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        tell(loss, f"loss of rank {rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(os.path.abspath("store"),), nprocs=RANKS)
