"""Costs of stages, on simulated runs whose every fetch is known."""

import numpy as np
import pytest
from simulated_runs import MAIN, jittered, simulate

from collector.diagnosis.loading.wait_breakdown import cost_per_stage, recent_loops

BATCHES = 40
LOOP = {"workers": 2, "prefetch": 2, "batches": BATCHES, "service": jittered(0.06), "consumer": jittered(0.01)}


def pipeline(**more):
    return in_stages(simulate(**LOOP, **more))


def in_stages(script, share=0.5):
    """Add a stage `decode` to each fetch, and a stage `loss` of 2 ms to the loop."""
    for fetches in script.parts["fetch"]:
        who = tuple(fetches[["host", "pid", "start_ticks"]].iloc[0])
        rows = fetches[["time_ns", "loader", "epoch", "index", "worker"]].assign(
            stage="decode",
            calls_count=8,
            duration_ns=fetches["getitem_ns"] * share,
            cpu_ns=fetches["getitem_ns"] * share / 4,
        )
        script.add("stage", rows.to_dict("records"), who)
    for batches in script.parts["batch"]:
        rows = batches[["time_ns", "loader", "epoch", "index"]].assign(stage="loss", duration_ns=2e6)
        script.add("stage", rows.to_dict("records"), MAIN)
    return script


def costs(tables):
    (loop,) = recent_loops(tables)
    return cost_per_stage(loop).set_index("stage")


def test_stages_of_a_fetch_add_up_and_loop_stages_are_separate():
    tables = pipeline(collate_share=0.2).tables()
    table, fetch = costs(tables), tables.stream("fetch")
    fetched = float(fetch["getitem_ns"].sum() + fetch["collate_ns"].sum()) / 1e9
    assert list(table.index) == ["decode", "other", "collate", "loss"]
    assert table.loc[["decode", "collate", "other"], "total_seconds"].sum() == pytest.approx(fetched)
    assert table["fetch_ratio"].sum() == pytest.approx(1)
    assert table.loc["decode", ["calls_per_batch", "cpu_ratio"]].tolist() == pytest.approx([8, 0.25])
    assert table["in_fetch"].tolist() == [True, True, True, False]
    assert table.loc["loss", "batch_ms"] == pytest.approx(2)
    assert np.isnan(table.loc["loss", ["calls", "cpu_ratio", "fetch_ratio"]].astype(float)).all()


def test_costs_count_only_the_batches_of_the_loop():
    tables = pipeline().tables()
    batch = tables.stream("batch")
    tables.streams["batch"] = batch[batch["index"] >= BATCHES / 4]
    table = costs(tables)
    assert table.loc["decode", "calls"] == 8 * BATCHES * 3 / 4
    assert table.loc["loss", "total_seconds"] == pytest.approx(0.002 * BATCHES * 3 / 4)


def test_loader_created_for_each_epoch_is_one_loop():
    script = None
    for epoch in range(3):
        script = simulate(**LOOP, script=script, loader=epoch, begin=100 + 10 * epoch)
    table = costs(in_stages(script).tables())
    assert table.loc["decode", "calls"] == 3 * 8 * BATCHES
    assert table.loc["loss", "total_seconds"] == pytest.approx(3 * 0.002 * BATCHES)


def test_fetch_without_named_stages_is_one_stage():
    assert list(costs(simulate(**LOOP, collate_share=0.0).tables()).index) == ["other"]


def test_rounding_error_is_no_stage():
    rounded = costs(in_stages(simulate(**LOOP, collate_share=0.0), share=1 - 1e-7).tables())
    assert list(rounded.index) == ["decode", "loss"]


def test_loop_without_fetch_records_has_no_costs():
    script = simulate(**LOOP)
    script.parts.pop("fetch")
    assert costs(script.tables()).empty
