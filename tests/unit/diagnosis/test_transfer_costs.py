"""Time of passing batches, on a worker with made-up times."""

import numpy as np
import pandas as pd
import pytest

from collector.diagnosis.tuning.overheads import assumed_overheads, overheads

MS = 1e6


def transfers(*, fetch_ms, gap_ms, took_ms, count=60):
    """Return batches of one worker; the loop asks 5 ms after each is made, and gets it `took_ms` later."""
    begun = np.arange(count) * (fetch_ms + gap_ms) * MS
    made = begun + fetch_ms * MS
    return pd.DataFrame(
        {
            "epoch": 0,
            "worker": 0,
            "idle_ns": gap_ms * MS,
            "fetch_ns": fetch_ms * MS,
            "made_ns": made,
            "asked_ns": made + 5 * MS,
            "yield_ns": made + (5 + took_ms) * MS,
        }
    )


def test_transfer_from_waiting_and_computing_workers_is_separated():
    computes = transfers(fetch_ms=20, gap_ms=0.5, took_ms=12)
    waits = transfers(fetch_ms=20, gap_ms=40, took_ms=2).assign(epoch=1)
    found = overheads(pd.concat([computes, waits], ignore_index=True), prefetch_factor=2, computing_ratio=1.0)
    assert found.hand_over == pytest.approx(0.002, rel=0.1)
    assert found.busy_hand_over == pytest.approx(0.010, rel=0.1)
    assert overheads(computes, prefetch_factor=2, computing_ratio=1.0).gap == pytest.approx(0.0005)


def test_worker_with_one_index_never_computes_during_transfer():
    rows = transfers(fetch_ms=20, gap_ms=8, took_ms=2)
    found = overheads(rows, prefetch_factor=1, computing_ratio=0.5)
    assert found.hand_over == pytest.approx(0.002)
    assert found.dispatch == pytest.approx(0.001)
    assert found.busy_hand_over == assumed_overheads(0.5).busy_hand_over


def test_waiting_loop_measures_the_transfer_time():
    rows = transfers(fetch_ms=20, gap_ms=30, took_ms=2)
    rows["asked_ns"] = rows["made_ns"] - 10 * MS
    found = overheads(rows, prefetch_factor=2, computing_ratio=1.0)
    assert found.transfer + found.hand_over == pytest.approx(0.007)
