"""An ordinary PyTorch training script, without a reference to Tidegauge.

python examples/plain_train.py
torchrun --nproc-per-node=2 examples/plain_train.py --steps 200
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spirals(Dataset):
    """Points on two noisy spirals, labelled by their spiral."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        radius = torch.rand((), generator=generator)
        angle = 6 * radius + 3.1416 * (index % 2)
        noise = 0.05 * torch.randn(2, generator=generator)
        return torch.stack([radius * angle.cos(), radius * angle.sin()]) + noise, index % 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--start-method", choices=["fork", "forkserver", "spawn"])
    parser.add_argument("--print-losses", action="store_true", help="each loss, to the last bit")
    options = parser.parse_args()
    torch.manual_seed(0)
    distributed, rank = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", 0))
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    if distributed:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    dataset = Spirals()
    sampler = DistributedSampler(dataset) if distributed else None
    loader = DataLoader(
        dataset,
        batch_size=32,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=options.num_workers,
        multiprocessing_context=options.start_method if options.num_workers else None,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    while step < options.steps:
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and (options.print_losses or step % 100 == 0):
                print(step, loss.item().hex() if options.print_losses else f"{loss.item():.4f}", flush=True)
            if step == options.steps:
                break
    if distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
