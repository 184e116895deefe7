"""Measure the time that Tidegauge adds to a training step and to a worker's batch.

    python -m benchmarks.overhead [--blocks 200] [--steps 100] [--image-pairs 300]

Short blocks of steps run bare and attached, in one process and in random order within each pair, so both meet the
same machine. The budget is 10 µs for the training thread and 5 µs for a worker, per step with one batch. With
`num_workers=0` the training thread plays the worker too. The columns are:

- The fastest tenth is that of all steps of all blocks. It is the steadiest figure where cores change their speed
  with the load of others.
- The ratio is that of the medians of the two blocks of a pair, as the median over the pairs, with the time that
  this ratio adds to the step of the fastest tenth. Where the speed changes within seconds, as in virtual
  machines, it says more than a difference.
- The time added to the median, and to the mean, is the median over the pairs of the difference between the two
  blocks. The mean includes costs that occur only now and then (a full metering at most every 2 ms, a write every
  5 ms).

A stage is a recognised call (docs/stages.md). The last row is the cost of a batch that takes more than 5 ms to
make, and so is metered in full and written at once; the 5 ms are subtracted.

At the end, the benchmark measures how much longer the `images` job takes, with its loading in the training
process: pairs of the same two steps, the median of their ratio with its 95 % interval by order statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, _utils

from benchmarks.in_turn import in_turn
from training_harness import layout, session
from training_harness.hooks.loading import fetch_meter, worker
from training_harness.jobs.common import ensure_data
from training_harness.jobs.images import Photographs, small_cnn
from training_harness.jobs.photographs import ensure_photographs

BATCH_SIZE = 8
#: Batches that fit into the pipe between a worker and the training.
QUEUED = 40
Block = Callable[[], list[int]]
"""Runs some steps; returns the duration of each, in ns."""


class Rows(Dataset[np.ndarray]):
    """Small arrays: with tensors, passing shared memory between processes would hide the step."""

    def __init__(self, steps: int) -> None:
        self.rows = np.random.default_rng(0).normal(size=(steps * BATCH_SIZE, 32)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]


def flipped(batch: np.ndarray) -> torch.Tensor:
    """Call one recognised stage."""
    return torch.tensor(cv2.flip(batch, 0))


def training_block(
    num_workers: int,
    steps: int,
    *,
    made_before: bool = False,
    to_tensor: Callable[..., torch.Tensor] = torch.tensor,
) -> Block:
    """A block of training steps below 1 ms, one batch each, which the loop makes a tensor.

    With `made_before` all batches wait in the queue: the workers rest, and share no core and no cache.
    """
    # Persistent, so that no block pays for a fork: the pages that it shares are copied for a while afterwards.
    loader = DataLoader(
        Rows(steps),
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        prefetch_factor=steps if made_before else None,
        collate_fn=np.stack,
    )
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def block() -> list[int]:
        ends_ns = []
        batches = iter(loader)
        time.sleep(0.05 if made_before else 0)
        for batch in batches:
            loss = model(to_tensor(batch)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends_ns.append(time.monotonic_ns())
        return durations(ends_ns)

    return block


def worker_block(steps: int) -> Block:
    """A block of torch's own worker loop, run in this thread and fed with all its indices at once."""
    data = Rows(steps)

    def block() -> list[int]:
        indices: queue.Queue[object] = queue.Queue()
        for index in range(steps):
            indices.put((index, list(range(index * BATCH_SIZE, (index + 1) * BATCH_SIZE))))
        indices.put(None)
        sink = Sink()
        worker.creation.loader = worker.creation.epoch = 0
        # The final None comes without the done event, so that the loop skips no batch.
        with contextlib.suppress(AssertionError):
            _utils.worker._worker_loop(
                0, data, indices, sink, threading.Event(), True, np.stack, False, 0, None, 0, 1, False, None
            )
        _utils.worker._worker_info = None
        return durations(sink.ends_ns)

    return block


def images_block() -> Block:
    """Steps of the `images` job with 8 photographs each, the same and augmented alike in every block."""
    cv2.setNumThreads(0)
    photographs = Photographs(ensure_data("photographs", ensure_photographs), limit=24)
    loader = DataLoader(photographs, batch_size=8)
    loss_of = torch.nn.CrossEntropyLoss()
    model = small_cnn(len(photographs.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def block() -> list[int]:
        torch.manual_seed(0)
        ends_ns = []
        for pictures, labels in loader:
            loss = loss_of(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends_ns.append(time.monotonic_ns())
        return [after - before for before, after in itertools.pairwise(ends_ns)]

    return block


class Sink:
    """A result queue that notes when each batch arrives."""

    def __init__(self) -> None:
        self.ends_ns: list[int] = []

    def put(self, message: object) -> None:
        self.ends_ns.append(time.monotonic_ns())


def durations(ends_ns: list[int]) -> list[int]:
    warm = len(ends_ns) // 4  # the loop is new, and so are its journals: each block attaches again
    return [after - before for before, after in itertools.pairwise(ends_ns[warm:])]


def compare(name: str, block: Block, blocks: int, run_dir: str) -> None:
    taken = in_turn(block, blocks, run_dir)
    bare, with_us = ([value / 1e3 for each in taken[attached] for value in each] for attached in (False, True))
    tenth, tenth_with_us = (statistics.quantiles(values, n=10)[0] for values in (bare, with_us))
    row = f"{name:<26}{tenth:>9.1f}{tenth_with_us - tenth:>8.1f}"
    pairs = list(zip(taken[False], taken[True], strict=True))
    share = statistics.median(statistics.median(after) / statistics.median(before) - 1 for before, after in pairs)
    row += f"{share:>8.1%}{share * tenth:>7.1f}{statistics.median(bare):>9.1f}"
    for middle_of in (statistics.median, statistics.fmean):
        added = [(middle_of(after) - middle_of(before)) / 1e3 for before, after in pairs]
        low, middle, high = statistics.quantiles(added, n=4)
        row += f"{middle:>8.1f} {f'({low:.1f} … {high:.1f})':<16}"
    print(row, flush=True)


def compare_images(pairs: int, run_dir: str) -> None:
    taken = in_turn(images_block(), pairs, run_dir)
    percent = sorted(100 * (sum(b) / sum(a) - 1) for a, b in zip(taken[False], taken[True], strict=True))
    # The median lies between these ranks in 95 % of samples: a binomial count, here by its normal approximation.
    spread = math.ceil(0.98 * math.sqrt(pairs))
    low, high = percent[max(0, pairs // 2 - spread)], percent[min(pairs - 1, pairs // 2 + spread)]
    step_ms = statistics.median(value for each in taken[False] for value in each) / 1e6
    print(
        f"images job, {step_ms:.0f} ms per step of 8 pictures: {statistics.median(percent):+.2f} % "
        f"(95 %: {low:+.2f} … {high:+.2f}; {pairs} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=100, help="steps per block")
    parser.add_argument("--image-pairs", type=int, default=300, help="pairs of two steps of the images job")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'µs per step':<26}{'fastest tenth':^17}{'ratio':^15}{'median':^34}{'mean':^25}")
    columns = f"{'bare':>9}{'added':>8}{'pairs':>8}{'µs':>7}{'bare':>9}"
    print(f"{'':<26}{columns}" + 2 * f"{'   added (quartiles)':<25}")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = str(layout.create_run(Path(folder), name="overhead", argv=[]))
        for name, block in (
            ("training thread", training_block(1, QUEUED, made_before=True)),
            ("the same, worker at work", training_block(1, options.steps)),
            ("num_workers=0", training_block(0, options.steps)),
            ("num_workers=0, one stage", training_block(0, options.steps, to_tensor=flipped)),
        ):
            compare(name, block, options.blocks, run_dir)
        compare("worker", worker_block(options.steps), options.blocks, run_dir)
        usual = fetch_meter.FULL_EVERY_NS, session.HOLD_NS
        fetch_meter.FULL_EVERY_NS = session.HOLD_NS = 0
        compare("worker, batches > 5 ms", worker_block(options.steps), options.blocks, run_dir)
        fetch_meter.FULL_EVERY_NS, session.HOLD_NS = usual
        compare_images(options.image_pairs, run_dir)


if __name__ == "__main__":
    main()
