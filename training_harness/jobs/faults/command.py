"""The `fault` job: one of the faults, or its twin."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from training_harness.jobs.common import (
    JobError,
    JobParser,
    add_loader_options,
    expect_many_workers,
    launch_ranks,
    positive,
)
from training_harness.jobs.faults import FAULTS
from training_harness.jobs.faults.job import Job


def main(arguments: Sequence[str]) -> None:
    """Run the job."""
    parser = JobParser("fault", "A small training with one known fault; --fixed runs the same job without it.")
    parser.add_argument("kind", nargs="?", metavar="KIND", help="see --list")
    parser.add_argument(
        "--list", action="store_true", help="list each KIND, the finding that it should cause, and its meaning"
    )
    parser.add_argument("--fixed", action="store_true", help="run the healthy twin: the same job without the fault")
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="optimizer steps [default: enough to show the fault]"
    )
    parser.add_argument(
        "--limit-mb", type=positive, default=512, metavar="N", help="size at which a leak stops growing, MiB"
    )
    parser.add_argument(
        "--at-batch", type=positive, default=200, metavar="N", help="batch at which a deadly fault ends the job"
    )
    add_loader_options(parser, num_workers=None)
    options = parser.parse_args(arguments)
    if options.list:
        for kind, fault in sorted(FAULTS.items()):
            print(f"{kind:18} {fault.finding:23} {fault.meaning}{' (GPU)' if fault.needs_gpu else ''}")
        return
    if options.kind not in FAULTS:
        parser.error(
            f"unknown fault {options.kind!r}; --list shows them" if options.kind else "give a KIND, or --list"
        )
    fault = FAULTS[options.kind]
    if fault.needs_gpu and not torch.cuda.is_available():
        raise JobError(f"{options.kind} needs a GPU and CUDA finds none; run it where there is one")
    if fault.ranks_count > 1 and "RANK" not in os.environ:
        launch_ranks(fault.ranks_count, ["fault", *arguments])
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    expect_many_workers()
    print(f"{options.kind}{', fixed' if options.fixed else ''}: {fault.meaning}", flush=True)
    job = Job(options, torch.device("cuda" if fault.needs_gpu else "cpu"))
    job.steps_count, job.num_workers, job.step_seconds = fault.steps_count, fault.num_workers, fault.step_seconds
    fault.spoil(job)
    print(f"done: {job.run()} steps", flush=True)
