"""A training that waits in one known way: the lines behind it end with a comment `line: CASE`.

python slow_lines.py CASE SECONDS
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

SIZE = 1_000_000
TEXT = ", ".join(f"{number}={number * 7}" for number in range(20_000))
JSON = json.dumps([{"name": str(number), "value": number} for number in range(20_000)])


class Data(Dataset):
    """A dataset whose samples are made by the method of the case."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.make = getattr(self, f"make_{case}", self.make_nothing)
        self.lock = multiprocessing.Lock()
        self.file = ""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.make(index)
        return torch.full((64,), float(index % 7))

    def make_nothing(self, index: int) -> None:
        time.sleep(0.0005)

    def make_sleep(self, index: int) -> None:
        np.ones(20_000).cumsum()
        time.sleep(0.02)  # line: sleep

    def make_opencv(self, index: int) -> None:
        import cv2

        cv2.setNumThreads(1)
        picture = np.full((700, 700, 3), index % 255, dtype=np.uint8)
        picture = cv2.resize(picture, (640, 640))
        cv2.bilateralFilter(picture, 9, 75, 75)  # line: opencv

    def make_parsing(self, index: int) -> None:
        self.parse(TEXT)

    def parse(self, text: str) -> dict[str, int]:
        fields = {}
        for part in re.split(", ", text):  # line: parsing
            name, _, value = part.partition("=")  # line: parsing
            if name.isdigit():  # line: parsing
                fields[name] = int(value) + int(name)  # line: parsing
        return fields

    def make_slow_worker(self, index: int) -> None:
        time.sleep(0.004)
        if get_worker_info().id == 1:
            self.read_shard()

    def read_shard(self) -> None:
        time.sleep(0.03)  # line: slow_worker

    def make_lock(self, index: int) -> None:
        with self.lock:  # line: lock
            time.sleep(0.008)  # line: lock

    def make_flock(self, index: int) -> None:
        with open(self.file, "rb") as cache:
            fcntl.flock(cache, fcntl.LOCK_EX)  # line: flock
            time.sleep(0.008)  # line: flock

    def make_file(self, index: int) -> None:
        with open(self.file, "rb") as shard:
            shard.read()  # line: file

    def make_inline(self, index: int) -> None:
        json.loads(JSON)  # line: inline

    def make_child(self, index: int) -> None:
        subprocess.run(["sleep", "0.03"], check=True)  # line: child

    def make_threads(self, index: int) -> None:
        torch.set_num_threads(8)
        matrix = torch.ones(700, 700)
        matrix @ matrix @ matrix  # line: threads


class SlowSampler(Sampler):
    """A sampler that weighs all samples again for each index."""

    def __iter__(self):
        weights = np.ones(300_000)
        while True:
            yield int(np.argsort(weights * np.random.rand(len(weights)))[0])  # line: sampler

    def __len__(self) -> int:
        return SIZE


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    rows = [[float(value) * 0.5 for value in sample.repeat(300)] for sample in samples]  # line: collate
    return torch.tensor(rows)[:, :64]


def confusion(scores: list[float]) -> int:
    """Count pairs that are in the wrong order, slowly."""
    wrong = 0
    for one in scores:
        for other in scores:  # line: pause
            wrong += one > other  # line: pause
    return wrong


def main() -> None:
    case, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
    data = Data(case)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(64 * 2**20)
        data.file = file.name
        workers = {"inline": 0, "slow_worker": 3, "threads": 2}.get(case, 2)
        loader = DataLoader(
            data,
            batch_size=4,
            num_workers=workers,
            sampler=SlowSampler() if case == "sampler" else None,
            collate_fn=slow_collate if case == "collate" else None,
        )
        model = torch.nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.004)
            if case == "pause" and step % 20 == 19:
                confusion([float(number % 97) for number in range(1_800)])
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
