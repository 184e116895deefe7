"""Exposed stall: what the awaited worker did during each wait, on simulated runs whose every moment is known."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from simulated_runs import MAIN, jittered, per_worker, simulate

from collector.diagnosis.loading.wait_breakdown import (
    CORE,
    DISPATCH,
    IDLE,
    OTHER,
    START,
    TRANSFER,
    UNKNOWN,
    wait_breakdowns,
)
from collector.diagnosis.loading.worker_lanes import lanes, waits_by_worker
from collector.diagnosis.tuning.stage_speedup import speed_ups, wait_summaries
from collector.report.wording import stall
from collector.store.queries import Reach
from training_harness.records import ROLE_MAIN

SLOW = {"workers": 4, "prefetch": 2, "service": jittered(0.06), "consumer": jittered(0.01), "batches": 300}


def only_breakdown(script):
    (seen,) = wait_breakdowns(script.tables())
    return seen


def in_stages(script, **shares):
    """Add stages to each fetch: name -> share of its `__getitem__`."""
    for fetches in script.parts["fetch"]:
        who = tuple(fetches[["host", "pid", "start_ticks"]].iloc[0])
        rows = [
            {**fetch[["time_ns", "loader", "epoch", "index", "worker"]], "stage": stage, "calls_count": 8}
            | {"duration_ns": fetch["getitem_ns"] * share}
            for _, fetch in fetches.iterrows()
            for stage, share in shares.items()
        ]
        script.add("stage", rows, who)
    return script


def collating_seconds(script):
    """Return the seconds that workers of awaited batches collated during the wait, fetch by fetch."""
    tables, total = script.tables(), 0.0
    for batch in tables.stream("batch").itertuples():
        made = tables.stream("fetch")
        mine = made[(made["epoch"] == batch.epoch) & (made["index"] == batch.index)].iloc[0]
        for fetch in made[made["pid"] == mine["pid"]].itertuples():
            begin = max(fetch.time_ns - fetch.collate_ns, batch.time_ns - batch.wait_ns)
            total += max(0.0, min(fetch.time_ns, mine["time_ns"], batch.time_ns) - begin)
    return total / 1e9


@settings(max_examples=8)
@given(
    workers=st.integers(0, 5),
    prefetch=st.integers(1, 4),
    in_order=st.booleans(),
    persistent=st.booleans(),
    service=st.floats(0.001, 0.1),
    seed=st.integers(0, 99),
)
def test_parts_of_every_wait_add_up(workers, prefetch, in_order, persistent, service, seed):
    script = simulate(
        workers=workers, prefetch=prefetch, in_order=in_order, persistent=persistent, seed=seed, startup=0.2,
        service=jittered(service, cv=0.8), consumer=jittered(0.02, cv=0.5), batches=10, epochs=2, collate_share=0.3,
    )  # fmt: skip
    seen = only_breakdown(in_stages(script, decode=0.5, read=0.2))
    assert seen.parts.sum(axis=1).to_numpy() == pytest.approx(seen.waits["wait_ns"].to_numpy(), abs=10)
    assert (seen.parts.to_numpy() >= 0).all()
    assert seen.by_part.get(UNKNOWN, 0) == 0
    assert seen.by_part.get("collate", 0) == pytest.approx(collating_seconds(script), abs=1e-6)


def test_wait_is_divided_by_the_stages_of_the_awaited_batch():
    seen = only_breakdown(in_stages(simulate(collate_share=0.0, **SLOW), decode=0.6, read=0.3))
    assert list(seen.by_part) == ["decode", "read", OTHER]
    assert [seconds / seen.wait_seconds for seconds in seen.by_part.values()] == pytest.approx([0.6, 0.3, 0.1])


def test_startup_and_waiting_for_an_index_are_separate_parts():
    started = only_breakdown(
        simulate(startup=0.7, epochs=2, persistent=False, **{**SLOW, "service": jittered(0.001)})
    )
    assert started.by_part[START] == pytest.approx(1.4)
    assert only_breakdown(with_sampler(simulate(**SLOW), 0.005)).by_part[DISPATCH] == pytest.approx(
        300 * 0.005, rel=0.02
    )
    inline = only_breakdown(simulate(**{**SLOW, "workers": 0}))
    assert IDLE not in inline.by_part
    assert START not in inline.by_part


def test_wait_for_a_finished_batch_is_transfer():
    script = simulate(**{**SLOW, "service": jittered(0.001)})
    for batches in script.parts["batch"]:
        batches["wait_ns"] += 3e6
        batches["time_ns"] += 3e6
        batches["blocked_ns"] = batches["wait_ns"]
    seen = only_breakdown(script)
    assert seen.by_part[TRANSFER] == pytest.approx(0.9, rel=0.02)


def with_sampler(script, seconds):
    """Let a sampler run that long in each `next`, after the batch left the queue."""
    for batches in script.parts["batch"]:
        batches["wait_ns"] += seconds * 1e9
        batches["time_ns"] += seconds * 1e9
        batches["blocked_ns"] = batches["wait_ns"] - seconds * 1e9
    return script


def with_queued_main(script, ratio):
    """Sample the training process once a second, waiting for a core for this share of its time."""
    times = np.concatenate([rows["time_ns"] for rows in script.parts["batch"]])
    seconds = np.arange(times.min() / 1e9 - 1, times.max() / 1e9 + 1, 0.1)
    rows = [
        {
            "time_ns": round(second * 1e9),
            "process_pid": MAIN[1],
            "process_start_ticks": MAIN[2],
            "role": ROLE_MAIN,
            "run_queue_ns": round(second * 1e9 * ratio),
            "alive": 1,
        }
        for second in seconds
    ]
    return script.add("process", rows, ("node", 90, 4900))


def test_waits_for_a_core_are_neither_the_samplers_nor_the_transfers():
    quick = {**SLOW, "service": jittered(0.001)}
    free = only_breakdown(with_queued_main(with_sampler(simulate(**quick), 0.005), 0.0))
    crowded = only_breakdown(with_queued_main(with_sampler(simulate(**quick), 0.005), 0.6))
    assert CORE not in free.by_part
    total = free.by_part[DISPATCH]
    assert crowded.by_part[CORE] == pytest.approx(0.6 * total, rel=0.05), "the training hardly ever sleeps"
    assert crowded.by_part[CORE] + crowded.by_part[DISPATCH] == pytest.approx(total)


def test_a_transfer_waits_for_a_core_as_much_as_its_worker_does():
    script = simulate(**{**SLOW, "service": jittered(0.001), "split": (0.25, 0.75, 0.0)})
    for batches in script.parts["batch"]:
        batches["wait_ns"] += 3e6
        batches["time_ns"] += 3e6
        batches["blocked_ns"] = batches["wait_ns"]
    for steps in script.parts["step"]:
        steps["data_wait_ns"] += 3e6
    seen = only_breakdown(script)
    assert seen.by_part[CORE] == pytest.approx(3 * seen.by_part[TRANSFER])
    assert "waiting for a core 75%" in stall(wait_summaries(script.tables())[0])


def test_slow_worker_blocks_batches_that_are_ready():
    one = only_breakdown(simulate(**{**SLOW, "service": per_worker([0.02, 0.06, 0.02, 0.02])}))
    assert one.head_of_line_seconds > 0.9 * one.wait_seconds
    assert only_breakdown(simulate(**{**SLOW, "workers": 1})).head_of_line_seconds == 0


def test_wait_without_a_fetch_record_is_unknown():
    script = simulate(**SLOW)
    script.parts["fetch"] = [rows.iloc[:-10] for rows in script.parts["fetch"]]
    seen = only_breakdown(script)
    lost = seen.waits.loc[seen.waits["made_ns"].isna(), "wait_ns"]
    assert len(lost) == 40
    assert seen.by_part[UNKNOWN] == pytest.approx(lost.sum() / 1e9)


def test_only_time_with_complete_records_counts():
    script = simulate(**SLOW)
    tables = script.tables()
    since = tables.stream("batch")["time_ns"].iloc[100]
    tables.streams["fetch"] = tables.stream("fetch")[lambda rows: rows["time_ns"] >= since]
    tables.totals["fetch"] = Reach(rows_count=300, first_ns=0, last_ns=0)
    (seen,) = wait_breakdowns(tables)
    assert len(seen.waits) == 200
    assert seen.by_part.get(UNKNOWN, 0) < 0.05 * seen.wait_seconds


def test_target_per_batch_removes_the_wait():
    """The stage at the length that the table names, in another simulation: the loop no longer waits."""
    script = in_stages(simulate(collate_share=0.0, **SLOW), decode=0.7, read=0.1)
    gains = speed_ups(only_breakdown(script))
    assert gains["decode"]["batch_seconds"] == pytest.approx(0.042, rel=0.05)
    shorter = 0.06 - gains["decode"]["batch_seconds"] + gains["decode"]["enough_seconds"]
    assert only_breakdown(simulate(**{**SLOW, "service": jittered(shorter)})).wait_ratio < 0.06
    longer = shorter + 0.01
    assert only_breakdown(simulate(**{**SLOW, "service": jittered(longer)})).wait_ratio > 0.1
    assert gains["read"]["enough_seconds"] is None
    assert gains["read"]["free_wait_ratio"] == pytest.approx(
        only_breakdown(simulate(**{**SLOW, "service": jittered(0.054)})).wait_ratio, abs=0.03
    )


def test_no_stage_is_the_target_of_waits_that_no_stage_causes():
    """Each batch is made in time but takes 4% of the loop's time to arrive: a faster dataset gains nothing."""
    script = simulate(**{**SLOW, "service": jittered(0.004), "consumer": jittered(0.02)})
    for batches in script.parts["batch"]:
        batches["wait_ns"] += 0.8e6
        batches["blocked_ns"] = batches["wait_ns"]
    for steps in script.parts["step"]:
        steps["data_wait_ns"] += 0.8e6
    assert speed_ups(only_breakdown(script)) == {}


def test_longest_waiting_loop_is_first_in_the_summaries():
    script = simulate(**{**SLOW, "service": jittered(0.001)})
    simulate(script=script, loader=1, begin=1100.0, **SLOW)
    slow, busy = wait_summaries(script.tables())
    assert (slow["loader"], busy["loader"]) == (1, 0)
    assert sum(each["seconds"] for each in slow["stages"]) == pytest.approx(slow["wait_seconds"])
    assert slow["stages"][0]["enough_seconds"] < slow["stages"][0]["batch_seconds"]
    assert all(each["enough_seconds"] is None for each in busy["stages"])
    assert np.isfinite(busy["wait_ratio"])


def test_slow_worker_stands_out_among_the_waits_and_in_the_timeline():
    script = simulate(**{**SLOW, "service": per_worker([0.02, 0.06, 0.02, 0.02])})
    seen = only_breakdown(script)
    waits = waits_by_worker(seen)
    assert waits["worker"].tolist() == [0, 1, 2, 3]
    assert waits["n"].sum() == 300 - seen.loop.ramp
    assert waits.set_index("worker").loc[1, "ratio"] > 0.95
    shown = lanes(seen, rounds=3)
    bars = shown.bars
    length_ms = (shown.end_ns - shown.begin_ns) / 1e6
    of_loop, of_workers = bars[bars["worker"].isna()], bars[bars["kind"].isin(["idle", "getitem", "collate"])]
    assert of_loop["duration_ms"].sum() == pytest.approx(length_ms)
    assert of_loop.loc[of_loop["kind"] == "wait", "by"].value_counts().idxmax() == 1
    assert of_workers.groupby("worker")["duration_ms"].sum().max() <= length_ms * 1.001
    idle = of_workers[of_workers["kind"] == "idle"].groupby("worker")["duration_ms"].sum()
    assert idle.get(1, 0.0) < 0.01 * length_ms < idle.drop(1, errors="ignore").min()
    assert ((bars["begin_ms"] >= 0) & (bars["begin_ms"] + bars["duration_ms"] <= length_ms + 1e-6)).all()


def test_run_too_short_for_a_steady_round_has_no_timeline():
    assert lanes(only_breakdown(simulate(**{**SLOW, "batches": 20}))) is None
