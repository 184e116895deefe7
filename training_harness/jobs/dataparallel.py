"""The `dataparallel` job: one process with nn.DataParallel over the visible GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from training_harness.jobs.common import (
    JobParser,
    add_loader_options,
    add_model_options,
    loader_arguments,
    positive,
)
from training_harness.jobs.language import Text, best_device, make_model, train


def main(arguments: Sequence[str]) -> None:
    """Run the `dataparallel` job."""
    parser = JobParser("dataparallel", "A small transformer under nn.DataParallel, on all GPUs that are visible.")
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="windows per step, of all GPUs"
    )
    add_model_options(parser)
    add_loader_options(parser, num_workers=1)
    options = parser.parse_args(arguments)
    devices_count, device = torch.cuda.device_count(), best_device()
    if device.type == "cuda":
        print(f"nn.DataParallel over {devices_count} GPU{'s' if devices_count > 1 else ''}", flush=True)
    else:
        print("no GPU is visible: nn.DataParallel runs on one device, the CPU", flush=True)
    model = nn.DataParallel(make_model(options).to(device))
    text = Text(options.steps * options.batch_size, options.length, seed=options.seed)
    steps = train(model, DataLoader(text, batch_size=options.batch_size, **loader_arguments(options)), device)
    for number in range(devices_count):
        print(f"cuda:{number}  peak {torch.cuda.max_memory_allocated(number) / 2**20:.0f} MiB", flush=True)
    print(f"done: {len(steps)} steps", flush=True)
