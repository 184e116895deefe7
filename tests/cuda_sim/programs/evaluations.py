"""A training that keeps the outputs of its evaluation after each epoch, on the GPU.

evaluations.py [--epochs N]
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
options = parser.parse_args()
model = nn.Linear(256, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training, validation = (DataLoader(TensorDataset(torch.zeros(count, 256)), batch_size=128) for count in (5120, 640))
history = []
for _ in range(options.epochs):
    for (x,) in training:
        optimizer.zero_grad()
        model(x.cuda()).square().mean().backward()
        optimizer.step()
        time.sleep(0.04)
    with torch.no_grad():
        for (x,) in validation:
            history.append(model(x.cuda()))  # KEPT
            time.sleep(0.04)
