"""Ray Data feeds a training: its tasks read and prepare rows in processes of their own.

    tidegauge run -- python data.py

There is no DataLoader, so the run has steps and the memory of each process, and the wait for batches as the stage
`ray data` of the loop.
"""

import numpy
import ray
import torch
from torch import nn

from training_harness import stage, step


def prepare(batch):
    rows = batch["id"].astype(numpy.float32)
    return {"inputs": numpy.stack([rows % 7] * 8, axis=1), "targets": rows % 3}


def main():
    ray.init()
    rows = ray.data.range(3200).map_batches(prepare, batch_size=64)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batches = iter(rows.iter_torch_batches(batch_size=32))
    while True:
        with stage("ray data"):
            batch = next(batches, None)
        if batch is None:
            break
        loss = nn.functional.mse_loss(model(batch["inputs"]).squeeze(1), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
    print("loss", loss.item())


if __name__ == "__main__":
    main()
