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


def test_optimizers_that_take_turns_count_once_and_those_that_follow_each_other_add_up(write):
    turns = [("step", thing, 1, 0) for thing in (0, 1, 0, 1, 0)]
    later = [("step", 2, 1, 0)] * 4
    assert read(write(1, turns + later)).steps == 3 + 4


def test_the_ranks_of_a_group_step_together_and_other_processes_add_up(write):
    write(1, [("step", 0, 2, 0)] * 5)
    write(2, [("step", 0, 2, 0)] * 4)
    assert read(write(3, [("step", 0, 1, 0)] * 7)).steps == 5 + 7


def test_without_an_optimizer_batches_are_steps_and_without_a_loader_forward_passes(write):
    forwards = [("forward", 0, 1, 0)] * 6
    assert read(write(1, forwards)) == Truth(6, "forward", 0, 0, 1)
    batches = [("batch", 0, 1, 2)] * 3 + [("batch", 1, 1, 1)] * 2
    assert read(write(1, forwards + batches)) == Truth(5, "batch", 5, 3, 1)


def test_a_line_cut_short_by_a_kill_is_left_out(write):
    place = write(1, [("step", 0, 1, 0)] * 3)
    with (place / "1.jsonl").open("a") as file:
        file.write('["step", 0, ')
    assert read(place).steps == 3
