"""A small plain training with one planted fault, which the environment variable SIGHT_FAULT names.

The file `began` in its folder says that the training begins.

SIGHT_TOOL names the tool whose edits the program has; without one it is the training alone. The forward pass and
the slow parts of loading sleep, so that two cores are enough for the workers of all faults.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from benchmarks.sight.edits import Edit, edited

DEVICE = os.environ["SIGHT_DEVICE"]
FAULT, SECONDS = os.environ["SIGHT_FAULT"], float(os.environ["SIGHT_SECONDS"])
BATCH_SIZE, FEATURES = 8, 32
KIB = 1 << 10
#: A leak takes this for each batch: some 40 MiB a second.
LEAK_BYTES = 1024 * KIB
#: Size of a picture. Kept batches must be as large as another leak.
PICTURE_BYTES = LEAK_BYTES // BATCH_SIZE if FAULT == "shm-growth" else 4 * KIB
#: Item at which worker 0 waits for a lock that it holds: some 10 s after the start.
LOCKED_ITEM = 400 * BATCH_SIZE


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures and labels of 0 or 1. Reading one takes 1 ms."""

    def __init__(self) -> None:
        self.cache: dict[int, bytearray] = {}
        self.lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        if FAULT == "copy-on-read":
            self.rows = [{"path": f"pictures/{i:09d}.jpg", "box": list(range(i, i + 9))} for i in range(300_000)]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        worker = get_worker_info()
        is_slow = FAULT == "slow-workers" or (FAULT == "slow-worker" and worker is not None and worker.id == 1)
        time.sleep(0.020 if is_slow else 0.001)
        if FAULT == "worker-leak":
            self.cache[index] = bytearray(b"\1" * (LEAK_BYTES // BATCH_SIZE))
        if FAULT == "copy-on-read":
            for row in self.rows[index * 7919 % 10_000 :: 10_000]:
                sum(row["box"])
        if FAULT == "hang" and index == LOCKED_ITEM:
            self.lock.acquire()
            self.lock.acquire()
        return torch.full((PICTURE_BYTES // 4,), index % 7 / 7), index % 2


class Network(nn.Module):
    """Two layers, whose forward pass takes 20 ms more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        time.sleep(0.020)
        return self.layers(features[:, :FEATURES])


def collate(items: list[Any]) -> Any:
    """Collate a batch; with a slow collate function, 80 ms are spent on padding."""
    if FAULT == "slow-collate":
        time.sleep(0.080)
    return default_collate(items)


def train(edit: Edit, model: nn.Module) -> None:
    """Train until the time is over."""
    if FAULT == "shm-growth":
        torch.multiprocessing.set_sharing_strategy("file_system")
    workers = 4 if FAULT in ("slow-worker", "slow-workers", "copy-on-read") else 2
    loader = DataLoader(Pictures(), batch_size=BATCH_SIZE, num_workers=workers, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: list[Any] = []
    end = time.monotonic() + SECONDS
    Path("began").touch()
    for features, labels in loader:
        with edit.step():
            optimizer.zero_grad()
            outputs = model(features.to(DEVICE))
            loss = nn.functional.cross_entropy(outputs, labels.to(DEVICE))
            loss.backward()
            optimizer.step()
        edit.log(loss.item())
        if FAULT in ("main-leak", "oom-kill", "cuda-leak", "cuda-oom"):
            kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8, device=DEVICE))
        elif FAULT == "shm-growth":
            kept.append(features)
        elif FAULT == "fd-leak":
            kept.append(os.open(__file__, os.O_RDONLY))
        if time.monotonic() > end:
            break


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Network().to(DEVICE)
    with edited(os.environ.get("SIGHT_TOOL", ""), model) as edit:
        train(edit, model)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
