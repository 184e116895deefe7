"""The `dataparallel` job: one process with nn.DataParallel over the visible GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from training_harness.jobs.common import JobParser, positive
from training_harness.jobs.language import add_options, best_device, make_loader, make_model, train


def main(arguments: Sequence[str]) -> None:
    """Run the `dataparallel` job."""
    parser = JobParser("dataparallel", "A small transformer under nn.DataParallel, on all GPUs that are visible.")
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="windows per step, on all GPUs together"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    devices_count, device = torch.cuda.device_count(), best_device()
    if device.type == "cuda":
        print(f"nn.DataParallel over {devices_count} GPU{'s' if devices_count > 1 else ''}", flush=True)
    else:
        print("no GPU is visible: nn.DataParallel runs on one device, the CPU", flush=True)
    model = nn.DataParallel(make_model(options).to(device))
    steps = train(model, make_loader(options, options.batch_size, options.batch_size), device)
    for number in range(devices_count):
        print(f"cuda:{number}  peak {torch.cuda.max_memory_allocated(number) / 2**20:.0f} MiB", flush=True)
    print(f"done: {len(steps)} steps", flush=True)
