"""Hogwild: children train one model in shared memory, then the parent evaluates it.

The children go one after the other, since the losses of a race would differ from run to run.
"""

import torch
import torch.multiprocessing
from generated import Digits, seed, small_net, tell
from torch.utils.data import DataLoader


def train(number, model):
    """Train in a child."""
    torch.set_num_threads(1)
    seed(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for images, labels in DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    tell(loss)


if __name__ == "__main__":
    seed()
    spawning = torch.multiprocessing.get_context("spawn")
    model = small_net()
    model.share_memory()
    for number in range(2):
        child = spawning.Process(target=train, args=(number, model))
        child.start()
        child.join()
    total = 0.0
    with torch.no_grad():
        for images, labels in DataLoader(Digits(512), batch_size=64):
            total += torch.nn.functional.cross_entropy(model(images), labels, reduction="sum").item()
    tell(total / 512)
