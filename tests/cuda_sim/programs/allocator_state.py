"""A few steps on the GPU with a CUDA graph, pinned memory and an error; then PyTorch's allocator statistics.

allocator_state.py FILE

It writes, as JSON: `device` and `unused`, the nested statistics of device 0 and of one that nothing uses, their
private pools apart, as [[id, statistics]]; `host`, those of pinned memory; and `snapshot`, with its history.
"""

import contextlib
import gzip
import json
import sys
from pathlib import Path

import torch
from torch import nn

torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=50)
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.zeros(64, 256, device="cuda")


def step():
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
for graph in graphs:
    with torch.cuda.graph(graph):
        step()
in_use, freed = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (1 << 20, 4 << 20))
del freed


def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


with contextlib.suppress(torch.cuda.OutOfMemoryError):
    take(1 << 40)
take(400 << 20)  # free at once, and in the cache: so the next finds no room until that is flushed
take(500 << 20)
torch.cuda.empty_cache()
kept = [take(3 << 20) for _ in range(8)]
kept[0].record_stream(side)
torch.cuda._sleep(10**12)
with torch.cuda.stream(side):
    torch.cuda._sleep(10**12)
del kept[::2]


def told(device):
    """Return the statistics of a device, and its private pools, whose keys JSON does not know."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    pools = statistics.pop("reserved_bytes_by_private_pools")
    return {**statistics, "private_pools": [[list(pool), of_pool] for pool, of_pool in pools.items()]}


state = {
    "device": told(0),
    "unused": told(1),
    "host": torch.cuda.host_memory_stats_as_nested_dict(),
    "snapshot": torch.cuda.memory._snapshot(0),
}
Path(sys.argv[1]).write_bytes(gzip.compress(json.dumps(state).encode(), 9, mtime=0))
