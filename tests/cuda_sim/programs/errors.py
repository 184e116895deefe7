"""A training whose steps grow until CUDA memory runs out, in one place of the step.

errors.py forward|backward|optimizer|temporaries|evaluation [--catch | --retry] [--fraction RATIO] [--other BYTES]
"""

import argparse
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("place")
parser.add_argument("--catch", action="store_true")
parser.add_argument("--retry", action="store_true", help="take the step again while the error is handled")
parser.add_argument("--fraction", type=float)
parser.add_argument("--other", type=int, default=0)
options = parser.parse_args()
WIDTH = 512
other = None
if options.other:
    hold = f"import torch; x = torch.empty({options.other}, dtype=torch.uint8, device='cuda'); print(); input()"
    other = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()


class Wasteful(torch.autograd.Function):
    """An operation whose backward pass needs far more memory than its forward pass."""

    @staticmethod
    def forward(context, x, rows):
        context.rows = rows
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        pieces = [torch.empty(context.rows, WIDTH, device="cuda") for _ in range(8)]
        return gradient * len(pieces), None


model = nn.Sequential(
    nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
).cuda()
if options.fraction:
    torch.cuda.set_per_process_memory_fraction(options.fraction)
optimizer = torch.optim.Adam(model.parameters())


def step(x, place, rows):
    """Take one step; its place takes as much memory as these rows."""
    if place == "temporaries":
        pieces = [torch.empty(rows, WIDTH, device="cuda") for _ in range(8)]
        x = x + pieces[0].mean() * 0
    if place == "evaluation":
        with torch.no_grad():
            (torch.empty(rows, WIDTH, device="cuda").softmax(1) * 2).exp()
    hidden = model(torch.empty(rows, WIDTH, device="cuda") if place == "forward" else x)
    if place == "backward":
        hidden = Wasteful.apply(hidden, rows)
    optimizer.zero_grad()
    hidden.mean().backward()
    if place == "optimizer":
        parameter = nn.Parameter(torch.empty(rows, WIDTH, device="cuda"))
        parameter.grad = torch.empty(rows, WIDTH, device="cuda")
        torch.optim.Adam([parameter]).step()
    optimizer.step()


rows = 1024
for (x,) in DataLoader(TensorDataset(torch.zeros(64 * 60, WIDTH)), batch_size=64):
    try:
        step(x.cuda(), options.place, rows)
    except torch.cuda.OutOfMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        if options.retry:
            step(x.cuda(), options.place, rows)
        if not options.catch:
            raise
        rows //= 2
        continue
    rows = int(rows * 1.3)
