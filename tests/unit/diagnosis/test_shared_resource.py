"""Workers that wait for one shared resource, on random fetches."""

import numpy as np
import pytest

from collector.diagnosis.tuning.shared_resource import measure_sharing

GAP = 5e-4  # seconds, of a worker between two fetches


def fetches(serve, *, workers=2, batches=600, spread=0.3, seed=0, pause=0.0):
    """Return the fetches of workers that never pause for the loop.

    Args:
        serve: (how many are busy) -> the speed of each, in the order in which they began.
        spread: of the work of a batch, lognormal.
        pause: mean seconds of a worker between two fetches, in addition to a gap.
    """
    draw = np.random.default_rng(seed)
    left, begun, free = {}, {}, {worker: 0.002 * worker for worker in range(workers)}
    now, found = 0.0, []
    while len(found) < batches:
        for worker in [worker for worker, at in free.items() if at <= now]:
            left[worker], begun[worker] = 0.02 * draw.lognormal(-(spread**2) / 2, spread), now
            del free[worker]
        speeds = dict(zip(left, serve(len(left)), strict=True))
        ends = {worker: now + left[worker] / speed for worker, speed in speeds.items() if speed}
        after = min([*ends.values(), *free.values()])
        for worker, speed in speeds.items():
            left[worker] -= speed * (after - now)
            if ends.get(worker) == after:
                found.append((begun[worker], after, worker))
                free[worker] = after + GAP * draw.lognormal(0, 0.3) + draw.exponential(pause)
        left = {worker: work for worker, work in left.items() if worker not in free}
        now = after
    begins, ends, made_by = (np.array(each) for each in zip(*found, strict=True))
    return begins, ends + draw.exponential(5e-5, len(ends)), made_by


def alone(busy):
    return [1.0] * busy


def in_turn(busy):
    return [1.0, *[0.0] * busy][:busy]


def in_proportion(busy):
    return [1.0 / max(busy, 1)] * busy


def measure(begins, ends, workers):
    return measure_sharing(begins, ends, ends - begins, workers.astype(np.intp), np.arange(len(begins)))


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_workers_served_in_turn_are_found(workers, spread):
    found = measure(*fetches(in_turn, workers=workers, spread=spread))
    assert found.is_shared
    assert not found.is_apart
    assert found.correlation_ratio > 0.5


@pytest.mark.parametrize("workers", [2, 3])
def test_proportional_sharing_is_found_by_the_pauses_of_others(workers):
    found = measure(*fetches(in_proportion, workers=workers, pause=0.01))
    assert found.is_shared
    assert found.slowdown_sigmas > 2.71
    assert found.service.mean() == pytest.approx(0.02, rel=0.05), "what a batch takes if nobody else is served"


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.6, 1.2])
@pytest.mark.parametrize("workers", [2, 4])
def test_independent_workers_are_not_taken_for_sharing(spread, workers):
    found = [measure(*fetches(alone, workers=workers, spread=spread, seed=seed, batches=300)) for seed in range(15)]
    assert not any(each.is_shared for each in found)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_few_far_slower_samples_of_independent_workers_are_no_sharing(workers):
    """One sample in twenty takes fifty times as long, so a batch has none, one or two of them."""
    draw = np.random.default_rng(0)
    costs = (
        0.002 * np.where(draw.random((600, 8)) < 0.05, 50, 1).sum(axis=1) * (1 + 0.03 * draw.exponential(size=600))
    )
    begins, ends, yields = np.zeros((3, len(costs)))
    for batch, cost in enumerate(costs):
        asked = yields[batch - 2 * workers] if batch >= 2 * workers else 0.0
        begins[batch] = max(asked, ends[batch - workers] if batch >= workers else 0.0) + GAP
        ends[batch] = begins[batch] + cost
        yields[batch] = max(ends[batch], yields[batch - 1] + 0.025)
    found = measure(begins, ends, np.arange(len(costs)) % workers)
    assert not found.is_shared
    assert found.is_apart


def test_nearly_equal_batches_served_in_turn_are_a_hint():
    found = measure(*fetches(in_turn, spread=0.005))
    assert found.queue_sigmas > 2.71
    assert found.because == "fetches are late together, and one that begins later ends no later"
    assert not found.is_shared
    assert not found.is_apart


def test_a_busy_machine_and_batches_that_are_sent_meanwhile_prove_no_sharing():
    """Each of two workers waits for itself; it sends a batch before its next fetch or while that is in progress."""
    draw = np.random.default_rng(0)
    busy = 0.001 * draw.exponential(1.0, 3000)
    found = []
    for worker in range(2):
        now = 0.013 * worker
        for _ in range(300):
            before, after = 0.001 * draw.dirichlet((1, 1))
            begun = now + 3e-4 + before
            now = begun + 0.12 + after + busy[int(begun / 0.06)]
            found.append((begun, now, worker))
    measured = measure(*map(np.array, zip(*sorted(found), strict=True)))
    assert measured.because
    assert not measured.is_shared


def test_workers_at_a_fixed_pace_are_not_taken_for_sharing():
    found = []
    for seed in range(10):
        draw = np.random.default_rng(seed)
        due = np.add.outer(0.04 * np.arange(150), [0.0, 0.013]).ravel()
        ends = due + draw.exponential(5e-5, len(due))
        begins = np.concatenate([due[:2] - 0.04, ends[:-2]]) + GAP * draw.lognormal(0, 0.3, len(due))
        found.append(measure(begins, ends, np.tile([0, 1], 150)))
    assert all(each.queue_sigmas > 2.71 for each in found), "one that begins later ends no later"
    assert not any(each.is_shared for each in found)


def test_temporarily_busy_machine_is_no_sharing():
    begins, ends, workers = fetches(alone, spread=0.005)
    busy = np.random.default_rng(0).lognormal(0, 0.08, 1000)[(begins // 0.05).astype(np.intp)]
    numbers = workers.astype(np.intp), np.arange(len(begins))
    assert measure_sharing(begins, ends, (ends - begins) * busy, *numbers).because
    assert not measure_sharing(begins, ends, (ends - begins) * busy, *numbers, queued_ratio=0.1).is_shared


def test_pauses_of_others_show_independent_workers():
    assert measure(*fetches(alone, pause=0.01)).is_apart


def test_pattern_of_long_and_short_batches_is_no_sharing():
    """Four long batches follow four short ones, so that two workers have long ones at the same time."""
    begins, ends, workers = fetches(alone, spread=0.02)
    long = np.arange(len(begins)) // 4 % 2
    found = measure_sharing(begins, ends, 0.02 * (1 + long), workers.astype(np.intp), np.arange(len(begins)))
    assert not found.is_shared


def test_few_stalls_of_all_workers_are_no_sharing():
    begins, ends, workers = fetches(alone, spread=0.2)
    stalled = np.isin(begins // 0.5 % 4, [0]) & (begins % 0.5 < 0.03)
    found = measure_sharing(
        begins, ends, ends - begins + 0.2 * stalled, workers.astype(np.intp), np.arange(len(begins))
    )
    assert stalled.sum() > 10
    assert not found.is_shared


def test_proportional_sharing_without_pauses_is_undecided():
    found = measure(*fetches(in_proportion, spread=0.05, batches=150))
    assert not found.is_shared
    assert not found.is_apart


def test_order_of_the_fetches_does_not_matter():
    drawn = fetches(in_turn)
    shuffled = np.random.default_rng(0).permutation(len(drawn[0]))
    places = np.arange(len(shuffled))
    orders = [slice(None), shuffled]
    found = [measure_sharing(b[o], e[o], (e - b)[o], w[o], places[o]) for o in orders for b, e, w in [drawn]]
    assert found[0].because == found[1].because
    assert found[1].service == pytest.approx(found[0].service[shuffled])
