"""The search for the largest batch that fits: which size comes next, and when it is over."""

import numpy as np
import pytest
from simulated_runs import MAIN, START_SECONDS, sample_host, sample_process, simulate

from collector.commands.batch_trials import Row, Search, as_json
from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.tuning.batch_sizes import (
    BatchSizeRun,
    batch_size_run,
    line_through,
    micro_batch,
    next_size,
)
from tests.recorded_runs import recorded
from training_harness.records import ROLE_MAIN, ROLE_WORKER

MIB = 2**20
ROOM = 4000 * MIB


def point(size, memory_mib):
    return BatchSizeRun(
        batch_size=size,
        samples_per_second=100.0,
        memory_bytes=memory_mib * MIB,
        room_bytes=ROOM,
        resource="GPU 0",
        is_device=True,
    )


def search(memory_mib, own, limit_mib=4100, trials=16):
    """Search with a training that takes so much memory; return the sizes tried and the largest that ran."""
    ran, refused, tried = [], [], []
    size = own
    while size is not None and len(tried) < trials:
        tried.append(size)
        needed = memory_mib(size)
        if needed > limit_mib:
            refused.append(size)
        else:
            ran.append(point(size, needed))
        size = next_size(ran, refused)
    assert size is None, tried
    return tried, max(each.batch_size for each in ran)


CURVES = {
    "activations": lambda size: 500 + 2 * size,
    "hidden by the optimizer": lambda size: max(800, 100 + 0.05 * size),
    "a large model": lambda size: 3000 + 0.5 * size,
    "in steps": lambda size: 500 + 20 * np.ceil(1.5 * size / 20),
    "faster than the batch": lambda size: 300 + 0.2 * size + 0.002 * size**1.6,
    "nothing but the batch": lambda size: 0.01 * size,
}


@pytest.mark.parametrize("own", [1, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_largest_batch_that_fits_is_found(curve, own):
    memory = CURVES[curve]
    tried, largest = search(memory, own)
    truth = next(size for size in range(10**6, 0, -1) if memory(size) <= 4100)
    assert 0.85 * truth <= largest <= truth
    ran = 0
    for size in tried:
        assert not ran or size <= 4 * ran
        ran = max(ran, size if memory(size) <= 4100 else 0)
    assert len(tried) <= 11 or own == 1


def test_search_goes_down_if_the_scripts_own_batch_does_not_fit():
    tried, largest = search(CURVES["activations"], 10_000)
    assert tried[1] == 2500
    assert 1500 <= largest <= 1800


def test_no_size_is_predicted_without_a_limit_or_growth():
    unknown = BatchSizeRun(
        batch_size=8,
        samples_per_second=1.0,
        memory_bytes=5.0,
        room_bytes=float("nan"),
        resource="GPU 0",
        is_device=True,
    )
    assert next_size([unknown], []) is None
    assert line_through([point(16, 500), point(32, 500), point(64, 500)]) is None
    assert line_through([point(16, 500), point(32, 500), point(64, 564)]) is None, "two stretches of two slopes"
    assert line_through([point(16, 532), point(32, 564), point(64, 628)]).at(128) == pytest.approx(756 * MIB)


def test_memory_shared_with_workers_is_not_counted_twice():
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
    found = batch_size_run(loop)
    assert found.memory_bytes == 500 * MIB
    assert found.room_bytes == pytest.approx(9 * 2**30 - 2**30 - 900 * MIB)
    assert (found.resource, round(found.samples_per_second / found.batch_size)) == ("host memory", 10)


def test_room_is_the_share_of_the_device_that_the_process_may_use():
    """It may use 30 % of 2 GiB."""
    tables = recorded("share-met")
    [loop] = loops(tables)
    assert 0.9 * 0.3 * 2**31 < batch_size_run(loop).room_bytes < 0.3 * 2**31


@pytest.mark.parametrize(
    ("effective", "largest", "split"),
    [(256, 100, (64, 4)), (256, 1000, (256, 1)), (7, 3, (1, 7)), (96, 0, (1, 96))],
)
def test_effective_batch_is_split_into_equal_micro_batches(effective, largest, split):
    assert micro_batch(effective, largest) == split


def test_json_of_a_search_has_trials_and_conclusions():
    rows = [Row(size=size, measured=point(size, 500 + 2 * size)) for size in (16, 32, 64)]
    rows.append(Row(size=4096, predicted_bytes=8692.0 * MIB, failure="CUDA memory ran out", ran_out=True))
    told = as_json(Search(rows=rows, is_complete=True), 96)
    assert [trial["batch_size"] for trial in told["trials"]] == [16, 32, 64, 4096]
    assert told["trials"][0]["measured"]["resource"] == "GPU 0"
    assert told["trials"][-1]["predicted"]["memory_bytes"] == 8692 * MIB
    assert told["trials"][-1]["failure"] == "CUDA memory ran out"
    assert (told["base_bytes"], told["sample_bytes"]) == pytest.approx((500 * MIB, 2 * MIB))
    assert told["largest"] == {"batch_size": 64, "is_complete": True}
    assert told["accumulate"] == {"batch_size": 48, "steps_count": 2}
    nothing = as_json(Search(rows=[Row(size=64, failure="CUDA memory ran out", ran_out=True)]), 96)
    assert (nothing["largest"], nothing["accumulate"], nothing["base_bytes"]) == (None, None, None)
