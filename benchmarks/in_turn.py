"""Blocks of training steps, bare and attached in turn."""

import random
from collections.abc import Callable
from typing import TypeVar

from training_harness import attach, detach

T = TypeVar("T")


def in_turn(block: Callable[[], T], pairs: int, run_dir: str) -> dict[bool, list[T]]:
    """Return what a block returns each time it runs bare (False) and attached (True).

    Both run once in each pair, in random order, so that they meet the same machine. One attached block before them
    does not count.
    """
    attach(run_dir)
    block()
    taken: dict[bool, list[T]] = {False: [], True: []}
    for _ in range(pairs):
        for attached in random.sample((False, True), 2):
            if attached:
                attach(run_dir)
            else:
                detach()
            taken[attached].append(block())
    detach()
    return taken
