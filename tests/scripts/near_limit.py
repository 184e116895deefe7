"""A training that fills its memory in one way, or is healthy, and saves the number of its last step on request.

    python near_limit.py CASE STEPS CHECKPOINT GROUP

The process first moves into the memory cgroup GROUP. Cases that end in `-function` register `on_risk`, the others
handle SIGUSR1, as Lightning and many Slurm scripts do. Each request writes one line to CHECKPOINT. The suite and
`benchmarks.before_oom` run it.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

CASE, STEPS, CHECKPOINT, GROUP = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
(GROUP / "cgroup.procs").write_text(str(os.getpid()))

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

MIB = 2**20
way, _, by = CASE.partition("-")
state = {"step": 0}
kept = []
peak = []


def save(*_):
    with CHECKPOINT.open("a") as file:
        file.write(f"{state['step']} {time.monotonic()}\n")


if by == "function":
    import training_harness

    training_harness.on_risk(save)
else:
    signal.signal(signal.SIGUSR1, save)


def block(size_bytes):
    """Memory that is really used."""
    return torch.full((int(size_bytes) // 4,), 1.0)


def sized(low_bytes, high_bytes):
    return block(random.uniform(low_bytes, high_bytes))


class Items(Dataset):
    def __init__(self):
        self.kept = []

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        if way == "worker":
            self.kept.append(block(0.4 * MIB))
        if way == "cache" and len(self.kept) < 250:
            self.kept.append(block(0.4 * MIB))
        return torch.ones(64)


def evaluate():
    """An evaluation; some keep what they predict."""
    outputs = []
    for _ in range(40):
        time.sleep(0.1)
        if way == "evaluation":
            outputs.append(block(12 * MIB))
        if way == "peaks":
            outputs.append(block(3 * MIB))


def step_memory(step):
    """Keep memory as the case does, after a step."""
    if way == "steady":
        kept.append(block(0.8 * MIB))
    elif way == "quick":
        kept.append(block(2.4 * MIB))
    elif way == "slow":
        kept.append(block(0.35 * MIB))
    elif way == "uneven":
        kept.append(sized(0, 2 * MIB))
    elif way == "bursts" and step % 40 == 39:
        kept.append(block(30 * MIB))
    elif way == "late" and step > 250:
        kept.append(block(2 * MIB))
    elif way == "faster":
        kept.append(block(0.004 * MIB * step))
    elif way == "warmup":
        kept.append(block(5 * MIB))
    elif way == "long" and step == 300:
        for _ in range(400):
            kept.append(block(2 * MIB))
            time.sleep(0.1)
    elif way == "shm" and step % 10 == 0:
        path = Path("/dev/shm", f"near-limit-{os.getpid()}-{step}")
        path.write_bytes(b"x" * (6 * MIB))
        kept.append(path)
    elif way == "plateau" and step < 40:
        kept.append(block(8 * MIB))
    elif way == "sizes":
        peak[:] = [sized(5 * MIB, 150 * MIB)]
    elif way == "files" and step % 20 == 0:
        path = CHECKPOINT.with_suffix(".data")
        path.write_bytes(os.urandom(4 * MIB) * 25)
        path.read_bytes()
    elif way == "buffer":
        kept.append(block(0.25 * MIB))
        del kept[:-400]


loader = DataLoader(Items(), batch_size=8, num_workers=2)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(loader)
try:
    for step in range(STEPS):
        model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if way == "epochs" and step % 100 == 99:
            batches = iter(loader)
        step_memory(step)
        time.sleep(0.05)
        if step % 200 == 199 and way in ("evaluation", "peaks", "buffer"):
            evaluate()
finally:
    for path in kept if way == "shm" else []:
        path.unlink()
