"""A rank that waits in a collective for one that has ended, and trainings that follow each other in one run."""

from __future__ import annotations

import pytest
from hanging_trainings import OTHER_RANK, only, stacks, training
from simulated_runs import MAIN, START_SECONDS, sample_process
from stack_events import IN_BACKWARD, LOCK, process

from training_harness.records import ROLE_MAIN

FIRST = (("node", 60, 3000), ("node", 61, 3001))
ENDED = "had ended by then, and enters no collective."


def start(key, rank, launcher, *, script=None, seconds=(10.0,), alive=(1,)):
    """Add a rank that its launcher started, with the collector's samples of it."""
    script = training(script=script, key=key, rank=rank)
    script.events[-3]["parent_pid"] = launcher
    assert script.events[-3]["kind"] == "process-start"
    size = [2**30] * len(seconds)
    times = [START_SECONDS + second for second in seconds]
    return sample_process(script, times, key, ROLE_MAIN, private=size, rss=size, alive=alive)


def waiting(script):
    """Return the finding on rank 0, which waits in a collective."""
    return only(stacks(script, process(MAIN, IN_BACKWARD, LOCK), silent=(MAIN,)))


@pytest.mark.parametrize(("ended_at", "is_named"), [(20.0, True), (90.0, False)])
def test_a_rank_that_had_ended_before_is_named_where_another_one_waits_in_a_collective(ended_at, is_named):
    script = start(MAIN, 0, 50)
    script = start(OTHER_RANK, 1, 50, script=script, seconds=(10.0, ended_at), alive=(1, 0))
    summary = waiting(script).summary
    assert (f"Rank 1 (pid 200) {ENDED}" in summary) == is_named
    assert ("waiting in a collective" in summary) == is_named


@pytest.mark.parametrize("has_other_rank", [True, False])
@pytest.mark.parametrize("launchers", [(40, 50), (50, 50)], ids=["torchrun twice", "mp.spawn twice"])
def test_a_rank_of_a_training_before_is_not_the_one_that_has_ended(launchers, has_other_rank):
    script = None
    for rank, key in enumerate(FIRST):
        script = start(key, rank, launchers[0], script=script, seconds=(-30.0, -10.0), alive=(1, 0))
    script = start(MAIN, 0, launchers[1], script=script)
    if has_other_rank:
        script = start(OTHER_RANK, 1, launchers[1], script=script)
    assert ENDED not in waiting(script).summary


def test_a_rank_of_another_training_at_the_same_time_is_not_the_one_that_has_ended():
    script = start(MAIN, 0, 50)
    for rank, key in enumerate(FIRST):
        script = start(key, rank, 40, script=script, seconds=(10.0, 20.0), alive=(1, 0))
    assert ENDED not in waiting(script).summary
