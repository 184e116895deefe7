"""Memory over batch size: the line, its interval, and what fits."""

import math

import numpy as np
import pytest
from simulated_runs import MAIN, START_SECONDS, sample_host, sample_process, simulate

from collector.commands.batch_trials import Row, as_json
from collector.diagnosis.batch_sizes import Sized, fit, micro_batch, sized
from collector.diagnosis.loops import loops
from training_harness.records import ROLE_MAIN, ROLE_WORKER

MIB = 2**20


def points(sizes, *, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Sized(
            batch_size=size,
            samples_per_second=100.0,
            memory_bytes=(500 + 2 * size) * MIB + noise * MIB * rng.normal(),
            room_bytes=4000.0 * MIB,
            resource="host memory",
        )
        for size in sizes
    ]


def test_the_line_gives_the_largest_batch_that_fits():
    line = fit(points([16, 32, 64]))
    assert line.at(128)[0] == pytest.approx(756 * MIB)
    assert line.largest(4000 * MIB) == pytest.approx((1750, 1750), abs=1)
    assert fit(points([32, 32])) is None
    assert not math.isfinite(fit(points([16, 32])).at(64)[2]), "two points say nothing of their scatter"
    assert fit(points([16, 32])).largest(4000 * MIB) is None


def test_the_interval_holds_what_comes_as_often_as_it_says():
    inside, careful = 0, 0
    for seed in range(400):
        *known, new = points([16, 32, 64, 128, 256], noise=30, seed=seed)
        line = fit(known)
        _, low, high = line.at(256)
        inside += low <= new.memory_bytes <= high
        careful += line.largest(4000 * MIB)[0] <= line.largest(4000 * MIB)[1]
    assert 0.85 <= inside / 400 <= 0.95
    assert careful == 400


def test_what_a_process_held_before_it_shared_it_with_its_workers_is_not_counted_twice():
    script = simulate(workers=1, prefetch=2, service=lambda *_: 0.1, consumer=lambda *_: 0.1, batches=100)
    seconds = START_SECONDS + np.arange(0.2, 11, 0.5)
    pss = np.where(seconds < START_SECONDS + 1.0, 900.0, 300.0) * MIB
    sample_process(script, seconds[::4], MAIN, ROLE_MAIN, private=pss[::4], rss=pss[::4])
    workers = seconds[seconds > START_SECONDS + 1.0]
    private = np.full(len(workers), 200.0 * MIB)
    sample_process(
        script, workers, (MAIN[0], 1000, 7000), ROLE_WORKER, private=private, rss=private, worker=0, loader=0
    )
    sample_host(script, seconds, demand=pss + 2**30, total=10 * 2**30)
    tables = script.tables()
    [loop] = loops(tables)
    found = sized(tables, loop)
    assert found.memory_bytes == 500 * MIB
    assert found.room_bytes == pytest.approx(9 * 2**30 - 2**30 - 900 * MIB)
    assert (found.resource, round(found.samples_per_second / found.batch_size)) == ("host memory", 10)


def test_memory_that_does_not_grow_with_the_batch_has_no_largest():
    flat = [point for size in (16, 32, 64) for point in points([size])[:1]]
    flat = [
        Sized(**{**{name: getattr(p, name) for name in p.__slots__}, "memory_bytes": 500.0 * MIB}) for p in flat
    ]
    assert fit(flat).largest(4000 * MIB) is None


@pytest.mark.parametrize(
    ("effective", "largest", "split"),
    [(256, 100, (64, 4)), (256, 1000, (256, 1)), (7, 3, (1, 7)), (96, 0, (1, 96))],
)
def test_an_effective_batch_is_split_into_equal_ones(effective, largest, split):
    assert micro_batch(effective, largest) == split


def test_programs_are_told_what_was_tried_and_what_follows():
    measured = points([16, 32, 64])
    rows = [Row(size=point.batch_size, predicted=None, measured=point, failure="") for point in measured]
    rows.append(Row(size=4096, predicted=fit(measured).at(4096), measured=None, failure="not tried"))
    told = as_json(rows, measured[0], fit(measured), 96)
    assert [trial["batch_size"] for trial in told["trials"]] == [16, 32, 64, 4096]
    assert told["trials"][0]["measured"]["resource"] == "host memory"
    assert told["trials"][-1]["predicted"]["memory_bytes"] == pytest.approx(8692 * MIB)
    assert told["trials"][-1]["failure"] == "not tried"
    assert told["largest"]["batch_size"] == pytest.approx(1750, abs=1)
    assert told["accumulate"] == {"batch_size": 96, "steps_count": 1}
    unsure = as_json(rows[:2], measured[0], fit(measured[:2]), None)
    assert (unsure["largest"], unsure["accumulate"]) == (None, None)
