"""The `ddp` job: several ranks on this machine. Started plainly it becomes torchrun, which starts the ranks."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from training_harness.jobs.common import JobError, JobParser, launch_ranks, not_negative, positive
from training_harness.jobs.language import add_options, make_loader, make_model, train

_SLOW_SECONDS = 0.030


def run_rank(options: argparse.Namespace, backend: str) -> None:
    """Train as the rank that torchrun's environment names; the first rank prints."""
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend)
    try:
        model = DistributedDataParallel(make_model(options).to(device))
        if options.slow_rank == rank:
            model.register_forward_pre_hook(lambda _model, _inputs: time.sleep(_SLOW_SECONDS))
        ranks_count = torch.distributed.get_world_size()
        loader = make_loader(options, options.batch_size * ranks_count, options.batch_size, DistributedSampler)
        steps = train(model, loader, device, log=rank == 0)
        if rank == 0:
            print(f"done: {len(steps)} steps in each of {ranks_count} ranks, {backend}", flush=True)
    finally:
        torch.distributed.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    """Run the job, or this rank's part of it."""
    parser = JobParser("ddp", "A small transformer under DistributedDataParallel: torchrun with several ranks.")
    parser.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks")
    backend_help = "[default: nccl where each rank has a GPU, else gloo]"
    parser.add_argument("--backend", choices=("gloo", "nccl"), help=backend_help)
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="windows per step and rank")
    parser.add_argument(
        "--slow-rank", type=not_negative, metavar="RANK", help="rank that takes 30 ms longer per step"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    gpus_count, ranks_count = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc))
    backend = options.backend or ("nccl" if gpus_count >= ranks_count else "gloo")
    if backend == "nccl" and gpus_count < ranks_count:
        raise JobError(
            f"--backend nccl needs a GPU for each of {ranks_count} ranks, and this machine has {gpus_count}; "
            "give --backend gloo"
        )
    if "RANK" not in os.environ:
        launch_ranks(options.nproc, ["ddp", *arguments])
    run_rank(options, backend)
