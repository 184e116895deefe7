"""A training whose dataset fails in some samples, and which goes on without those batches; argv[1]: its workers.

With `--uncaught`, the last batch fails as well, and ends the training.
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset

WORKERS = int(sys.argv[1])
UNCAUGHT = "--uncaught" in sys.argv


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index % 8 == 3 or (UNCAUGHT and index == 63):
            raise ValueError(f"sample {index} is damaged")
        return torch.full((4,), float(index))


def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=WORKERS))
    for number in range(16):
        try:
            batch = next(batches)
        except ValueError:
            if UNCAUGHT and number == 15:
                raise
            continue
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    print("trained")


if __name__ == "__main__":
    main()
