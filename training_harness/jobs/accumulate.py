"""The `accumulate` job: the same effective batch from smaller and smaller micro-batches, and the memory of each."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch

from training_harness.jobs.common import JobError, JobParser, positive
from training_harness.jobs.language import add_options, best_device, make_loader, make_model, train

#: Largest difference between losses of the same training: sums in another order are rounded differently.
TOLERANCE = 1e-3


class Choice(NamedTuple):
    """Needs of one micro-batch size: `memory_bytes` has a name for each figure, `losses` one value per step."""

    micro_batch: int
    accumulation: int
    step_seconds: float
    memory_bytes: dict[str, int]
    losses: list[float]


def measure(options: argparse.Namespace, micro_batch: int, *, log: bool = False) -> Choice:
    """Train in this process, which should not have trained before: its peaks are never reset."""
    device, accumulation = best_device(), options.effective_batch // micro_batch
    model, loader = make_model(options).to(device), make_loader(options, options.effective_batch, micro_batch)
    before_bytes = highest_resident_bytes()
    steps = train(model, loader, device, accumulation=accumulation, log=log)
    if device.type == "cuda":
        peaks_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        memory_bytes = dict(zip(("peak allocated", "peak reserved"), peaks_bytes, strict=True))
    else:
        memory_bytes = {"peak resident": highest_resident_bytes(), "before training": before_bytes}
    step_seconds = statistics.median(step.seconds for step in steps)
    return Choice(micro_batch, accumulation, step_seconds, memory_bytes, [step.loss for step in steps])


def highest_resident_bytes() -> int:
    """Return VmHWM of this process. `ru_maxrss` would not do: it survives exec (getrusage(2))."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def measure_apart(options: argparse.Namespace, micro_batch: int) -> Choice | None:
    """Train in a new process; return None if the training did not fit into memory."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure, options, micro_batch).result()
    except (torch.cuda.OutOfMemoryError, BrokenProcessPool):
        return None


def compare(options: argparse.Namespace) -> list[Choice]:
    """Measure each micro-batch and print the table."""
    choices: list[Choice] = []
    for micro_batch in options.micro_batch:
        alone = len(options.micro_batch) == 1
        choice = measure(options, micro_batch, log=True) if alone else measure_apart(options, micro_batch)
        if choice is None:
            print(f"{micro_batch:>11}  does not fit: its process ran out of memory", flush=True)
            continue
        if not choices:
            names = "  ".join(f"{name:>15} MiB" for name in choice.memory_bytes)
            print(f"micro-batch  accumulation  ms a step  {names}  first loss  last loss")
        choices.append(choice)
        sizes = "  ".join(f"{size_bytes / 2**20:>19.0f}" for size_bytes in choice.memory_bytes.values())
        start = f"{micro_batch:>11}  {choice.accumulation:>12}  {choice.step_seconds * 1e3:>9.0f}"
        print(f"{start}  {sizes}  {choice.losses[0]:>10.5f}  {choice.losses[-1]:>9.5f}", flush=True)
    return choices


def agreement(choices: Sequence[Choice]) -> str:
    """Describe the largest difference between the loss trajectories, over all steps."""
    trajectories = zip(*(choice.losses for choice in choices), strict=True)
    spread = max(max(losses) - min(losses) for losses in trajectories)
    verdict = "the same training" if spread <= TOLERANCE else "NOT the same training"
    steps_count = len(choices[0].losses)
    return f"losses differ by at most {spread:.1e} over {steps_count} steps (tolerance {TOLERANCE:.0e}): {verdict}"


def main(arguments: Sequence[str]) -> None:
    """Run the job."""
    parser = JobParser("accumulate", "A small transformer language model whose gradients are accumulated.")
    parser.add_argument("--effective-batch", type=positive, default=256, metavar="N", help="windows per step")
    several = "windows at once; several are compared, each in a process of its own"
    parser.add_argument("--micro-batch", type=positive, nargs="+", default=[16], metavar="N", help=several)
    add_options(parser)
    options = parser.parse_args(arguments)
    for micro_batch in options.micro_batch:
        if options.effective_batch % micro_batch:
            whole = f"--effective-batch {options.effective_batch}"
            raise JobError(f"--micro-batch {micro_batch} does not divide {whole}; choose one that does")
    where = "GPU memory in PyTorch's allocator" if torch.cuda.is_available() else "CPU memory of the whole process"
    print(f"effective batch {options.effective_batch}, {options.steps} steps; {where}", flush=True)
    choices = compare(options)
    if len(choices) > 1:
        print(agreement(choices))
    print(f"done: {options.steps} steps", flush=True)
