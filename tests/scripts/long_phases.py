"""A healthy training with one long phase of 75 s, after 60 short steps: argv[1] says which."""

import os
import subprocess
import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

PHASE = sys.argv[1]
SECONDS = 75.0


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def validation():
    compute(SECONDS)


def checkpoint():
    end = time.monotonic() + SECONDS
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(os.urandom(1 << 22))
            file.flush()
            os.fsync(file.fileno())


def program():
    code = f"import time; end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-c", code], check=True)


def pause():
    time.sleep(SECONDS)


def slow_sample():
    """Nothing: this phase is in the worker."""


class Numbers(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        if PHASE == "slow_sample" and index == 320 and get_worker_info() is not None:
            compute(SECONDS)
        return torch.full((4,), float(index))


def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=2)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.05)
        if step == 60:
            globals()[PHASE]()


if __name__ == "__main__":
    main()
