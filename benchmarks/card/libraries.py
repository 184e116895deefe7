"""A healthy training on a GPU whose libraries take memory of their own, as real ones do.

libraries.py convolutions|collectives|compiled|loader|checkpoints|streams|attention|clock [--seconds N]

`clock` writes the GPU time of each step by its own CUDA events to the file `clock.json`, as [step, ms].
"""

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--seconds", type=float, default=30.0)
options = parser.parse_args()
BATCH = 32
chance = random.Random(0)


class Rows(Dataset):
    """Numbers, made for each sample when it is read."""

    def __init__(self, *shape):
        self.shape = shape

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.full(self.shape, float(index % 7))


def mlp():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convolutions():
    """Photographs of many sizes: cuDNN tries its algorithms for each, with workspaces."""
    torch.backends.cudnn.benchmark = True
    sizes = (3, 32, 64, 128)
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in itertools.pairwise(sizes)
    )
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def loss(model, rows):
        side = 32 * chance.randint(2, 10)
        with torch.autocast("cuda", torch.bfloat16):
            return model(functional.interpolate(rows, size=side)).square().mean()

    return model, loss, {"dataset": Rows(3, 64, 64)}


def collectives():
    """One rank of DDP over NCCL, which makes a second communicator in the middle."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ[name] = value
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    model = nn.parallel.DistributedDataParallel(mlp().cuda())
    groups: list[object] = []

    def loss(model, rows):
        if not groups and time.monotonic() > begun + options.seconds / 2:
            groups.append(torch.distributed.new_group([0]))
        value = model(rows).square().mean()
        torch.distributed.all_reduce(value.detach().clone(), group=groups[0] if groups else None)
        return value

    return model, loss, {"dataset": Rows(256)}


def compiled():
    """A compiled model, whose graphs have pools of their own, with batches of three sizes."""
    model = torch.compile(mlp(), mode="reduce-overhead")

    def loss(model, rows):
        return model(rows[: chance.choice((16, 24, 32))]).square().mean()

    return model, loss, {"dataset": Rows(256)}


def loader():
    """Workers and a thread that pins: batches of 12 MiB that are copied while the GPU computes."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 180 * 180, 64), nn.ReLU(), nn.Linear(64, 10))
    return (
        model,
        lambda model, rows: model(rows).square().mean(),
        {"dataset": Rows(3, 180, 180), "num_workers": 4, "pin_memory": True},
    )


def checkpoints():
    """Activations are made again in the backward pass, and gradients come from four batches."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8))

    def loss(model, rows):
        values = []
        for _ in range(4):
            x = rows
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            values.append(x.square().mean() / 4)
        return sum(values)

    return blocks, loss, {"dataset": Rows(1024)}


def streams():
    """Another stream computes on the batch, and memory is given back when it has ended there."""
    side = torch.cuda.Stream()

    def loss(model, rows):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            more = torch.cat([rows * 2] * chance.randint(1, 8))
        torch.cuda.current_stream().wait_stream(side)
        more.record_stream(torch.cuda.current_stream())
        return model(more).square().mean()

    return mlp(), loss, {"dataset": Rows(256)}


def attention():
    """Sentences of many lengths."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)

    def loss(model, rows):
        return model(rows[:, : chance.randint(16, 128)]).square().mean()

    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), loss, {"dataset": Rows(128, 256)}


def clock():
    """Steps of a known time on the GPU, most of it in the forward pass."""

    def loss(model, rows):
        torch.cuda._sleep(20_000_000)
        return model(rows).square().mean()

    return mlp(), loss, {"dataset": Rows(256)}


KINDS = {
    each.__name__: each
    for each in (convolutions, collectives, compiled, loader, checkpoints, streams, attention, clock)
}
begun = time.monotonic()
model, loss_of, settings = KINDS[options.kind]()
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
ends = []
begun = time.monotonic()
for rows in DataLoader(batch_size=BATCH, **settings):
    loss = loss_of(model, rows.cuda(non_blocking=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if options.kind == "clock":
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    if time.monotonic() > begun + options.seconds:
        break
    time.sleep(0.01)
torch.cuda.synchronize()
if ends:
    times = [
        [number, before.elapsed_time(after)] for number, (before, after) in enumerate(itertools.pairwise(ends), 1)
    ]
    Path("clock.json").write_text(json.dumps(times))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
print("done")
