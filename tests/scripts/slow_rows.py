"""A training whose batches are made slowly in the training process, for some passes.

    python slow_rows.py PASSES|set|worse|asked

`set` ends five passes after the loader got workers. `worse` has workers that together are slower than the training
process, however many they are, and ends when the loader has none again. `asked` ends once
`training_harness.recommended` knows a setting. With a number of passes the batches are made at once, so
that the losses are there soon.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import training_harness

MODE = sys.argv[1]
MOST_PASSES = int(MODE) if MODE.isdecimal() else 100
#: Long enough that a busy machine, which wakes a sleeper late, adds little.
FETCH_SECONDS = 0.0 if MODE.isdecimal() else 0.08
STEP_SECONDS = FETCH_SECONDS / 16


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitems__(self, indices):
        worker = get_worker_info()
        time.sleep(FETCH_SECONDS * 1.3 * worker.num_workers if MODE == "worse" and worker else FETCH_SECONDS)
        return [(torch.full((8,), float(index)), float(index % 2)) for index in indices]


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
            time.sleep(STEP_SECONDS)
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
