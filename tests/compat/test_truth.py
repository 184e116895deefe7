"""The suite's own count: optimizers that take turns, ranks, and processes without ranks."""

import json

import pytest
from truth import Truth, read


@pytest.fixture
def write(tmp_path):
    """Write the events of a process: (kind, thing, world size, workers)."""

    def write(pid, events):
        lines = [json.dumps([kind, 0, thing, world, workers]) for kind, thing, world, workers in events]
        (tmp_path / f"{pid}.jsonl").write_text("\n".join(lines) + "\n")
        return tmp_path

    return write


def test_alternating_optimizers_count_once_and_successive_ones_add_up(write):
    turns = [("step", thing, 1, 0) for thing in (0, 1, 0, 1, 0)]
    later = [("step", 2, 1, 0)] * 4
    assert read(write(1, turns + later)).steps == 3 + 4


def test_ranks_of_a_group_count_once_and_other_processes_add_up(write):
    write(1, [("step", 0, 2, 0)] * 5)
    write(2, [("step", 0, 2, 0)] * 4)
    assert read(write(3, [("step", 0, 1, 0)] * 7)).steps == 5 + 7


def test_batches_or_forward_passes_are_steps_without_an_optimizer(write):
    forwards = [("forward", 0, 1, 0)] * 6
    assert read(write(1, forwards)) == Truth(6, "forward", 0, 0, 1)
    batches = [("batch", 0, 1, 2)] * 3 + [("batch", 1, 1, 1)] * 2
    assert read(write(1, forwards + batches)) == Truth(5, "batch", 5, 3, 1)


def test_line_cut_short_by_a_kill_is_ignored(write):
    place = write(1, [("step", 0, 1, 0)] * 3)
    with (place / "1.jsonl").open("a") as file:
        file.write('["step", 0, ')
    assert read(place).steps == 3
