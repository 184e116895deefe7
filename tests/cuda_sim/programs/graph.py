"""A training whose step is a CUDA graph, and which keeps memory in the graph's own pool.

graph.py FILE [--unmarked]

It writes what PyTorch says is reserved, and its snapshot says is in private pools, when each replayed step ends. It
calls `training_harness.step()` then, unless it is unmarked.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import training_harness

BATCH, WIDTH, STEPS = 64, 256, 60
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.zeros(BATCH, WIDTH, device="cuda")
statistics = []


def step():
    optimizer.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(3):
        step()
        time.sleep(0.03)  # long enough for device times of each
marks_steps = "--unmarked" not in sys.argv
if marks_steps:
    training_harness.step()
for (rows,) in DataLoader(TensorDataset(torch.zeros(BATCH * STEPS, WIDTH)), batch_size=BATCH):
    batch.copy_(rows)
    graph.replay()
    time.sleep(0.03)
    segments = torch.cuda.memory_snapshot()
    private = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))
    statistics.append({"reserved_bytes": torch.cuda.memory_reserved(), "private_pool_bytes": private})
    if marks_steps:
        training_harness.step()
Path(sys.argv[1]).write_text(json.dumps(statistics))
