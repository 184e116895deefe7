"""Fastai: `Learner.fit_one_cycle` with its own DataLoader, optimizer and validation."""

import sys

import fastai.callback.schedule
import torch
from fastai.basics import DataLoader, DataLoaders, Learner, accuracy
from fastai.callback.progress import ProgressCallback
from generated import Digits, seed, small_net, tell

if __name__ == "__main__":
    seed()
    if "counter" in sys.modules:  # this optimizer is not derived from torch's
        sys.modules["counter"].count_steps_of(fastai.optimizer.Optimizer)
    loaders = DataLoaders(
        DataLoader(Digits(), bs=64, shuffle=True, num_workers=1), DataLoader(Digits(512), bs=128, num_workers=1)
    )
    learner = Learner(loaders, small_net(), loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy)
    learner.remove_cb(ProgressCallback)
    with learner.no_logging():
        learner.fit_one_cycle(3)
    for training, checking, _ in learner.recorder.values:
        tell(training)
        tell(checking)
