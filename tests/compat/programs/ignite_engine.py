"""Ignite: a supervised trainer and an evaluator that runs after each epoch."""

import torch
from generated import Digits, seed, small_net, tell
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from torch.utils.data import DataLoader

if __name__ == "__main__":
    seed()
    model, loss_of = small_net(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = create_supervised_trainer(model, optimizer, loss_of)
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(loss_of)})
    training = DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=1)
    checking = DataLoader(Digits(512), batch_size=128, num_workers=1)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        tell(engine.state.output)
        tell(evaluator.run(checking).metrics["loss"])

    trainer.run(training, max_epochs=3)
