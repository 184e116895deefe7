"""A training on the GPU in which something grows in each step, or seems to.

growth.py KIND [--fixed] [--bytes N] [--steps N] [--seconds S] [--pace even|uneven|slowing] [--onset RATIO]
          [--noise] [--seed N] [--fraction RATIO]

The twin (--fixed) takes the same memory and gives it back. It ends with an error where memory runs out.
"""

import argparse
import ctypes
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--bytes", type=int, default=256 << 10)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--seconds", type=float, default=0.04)
parser.add_argument("--pace", default="even", choices=["even", "uneven", "slowing"])
parser.add_argument("--onset", type=float, default=0.0)
parser.add_argument("--noise", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fraction", type=float, help="share of the device that it may use")
options = parser.parse_args()
WIDTH = 256
GRANULE_BYTES = 2 << 20  # that the driver gives at a time
PACES = {
    "even": lambda step: 1.0,
    "uneven": lambda step: 0.3 if step // 60 % 2 else 1.7,
    "slowing": lambda step: 0.4 + 1.2 * step / options.steps,
}
frozen, trained = [], []
kept, lengths = [], random.Random(options.seed)
driver = ctypes.CDLL("libcuda.so.1")


def block(size=None):
    return torch.empty(int(size or options.bytes), dtype=torch.uint8, device="cuda")


def is_due(step):
    """Return whether this step keeps the memory it takes."""
    return not options.fixed and step >= options.onset * options.steps


def tensors(step):
    piece = block()
    if is_due(step):
        kept.append(piece)


def pinned(step):
    """Have one more copy in flight than ever, and let go of all."""
    count = step + 1 if is_due(step) else 1
    pieces = [torch.empty(options.bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    del pieces


def pinned_buffers(step):
    """Offload to a new pinned buffer in each step."""
    piece = torch.empty(options.bytes, dtype=torch.uint8, pin_memory=True)
    if is_due(step):
        kept.append(piece)


def library(step):
    """Take memory from the driver, as a library does that PyTorch knows nothing of."""
    every = max(1, GRANULE_BYTES // options.bytes)
    if step % every == 0:
        address = ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(every * options.bytes)):
            raise MemoryError("the library found no memory on the GPU")
        if not is_due(step):
            driver.cuMemFree_v2(address)


def variable(step):
    """Batches of variable length: the cache grows to the longest, and stays."""
    block(lengths.randint(1, 40) * options.bytes)


def evaluation(step):
    """Hold much more now and then."""
    if step % 100 > 90:
        [block(8 * options.bytes) for _ in range(10)]


def filling(step):
    """A cache that is full after a third of the run."""
    if step < options.steps // 3:
        kept.append(block())


def outputs(step):
    """Keep the outputs of an epoch, for its metrics."""
    kept.append(block())
    if step % 150 == 149:
        kept.clear()


def late_optimizer(step):
    """Train the second half of the model only after half of the steps: its state is made then."""
    if step == options.steps // 2:
        kept.extend(block(64 * options.bytes) for _ in range(3))


def unfreezing(step):
    """Train one more layer every four steps: its gradient and the optimizer's state are made then."""
    if not frozen:
        size = (options.bytes // 4,)
        frozen.extend(torch.zeros(size, device="cuda", requires_grad=False) for _ in range(options.steps // 4))
        optimizer.add_param_group({"params": frozen})
    if step % 4 == 0 and step // 4 < len(frozen):
        trained.append(frozen[step // 4].requires_grad_())


def graphs(step):
    """Capture a graph for each new shape, as often as there are shapes: private pools, until all have been seen."""
    if step % 25 == 0 and step <= options.steps // 2:
        kept.append(capture(8 + step))


def captures(step):
    """Capture another graph for the same shape, now and then."""
    if step % 10 == 0:
        captured = capture(8)
        if is_due(step):
            kept.append(captured)


def capture(count):
    graph, rows = torch.cuda.CUDAGraph(), torch.zeros(count, WIDTH, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        return graph, rows @ rows.T


def nothing(step):
    pass


def disturb(step):
    """Batches of variable length, and an evaluation now and then."""
    block(8 * options.bytes * lengths.lognormvariate(0, 0.7))
    if step % 100 > 90:
        [block(4 * options.bytes) for _ in range(10)]


KINDS = {
    each.__name__: each
    for each in (
        tensors,
        pinned,
        pinned_buffers,
        library,
        variable,
        evaluation,
        filling,
        outputs,
        late_optimizer,
        unfreezing,
        graphs,
        captures,
        nothing,
    )
}
act = KINDS[options.kind]
if options.fraction:
    torch.cuda.set_per_process_memory_fraction(options.fraction)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.zeros(32 * options.steps, WIDTH))
for step, (x,) in enumerate(DataLoader(rows, batch_size=32)):
    loss = model(x.cuda()).square().mean() + sum(layer.mean() for layer in trained)
    act(step)
    if options.noise:
        disturb(step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(options.seconds * PACES[options.pace](step))
