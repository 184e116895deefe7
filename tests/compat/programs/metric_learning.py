"""PyTorch Metric Learning: its `MetricLossOnly` trainer with a miner, two optimizers and its own loader."""

import logging

import torch
from generated import Digits, seed, small_net, tell
from pytorch_metric_learning import losses, miners, samplers, trainers


def tell_some(trainer):
    """Print each twentieth loss."""
    if trainer.iteration % 20 == 0:
        tell(trainer.losses["total_loss"])


if __name__ == "__main__":
    seed()
    logging.getLogger("PML").setLevel(logging.ERROR)
    dataset, trunk, embedder = Digits(2000), small_net(), torch.nn.Linear(10, 16)
    trainer = trainers.MetricLossOnly(
        models={"trunk": trunk, "embedder": embedder},
        optimizers={
            "trunk_optimizer": torch.optim.Adam(trunk.parameters(), lr=1e-3),
            "embedder_optimizer": torch.optim.Adam(embedder.parameters(), lr=1e-3),
        },
        batch_size=50,
        loss_funcs={"metric_loss": losses.NTXentLoss()},
        mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
        dataset=dataset,
        sampler=samplers.MPerClassSampler([index % 10 for index in range(2000)], m=5, length_before_new_iter=2000),
        data_device=torch.device("cpu"),
        dataloader_num_workers=1,
        end_of_iteration_hook=tell_some,
    )
    trainer.train(num_epochs=3)
