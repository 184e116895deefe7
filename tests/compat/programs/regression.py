"""Regression: a linear layer fits a polynomial on batches made by hand, with updates made by hand."""

import torch
from generated import seed, tell

if __name__ == "__main__":
    seed()
    weights, bias = torch.randn(4, 1) * 5, torch.randn(1) * 5
    layer = torch.nn.Linear(4, 1)
    for step in range(3000):
        x = torch.randn(256)
        powers = torch.stack([x**power for power in range(1, 5)], 1)
        layer.zero_grad()
        loss = torch.nn.functional.smooth_l1_loss(layer(powers), powers @ weights + bias)
        loss.backward()
        with torch.no_grad():
            for values in layer.parameters():
                values.add_(values.grad, alpha=-0.1)
        if step % 1000 == 999:
            tell(loss)
