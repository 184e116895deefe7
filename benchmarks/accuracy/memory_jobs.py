"""The trainings of the memory benchmark besides built-in faults: leaks of a given rate, look-alikes, deaths.

    python -m benchmarks.accuracy.memory_jobs KIND [--fixed] [--seconds S] [--rate BYTES] [--onset RATIO] [--noise]

Each is the training of `tidegauge job fault`, with another fault. A leak begins at `--onset`. `--noise` adds
lengths that vary (lognormal), an evaluation every 5 s and a checkpoint every 9 s.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import time
from functools import partial

import torch

from benchmarks.accuracy import memory_caches, memory_deaths, memory_healthy
from benchmarks.accuracy.memory_leaks import KINDS, MIB, block, each_step
from training_harness.jobs.common import add_loader_options
from training_harness.jobs.faults.job import Items, Job, sleep

#: Declared by importing them.
_DECLARED = (memory_caches, memory_deaths, memory_healthy)


def disturb(job: Job) -> None:
    """Lengths that vary from step to step, evaluations and checkpoints."""
    lengths, held = random.Random(job.options.seed), [block(1)]
    often, evaluation, checkpoint = (max(1, round(seconds / job.step_seconds)) for seconds in (0.02, 5, 9))

    def work() -> None:
        if job.step % often == 0:
            held[0] = block(8 * MIB * lengths.lognormvariate(0, 0.7))
        if job.step % evaluation >= evaluation // 10:
            del held[1:]
        elif len(held) == 1:
            held.append(block(40 * MIB))
        if job.step % checkpoint == 0:
            torch.save([held[0], job.model.state_dict()], io.BytesIO())

    each_step(job, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seconds", type=float, default=36.0, help="that its steps sleep together")
    parser.add_argument("--step-seconds", type=float, default=0.020)
    parser.add_argument("--rate", type=int, default=256 * 1024, help="bytes kept in each step")
    parser.add_argument("--onset", type=float, default=0.0, help="share of the steps after which it begins")
    parser.add_argument(
        "--fill", type=float, default=2.0, help="length of the training in time constants of a cache"
    )
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    add_loader_options(parser, num_workers=None)
    parser.set_defaults(steps=None, limit_mb=1 << 20)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    job = Job(options, torch.device("cpu"))
    job.step_seconds = options.step_seconds
    job.steps_count = round(options.seconds / options.step_seconds)
    job.dataset = Items(partial(sleep, options.step_seconds / 2), count=10_000_000)
    if options.noise:
        disturb(job)
    KINDS[options.kind](job)
    begun = time.monotonic()
    print(f"{options.kind}: {job.run()} steps in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
