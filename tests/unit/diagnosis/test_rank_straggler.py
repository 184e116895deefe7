"""Ranks that hold up the others, on simulated runs: which one, why, and what to do."""

import numpy as np
import pytest
from simulated_runs import MIB, Script, ns, sample_process, start_training

from collector.diagnosis.consequences import without_consequences
from collector.diagnosis.stalls.rank_straggler import find_rank_straggler
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding, Locus, measurements
from tests.recorded_runs import recorded
from training_harness.records import ROLE_MAIN


def ranks(*, late, column="forward_ns", waits=True, lacks_memory=False, steps=200):
    """Two ranks that meet in the backward pass; rank 1 takes longer by `late` in one phase.

    Rank 1's allocator can flush the cache as often as a recorded run did; that of rank 0 never does.
    """
    flushes = recorded("caught-errors").streams["device_memory"]["alloc_retry_count"].to_numpy()
    script, generator = Script(), np.random.default_rng(0)
    base = {"data_wait_ns": 0.001, "forward_ns": 0.010, "optimizer_ns": 0.002, "other_ns": 0.001}
    for rank in range(2):
        key, now, rows = ("node", 100 + rank, 5000 + rank), 1001.0, []
        start_training(script, key=key, rank=rank)
        for step in range(steps):
            own = {name: value * float(np.exp(generator.normal(0, 0.1))) for name, value in base.items()}
            own[column] += late if rank else 0.0
            backward = 0.020 + (late if waits and not rank else 0.0)
            now += sum(own.values()) + backward
            columns = {name: ns(value) for name, value in own.items()}
            duration = sum(own.values()) + backward
            rows.append(
                {
                    "time_ns": ns(now),
                    "step": step,
                    "duration_ns": ns(duration),
                    "backward_ns": ns(backward),
                    **columns,
                }
            )
        script.add("step", rows, key, rank)
        counts = flushes[np.arange(steps) * len(flushes) // steps] * (lacks_memory and rank)
        script.add(
            "device_memory",
            [{"time_ns": row["time_ns"], "alloc_retry_count": n} for row, n in zip(rows, counts, strict=True)],
            key,
            rank,
        )
    return script


@pytest.mark.parametrize(
    ("column", "lacks_memory", "by"),
    [("data_wait_ns", False, "data"), ("forward_ns", False, "compute"), ("forward_ns", True, "memory")],
)
def test_straggler_rank_is_named_with_its_reason(column, lacks_memory, by):
    findings = find_rank_straggler(ranks(late=0.030, column=column, lacks_memory=lacks_memory).tables())
    assert [(f.kind, f.severity, f.locus.rank, f.limited_by) for f in findings] == [
        ("rank-straggler", "warning", 1, by)
    ]
    assert findings[0].value_of("own_time_excess_seconds") == pytest.approx(0.030, rel=0.05)


@pytest.mark.parametrize(
    ("computing", "queued", "words", "advice"),
    [
        (0.9, 0.0, "it computes for 9", "Look at what rank 1 alone computes"),
        (0.05, 0.8, "waits for a core for 80%", "Give rank 1 a core"),
        (0.1, 0.1, "it neither computes nor waits for a core", "Look for what rank 1 alone waits for"),
    ],
)
def test_advice_for_a_straggler_fits_what_it_does_in_that_time(computing, queued, words, advice):
    """A step takes 0.064 s; rank 1 is late by 0.030 s of it."""
    script = ranks(late=0.030, column="other_ns")
    seconds = 1001.0 + np.arange(0.0, 12.0)
    held = np.full(len(seconds), 300 * MIB)
    for rank in range(2):
        used = {"cpu_ns": 0.03 + computing * 0.030 * rank, "run_queue_ns": queued * 0.030 * rank}
        clocks = {name: ns(value / 0.064) * (seconds - 1001.0) for name, value in used.items()}
        key = ("node", 100 + rank, 5000 + rank)
        sample_process(script, seconds, key, ROLE_MAIN, private=held, rss=held, rank=rank, **clocks)
    (found,) = find_rank_straggler(script.tables())
    assert words in found.summary
    assert found.advice[0].text.startswith(advice)


def test_ranks_that_gather_weights_wait_in_their_forward_pass():
    """With FSDP rank 0 waits for rank 1 in its forward pass, where the weights are gathered first."""
    script = ranks(late=0.030, column="other_ns")
    waiting = script.parts["step"][0]
    waiting["forward_ns"] += ns(0.030)
    waiting["backward_ns"] -= ns(0.030)
    (found,) = find_rank_straggler(script.tables())
    assert (found.locus.rank, found.locus.stage) == (1, "other")
    assert "longer in their forward and backward pass, where weights are gathered" in found.summary
    assert found.value_of("others_forward_and_backward_excess_seconds") == pytest.approx(0.030, rel=0.1)


def test_ranks_that_get_their_batches_from_another_one_do_not_wait_for_it_to_gather_weights():
    """Rank 1 loads for both and broadcasts, which is "other" there and a part of rank 0's forward pass."""
    script = ranks(late=0.030, column="other_ns", waits=False)
    script.parts["step"] = [
        rows.assign(batches_count=[0, 2][rank], **({} if rank else {"forward_ns": rows["forward_ns"] + ns(0.030)}))
        for rank, rows in enumerate(script.parts["step"])
    ]
    script.parts["step"][0]["duration_ns"] += ns(0.030)
    assert find_rank_straggler(script.tables()) == []


def test_straggler_on_gpus_is_found_from_device_and_host_times():
    script = ranks(late=0.030, column="data_wait_ns")
    for part in script.parts["step"]:
        device = part.drop(columns=["data_wait_ns", "h2d_ns"])
        device["other_ns"] += part["data_wait_ns"]
        script.parts.setdefault("device_time", []).append(device)
    script.parts["step"] = [part.assign(backward_ns=ns(0.002)) for part in script.parts["step"]]
    found = find_rank_straggler(script.tables())
    assert [(f.locus.rank, f.limited_by) for f in found] == [(1, "data")]


def test_rank_that_became_late_costs_only_the_steps_since():
    """Rank 1 is late in the last 1,000 of 3,000 steps; only GPUs have an allocator whose cache is flushed."""
    script = ranks(late=0.0, steps=3000)
    del script.parts["device_memory"]
    for part, column in zip(script.parts["step"], ("backward_ns", "forward_ns"), strict=True):
        part.loc[part["step"] >= 2000, [column, "duration_ns"]] += ns(0.030)
    [found] = find_rank_straggler(script.tables())
    assert found.value_of("own_time_excess_seconds") == pytest.approx(0.030, rel=0.05)
    assert found.value_of("lost_seconds") == pytest.approx(30, rel=0.05)
    assert (found.since_step, found.value_of("alloc_retry_count")) == (None, None)


def paused(every, *, is_saving):
    """Rank 1 takes 1 s longer in each step before a multiple of `every`; it saves then, or does not."""
    script = ranks(late=0.0, steps=400)
    waiting, late = script.parts["step"]
    for part, column in ((waiting, "backward_ns"), (late, "other_ns")):
        extra = np.where(part["step"] % every == every - 1, ns(1.0), 0)
        for changed in (column, "duration_ns"):
            part[changed] += extra
        part["time_ns"] += np.cumsum(extra)
    if is_saving:
        for row in late[late["other_ns"] > ns(0.5)].itertuples():
            script.event(
                row.time_ns / 1e9 - 0.9,
                "checkpoint",
                key=("node", 101, 5001),
                rank=1,
                begun_ns=row.time_ns - ns(0.95),
            )
    return script


@pytest.mark.parametrize("is_saving", [True, False])
def test_a_rank_that_is_late_in_few_steps_says_so_and_whether_it_saves_then(is_saving):
    (found,) = find_rank_straggler(paused(40, is_saving=is_saving).tables())
    assert "Most of that falls on 8 steps of 390, 1 s each" in found.summary
    assert ("a checkpoint that it saves" in found.summary) == is_saving
    assert ("save less often" in found.advice[0].text) == is_saving
    (always,) = find_rank_straggler(ranks(late=0.030).tables())
    assert "falls on" not in always.summary


def test_a_rank_that_is_late_by_its_regular_pauses_is_told_of_these_first():
    findings = diagnose(paused(40, is_saving=False).tables()).findings
    found = {finding.kind: finding for finding in findings}
    assert found["main-thread-pause"].locus.rank == found["rank-straggler"].locus.rank == 1
    assert found["rank-straggler"].consequence_of == "main-thread-pause"
    kinds = [finding.kind for finding in findings]
    assert kinds.index("main-thread-pause") < kinds.index("rank-straggler")


def test_ranks_that_make_no_other_wait_are_no_stragglers():
    assert find_rank_straggler(ranks(late=0.0).tables()) == []
    assert find_rank_straggler(ranks(late=0.030, waits=False).tables()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_by_its_data_names_what_is_slow_in_its_loading(rank):
    (late,) = find_rank_straggler(ranks(late=0.030, column="data_wait_ns").tables())
    slow = Finding(
        kind="workers-too-slow",
        severity="warning",
        confidence=0.9,
        summary="Both workers are too slow.",
        locus=Locus(host="node", rank=rank, role="worker", loader=0),
        evidence=measurements(9, "run", starved_ratio=0.4, worker_idle_ratio=0.0),
    )
    found = without_consequences([late, slow])[0]
    assert (found.severity, found.consequence_of) == ("warning", "workers-too-slow" if rank else None)
    assert found.summary.endswith("Fix workers-too-slow of that rank first.") == bool(rank)
