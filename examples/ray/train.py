"""Ray Train with two workers on the CPU, each with a DataLoader of its own, all in one run of Tidegauge.

tidegauge run -- python train.py
"""

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    rows = TensorDataset(torch.randn(640, 8), torch.randn(640, 1))
    loader = prepare_data_loader(DataLoader(rows, batch_size=16, num_workers=1))
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


if __name__ == "__main__":
    ray.init()
    trainer = TorchTrainer(train, train_loop_config={"lr": 0.01}, scaling_config=ScalingConfig(num_workers=2))
    print("loss", trainer.fit().metrics["loss"])
