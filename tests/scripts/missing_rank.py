"""A training of two ranks, of which rank 1 stops before a collective that rank 0 enters: missing_rank.py SECONDS.

That collective fails after these seconds. As NCCL's watchdog does, each rank writes the dump of its Flight Recorder
to a file whose name begins with TORCH_FR_DUMP_TEMP_FILE: every second from then on, and when the collective fails.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

RANK = int(os.environ["RANK"])
LAST_STEP = 5


def write_dump():
    path = os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(RANK)
    with open(f"{path}.new", "wb") as file:
        file.write(_dump_fr_trace())
    os.replace(f"{path}.new", path)


def write_dumps():
    while True:
        time.sleep(1)
        write_dump()


def hang_missing_rank():
    threading.Event().wait()


def average(gradient):
    dist.all_reduce(gradient)


dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(LAST_STEP + 1):
    weight.square().mean().backward()
    if step == LAST_STEP:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=float(sys.argv[1])))
        threading.Thread(target=write_dumps, daemon=True).start()
        if RANK == 1:
            hang_missing_rank()
    try:
        average(weight.grad)
    except RuntimeError:
        write_dump()
        raise
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
