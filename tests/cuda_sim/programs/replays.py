"""An inference that replays a CUDA graph without a DataLoader or an optimizer, and keeps each output.

replays.py [--fixed] [--steps N] [--seconds S]
"""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--seconds", type=float, default=0.04)
options = parser.parse_args()
model = nn.Linear(256, 256).cuda()
rows = torch.zeros(1024, 256, device="cuda")
kept = []
with torch.no_grad():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(rows)
    for _ in range(options.steps):
        graph.replay()
        copy = output.clone()
        if not options.fixed:
            kept.append(copy)
        time.sleep(options.seconds)
