"""The setting that each loop should get, within what the others leave."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from simulated_runs import MAIN, MIB, finish, jittered, ns, sample_host, sample_process, simulate
from test_loader_memory import SECONDS, simulate_training

from collector.diagnosis.loading.loaders import all_loops, loops
from collector.diagnosis.tuning.recommendation import recommendations, settings_json
from collector.diagnosis.tuning.what_if import Limits, forecast
from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN

SLOW, FAST, LOOP = jittered(0.04), jittered(0.001), jittered(0.01)
EPOCH = {"service": SLOW, "consumer": LOOP, "prefetch": 2}


def only(tables):
    (one,) = recommendations(tables)
    return one


def test_slow_loader_gets_more_workers_and_an_iterable_one_stays():
    one = only(simulate(workers=1, batches=400, **EPOCH).tables())
    assert one.best.setting == one.setting
    assert one.setting.num_workers > 1
    assert one.best.low > one.measured
    iterable = only(simulate(workers=1, batches=400, iterable=True, **EPOCH).tables())
    assert (iterable.setting, iterable.best) == (None, None)
    assert "iterable" in iterable.reason


def test_loader_that_keeps_up_gets_its_own_setting():
    one = only(simulate(workers=1, batches=400, prefetch=2, service=FAST, consumer=LOOP).tables())
    assert (one.setting.num_workers, one.best) == (1, None)
    assert "5% faster" in one.reason


def test_few_batches_give_no_setting():
    one = only(simulate(workers=1, batches=60, **EPOCH).tables())
    assert one.setting is None
    assert "it needs 100 recorded batches" in one.reason


def inline_training(*, room_mib):
    """Return the tables of a training of 500 MiB that loads by itself, on a host with that much room."""
    script = simulate(workers=0, batches=400, **EPOCH)
    much = SECONDS * 0 + 1
    total = (1024 + room_mib) / 0.9 * MIB
    sample_host(script, SECONDS, demand=much * 1024 * MIB, total=total, shm_used_bytes=much * 0)
    held = {"private": much * 500 * MIB, "rss": much * 500 * MIB, "pss_bytes": much * 500 * MIB}
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, **held)
    return script.tables()


@pytest.mark.parametrize(("room_mib", "most_workers"), [(100_000, 8), (1_200, 2), (300, 0)])
def test_first_workers_have_to_fit_at_the_size_of_the_training(room_mib, most_workers):
    one = only(inline_training(room_mib=room_mib))
    assert one.setting.num_workers <= most_workers
    assert (one.setting.num_workers > 0) == (most_workers > 0)


def test_unknown_memory_of_the_training_gives_no_first_workers():
    one = only(simulate(workers=0, batches=400, **EPOCH).tables())
    assert one.setting is None
    assert "not sampled" in one.reason


def test_memory_and_workers_that_others_take_are_left_out():
    tables = simulate_training(workers=1, fetch=0.1).tables()
    (loop,) = loops(tables)
    free = forecast(loop)
    assert free.best.setting.num_workers > 2
    taken = forecast(loop, Limits(taken_bytes=free.memory.room))
    assert not any(option.fits for option in taken.options if option.setting.num_workers > 1)
    few = forecast(loop, Limits(most_workers=2))
    assert max(option.setting.num_workers for option in few.options) == 2


def test_ranks_of_a_host_get_one_setting():
    script = simulate(workers=1, batches=400, rank=0, **EPOCH)
    key = (MAIN[0], MAIN[1] + 1, MAIN[2])
    simulate(
        workers=1, batches=400, rank=1, key=key, script=script, prefetch=2, service=jittered(0.03), consumer=LOOP
    )
    first, second = recommendations(script.tables())
    assert first.loop.main != second.loop.main
    assert first.setting == second.setting
    assert first.measured != second.measured


def changed_training(first, then):
    """Return a training whose DataLoader has other workers in its second pass."""
    script = simulate(workers=first, batches=400, **EPOCH)
    now = script.now_seconds
    simulate(workers=then, batches=400, script=script, begin=now, loader=1, replaces=0, **EPOCH)
    return finish(script).tables()


@pytest.mark.parametrize(("first", "then"), [(1, 8), (8, 1), (0, 8), (8, 0)])
def test_verdict_on_a_changed_loader_is_on_its_last_setting(first, then):
    tables = changed_training(first, then)
    alone = finish(simulate(workers=then, batches=800, loader=1, **EPOCH)).tables()
    assert [loop.num_workers for loop in all_loops(tables)] == [first, then]
    assert [loop.num_workers for loop in loops(tables)] == [then]
    ours = [(finding.kind, finding.locus.loader) for finding in diagnose(tables).findings]
    assert ours == [(finding.kind, finding.locus.loader) for finding in diagnose(alone).findings]
    (one,) = settings_json(tables)
    assert one["loader"] == 1


def test_setting_from_before_counts_again_once_it_is_used_again():
    tables = changed_training(1, 8)
    batch = tables.stream("batch")
    late = batch.tail(50).assign(loader=0, time_ns=batch["time_ns"].tail(50) + 10**10)
    back = dataclasses.replace(tables, streams={**tables.streams, "batch": pd.concat([batch, late])})
    assert [loop.num_workers for loop in loops(back)] == [1]


def test_waits_for_a_core_of_fetches_that_sleep_say_nothing_of_the_loop():
    """A fetch computes for 0.6 ms, and waits for a core for 22 ms as it wakes up: other programs have the cores."""
    run = {"service": jittered(0.2), "consumer": jittered(0.04), "prefetch": 2, "split": (0.003, 0.11, 0.887)}
    script = simulate(workers=2, batches=200, **run)
    held = np.full(len(SECONDS), 300 * MIB)
    used = {name: ns(cores) * (SECONDS - SECONDS[0]) for name, cores in (("cpu_ns", 0.03), ("run_queue_ns", 0.05))}
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, **used)
    one = only(finish(script).tables())
    assert one.setting.num_workers <= 8
    assert one.best.batches_per_second < 1.25 / 0.04
