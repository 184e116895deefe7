"""MNIST: training and validation loaders, one optimizer, a learning rate that falls."""

import torch
from generated import Digits, seed, small_net, tell
from torch.utils.data import DataLoader

if __name__ == "__main__":
    seed()
    training = DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=2)
    checking = DataLoader(Digits(512), batch_size=128, num_workers=1)
    model = small_net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        model.train()
        for images, labels in training:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for images, labels in checking:
                total += torch.nn.functional.cross_entropy(model(images), labels, reduction="sum").item()
        tell(loss)
        tell(total / 512)
        schedule.step()
