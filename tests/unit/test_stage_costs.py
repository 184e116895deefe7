"""What stages cost, on simulated runs whose every fetch is known."""

import numpy as np
import pytest

from collector.diagnosis.stage_costs import stage_costs
from tests.unit.simulated_runs import MAIN, jittered, simulate

BATCHES = 40
LOOP = {"workers": 2, "prefetch": 2, "batches": BATCHES, "service": jittered(0.06), "consumer": jittered(0.01)}


def pipeline(**more):
    """A run whose workers decode for half of `__getitem__`, and whose loop computes a loss of 2 ms."""
    script = simulate(**LOOP, **more)
    for fetches in script.parts["fetch"]:
        who = tuple(fetches[["host", "pid", "start_ticks"]].iloc[0])
        rows = fetches[["time_ns", "loader", "epoch", "index", "worker"]].assign(
            stage="decode", calls_count=8, duration_ns=fetches["getitem_ns"] / 2, cpu_ns=fetches["getitem_ns"] / 8
        )
        script.add("stage", rows.to_dict("records"), who)
    for batches in script.parts["batch"]:
        rows = batches[["time_ns", "loader", "epoch", "index"]].assign(stage="loss", duration_ns=2e6)
        script.add("stage", rows.to_dict("records"), MAIN)
    return script.tables()


def test_the_stages_of_a_fetch_add_up_to_it_and_those_of_the_loop_stand_apart():
    tables = pipeline(collate_share=0.2)
    table = stage_costs(tables, loader=0, since_ns=-np.inf).set_index("stage")
    fetch = tables.stream("fetch")
    fetched = float(fetch["getitem_ns"].sum() + fetch["collate_ns"].sum()) / 1e9
    assert list(table.index) == ["decode", "other", "collate", "loss"]
    assert table.loc[["decode", "collate", "other"], "total_seconds"].sum() == pytest.approx(fetched)
    assert table["fetch_ratio"].sum() == pytest.approx(1)
    assert table.loc["decode", ["calls_per_batch", "cpu_ratio"]].tolist() == pytest.approx([8, 0.25])
    assert table["in_fetch"].tolist() == [True, True, True, False]
    assert table.loc["loss", "batch_ms"] == pytest.approx(2)
    assert np.isnan(table.loc["loss", ["calls", "cpu_ratio", "fetch_ratio"]].astype(float)).all()


def test_what_was_before_and_what_other_loaders_did_is_left_out():
    tables = pipeline()
    half = float(np.sort(tables.stream("fetch")["time_ns"])[BATCHES // 2])
    table = stage_costs(tables, loader=0, since_ns=half).set_index("stage")
    assert table.loc["decode", "calls"] == 8 * BATCHES / 2
    assert stage_costs(tables, loader=1, since_ns=-np.inf).empty


def test_without_named_stages_the_fetch_is_told_as_a_whole():
    script = simulate(**LOOP, collate_share=0.0)
    table = stage_costs(script.tables(), loader=0, since_ns=-np.inf)
    assert table["stage"].tolist() == ["other"]
