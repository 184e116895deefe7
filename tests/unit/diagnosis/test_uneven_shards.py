"""Judge loops whose samples are shared out unevenly: some workers run out of them first, or never have any."""

import pytest
from loading_runs import loading_findings
from simulated_runs import finish, jittered, per_worker, simulate

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.stalls.shard_skew import while_shared
from collector.diagnosis.stalls.verdict import find_stalls


def test_uneven_shards_are_found_with_the_largest_worker():
    run = {"workers": 2, "prefetch": 2, "service": jittered(0.016), "consumer": jittered(0.010), "epochs": 3}
    kinds, found = loading_findings(simulate(shards=[180, 20], batches=200, iterable=True, **run))
    assert kinds == [("shard-skew", "warning")]
    assert found["shard-skew"].locus.worker == 0
    assert found["shard-skew"].value_of("largest_share_ratio") == pytest.approx(1.8)
    assert loading_findings(simulate(shards=[100, 100], batches=200, iterable=True, **run))[0] == []


def test_the_shared_part_of_a_loop_has_the_fetches_of_its_batches_alone():
    run = {"workers": 2, "prefetch": 2, "service": jittered(0.016), "consumer": jittered(0.010), "epochs": 3}
    tables = finish(simulate(shards=[180, 20], batches=200, iterable=True, **run)).tables()
    (loop,) = loops(tables)
    even = while_shared(loop)
    assert len(even.fetches) == len(even.batches) < len(loop.batches) == len(loop.fetches)


def test_a_slow_worker_and_uneven_shards_are_both_named_where_both_cost_time():
    run = {"workers": 3, "prefetch": 2, "consumer": jittered(0.010), "epochs": 4, "batches": 180, "iterable": True}
    run["service"] = per_worker([0.128, 0.024, 0.024], 0.1)
    kinds, found = loading_findings(simulate(shards=[30, 30, 120], **run))
    assert kinds == [("slow-worker", "warning"), ("shard-skew", "warning")]
    assert (found["slow-worker"].locus.worker, found["shard-skew"].locus.worker) == (0, 2)
    assert loading_findings(simulate(shards=[60, 60, 60], **run))[0] == [("slow-worker", "warning")]


def test_a_slow_worker_that_ends_last_has_no_more_than_its_share_of_the_samples():
    """Without the order of batches, the others go on without it."""
    run = {"workers": 2, "prefetch": 2, "consumer": jittered(0.01), "epochs": 3, "batches": 200, "iterable": True}
    kinds, _ = loading_findings(simulate(service=per_worker([0.016, 0.048], 0.1), in_order=False, **run))
    assert "shard-skew" not in dict(kinds)


def test_workers_without_a_shard_are_named_and_the_loop_is_judged_by_the_others():
    run = {"prefetch": 2, "consumer": jittered(0.002), "service": jittered(0.06), "split": (0.02, 0.0, 0.98)}
    script = finish(simulate(workers=4, shards=[100, 100, 0, 0], batches=200, iterable=True, epochs=2, **run))
    found = {finding.kind: finding for finding in find_stalls(script.tables())}
    idle = found["idle-workers"]
    assert idle.severity == "info"
    assert "2 of 4 workers of loader 0 never made a batch (workers 2 and 3)" in idle.summary
    assert [advice.text.partition(" shards")[0] for advice in idle.advice] == ["Split the data into at least 4"]
    slow = [advice.text for advice in found["workers-too-slow"].advice]
    assert slow[0].startswith("Split the data into at least 4 shards")
    assert not any(text.startswith("Set num_workers") for text in slow)


def test_workers_without_a_shard_are_too_many_where_the_others_keep_up():
    run = {"prefetch": 2, "consumer": jittered(0.06), "service": jittered(0.01), "split": (0.02, 0.0, 0.98)}
    script = finish(simulate(workers=4, shards=[100, 100, 0, 0], batches=200, iterable=True, epochs=2, **run))
    (idle,) = [finding for finding in find_stalls(script.tables()) if finding.kind == "idle-workers"]
    assert idle.advice[0].text == "Set num_workers=2"
    assert "at least 4 shards" in idle.advice[1].text


def test_an_epoch_with_fewer_batches_than_workers_leaves_workers_idle():
    run = {"prefetch": 2, "consumer": jittered(0.002), "service": jittered(0.06), "split": (0.02, 0.0, 0.98)}
    script = finish(simulate(workers=8, batches=3, epochs=3, dataset_length=24, batch_size=8, **run))
    (idle,) = [finding for finding in find_stalls(script.tables()) if finding.kind == "idle-workers"]
    assert idle.advice[0].text == "Set num_workers=3"
    assert "an epoch has at most 3 batches" in idle.summary


def test_a_loop_that_takes_one_batch_of_each_new_iterator_has_no_idle_workers():
    run = {"prefetch": 2, "consumer": jittered(0.002), "service": jittered(0.06), "split": (0.02, 0.0, 0.98)}
    script = finish(simulate(workers=2, batches=1, epochs=20, dataset_length=400, batch_size=8, **run))
    assert not [finding for finding in find_stalls(script.tables()) if finding.kind == "idle-workers"]


def test_a_loop_that_is_left_before_each_worker_had_its_turn_shows_no_idle_workers():
    run = {"prefetch": 2, "consumer": jittered(0.002), "service": jittered(0.06), "split": (0.02, 0.0, 0.98)}
    script = finish(simulate(workers=8, batches=5, epochs=1, iterable=True, **run))
    assert not [finding for finding in find_stalls(script.tables()) if finding.kind == "idle-workers"]


def test_a_slow_worker_is_not_helped_by_workers_that_get_no_shard():
    run = {"prefetch": 2, "consumer": jittered(0.01), "service": per_worker([0.128, 0.024, 0.0], 0.1)}
    script = finish(simulate(workers=3, shards=[60, 60, 0], batches=120, iterable=True, epochs=2, **run))
    found = {finding.kind: finding for finding in find_stalls(script.tables())}
    advice = [advice.text for advice in found["slow-worker"].advice]
    assert advice[-1].startswith("Split the data into at least 3 shards")
    assert not any("num_workers=" in text for text in advice)
