"""A healthy training with one long phase: argv[1] says which, argv[2] its seconds.

Most phases come after 60 short steps, within an epoch.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info

PHASE = sys.argv[1]
SECONDS = float(sys.argv[2])
STEPS_BEFORE = 60
#: Phases of a training of two ranks, of which the first alone is busy.
OF_RANKS = ("rank_checkpoint", "rank_evaluation")


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def write(seconds):
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(os.urandom(1 << 22))
            file.flush()
            os.fsync(file.fileno())


def receive(seconds):
    """Read from a server that sends a byte each second, as a slow download."""
    server = socket.create_server(("127.0.0.1", 0))

    def send():
        connection, _ = server.accept()
        with connection:
            for _ in range(round(seconds)):
                time.sleep(1)
                connection.send(b"x")

    threading.Thread(target=send, daemon=True).start()
    with socket.create_connection(server.getsockname()) as connection:
        while connection.recv(1 << 16):
            pass


def run_program(seconds):
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-c", code], check=True)


#: Phase -> what the training process does after some steps.
IN_EPOCH = {
    "validation": compute,
    "checkpoint": write,
    "program": run_program,
    "pause": time.sleep,
    "upload": receive,
    "rank_checkpoint": write,
    "rank_evaluation": compute,
}
#: Phase -> what it does elsewhere.
BEFORE_FIRST_STEP = {"first_step": compute, "first_download": receive}
AFTER_EPOCH = {"epoch_end": compute, "epoch_end_checkpoint": write, "end_upload": receive, "end_sleep": time.sleep}
IN_WORKER = {"slow_sample": compute, "sample_download": receive}


class Numbers(Dataset):
    def __init__(self, size=600):
        self.size = size
        self.is_first_epoch = True

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if PHASE in IN_WORKER and index == 320 and get_worker_info() is not None:
            IN_WORKER[PHASE](SECONDS)
        if PHASE == "slow_first_epoch" and self.is_first_epoch:
            time.sleep(SECONDS / 10)
        return torch.full((4,), float(index))


class Slow(torch.nn.Module):
    """Validation with a loader of its own, whose batches take long."""

    def forward(self, batch):
        compute(SECONDS / 4)
        return batch


def prepare_worker(_worker):
    if PHASE == "worker_start":
        compute(SECONDS)


def validate_with_a_loader():
    model = Slow()
    for batch in DataLoader(Numbers(16), batch_size=4, num_workers=1):
        model(batch)


def deep_model():
    """Return a model whose compilation takes a while, as the first step of a real one does."""
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU()) for _ in range(60)]
    return torch.compile(torch.nn.Sequential(*layers, torch.nn.Linear(4, 1)))


def train(rank=None):
    model = deep_model() if PHASE == "compilation" else torch.nn.Linear(4, 1)
    if rank is not None:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    dataset = Numbers(24 if PHASE == "slow_first_epoch" else 600)
    for epoch in range(20 if PHASE == "slow_first_epoch" else 1):
        dataset.is_first_epoch = epoch == 0
        for step, batch in enumerate(
            DataLoader(dataset, batch_size=4, num_workers=2, worker_init_fn=prepare_worker)
        ):
            if step == 0:
                BEFORE_FIRST_STEP.get(PHASE, lambda _: None)(SECONDS)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.05)
            if step == STEPS_BEFORE and rank in (None, 0):
                IN_EPOCH.get(PHASE, lambda _: None)(SECONDS)
                if PHASE == "validation_loader":
                    validate_with_a_loader()
                if PHASE == "early_end":
                    break
        AFTER_EPOCH.get(PHASE, lambda _: None)(SECONDS)
    if PHASE == "early_end":
        receive(SECONDS)


if __name__ == "__main__":
    if PHASE in OF_RANKS and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*command, *sys.argv], check=False).returncode)
    train(int(os.environ["RANK"]) if PHASE in OF_RANKS else None)
