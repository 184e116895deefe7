"""A training whose memory comes and goes, and runs out now and then.

gauges.py FILE [--fraction RATIO]

It writes what PyTorch's own statistics say just before each optimizer step to a file, as JSON objects.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--fraction", type=float)
options = parser.parse_args()
STEPS = 150
#: Column of the `device_memory` stream -> PyTorch's name.
CURRENT = {
    "allocated_bytes": "allocated_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "active_bytes": "active_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "allocation_count": "allocation.all.current",
    "segment_count": "segment.all.current",
    "alloc_retry_count": "num_alloc_retries",
    "oom_count": "num_ooms",
    "device_alloc_count": "num_device_alloc",
    "device_free_count": "num_device_free",
}
PINNED = {
    "pinned_allocated_bytes": "allocated_bytes.current",
    "pinned_active_bytes": "active_bytes.current",
}

model = nn.Linear(256, 256).cuda()
if options.fraction:
    torch.cuda.set_per_process_memory_fraction(options.fraction)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
statistics, chance = [], random.Random(1)


def write(*_):
    of_device, of_host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    told = {name: of_device[key] for name, key in CURRENT.items()} | {n: of_host[k] for n, k in PINNED.items()}
    statistics.append(told)


optimizer.register_step_pre_hook(write)
kept, side = [], torch.cuda.Stream()
for step in range(STEPS):
    size = chance.randrange(1 << 10, 10 << 20)
    try:
        kept += [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        if step % 3 == 0:
            kept[-1].record_stream(side)
        if step % 50 == 49:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        kept.clear()
    while len(kept) > 6 + step % 8:
        kept.pop(chance.randrange(len(kept)))
    pinned = torch.empty(size >> 4, dtype=torch.uint8, pin_memory=True) if step % 2 else None
    optimizer.zero_grad()
    model(torch.zeros(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
options.file.write_text(json.dumps(statistics))
