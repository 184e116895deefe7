"""A training on the GPU in which something grows in each step, or seems to.

growth.py KIND [--bytes N] [--steps N] [--seconds S] [--pace even|uneven|slowing]
"""

import argparse
import ctypes
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--bytes", type=int, default=256 << 10)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--seconds", type=float, default=0.04)
parser.add_argument("--pace", default="even", choices=["even", "uneven", "slowing"])
options = parser.parse_args()
WIDTH = 256
PACES = {
    "even": lambda step: 1.0,
    "uneven": lambda step: 0.3 if step // 60 % 2 else 1.7,
    "slowing": lambda step: 0.4 + 1.2 * step / options.steps,
}
kept, lengths = [], torch.Generator().manual_seed(0)
driver = ctypes.CDLL("libcuda.so.1")


def block(size=None):
    return torch.empty(size or options.bytes, dtype=torch.uint8, device="cuda")


def tensors(step):
    kept.append(block())


def pinned(step):
    """Have one more copy in flight than ever, and let go of all."""
    pieces = [torch.empty(options.bytes, dtype=torch.uint8, pin_memory=True) for _ in range(step + 1)]
    del pieces


def library(step):
    """Take memory from the driver, as a library does that PyTorch knows nothing of."""
    if step % 8 == 0:
        driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(8 * options.bytes))


def variable(step):
    """Batches of variable length: the cache grows to the longest, and stays."""
    length = int(torch.randint(1, 40, (1,), generator=lengths))
    block(length * options.bytes)


def evaluation(step):
    """Hold much more now and then."""
    if step % 100 > 90:
        [block(8 * options.bytes) for _ in range(10)]


def filling(step):
    """A cache that is full after a third of the run."""
    if step < options.steps // 3:
        kept.append(block())


def nothing(step):
    pass


KINDS = {each.__name__: each for each in (tensors, pinned, library, variable, evaluation, filling, nothing)}
act = KINDS[options.kind]
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.zeros(32 * options.steps, WIDTH))
for step, (x,) in enumerate(DataLoader(rows, batch_size=32)):
    loss = model(x.cuda()).square().mean()
    act(step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(options.seconds * PACES[options.pace](step))
