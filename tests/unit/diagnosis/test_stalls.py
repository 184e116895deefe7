"""Causes of the training loop's waits, on simulated DataLoaders whose truth is known."""

import re

import numpy as np
import pytest
from simulated_runs import MAIN, jittered, ns, per_worker, sample_process, simulate

from collector.diagnosis.stalls.verdict import find_stalls
from collector.units import percent
from training_harness.records import ROLE_MAIN, ROLE_WORKER


def verdict(**run):
    return find_stalls(simulate(**run).tables())


def kinds(findings):
    return [(finding.kind, finding.locus.worker) for finding in findings]


def draw(seed):
    """A loader of random size with a random consumer and jitter."""
    generator = np.random.default_rng(seed)
    workers = int(generator.integers(2, 9))
    run = {
        "workers": workers,
        "prefetch": int(generator.integers(1, 5)),
        "consumer": jittered(generator.uniform(0.005, 0.05)),
        "batches": int(generator.integers(12, 30)) * workers + 4 * workers,
        "epochs": int(generator.integers(1, 4)),
        "persistent": bool(generator.integers(2)),
        "seed": seed,
    }
    work = run["consumer"](np.random.default_rng(0), 0)
    return generator, run, workers * work


@pytest.mark.parametrize("seed", range(15))
def test_all_slow_and_one_slow_worker_are_distinguished(seed):
    generator, run, round_seconds = draw(seed)
    slow = generator.uniform(1.35, 4) * round_seconds
    jitter = generator.uniform(0.02, 0.4)
    assert kinds(verdict(service=jittered(slow, jitter), **run)) == [("workers-too-slow", None)]

    culprit = int(generator.integers(run["workers"]))
    seconds = [slow / generator.uniform(2, 5)] * run["workers"]
    seconds[culprit] = slow
    assert kinds(verdict(service=per_worker(seconds, jitter), **run)) == [("slow-worker", culprit)]


@pytest.mark.parametrize(("queued_ratio", "limited_by"), [(0.35, None), (0.6, None), (0.9, "oversubscribed")])
def test_full_cores_explain_a_slow_worker_only_if_it_waits_for_them_longer_than_the_others(
    queued_ratio, limited_by
):
    run = {"workers": 2, "prefetch": 2, "consumer": jittered(0.01), "batches": 200}
    tables = simulate(service=per_worker([0.02, 0.1], 0.1), split=(0.05, 0.5, 0.45), **run).tables()
    fetch = tables.streams["fetch"]
    slow = fetch["worker"] == 1
    for column, ratio in (("run_queue_ns", queued_ratio), ("blocked_ns", 0.95 - queued_ratio)):
        fetch[column] = fetch[column].where(~slow, (ratio * fetch["getitem_ns"]).astype("int64"))
    (found,) = find_stalls(tables)
    assert (found.kind, found.limited_by) == ("slow-worker", limited_by)


def test_slow_worker_is_compared_with_the_other_one_by_name():
    run = {"workers": 2, "prefetch": 2, "consumer": jittered(0.01), "batches": 200}
    (found,) = verdict(service=per_worker([0.02, 0.1], 0.1), **run)
    assert "times as long as those of worker 0 (" in found.summary
    assert "which idles" in found.summary
    assert found.advice[-1].text == "Until then, set num_workers=4"
    assert found.advice[-1].expected == "worker 1 makes one batch in 4 instead of one in 2"


@pytest.mark.parametrize("seed", range(8))
def test_a_loader_that_keeps_up_has_no_warning(seed):
    generator, run, round_seconds = draw(seed)
    found = verdict(service=jittered(generator.uniform(0.1, 0.6) * round_seconds, 0.2), **run)
    assert [(finding.kind, finding.severity) for finding in found] == [("compute-bound", "info")]


def crowded(*, waits=0.3, cores_used=3.9, busy=4.0, split=(0.0, 0.0, 1.0), **more):
    """Return the finding about a loop with batches in time, whose main thread waits for a core.

    It uses `cores_used` of 4 cores, of which all programs together keep `busy` ones busy.
    """
    pace = {"service": jittered(0.02), "consumer": jittered(0.02)}
    script = simulate(**{"workers": 4, "prefetch": 2, "batches": 300, "split": split, "cores": 4.0} | pace | more)
    seconds = 1000 + np.arange(12.0)
    used = {"cpu_ns": cores_used * 1e9 * seconds, "run_queue_ns": waits * 1e9 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(12), rss=np.ones(12), **used)
    cores = {"usable_cores_count": 4.0, "busy_cores_count": busy}
    script.add("host", [{"time_ns": ns(second), **cores} for second in seconds], ("node", 90, 4900))
    (found,) = find_stalls(script.tables())
    return found


@pytest.mark.parametrize(("cores_used", "who"), [(0.4, "other processes use the rest"), (3.9, "its own processes")])
def test_waiting_for_a_core_is_not_called_healthy(cores_used, who):
    found = crowded(cores_used=cores_used)
    assert (found.kind, found.limited_by, found.severity) == ("compute-bound", "oversubscribed", "info")
    assert found.value_of("training_run_queue_ratio") == pytest.approx(0.3, abs=0.01)
    assert who in found.summary
    assert crowded(rank=1).summary.startswith("Rank 1 waits for a core")
    found = crowded(waits=0.01)
    assert (found.kind, found.limited_by, found.severity) == ("compute-bound", None, "info")


def test_late_waking_on_free_cores_is_blamed_on_nobody():
    found = crowded(cores_used=0.4, busy=0.6)
    assert (found.kind, found.limited_by, found.severity) == ("compute-bound", None, "info")
    slow = crowded(cores_used=0.4, busy=0.6, split=(0.5, 0.5, 0.0))
    assert slow.limited_by is None
    assert "other processes" not in found.summary + slow.summary


def test_waiting_for_a_core_is_found_once_for_two_loops():
    script, seconds = None, 1000 + np.arange(12.0)
    for loader, batches in enumerate((300, 200)):
        script = simulate(
            workers=4,
            prefetch=2,
            service=jittered(0.02),
            consumer=jittered(0.04),
            batches=batches,
            script=script,
            loader=loader,
        )
    used = {"cpu_ns": 0.4e9 * seconds, "run_queue_ns": 0.3e9 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(12), rss=np.ones(12), **used)
    assert [finding.limited_by for finding in find_stalls(script.tables())] == ["oversubscribed"]


@pytest.mark.parametrize(("workers", "fetch"), [(2, 0.08), (0, 0.02)])
@pytest.mark.parametrize(("training_cores", "others"), [(1.9, False), (0.1, True)])
def test_cores_filled_by_the_training_are_not_blamed_on_others(workers, fetch, training_cores, others):
    script = simulate(
        workers=workers,
        prefetch=2,
        service=jittered(fetch),
        consumer=jittered(0.02),
        batches=300,
        split=(0.2, 0.8, 0.0),
        cores=2.0,
    )
    seconds = 1000 + np.arange(15.0)
    used = {"cpu_ns": training_cores * 1e9 * seconds, "run_queue_ns": 0.0 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(15), rss=np.ones(15), **used)
    (found,) = find_stalls(script.tables())
    assert found.limited_by == "oversubscribed"
    assert ("other processes use the rest" in found.summary) == others
    assert ("what else uses the cores" in found.advice[0].text) == others
    assert found.fault == ("this machine" if others else "your settings")


@pytest.mark.parametrize(
    ("workers", "fetch", "less", "fewer"), [(2, 0.08, False, False), (2, 0.3, True, False), (4, 0.12, False, True)]
)
def test_what_the_run_itself_asks_of_the_cores_is_told_beside_other_programs(workers, fetch, less, fewer):
    settings = {"workers": workers, "prefetch": 2, "consumer": jittered(0.02), "batches": 200, "cores": 2.0}
    script = simulate(service=jittered(fetch), split=(0.2, 0.8, 0.0), **settings)
    seconds = 1000 + np.arange(35.0)
    used = {"cpu_ns": 0.1e9 * seconds, "run_queue_ns": 0.0 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(35), rss=np.ones(35), **used)
    (found,) = find_stalls(script.tables())
    assert "what else uses the cores" in found.advice[0].text
    assert any("too long for the loop" in advice.expected for advice in found.advice) == less
    assert any("num_workers=2, and one thread per worker" in advice.text for advice in found.advice) == fewer


def test_workers_are_blamed_if_they_and_the_loop_wait_for_cores():
    queueing = (0.5, 0.5, 0.0)
    found = crowded(split=queueing)
    assert (found.kind, found.limited_by, found.severity) == ("workers-too-slow", "oversubscribed", "warning")
    assert "3.9 of 4 usable cores" in found.summary
    assert [advice.text.split(":")[0] for advice in found.advice] == ["Do less work per sample"], "4 for 4 cores"
    assert "num_workers=4, and one thread" in crowded(split=queueing, workers=8).advice[1].text
    collated = crowded(split=queueing, collate_share=0.9).advice[0]
    assert collated.text.startswith("Make collate_fn cheaper")
    assert "collate_fn takes 90% of a fetch" in collated.expected
    for waits in (0.3, 0.99):  # however long both wait, workers that do not use the cores do not take them
        others = crowded(split=queueing, cores_used=0.4, waits=waits)
        assert (others.kind, others.severity) == ("compute-bound", "info")
        assert "other processes use the rest" in others.summary


@pytest.mark.parametrize(("fetch", "blamed"), [(0.03, True), (0.012, False)])
def test_late_batches_of_busy_workers_are_blamed_on_the_workers(fetch, blamed):
    script = simulate(
        workers=1, prefetch=2, service=jittered(fetch), consumer=jittered(0.015), batches=200, split=(1.0, 0.0, 0.0)
    )
    tables = script.tables()
    batch, made = tables.streams["batch"], tables.streams["fetch"]
    batch["wait_ns"] = batch["wait_ns"].clip(lower=7_000_000)
    made["time_ns"] = batch["time_ns"] - batch["wait_ns"]  # it was there as the loop asked for it, and came late
    assert (kinds(find_stalls(tables))[0][0] == "workers-too-slow") == blamed


def test_slow_workers_and_one_slow_worker_with_equal_waits_differ():
    run = {"workers": 4, "prefetch": 2, "consumer": jittered(0.01, 0.01), "batches": 160}
    every = verdict(service=jittered(0.06, 0.01), **run)[0]
    one = verdict(service=per_worker([0.02, 0.06, 0.02, 0.02], 0.01), **run)[0]
    assert (every.kind, one.kind, one.locus.worker) == ("workers-too-slow", "slow-worker", 1)
    seen = [{e.name: e.value for e in finding.evidence}["data_wait_ratio"] for finding in (every, one)]
    assert seen[0] == pytest.approx(seen[1], abs=0.03)
    assert "num_workers=8" in every.advice[0].text
    ratio = {e.name: e.value for e in one.evidence}["worker_fetch_ratio"]
    assert ratio == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("period", [37, 40])
def test_straggling_samples_are_no_slow_worker(period):
    def service(generator, _, index):
        return 0.02 * (12 if index % period == 0 else 1) * float(np.exp(generator.normal(0, 0.05)))

    found = verdict(workers=4, prefetch=2, service=service, consumer=jittered(0.01), batches=400)
    assert kinds(found) == [("straggler-samples", None)]
    listed = {each.name: each.value for each in found[0].evidence}["straggler_batches"]
    assert listed == ", ".join(f"0:{index}" for index in range(period, 400, period))
    assert found[0].advice[0].text.startswith("Set num_workers=")  # longer queues outlast them


def test_a_setting_that_may_gain_nothing_comes_after_the_advice_on_slow_samples():
    def service(generator, _, index):
        return 0.02 * (60 if index % 100 == 0 else 1) * float(np.exp(generator.normal(0, 0.05)))

    (found,) = verdict(workers=4, prefetch=2, service=service, consumer=jittered(0.01), batches=400)
    assert found.kind == "straggler-samples"
    assert [advice.text[:8] for advice in found.advice] == ["Find the", "Set num_"]


def test_few_slow_batches_that_take_most_of_the_time_are_named():
    """One batch in twelve takes 1.2 s: the workers are too slow for that, whatever the order of the batches."""

    def service(generator, _, index):
        return 0.02 * (60 if index % 12 == 0 else 1) * float(np.exp(generator.normal(0, 0.05)))

    (found,) = verdict(workers=2, prefetch=2, service=service, consumer=jittered(0.03), batches=400)
    assert found.kind == "workers-too-slow"
    assert "8.3% of the batches are slow ones (over 3 times the usual)" in found.summary
    assert re.search(r"although the workers idle \d+%, since only a few batches are slow;", found.summary)
    listed = {each.name: each.value for each in found.evidence}["straggler_batches"]
    assert all(int(each.removeprefix("0:")) % 12 == 0 for each in listed.split(", "))


@pytest.mark.parametrize("gathered", [8, 12, 16])
def test_bursts_of_the_loop_ask_for_more_batches_ahead(gathered):
    """The loop gathers batches for one large step, in which the workers would make three times as many."""

    def consumer(generator, index):
        return (0.06 * gathered if index % gathered == gathered - 1 else 5e-4) * float(
            np.exp(generator.normal(0, 0.03))
        )

    run = {"service": jittered(0.04), "consumer": consumer, "batches": 480}
    (found,) = verdict(workers=2, prefetch=2, **run)
    assert (found.kind, found.severity) == ("workers-too-slow", "warning")
    assert "keep up on average" in found.summary
    assert found.value_of("capacity_ratio") < 0.5
    workers, prefetch = map(int, re.findall(r"\d+", found.advice[0].text))
    (healthy,) = verdict(workers=workers, prefetch=prefetch, **run)
    assert healthy.severity == "info"


def test_many_batches_with_a_slow_sample_ask_for_more_batches_ahead():
    """A third of the batches has a slow sample: the workers idle a quarter of their time, and the loop waits."""

    def service(generator, *_):
        return 0.002 * float(np.where(generator.random(8) < 0.05, 50, 1).sum() * np.exp(generator.normal(0, 0.03)))

    run = {"service": service, "consumer": jittered(0.03), "batches": 600}
    (found,) = verdict(workers=2, prefetch=2, **run)
    assert (found.kind, found.severity) == ("workers-too-slow", "warning")
    assert "keep up on average" in found.summary
    assert "with batches of unequal cost" in found.summary
    workers, prefetch = map(int, re.findall(r"\d+", found.advice[0].text))
    (healthy,) = verdict(workers=workers, prefetch=prefetch, **run)
    assert healthy.severity == "info"


def test_two_slow_workers_are_both_named():
    found = verdict(
        workers=6,
        prefetch=2,
        service=per_worker([0.02, 0.2, 0.02, 0.02, 0.2, 0.02]),
        consumer=jittered(0.01),
        batches=200,
    )
    assert kinds(found) == [("slow-worker", 1), ("slow-worker", 4)]


def test_startup_and_epoch_starts_are_no_stall():
    def slow_start(generator, _, index):
        return 2.0 if index < 4 else 0.01

    found = verdict(workers=4, prefetch=2, service=slow_start, consumer=jittered(0.02), batches=60, epochs=3)
    assert kinds(found) == [("compute-bound", None)]


def test_pause_of_the_loop_hides_no_stall():
    def validates(generator, k):
        return 30.0 if k == 100 else 0.01

    found = verdict(workers=4, prefetch=2, service=jittered(0.06), consumer=validates, batches=200)
    assert kinds(found) == [("workers-too-slow", None)]


def test_out_of_order_loading_is_not_blamed_on_the_slow_worker():
    found = verdict(
        workers=4,
        prefetch=2,
        service=per_worker([0.02, 0.06, 0.02, 0.02]),
        consumer=jittered(0.01),
        batches=300,
        in_order=False,
    )
    assert kinds(found) == [("compute-bound", None)]
    found = verdict(
        workers=4, prefetch=2, service=jittered(0.06), consumer=jittered(0.005), batches=300, in_order=False
    )
    assert kinds(found) == [("workers-too-slow", None)]


@pytest.mark.parametrize(
    ("split", "cores", "limited_by"),
    [
        ((0.97, 0.03, 0.0), 64.0, "cpu"),
        ((0.45, 0.55, 0.0), 2.0, "oversubscribed"),
        ((0.0, 0.0, 1.0), 64.0, None),
        ((0.1, 0.35, 0.55), 2.0, None),
        ((0.25, 0.75, 0.0), 64.0, "oversubscribed"),
    ],
)
def test_limit_of_the_workers_is_found(split, cores, limited_by):
    found = verdict(
        workers=4,
        prefetch=2,
        service=jittered(0.06),
        consumer=jittered(0.01),
        batches=120,
        split=split,
        cores=cores,
    )
    assert [(finding.kind, finding.limited_by) for finding in found] == [("workers-too-slow", limited_by)]


@pytest.mark.parametrize(("allowed", "limited_by"), [(1.0, "affinity"), (64.0, "oversubscribed")])
def test_affinity_is_blamed_only_if_it_binds(allowed, limited_by):
    script = simulate(
        workers=4,
        prefetch=2,
        service=jittered(0.06),
        consumer=jittered(0.01),
        batches=120,
        split=(0.25, 0.75, 0.0),
        cores=64.0,
    )
    seconds, memory = np.arange(3.0), np.full(3, 1e8)
    for worker in range(4):
        sample_process(
            script,
            seconds,
            ("node", 1000 + worker, 7000 + worker),
            ROLE_WORKER,
            private=memory,
            rss=memory,
            worker=worker,
            loader=0,
            allowed_cores_count=np.full(3, allowed),
        )
    assert [finding.limited_by for finding in find_stalls(script.tables())] == [limited_by]


def test_workers_are_not_added_beyond_the_cores():
    run = {"workers": 4, "prefetch": 2, "service": jittered(0.06), "consumer": jittered(0.01), "batches": 120}
    crowded = verdict(split=(1.0, 0.0, 0.0), cores=4.0, **run)[0]
    roomy = verdict(split=(1.0, 0.0, 0.0), cores=64.0, **run)[0]
    assert not any("num_workers" in advice.text for advice in crowded.advice)
    assert "num_workers=8" in roomy.advice[0].text


def test_inline_loading_is_named_with_the_workers_it_needs():
    found = verdict(workers=0, prefetch=0, service=jittered(0.025), consumer=jittered(0.01), batches=60)
    assert [(f.kind, f.severity) for f in found] == [("inline-loading", "warning")]
    assert "num_workers=3" in found[0].advice[0].text


@pytest.mark.parametrize(("epochs", "persists"), [(1, False), (3, True)])
def test_workers_stay_between_epochs_where_the_run_has_several(epochs, persists):
    found = verdict(
        workers=0, prefetch=0, service=jittered(0.025), consumer=jittered(0.01), batches=60, epochs=epochs
    )
    assert ("persistent_workers=True" in found[0].advice[0].text) == persists


@pytest.mark.parametrize("again", [True, False])
def test_workers_are_advised_for_a_loader_that_is_made_once(again):
    """A loader that is gone gives its number to the next one with its settings."""
    run = {"workers": 0, "prefetch": 0, "service": jittered(0.025), "consumer": jittered(0.01), "batches": 60}
    script = simulate(epochs=3, **run)
    if again:
        script.event(1005.0, "loader-again", loader=0)
    (finding,) = find_stalls(script.tables())
    assert ("make the DataLoader once" in finding.advice[0].text) == again


@pytest.mark.parametrize("between", [10, 0])
def test_workers_are_advised_for_loaders_of_a_chain_made_once(between):
    script = None
    for loader in range(3):
        run = {"workers": 0, "prefetch": 0, "service": jittered(0.025), "consumer": jittered(0.01), "batches": 60}
        script = simulate(loader=loader, script=script, begin=1000.0 + between * loader, **run)
    is_made_again = bool(between)
    for finding in find_stalls(script.tables()):
        assert ("make the DataLoader once" in finding.advice[0].text) == is_made_again


def test_tiny_data_is_better_off_without_workers():
    found = verdict(workers=0, prefetch=0, service=jittered(0.0002), consumer=jittered(0.0005), batches=300)
    assert [(f.kind, f.severity) for f in found] == [("inline-loading", "info")]
    assert "num_workers=0" in found[0].advice[0].text


def test_cheap_inline_loading_is_healthy():
    found = verdict(workers=0, prefetch=0, service=jittered(0.0005), consumer=jittered(0.05), batches=60)
    assert kinds(found) == [("compute-bound", None)]


@pytest.mark.parametrize("batches", [1, 3, 8, 12])
def test_finding_of_a_short_run_says_what_is_missing(batches):
    found = verdict(workers=4, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=batches)
    assert kinds(found) == [("cannot-tell", None)]
    assert "the verdict needs 10 batches" in found[0].summary
    assert found[0].value_of("fetches") == batches


def test_silent_workers_are_not_judged():
    script = simulate(workers=4, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=100)
    del script.parts["fetch"]
    found = find_stalls(script.tables())
    assert kinds(found) == [("cannot-tell", None)]
    assert "0 of 4 workers" in found[0].summary
    assert (found[0].value_of("steady_batches"), found[0].value_of("fetches")) == (92, 0)


def test_short_validation_loop_is_no_warning_in_a_healthy_run():
    script = simulate(workers=4, prefetch=2, service=jittered(0.005), consumer=jittered(0.02), batches=2000)
    slow = {"service": jittered(0.06), "consumer": jittered(0.005), "batches": 30}
    simulate(workers=2, prefetch=2, loader=1, begin=1042.0, script=script, **slow)
    found = find_stalls(script.tables())
    assert [(f.kind, f.severity) for f in found] == [("compute-bound", "info"), ("workers-too-slow", "info")]
    evidence = {e.name: e.value for e in found[1].evidence}
    assert evidence["starved_ratio"] > 0.5 > 0.1 > evidence["lost_wall_ratio"]


def test_summary_and_first_evidence_agree():
    healthy = verdict(workers=4, prefetch=2, service=jittered(0.005), consumer=jittered(0.02), batches=100)[0]
    assert healthy.evidence[0].name == "starved_ratio"
    assert f"the loop waits {percent(healthy.evidence[0].value)} of its time for one" in healthy.summary


def test_each_rank_gets_its_own_verdict():
    script = simulate(workers=2, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=80, rank=0)
    simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.005),
        consumer=jittered(0.02),
        batches=80,
        rank=1,
        key=("node", 101, 5001),
        script=script,
    )
    found = find_stalls(script.tables())
    assert {(f.kind, f.locus.rank) for f in found} == {("workers-too-slow", 0), ("compute-bound", 1)}
    assert all(f.since_step is not None for f in found)


@pytest.mark.parametrize(
    ("workers", "iterable", "has_condition"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_advice_for_an_iterable_dataset_mentions_get_worker_info(workers, iterable, has_condition):
    run = {"prefetch": 2, "consumer": jittered(0.002), "batches": 200, "split": (0.02, 0.0, 0.98)}
    (found,) = verdict(workers=workers, service=jittered(0.06), iterable=iterable, **run)
    assert found.advice[0].text.startswith("Set num_workers=")
    assert ("get_worker_info()" in found.advice[0].text) == has_condition
    assert ("The one worker of loader 0 is too slow" in found.summary) == (workers == 1)
