"""A training that stops for ever: argv[1] is the way in which worker 0 of 2, or the training process, hangs."""

import os
import signal
import subprocess
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

WAY = sys.argv[1]


def hang_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_pipe():
    os.read(os.pipe()[0], 1)


def hang_child():
    subprocess.run(["cat"], stdin=os.pipe()[0], check=True)


def hang_busy():
    while True:
        sum(range(1000))


class Numbers(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.01)
        if index == 80 and WAY != "main" and get_worker_info().id == 0:
            globals()[f"hang_{WAY}"]()
        return torch.full((4,), float(index))


def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=8, num_workers=2)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if step == 10 and WAY == "main":
            hang_lock()


if __name__ == "__main__":
    main()
