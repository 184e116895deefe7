"""Ray Train with two workers on the CPU, each with a DataLoader of its own, all in one run of Tidegauge.

On a Ray of its own:                    tidegauge run -- python train.py
On a cluster that runs already:         python train.py --address auto

On a cluster, Tidegauge is installed where the workers run, and each node with workers has its own run. The runtime
environment passes variables to the workers: TIDEGAUGE_HOME, or TIDEGAUGE_RUN_ID and the store for one run of all
nodes.
"""

import argparse
import os

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import training_harness


def train(config):
    training_harness.attach(name="ray-train")
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
    training_harness.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="address of a cluster; without it, this process starts a Ray")
    options = parser.parse_args()
    variables = {name: value for name, value in os.environ.items() if name.startswith("TIDEGAUGE_")}
    ray.init(address=options.address, runtime_env={"env_vars": variables})
    trainer = TorchTrainer(train, train_loop_config={"lr": 0.01}, scaling_config=ScalingConfig(num_workers=2))
    trainer.fit()


if __name__ == "__main__":
    main()
