"""Batches that are slow together in time, on simulated runs: the samples' own fault, or that of the time."""

import pytest
from loading_runs import STEADY, loading_findings
from simulated_runs import jittered, simulate

EPOCHS, BATCHES = 3, 300


def slow_at(begins):
    """Return service times that are slow for 12 batches of each epoch; they begin at these indices."""
    epochs = {}

    def service(generator, worker, index):
        epoch = epochs[index] = epochs.get(index, -1) + 1
        is_slow = begins[epoch] <= index < begins[epoch] + 12
        return (1.5 if is_slow else 0.02) * generator.uniform(0.9, 1.1)

    return service


def per_index(seconds_of):
    return lambda _generator, _worker, index: seconds_of(index)


def findings(begins, **settings):
    run = STEADY | {"service": slow_at(begins), "batches": BATCHES, "epochs": EPOCHS}
    return loading_findings(simulate(**run, **settings))


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"sampler": "RandomSampler"}, (100, 100, 100)),
        ({"sampler": "DistributedSampler", "shuffle": True}, (100, 100, 100)),
        ({"sampler": "SequentialSampler"}, (60, 120, 240)),
    ],
    ids=["shuffled", "shuffled and shared out", "other data in each epoch"],
)
def test_workers_that_are_slow_at_the_same_times_are_no_slow_samples(settings, begins):
    kinds, found = findings(begins, **settings)
    assert kinds == [("workers-too-slow", "warning")]
    finding = found["workers-too-slow"]
    assert "Most workers of loader 0 are slow at the same times: in 3 spells of about" in finding.summary
    assert [str(one.value).count("-") for one in finding.evidence if one.name == "slow_spells"] == [3]
    assert finding.advice[0].text.startswith("Find out what is busy at these times")


@pytest.mark.parametrize(
    "settings", [{"sampler": "SequentialSampler"}, {"sampler": "DistributedSampler", "shuffle": False}]
)
def test_the_same_slow_data_in_each_epoch_is_slow_samples(settings):
    assert findings((100, 100, 100), **settings)[0] == [("straggler-samples", "warning")]


def test_workers_that_open_their_next_shards_in_the_same_round_are_not_slow_at_the_same_times():
    run = STEADY | {"batches": 900, "service": per_index(lambda index: 1.5 if index // 4 % 25 == 7 else 0.02)}
    assert loading_findings(simulate(**run, iterable=True))[0] == [("straggler-samples", "warning")]


@pytest.mark.parametrize(
    ("seconds_less", "kind"), [(0.04, "workers-too-slow"), (0.0, "straggler-samples")], ids=["ends", "begins"]
)
def test_neighbours_in_the_data_that_are_slow_until_the_same_moment_wait_for_one_thing(seconds_less, kind):
    """Each worker begins its batch of a round 40 ms after the one before."""
    run = STEADY | {"batches": 900, "consumer": lambda _generator, _k: 0.04}
    run["service"] = per_index(lambda k: 1.5 - seconds_less * (k % 100 - 50) if 50 <= k % 100 < 54 else 0.02)
    assert loading_findings(simulate(**run, sampler="SequentialSampler"))[0] == [(kind, "warning")]


def test_slow_samples_among_spells_are_not_counted_as_spells():
    """Half of the slow batches come together, the others alone."""
    slow = {*range(100, 108), *range(400, 408), *range(700, 708), *range(30, 870, 30)}
    run = STEADY | {"batches": 900, "service": per_index(lambda index: 1.5 if index in slow else 0.02)}
    assert loading_findings(simulate(**run, sampler="RandomSampler"))[0] == [("straggler-samples", "warning")]


def test_the_only_worker_is_slow_at_times():
    slow = {*range(50, 60), *range(150, 160)}
    service = per_index(lambda index: 1.5 if index in slow else 0.02)
    run = STEADY | {"workers": 1, "consumer": jittered(0.2), "service": service}
    kinds, found = loading_findings(simulate(**run, sampler="RandomSampler"))
    assert kinds == [("workers-too-slow", "warning")]
    assert found["workers-too-slow"].summary.startswith("The worker of loader 0 is slow at times: in 2 spells")


def test_slow_samples_that_come_alone_are_stragglers():
    run = STEADY | {"batches": 900}

    def service(generator, worker, index):
        return (1.5 if index % 25 == 7 else 0.02) * generator.uniform(0.9, 1.1)

    kinds, _ = loading_findings(simulate(**run | {"service": service}, sampler="RandomSampler"))
    assert kinds == [("straggler-samples", "warning")]


def test_a_few_slow_batches_of_a_training_process_are_named():
    def service(generator, worker, index):
        return 1.0 if index % 50 == 7 else 0.01

    run = STEADY | {"workers": 0, "batches": 400, "service": service}
    kinds, found = loading_findings(simulate(**run))
    assert kinds == [("inline-loading", "warning")]
    assert "2.0% of the batches are slow ones" in found["inline-loading"].summary
    assert "straggler_batches" in {one.name for one in found["inline-loading"].evidence}
