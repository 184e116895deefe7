"""Heaps that grow, and heaps that only seem to."""

import re

import numpy as np
import pytest
from growing_memory import (
    COLLECTOR,
    FLAT,
    RAMP,
    SATURATING,
    SECONDS,
    UNREAD,
    WORKERS,
    findings_of,
    kinds,
    memory,
    training,
)
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    Script,
    finish,
    jittered,
    sample_host,
    sample_process,
    simulate,
)

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER, UNIT_BATCH, UNIT_OPTIMIZER


def test_flat_memory_is_healthy():
    assert kinds(memory(training())) == []


def test_leak_of_the_main_heap_is_found_with_its_rate():
    leak = findings_of(memory(training(), main=600 * RAMP, host=600 * RAMP, total=10**14))
    assert [f.kind for f in leak] == ["main-heap-leak"]
    assert leak[0].rate.value == pytest.approx(10 * MIB, rel=0.1)
    assert leak[0].rate.low <= leak[0].rate.value <= leak[0].rate.high
    assert leak[0].locus.role == "main"
    assert leak[0].since_step is not None


def test_leak_per_step_is_right_although_steps_become_faster():
    pace = {"service": jittered(0.05), "consumer": lambda _, k: 0.45 if k < 80 else 0.15, "batches": 240}
    script = simulate(workers=2, prefetch=2, **pace)
    step_times = np.concatenate([part["time_ns"] for part in script.parts["step"]]) / 1e9
    leaked = np.searchsorted(np.sort(step_times), SECONDS) * 2.0  # MiB
    (leak,) = findings_of(memory(script, main=leaked, host=leaked, total=10**14))
    per_step_mib = float(re.search(r"([\d.]+) MiB per step", leak.summary)[1])
    assert per_step_mib == pytest.approx(2, rel=0.15)
    assert leak.rate.low <= 2 * MIB / 0.45 * 1.1
    assert leak.rate.high >= 2 * MIB / 0.15 * 0.9


@pytest.mark.parametrize(("unit", "words"), [(UNIT_OPTIMIZER, "create_graph"), (UNIT_BATCH, "a list of results")])
def test_growth_without_an_optimizer_is_advised_to_look_at_the_results(unit, words):
    script = memory(training(), main=300 * RAMP, total=10**14)
    for part in script.parts["step"]:
        part["unit"] = unit
    [leak] = findings_of(script)
    assert words in leak.advice[0].text


def test_threads_that_workers_never_end_are_named():
    script, counts = training(), np.round(8 + 200 * RAMP)
    for worker, key in enumerate(WORKERS):
        held = (300 + 100 * RAMP) * MIB
        of_worker = {"worker": worker, "loader": 0, "thread_count": counts}
        sample_process(script, SECONDS, key, ROLE_WORKER, private=held, rss=held, **of_worker)
    [leak] = findings_of(script)
    assert leak.kind == "worker-heap-leak"
    assert "threads that never end" in leak.advice[0].text


@pytest.mark.parametrize(("threads", "names"), [(200 * RAMP, True), (4 * RAMP, False), (20 * (RAMP > 0.5), False)])
def test_a_leak_by_threads_that_never_end_names_them(threads, names):
    """A few threads, or a pool that starts once, do not explain growth."""
    script, held = training(), (300 + 200 * RAMP) * MIB
    counts = np.round(8 + threads)
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, thread_count=counts)
    sample_host(script, SECONDS, demand=held, total=10**14)
    [leak] = findings_of(script)
    assert ("threads that never end" in leak.advice[0].text) == names
    assert (100 < (leak.value_of("thread_rise_count") or 0) <= 200) == names


@pytest.mark.parametrize(("batch", "found"), [(60 * RAMP, []), (FLAT, ["main-heap-leak"])])
def test_a_batch_that_grows_in_the_training_process_is_no_leak(batch, found):
    script = simulate(workers=0, prefetch=2, service=jittered(0.2), consumer=jittered(0.25), batches=130)
    for rows in script.parts["batch"]:
        rows["payload_bytes"] = np.interp(rows["time_ns"] / 1e9, SECONDS, 1 + batch) * MIB
    assert kinds(memory(script, main=60 * RAMP, total=10**14)) == found


def test_a_leak_is_found_although_one_batch_was_larger():
    script = simulate(workers=0, prefetch=2, service=jittered(0.2), consumer=jittered(0.25), batches=130)
    for rows in script.parts["batch"]:
        rows["payload_bytes"] = 10 * MIB
        rows.loc[rows.index == rows.index[len(rows) * 2 // 3], "payload_bytes"] = 300 * MIB
    assert kinds(memory(script, main=300 * RAMP, total=10**14)) == ["main-heap-leak"]


@pytest.mark.parametrize(("threads", "found"), [(200 * RAMP, ["main-heap-leak"]), (FLAT, [])])
def test_small_growth_is_a_leak_where_threads_never_end(threads, found):
    script, held = training(), (300 + 10 * RAMP) * MIB
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, thread_count=np.round(8 + threads))
    assert kinds(sample_host(script, SECONDS, demand=held, total=10**14)) == found


@pytest.mark.parametrize(("free", "in_all"), [(300 * RAMP, True), (50 * RAMP, False)])
def test_a_leak_says_how_much_freed_memory_lies_between_what_stays(free, in_all):
    """A kept graph is small; the freed activations around it are not given back."""
    [leak] = findings_of(memory(training(), main=100 * RAMP + free, free=free, total=10**14))
    assert leak.rate.value == pytest.approx(100 / 60 * MIB, rel=0.1)
    assert ("freed memory" in leak.summary and "MiB in all" in leak.summary) == in_all
    assert ((leak.value_of("freed_rise_bytes") or 0) > 150 * MIB) == in_all


@pytest.mark.parametrize(
    ("key", "role", "kind"),
    [
        (MAIN, ROLE_MAIN, "main-heap-leak"),
        (WORKERS[0], ROLE_WORKER, "worker-heap-leak"),
    ],
)
def test_a_leak_is_found_although_it_is_swapped_out(key, role, kind):
    script = training()
    held, slot = np.full(60, 300 * MIB), {"worker": 0, "loader": 0} if role == ROLE_WORKER else {}
    sample_process(script, SECONDS, key, role, private=held, rss=held, swap_bytes=RAMP * 400 * MIB, **slot)
    sample_host(script, SECONDS, demand=(4000 + RAMP * 400) * MIB)
    summaries = {finding.kind: finding.summary for finding in findings_of(script)}
    assert kind in summaries
    assert role != ROLE_WORKER or summaries[kind].startswith("Worker 0 of loader 0 keeps taking memory")


def test_freshly_written_mapped_file_is_no_leak():
    """Its pages count as this process's own and dirty until the kernel has written them back."""
    script, mapped = training(), 600 * RAMP * MIB
    held = 300 * MIB + mapped
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, file_bytes=mapped)
    assert kinds(sample_host(script, SECONDS, demand=np.full(60, 4000 * MIB))) == []


@pytest.mark.parametrize(
    ("seconds", "living", "severity"),
    [(8, {MAIN}, "info"), (8, set(), "warning"), (8, {COLLECTOR}, "warning"), (20, {MAIN}, "warning")],
)
def test_brief_growth_is_no_warning_while_the_run_goes_on(seconds, living, severity):
    script, at = training(), START_SECONDS + 1 + np.arange(0, seconds, 0.25)
    script.living = frozenset(living)
    held = 300 * MIB + 20 * MIB * (at - at[0])
    sample_process(script, at, MAIN, ROLE_MAIN, private=held, rss=held)
    leaks = findings_of(sample_host(script, at, demand=held, total=10**14))
    assert [(each.kind, each.severity) for each in leaks] == [("main-heap-leak", severity)]


#: Recorded: a replay buffer of bounded size with evaluations, checkpoints and batches of varying lengths around it.
REPLAY = {
    "resident": """
        228 287 273 308 316 317 348 349 360 400 366 394 423 423 423 429 443 455 471 488 473 513 513 513 513
        533 561 505 518 520 522 530 542 542 600 560 560 560 560 560 577 577 607 607 642 607 607 607 607 607
        637 637 637 637 637 637 637 637 637 677
    """,
    "free": """
        1 19 33 39 67 49 47 69 64 61 55 64 82 70 60 58 59 73 75 74 60 83 87 86 93 73 86 80 82 98 83 83 120
        133 135 142 128 132 139 140 158 149 130 177 189 177 177 177 177 177 196 215 208 208 207 217 216 216
        217 210
    """,
}
#: Recorded: 2 KiB leaked in each step, with the same noise.
LEAK_INTO_HOLES = {
    "resident": """
        231 279 304 278 278 278 278 301 301 301 301 346 324 324 324 324 324 336 336 336 377 386 386 346 346
        346 346 385 346 346 346 346 346 370 393 394 394 394 394 396 396 396 396 396 436 396 396 396 396 434
        396 396 396 396 396 398 398 398 398 398
    """,
    "free": """
        2 16 22 48 53 44 45 70 62 69 69 66 88 84 84 86 77 95 89 86 88 95 100 98 93 93 100 97 91 85 79 79 80
        109 119 128 132 129 129 132 129 128 126 128 126 124 121 120 119 122 122 116 114 114 111 107 107 108
        110 110
    """,
}


@pytest.mark.parametrize(
    ("recorded", "by_resident", "by_in_use"),
    [(REPLAY, ["main-heap-leak"], []), (LEAK_INTO_HOLES, [], ["main-heap-leak"])],
)
def test_free_memory_in_the_heap_is_no_leak_and_hides_none(recorded, by_resident, by_in_use):
    resident, free = (np.array(recorded[name].split(), dtype=float) for name in ("resident", "free"))
    series = {"main": resident, "host": resident, "noise": 0, "total": 10**14}
    assert kinds(memory(training(), **series)) == by_resident
    assert kinds(memory(training(), **series, free=free)) == by_in_use


def test_leak_that_begins_in_the_middle_has_its_first_step():
    late = 600 * np.maximum(0, RAMP - 0.5)
    leak = findings_of(memory(training(), main=late, host=late, total=10**14))
    assert [f.kind for f in leak] == ["main-heap-leak"]
    assert 80 <= leak[0].since_step <= 150


@pytest.mark.parametrize(
    ("main", "private", "host"),
    [
        (600 * RAMP, FLAT, FLAT),  # mapped files: resident, never written
        (FLAT, 300 * SATURATING, FLAT),  # pages that come back from the workers
        (300 * SATURATING, 300 * SATURATING, 300 * SATURATING),  # warm-up
        (300 * (RAMP > 0.4), 300 * (RAMP > 0.4), 300 * (RAMP > 0.4)),  # a checkpoint
        (8 * RAMP, 8 * RAMP, 8 * RAMP),  # too little to matter
        (400 * (np.arange(60) % 10) / 10, 400 * (np.arange(60) % 10) / 10, FLAT),  # garbage collection
    ],
)
def test_harmless_growth_of_the_main_process_is_no_leak(main, private, host):
    assert kinds(memory(training(), main=main, main_private=private, host=host)) == []


def test_leak_is_found_although_each_epoch_forks_again():
    """At each fork the whole heap becomes shared, so private dirty shows only what came since."""
    script = Script()
    script.event(START_SECONDS, "process-start")
    script.event(START_SECONDS, "loader", loader=0, num_workers=1, prefetch_factor=2, start_method="fork")
    leak = 600 * RAMP
    private = np.full(60, np.nan)
    for epoch in range(10):
        at = epoch * 6
        worker = ("node", 1000 + epoch, 7000 + epoch)
        script.event(SECONDS[at] - 0.5, "epoch-start", loader=0, epoch=epoch, worker_pids=[worker[1]])
        script.event(SECONDS[at] - 0.4, "worker-start", worker, loader=0, epoch=epoch, worker=0)
        inherited = np.full(6, 300 + leak[at]) * MIB
        sample_process(
            script,
            SECONDS[at : at + 6],
            worker,
            ROLE_WORKER,
            private=np.full(6, 9 * MIB),
            rss=inherited,
            worker=0,
            loader=0,
        )
        private[at + 4] = 20
    script.add(
        "step", [{"time_ns": round(s * 1e9), "step": i, "duration_ns": 10**9} for i, s in enumerate(SECONDS)]
    )
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=private * MIB, rss=(500 + leak) * MIB)
    assert kinds(script) == ["main-heap-leak"]


def test_growing_cache_in_the_workers_is_a_worker_leak():
    leak = findings_of(memory(training(), workers=300 * RAMP, host=600 * RAMP, total=10**14))
    assert [f.kind for f in leak] == ["worker-heap-leak"]
    assert leak[0].rate.value == pytest.approx(10 * MIB, rel=0.1)


def test_free_memory_in_the_heap_of_a_worker_is_no_leak_and_hides_none():
    """A cache that is full replaces its items, whose sizes vary: only the holes between them grow."""
    grown, total = 300 * RAMP, 10**14
    assert kinds(memory(training(), workers=grown, host=2 * grown, total=total, free_in_workers=grown)) == []
    filled = 150 * (1 - RAMP)
    leak = findings_of(memory(training(), workers=grown, host=2 * grown, total=total, free_in_workers=filled))
    assert [f.kind for f in leak] == ["worker-heap-leak"]
    assert leak[0].rate.value == pytest.approx(15 * MIB, rel=0.1)


@pytest.mark.parametrize(("epochs", "severity"), [(2, "warning"), (3, "info")])
def test_growth_that_ends_with_each_epoch_is_information(epochs, severity):
    """Workers that are not persistent free their cache with each epoch; two epochs may differ by chance."""
    script, length = Script(), 60 // epochs
    script.event(START_SECONDS, "process-start")
    script.event(START_SECONDS, "loader", loader=0, num_workers=1, prefetch_factor=2, start_method="fork")
    cache = 300 * np.arange(length) / length * MIB
    for epoch in range(epochs):
        worker, at = ("node", 1000 + epoch, 7000 + epoch), SECONDS[epoch * length :][:length]
        script.event(at[0] - 0.5, "epoch-start", loader=0, epoch=epoch, worker_pids=[worker[1]])
        script.event(at[0] - 0.4, "worker-ready", worker, loader=0, epoch=epoch, worker=0)
        held = {"private": 10 * MIB + cache, "rss": 320 * MIB + cache}
        sample_process(script, at, worker, ROLE_WORKER, worker=0, loader=0, **held)
    script.add("step", [{"time_ns": round(s * 1e9), "step": i} for i, s in enumerate(SECONDS)])
    [found] = findings_of(script)
    assert (found.kind, found.severity) == ("worker-heap-leak", severity)
    assert ("Worker 0 of loader 0 took memory during each epoch" in found.summary) == (severity == "info")


def test_few_readings_of_private_memory_confirm_growth_of_rss():
    sparse = np.full(60, np.nan)
    sparse[[2, 15, 30, 45, 58]] = 300 * RAMP[[2, 15, 30, 45, 58]]
    assert kinds(memory(training(), workers=300 * RAMP, workers_private=sparse)) == ["worker-heap-leak"]
    assert kinds(memory(training(), workers=300 * RAMP, workers_private=0 * sparse)) == []  # mapped files


def test_worker_that_grows_like_a_confirmed_one_is_part_of_the_leak():
    script = memory(training(), workers=300 * RAMP, total=10**14)
    [samples] = [rows for rows in script.parts["process"] if (rows["process_pid"] == WORKERS[0][1]).all()]
    samples["private_dirty_bytes"] = np.nan
    [leak] = findings_of(script)
    assert leak.summary.startswith("Workers 0 and 1 of loader 0 keep taking memory")
    assert leak.value_of("private_dirty_rise_bytes")


def test_the_hosts_demand_confirms_growth_where_private_memory_was_not_read():
    grown = {"main": 300 * RAMP, "main_private": UNREAD, "host": 300 * RAMP, "total": 10**14}
    assert kinds(memory(training(), **grown)) == ["main-heap-leak"]
    # The memory that the training gives back at its end does not hide the growth before it.
    script = memory(training(), **grown)
    after = np.arange(12) + SECONDS[-1] + 1
    sample_host(script, after, demand=np.full(12, 3700 * MIB), total=10**14)
    assert kinds(script) == ["main-heap-leak"]


def test_anonymous_memory_and_address_space_confirm_a_leak_where_private_memory_was_not_read():
    grown = {"main": 300 * RAMP, "main_private": UNREAD, "total": 10**14}
    [leak] = findings_of(memory(training(), **grown, files_known=True))
    assert (leak.kind, leak.severity) == ("main-heap-leak", "warning")
    assert leak.value_of("address_space_rise_bytes") == pytest.approx(250 * MIB, rel=0.1)


def test_growth_of_other_programs_is_no_evidence_of_a_leak_that_private_memory_confirms():
    for host, shown in ((300 * RAMP, True), (900 * RAMP, False)):
        [leak] = findings_of(memory(training(), main=300 * RAMP, host=host, total=10**14))
        assert (leak.value_of("host_demand_rise_bytes") is not None) == shown
        assert leak.value_of("private_dirty_rise_bytes")


@pytest.mark.parametrize("name", ["main", "workers"])
def test_growth_that_nothing_confirms_is_told_as_not_known(name):
    script = memory(training(), **{name: 300 * RAMP, f"{name}_private": UNREAD}, total=10**14)
    [found] = [finding for finding in diagnose(script.tables()).findings if finding.rate is not None]
    assert (found.kind, found.severity, found.advice) == ("cannot-tell", "info", ())
    assert "Private memory was read too seldom to confirm a leak" in found.summary
    checked = "workers' memory" if name == "workers" else "training process's memory"
    [check] = [one for one in diagnose(script.tables()).checks if one.name == checked]
    assert check.status == "not judged"


def test_every_finding_has_two_measurements():
    script = finish(
        memory(training(), main=600 * RAMP, workers_private=250 * SATURATING, host=900 * RAMP, limit=7000 * MIB)
    )
    for finding in diagnose(script.tables()).findings:
        assert finding.kind == "cannot-tell" or len({e.name for e in finding.evidence}) >= 2
        assert all(e.n >= 0 and e.window and e.unit for e in finding.evidence)
        assert finding.severity == "info" or finding.advice


@pytest.mark.parametrize(
    ("seconds", "again"),
    [(SECONDS[::2], True), (SECONDS[::20], False), (SECONDS[0] + RAMP, False)],
    ids=["throughout", "three times", "at first"],
)
def test_a_leak_while_code_is_compiled_again_begins_with_that(seconds, again):
    script, held = training(), (300 + 200 * RAMP) * MIB
    for number, second in enumerate(seconds):
        compiled = {"function": "train.py:8, in f", "reason": "k == 3", "gave_up": False}
        script.event(second, "compilation", **compiled, again_count=number, again_ns=number * 10**8)
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held)
    sample_host(script, SECONDS, demand=held, total=10**14)
    [leak] = findings_of(script)
    assert ("torch.compile" in leak.advice[0].text) == again
    assert (leak.value_of("compilation_count") is not None) == again
