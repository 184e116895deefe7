"""Trials of `tidegauge tune` that ran out of memory, by the recorded runs of real deaths."""

import pytest

from collector.agent.trial import memory_shortage
from collector.diagnosis import load_tables
from collector.store import Run
from tests.recorded_runs import unpack


@pytest.mark.parametrize(
    ("name", "exit_status", "words"),
    [
        ("oom-worker", 1, "The kernel killed worker"),
        ("oom-main", -9, "The kernel killed the training process"),
        ("oom-main", 137, "The kernel killed the training process"),  # as a shell reports it
        ("killed", -9, "the training was killed by SIGKILL, which the kernel sends when memory runs out"),
        ("worker-killed", 1, "a worker was killed by SIGKILL"),
    ],
)
def test_a_death_for_lack_of_memory_names_its_victim(name, exit_status, words, tmp_path):
    assert words in memory_shortage(load_tables(Run(unpack(name, tmp_path))), exit_status)


@pytest.mark.parametrize(("name", "exit_status"), [("crash", 1), ("killed", None), ("main-leak", None)])
def test_other_ends_are_no_lack_of_memory(name, exit_status, tmp_path):
    assert not memory_shortage(load_tables(Run(unpack(name, tmp_path))), exit_status)
