"""Three loops with known sleeps in known phases: without an optimizer, with one, and with `step()`."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

import training_harness

ROW_MS, FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, OTHER_MS = 1, 8, 12, 16, 20


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(ROW_MS / 1e3)
        return torch.full((4,), float(index))


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        time.sleep(FORWARD_MS / 1e3)
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(BACKWARD_MS / 1e3)
        return gradient


class SleepySGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(OPTIMIZER_MS / 1e3)
        return super().step(closure)


def accumulate(model, optimizer, batches, *, end=lambda: None):
    for number, batch in enumerate(batches):
        Sleepy.apply(model(batch)).square().mean().backward()
        if number % 2:
            time.sleep(OTHER_MS / 1e3)
            optimizer.step()
            optimizer.zero_grad()
        if number % 3 == 2:
            end()


loader = DataLoader(Rows(), batch_size=4)
model = torch.nn.Linear(4, 1)
for batch in loader:
    model(batch)
optimizer = SleepySGD(model.parameters(), lr=1e-4)
accumulate(model, optimizer, loader)
accumulate(model, optimizer, loader, end=training_harness.step)
if os.fork() == 0:
    accumulate(model, optimizer, loader)
    os._exit(0)
os.wait()
