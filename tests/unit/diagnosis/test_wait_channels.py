"""Resources that blocked fetches wait for, and the advice that follows."""

import numpy as np
import pytest
from simulated_runs import START_SECONDS, jittered, sample_process, simulate

from collector.diagnosis.loading.worker_limit import main_wait
from collector.diagnosis.stalls.verdict import find_stalls
from training_harness.records import ROLE_OTHER, ROLE_WORKER


@pytest.mark.parametrize(
    ("channels", "told"),
    [
        (["hrtimer_nanosleep"] * 4, "sleep"),
        (["futex_do_wait", "futex_wait_queue_me", "futex_do_wait", "pipe_read"], "lock"),
        (["anon_pipe_read"] * 3 + ["poll_schedule_timeout.co"], "pipe"),
        (["wait_woken"] * 2 + ["folio_wait_bit_common"] * 3 + ["hrtimer_nanosleep"] * 4, "storage"),
        (["do_wait", "poll_schedule_timeout.co", "futex_do_wait", "hrtimer_nanosleep"], ""),
        (["a_function_of_a_new_kernel"] * 9, ""),
        (["hrtimer_nanosleep"] * 3, None),
        ([], None),
    ],
)
def test_main_wait_is_that_of_most_samples(channels, told):
    assert main_wait(channels) == told


def slow(channel=None, *, split=(0.02, 0.0, 0.98), children=0.0, living_children=0.0, cores=64.0, **columns):
    """The finding about two workers that are always busy, sampled in this kernel function once a second.

    Each worker has a child that lives as long as it does, and uses `living_children` cores.
    """
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.2),
        consumer=jittered(0.001),
        batches=100,
        split=split,
        cores=cores,
    )
    for made in script.parts["fetch"]:
        taken = made["getitem_ns"] + made["collate_ns"]
        made["children_cpu_ns"] = children * taken
        for name, value in columns.items():
            made[name] = value
    seconds = START_SECONDS + 2 + np.arange(8.0)
    for worker in range(2):
        key = ("node", 1000 + worker, 7000 + worker)
        still = {"private": np.ones(8), "rss": np.ones(8)}
        channels = [channel] * 8
        sample_process(script, seconds, key, ROLE_WORKER, worker=worker, loader=0, wait_channel=channels, **still)
        child, spent = ("node", 2000 + worker, 8000 + worker), living_children * 1e9 * np.arange(8.0)
        sample_process(script, seconds, child, ROLE_OTHER, parent_pid=[key[1]] * 8, cpu_ns=spent, **still)
    (found,) = find_stalls(script.tables())
    return found


def advice(finding):
    return " ".join(each.text for each in finding.advice)


@pytest.mark.parametrize(
    ("channel", "limited_by", "because", "do"),
    [
        ("hrtimer_nanosleep", None, "they sleep", "what sleeps in the fetch"),
        ("futex_do_wait", None, "they wait for a lock", "Hold the lock for a shorter time"),
        ("anon_pipe_read", "io", "they read from a pipe", "what fills the pipe"),
        ("folio_wait_bit_common", "io", "they read from storage", "Read less"),
        ("do_wait", None, "they wait for a child process", "Leave less to child processes"),
    ],
)
def test_advice_follows_from_the_kernels_wait_channel(channel, limited_by, because, do):
    found = slow(channel, read_bytes=4096)
    assert (found.kind, found.limited_by) == ("workers-too-slow", limited_by)
    assert because in found.summary
    assert do in advice(found)
    assert "less work per sample" not in advice(found), "fetches that wait do not compute less by less work"


@pytest.mark.parametrize("channel", ["futex_do_wait", "anon_pipe_read"])
def test_advice_is_to_measure_if_workers_may_share_a_resource(channel):
    found = slow(channel)
    assert "num_workers=" not in advice(found)
    assert found.advice[-1].text.startswith("Measure other settings before you add workers")


def test_reads_from_storage_are_io_and_from_the_page_cache_are_not():
    cached = slow(read_bytes=50_000_000, storage_bytes=0)
    assert cached.limited_by is None
    assert "too few samples show what they wait for" in cached.summary
    assert slow(read_bytes=50_000_000, storage_bytes=2_000_000).limited_by == "io"
    assert slow(major_fault_count=20).limited_by == "io", "mapped files come by page faults"


def test_storage_explains_only_the_fetches_that_read_from_it():
    """One fetch may import a library of many megabytes."""
    reads = np.zeros(50)
    reads[20] = 200_000_000
    assert slow(storage_bytes=reads).limited_by is None


def test_few_bytes_from_storage_do_not_explain_a_long_wait():
    assert slow("futex_do_wait", storage_bytes=4096).limited_by is None


def test_fetch_with_computing_children_is_cpu_bound():
    found = slow("poll_schedule_timeout.co", children=0.9)
    assert found.limited_by == "cpu"
    assert "in child processes" in found.summary
    assert {each.name: each.value for each in found.evidence}["fetch_children_cpu_ratio"] == pytest.approx(0.9)
    assert "Leave less to child processes" in advice(found)


def test_fetch_that_a_lasting_child_computes_for_is_cpu_bound():
    found = slow("anon_pipe_read", living_children=0.9)  # a decoder that feeds the worker by a pipe
    assert found.limited_by == "cpu"
    assert "in child processes" in found.summary
    assert {each.name: each.value for each in found.evidence}["fetch_children_cpu_ratio"] >= 0.6
    assert slow("anon_pipe_read", living_children=0.02).limited_by == "io", "an idle child does not feed it"


def test_fetch_with_children_waiting_for_full_cores_is_cpu_bound():
    assert slow("poll_schedule_timeout.co", children=0.5, cores=1.0).limited_by == "cpu"


def test_sleeping_child_is_what_the_fetch_waits_for():
    assert "wait for a child process" in slow("poll_schedule_timeout.co", children=0.01).summary


@pytest.mark.parametrize("holder", ["anon_pipe_read", "hrtimer_nanosleep"])
def test_a_lock_that_is_held_by_a_worker_that_reads_a_pipe_is_a_queue(holder):
    script = simulate(
        workers=3, prefetch=2, service=jittered(0.2), consumer=jittered(0.001), batches=200, split=(0.02, 0.0, 0.98)
    )
    seconds = START_SECONDS + 2 + np.arange(9.0)
    for worker in range(3):
        channels = np.roll([holder, "futex_do_wait", "futex_do_wait"] * 3, worker)
        still = {"private": np.ones(9), "rss": np.ones(9)}
        key = ("node", 1000 + worker, 7000 + worker)
        sample_process(script, seconds, key, ROLE_WORKER, worker=worker, loader=0, wait_channel=channels, **still)
    (found,) = find_stalls(script.tables())
    is_queue = holder == "anon_pipe_read"
    assert found.limited_by == ("io" if is_queue else None)
    assert ("a multiprocessing.Queue" in found.summary) == is_queue
    assert ("what fills the queue" in advice(found)) == is_queue
    assert ("Hold the lock" in advice(found)) != is_queue
