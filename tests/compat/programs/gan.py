"""GAN: two optimizers that take turns on each batch."""

import torch
from generated import Digits, seed, tell
from torch.utils.data import DataLoader

if __name__ == "__main__":
    seed()
    maker = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 784))
    judge = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.LeakyReLU(0.2), torch.nn.Linear(512, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4)
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    loader = DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=2)
    for _ in range(3):
        for images, _ in loader:
            true, false = torch.ones(len(images), 1), torch.zeros(len(images), 1)
            made = maker(torch.randn(len(images), 64))
            of_judge.zero_grad()
            judged = loss_of(judge(images.flatten(1)), true) + loss_of(judge(made.detach()), false)
            judged.backward()
            of_judge.step()
            of_maker.zero_grad()
            fooled = loss_of(judge(made), true)
            fooled.backward()
            of_maker.step()
        tell(judged)
        tell(fooled)
