"""Code that torch.compile compiles again and again: what it costs, and what its twins cost."""

import numpy as np
import pytest
from simulated_runs import finish, jittered, simulate

from collector.diagnosis.stalls.main_thread_pause import find_pauses

SECONDS_EACH = 0.5
STEPS = 200


def pauses(recompiled, *, gave_up=False, condition="k.scale == 3.0", functions=1, other_pauses=()):
    """Findings of a training of 200 steps that first compiles, and compiles again within these steps."""

    def consumer(generator, k):
        return jittered(0.02)(generator) + (SECONDS_EACH if k in (*recompiled, *other_pauses) else 0.0)

    script = simulate(workers=2, prefetch=2, service=jittered(0.005), consumer=consumer, batches=STEPS)
    ends = np.sort(np.concatenate([rows["time_ns"] for rows in script.parts["step"]])) / 1e9
    compiled(script, ends[0] - 0.01, 0)
    for number, step in enumerate(recompiled, 1):
        compiled(script, ends[step] - 0.001, number, line=number % functions, reason=condition)
    if gave_up:
        compiled(script, ends[recompiled[-1] + 1] - 0.001, len(recompiled), reason=condition, gave_up=True)
    return find_pauses(finish(script).tables())


def compiled(script, end, again_count, *, line=0, reason=None, gave_up=False):
    script.event(
        end,
        "compilation",
        begun_ns=round((end - SECONDS_EACH) * 1e9),
        function=None if gave_up else f"train.py:{8 + line}, in f",
        reason=reason,
        gave_up=gave_up,
        again_count=again_count,
        again_ns=round(again_count * SECONDS_EACH * 1e9),
    )


def test_repeated_compilation_is_a_pause_with_its_condition():
    [pause] = pauses(range(10, 190, 9))
    assert (pause.kind, pause.severity, pause.since_step) == ("main-thread-pause", "warning", 10)
    assert "20 times, 500 ms each" in pause.summary
    assert "train.py:8, in f" in pause.summary
    assert pause.value_of("lost_seconds") == pytest.approx(20 * SECONDS_EACH)
    assert "k.scale == 3.0" in pause.advice[0].text


def test_sizes_that_vary_have_their_own_advice():
    [pause] = pauses(range(10, 190, 9), condition="tensor 'x' size mismatch at index 0. expected 8, actual 9")
    assert "dynamic=True" in pause.advice[0].text


def test_recompilations_that_ended_early_are_information():
    [pause] = pauses(range(2, 20, 2))
    assert pause.severity == "info"


def test_limit_of_recompilations_is_told():
    [pause] = pauses(range(2, 10), gave_up=True)
    assert "run uncompiled" in pause.summary


def test_recompilations_that_are_over_hide_no_regular_pause():
    over, regular = pauses(range(11, 18), other_pauses=range(30, 200, 20))
    assert "torch.compile" in over.summary
    assert regular.value_of("pause_distance_count") == 20


@pytest.mark.parametrize(
    ("recompiled", "functions"),
    [([], 1), ([3, 40], 1), (range(20, 27), 7)],
    ids=["compiled once", "compiled for two more sizes", "seven parts between graph breaks, for one more size"],
)
def test_few_compilations_are_no_pause(recompiled, functions):
    assert pauses(recompiled, functions=functions) == []
