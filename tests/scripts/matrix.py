"""A small training for each start method, number of workers, persistence and kind of dataset, in one process.

Prints the losses; what is left behind goes to the file that is named.

    python matrix.py LEFTOVERS
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import random
import sys

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

ROWS, BATCH_SIZE, EPOCHS = 8, 2, 2


def row(index):
    noise = torch.randn(3) + random.random()  # the worker's own random state shows in the loss
    return noise + index


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return row(index)


class Batched(Rows):
    def __getitems__(self, indices):
        return [row(index) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return (row(index) for index in range(first, ROWS, step))


KINDS = {"rows": Rows, "batched": Batched, "stream": Stream}
PLACES = [
    ("inline", 0, False),
    *itertools.product(("fork", "forkserver"), (1, 2), (False, True)),
    ("spawn", 1, True),  # each spawned worker imports torch again
]


def train(name, kind, start_method, num_workers, persistent):
    options = {"multiprocessing_context": start_method, "persistent_workers": persistent} if num_workers else {}
    loader = DataLoader(
        KINDS[kind](), batch_size=BATCH_SIZE, shuffle=kind == "rows", num_workers=num_workers, **options
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(name, f"{loss.item():.17g}")


def descriptors():
    """Return the number of open files; each journal that is open once does not count: a stream may begin late."""
    gc.collect()
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return len(open_files) - len({path for path in open_files if path.endswith(".journal")})


def main():
    multiprocessing.set_forkserver_preload(["__main__", "torch"])
    torch.manual_seed(0)
    random.seed(0)
    counts = []
    for kind, place in [*itertools.product(KINDS, PLACES), *itertools.product(KINDS, PLACES[:5])]:
        if place[0] == "spawn" and kind == "batched":
            continue
        train(f"{kind}-{place[0]}-{place[1]}-{place[2]}", kind, *place)
        counts.append(descriptors())
    left = {
        "children": len(multiprocessing.active_children()),
        "descriptors_once": max(counts[: len(KINDS) * len(PLACES) - 1]),
        "descriptors_again": counts[-1],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(left, file)


if __name__ == "__main__":
    main()
