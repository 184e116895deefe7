"""Torchdata: a `StatefulDataLoader` that is stopped in the middle of an epoch and goes on from its state."""

import torch
from generated import Digits, seed, small_net, tell
from torchdata.stateful_dataloader import StatefulDataLoader


def train(model, optimizer, loader, most):
    """Train on the next batches of the loader."""
    for number, (images, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number == most:
            break
    tell(loss)


if __name__ == "__main__":
    seed()
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = Digits(4096)
    loader = StatefulDataLoader(dataset, batch_size=32, num_workers=2)
    train(model, optimizer, loader, 40)
    state = loader.state_dict()
    del loader
    resumed = StatefulDataLoader(dataset, batch_size=32, num_workers=2)
    resumed.load_state_dict(state)
    train(model, optimizer, resumed, 1000)
