"""A training whose rows are read slowly in the training process, for some passes.

    python slow_rows.py PASSES|set|worse|asked

`set` ends five passes after the loader got workers. `worse` has workers that need much longer for a row than the
training process, and ends when the loader has none again. `asked` ends once `training_harness.recommended` knows a
setting. With a number of passes the rows are read at once, so that the losses are there soon.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import training_harness

MODE = sys.argv[1]
MOST_PASSES = int(MODE) if MODE.isdecimal() else 100
ROW_SECONDS = 0.0 if MODE.isdecimal() else 0.005


class Rows(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        is_slow = MODE == "worse" and get_worker_info() is not None
        time.sleep(0.1 if is_slow else ROW_SECONDS)
        return torch.full((8,), float(index)), float(index % 2)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Rows(), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    passes_with_workers = 0
    for number in range(MOST_PASSES):
        print(f"pass {number}")
        for rows, labels in loader:
            loss = (model(rows).squeeze(1) - labels.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(ROW_SECONDS)
            print(f"loss {loss.item():.17g}")
        passes_with_workers += loader.num_workers > 0
        if MODE == "worse" and passes_with_workers and not loader.num_workers:
            break
        if MODE == "set" and passes_with_workers == 5:
            break
        if MODE == "asked" and (setting := training_harness.recommended(loader)) is not None:
            print(f"recommended: {setting}")
            break


if __name__ == "__main__":
    main()
