"""Inference: a model in eval mode, a DataLoader with two workers, no optimizer."""

import torch
from generated import Digits, seed, small_net, tell
from torch.utils.data import DataLoader

if __name__ == "__main__":
    seed()
    model = small_net(width=32).eval()
    total = torch.zeros(())
    with torch.inference_mode():
        for images, _ in DataLoader(Digits(8192), batch_size=64, num_workers=2):
            total += model(images).logsumexp(1).sum()
    tell(total, "sum")
