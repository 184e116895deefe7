"""Traces of the lines whose allocations stay alive, on real tensors."""

import gc

import torch

from training_harness.hooks.on_request.allocation_growth import FRAMES, Growth, growth_between


def use(numbers: torch.Tensor, *, fails: bool) -> torch.Tensor:
    """Make a tensor, and raise an error or return another one."""
    doubled = numbers * 2
    if fails:
        raise ValueError("a sample that cannot be used")
    return doubled + 1


def test_tensors_that_only_a_kept_exception_holds_are_marked():
    errors, results, numbers = [], [], torch.zeros(1000)
    trace = Growth(torch, 20)
    first = trace._take_mark()
    try:
        for step in range(10):
            try:
                results.append(use(numbers, fails=step % 2 == 0))
            except ValueError as error:
                errors.append(error)
        last = trace._take_mark()
    finally:
        trace.stop()
    assert gc.get_freeze_count() == 0
    grown = growth_between(first, last, "steps")
    rows = [row for row in grown["rows"] if row["device"] == "cpu"]
    lines = {row["in_traceback"]: grown["frames"][grown["stacks"][row["stack"]][0]][1] for row in rows}
    body = use.__code__.co_firstlineno
    assert lines == {True: body + 2, False: body + 5}
    assert [row["grown_count"] for row in rows] == [5, 5]
    assert len(errors) == len(results) == 5 < FRAMES
