"""Settings that `tidegauge tune` tries until none can gain, for loaders whose throughput is a formula."""

import math

import numpy as np
import pytest
from simulated_runs import MAIN, jittered, ns, sample_process, simulate

from collector.diagnosis.loading import cores_of_other_programs, loops
from collector.diagnosis.tuning import (
    Candidate,
    Option,
    Outcome,
    Plan,
    Setting,
    nearby_settings,
    plan_trials,
)
from training_harness.records import ROLE_MAIN


def test_cores_of_other_programs_are_those_that_were_busy_beside_the_run():
    pace = {"service": jittered(0.02), "consumer": jittered(0.02)}
    script = simulate(workers=2, prefetch=2, batches=300, cores=4.0, **pace)
    (loop,) = loops(script.tables())
    assert math.isnan(cores_of_other_programs(loop)), "the host was not sampled"
    seconds = 1000 + np.arange(12.0)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(12), rss=np.ones(12), cpu_ns=0.5e9 * seconds)
    busy = {"usable_cores_count": 4.0, "busy_cores_count": 1.75}
    script.add("host", [{"time_ns": ns(second), **busy} for second in seconds], ("node", 90, 4900))
    (loop,) = loops(script.tables())
    assert cores_of_other_programs(loop) == pytest.approx(1.25)


def setting(workers, prefetch=2):
    return Setting(num_workers=workers, prefetch_factor=prefetch)


def predicted(workers, rate):
    one = setting(workers)
    interval = {"batches_per_second": rate, "low": 0.9 * rate, "high": 1.1 * rate}
    return Candidate(
        setting=one,
        predicted=Option(
            setting=one,
            if_shared=None,
            if_apart=None,
            wait_ratio=0,
            memory_bytes=1,
            most_bytes=1,
            fits=True,
            **interval,
        ),
    )


def unpredicted(own, cores):
    return Plan(candidates=tuple(Candidate(setting=one) for one in nearby_settings(own, cores)))


def tried(plan, own, measure):
    """Return the workers of all trials after the first; `measure` gives None where memory runs out."""

    def outcome(one):
        rate = measure(one)
        return Outcome(setting=one, batches_per_second=math.nan if rate is None else rate, fits=rate is not None)

    outcomes = [outcome(own)]
    while (candidate := plan.next(outcomes)) is not None:
        outcomes.append(outcome(candidate.setting))
    return [one.setting.num_workers for one in outcomes[1:]]


@pytest.mark.parametrize(
    ("own", "cores", "rate", "expected"),
    [
        (1, 8, lambda workers: 10 * min(workers, 4), [2, 4, 8, 16]),  # up, until two trials gained nothing
        (0, 8, lambda workers: 10 * min(workers, 2), [1, 2, 4, 8]),
        (8, 2, lambda workers: 10 / max(workers, 2), [4, 2, 1, 0]),  # too many for the cores: down, and never up
        (8, 2, lambda workers: 10 * workers, [4, 2, 16, 32, 64]),  # they wait for a disk: down fails, up gains
        (4, 8, lambda workers: 10, [8, 16, 2, 1]),  # no gain in either direction
        (4, math.inf, lambda workers: 10 / max(workers, 1), [8, 16, 2, 1, 0]),
    ],
)
def test_without_a_prediction_a_direction_ends_after_two_trials_without_a_gain(own, cores, rate, expected):
    assert tried(unpredicted(setting(own), cores), setting(own), lambda one: rate(one.num_workers)) == expected


def test_a_setting_that_does_not_fit_rules_out_larger_ones():
    def rate(one):
        return None if one.num_workers >= 4 else 10.0 * one.num_workers

    assert tried(unpredicted(setting(2), 8), setting(2), rate) == [4, 1, 0]
    # The script's own setting does not fit.
    assert tried(unpredicted(setting(8), 64), setting(8), rate) == [4, 2, 1, 0]


def test_predictions_give_the_order_and_measured_gains_the_end():
    plan = Plan(candidates=(predicted(4, 40), predicted(3, 38), predicted(8, 41), predicted(1, 20)))
    assert tried(plan, setting(2), lambda one: {2: 20, 4: 36, 3: 30, 8: 37}[one.num_workers]) == [4, 3, 8]
    # The prediction was wrong: more workers gain nothing, so after two trials fewer are tried.
    assert tried(plan, setting(2), lambda one: 10) == [4, 3, 1]


def test_a_run_too_short_for_a_prediction_is_tried_from_its_own_setting():
    plan = plan_of(workers=2, batches=20)
    assert plan.current is None
    assert "needs 30 recorded batches" in plan.why_unpredicted
    assert {one.setting.num_workers for one in plan.candidates} >= {0, 1, 4, 8}
    assert {one.setting.prefetch_factor for one in plan.candidates if one.setting.num_workers} == {2}


def test_the_replay_leads_where_it_predicts():
    plan = plan_of(workers=1, batches=400)
    first = plan.candidates[0]
    assert plan.current is not None
    assert first.predicted is not None
    assert first.setting.num_workers > 1
    assert first.predicted.batches_per_second > 1.5 * plan.current.batches_per_second


def test_batches_that_take_longer_to_transfer_than_to_make_are_first_tried_without_workers():
    script = simulate(workers=2, prefetch=2, service=jittered(0.0005), consumer=jittered(0.005), batches=400)
    quick, slow = script.tables(), script.tables()
    slow.streams["batch"]["wait_ns"] += 2_500_000
    slow.streams["step"]["data_wait_ns"] += 2_500_000
    plans = [plan_trials(loops(tables)[0]) for tables in (quick, slow)]
    assert all(plan.current is not None for plan in plans)
    assert 0 not in {one.setting.num_workers for one in plans[0].candidates}
    assert plans[1].candidates[0].setting.num_workers == 0


def plan_of(*, workers, batches):
    script = simulate(workers=workers, prefetch=2, service=jittered(0.04), consumer=jittered(0.01), batches=batches)
    tables = script.tables()
    return plan_trials(loops(tables)[0])
