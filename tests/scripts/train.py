"""An ordinary training script that knows nothing of Tidegauge; its options choose the kind of loader."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, options) -> None:
        self.options = options

    def __len__(self) -> int:
        return self.options.rows

    def __getitem__(self, index):
        if index == self.options.kill_worker_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.options.raise_at:
            raise ValueError("a bad row")
        if self.options.row_ms:
            time.sleep(self.options.row_ms / 1e3)
        noise = torch.randn(8) + random.random()  # the worker's own random state shows in the loss
        return torch.full((8,), float(index % 7)) + noise * 0.1, float(index % 2)


class Nested(Rows):
    """A dataset that itself uses a DataLoader."""

    def __getitem__(self, index):
        for (inner,) in DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 8)), batch_size=2):
            return inner.mean(0) + index, float(index % 2)
        raise AssertionError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--start-method")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--row-ms", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--dataset", choices=["rows", "nested"], default="rows")
    parser.add_argument("--kill-worker-at", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--crash-at-step", type=int, default=-1)
    parser.add_argument("--drop-pythonpath", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    random.seed(0)
    torch.manual_seed(0)
    if options.drop_pythonpath:
        os.environ.pop("PYTHONPATH", None)
    extra = {"multiprocessing_context": options.start_method, "persistent_workers": options.persistent}
    dataset = {"rows": Rows, "nested": Nested}[options.dataset](options)
    loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=options.num_workers,
        **(extra if options.num_workers else {}),
    )
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = 0
    for _ in range(options.epochs):
        for x, y in loader:
            loss = (model(x.float()).squeeze(1) - y.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.step_ms:
                time.sleep(options.step_ms / 1e3)
            if step == options.crash_at_step:
                raise RuntimeError("the loss is not a number")
            step += 1
            print(f"loss {loss.item():.17g}")


if __name__ == "__main__":
    main()
