"""Measure the cost of recording a stage.

    python -m benchmarks.stages [--blocks 300]

The first rows are calls that do nothing, again and again, so recording is all of their cost. The others are calls
of a loop that reads, resizes, turns and converts small pictures, so that the caches hold the loop's data and not
ours. Blocks of the loop run with recording and without, in random order within each pair. The lower quartile and
the median of both are compared, in CPU time of the thread. The budget is 2 µs per call.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import cast

import cv2
import numpy as np
import torch

from training_harness import stage
from training_harness.hooks.stages import stage_calls, stages

ITEMS_PER_BLOCK = 20
CALLS_PER_ITEM = 5
REPEATS = 100_000


def nothing() -> None:
    pass


def hot_ns(call: Callable[[], object]) -> float:
    """The best of ten times that one call takes."""
    return min(timeit.repeat(call, number=REPEATS, repeat=10)) / REPEATS * 1e9


def hot_rows() -> list[tuple[str, float]]:
    hook = stage_calls.install("torch")
    assert hook is not None
    nothing.__module__ = cast("str", None)  # as OpenCV's
    noted, bare = stage_calls.time_calls(nothing, "augment", hook), hot_ns(nothing)
    named, tensor, unpatched = stage("augment"), torch.ones(1), inspect.unwrap(torch.Tensor.to)

    def user_stage() -> None:
        with named:
            pass

    rows = [
        ("recognised call", hot_ns(noted) - bare),
        ("with stage(...)", hot_ns(user_stage) - bare),
        (
            "Tensor.to that copies nothing",
            hot_ns(lambda: tensor.to("cpu")) - hot_ns(lambda: unpatched(tensor, "cpu")),
        ),
    ]
    stages._UNREAD_CALLS = 0
    rows.insert(1, ("recognised call, CPU clock read", hot_ns(noted) - bare))
    stages._UNREAD_CALLS = 15
    hook.remove()
    rows.append(("recognised call, detached", hot_ns(noted) - bare))
    return rows


def items(path: str, count: int) -> int:
    """Make some items of five recognised calls each; returns the CPU time of one item, in ns."""
    begun_ns = time.thread_time_ns()
    for _ in range(count):
        picture = cv2.resize(np.asarray(cv2.imread(path)), (64, 48))
        torch.from_numpy(cv2.cvtColor(cv2.flip(picture, 1), cv2.COLOR_BGR2RGB)).float().mean()
    return (time.thread_time_ns() - begun_ns) // count


def loop_rows(blocks: int) -> list[tuple[str, float]]:
    took_ns: dict[bool, list[int]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "a.jpg")
        cv2.imwrite(path, np.random.default_rng(0).integers(0, 255, (96, 128, 3), np.uint8))
        cv2.setNumThreads(0)
        torch.set_num_threads(1)
        items(path, ITEMS_PER_BLOCK)
        for _ in range(blocks):
            for noting in random.sample([False, True], 2):
                installed = [stage_calls.install(module) for module in ("torch", "cv2") if noting]
                took_ns[noting].append(items(path, ITEMS_PER_BLOCK))
                for hook in filter(None, installed):
                    hook.remove()
    bare, noted = (statistics.quantiles(took_ns[noting], n=4) for noting in (False, True))
    print(f"the loop: {bare[1] / 1000:.0f} µs per item, {CALLS_PER_ITEM} calls each\n")
    quartile, median = ((noted[at] - bare[at]) / CALLS_PER_ITEM for at in (0, 1))
    return [("call in the loop, lower quartile", quartile), ("call in the loop, median", median)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=300, help="pairs of blocks of the loop")
    for name, added_ns in loop_rows(parser.parse_args().blocks) + hot_rows():
        print(f"{name:40}{added_ns / 1000:8.2f} µs added")


if __name__ == "__main__":
    main()
