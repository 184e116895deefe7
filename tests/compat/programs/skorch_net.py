"""Skorch: `NeuralNetClassifier.fit` with its own validation split, then `predict_proba`."""

import numpy as np
import torch
from generated import Digits, seed, small_net, tell
from skorch import NeuralNetClassifier

if __name__ == "__main__":
    seed()
    digits = Digits(2000)
    images = np.stack([digits[index][0].numpy() for index in range(len(digits))])
    labels = np.array([index % 10 for index in range(len(digits))])
    net = NeuralNetClassifier(
        small_net(),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=3,
        batch_size=50,
        iterator_train__shuffle=True,
        iterator_train__num_workers=1,
        verbose=0,
    )
    net.fit(images, labels)
    for epoch in net.history:
        tell(epoch["train_loss"])
        tell(epoch["valid_loss"])
    tell(net.predict_proba(images[:100]).sum(), "probabilities")
