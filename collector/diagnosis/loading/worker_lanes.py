"""Rounds of a loop: which worker the training waits for, and what each worker does meanwhile.

In a round each worker makes one batch, so what recurs with `num_workers` batches is a worker's doing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.loading.wait_breakdown import WaitBreakdown

MS_NS = 1e6
ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A few rounds of a loop.

    Attributes:
        begin_ns, end_ns: the window.
        bars: worker (NaN: the training loop), kind (`idle`, `getitem`, `collate`, `parked`; in the loop: `wait`,
            `work`), index of the batch, by (the worker that made the batch), begin_ms (since `begin_ns`) and
            duration_ms. `parked` lasts from the end of a batch's fetch until the batch is yielded.
    """

    begin_ns: float
    end_ns: float
    bars: pd.DataFrame


def waits_by_worker(breakdown: WaitBreakdown) -> pd.DataFrame:
    """Sum up the waits by the worker that DataLoader recorded.

    Returns:
        worker, n, mean_ms, p95_ms, and ratio of all waiting; without the first batches of each epoch, for which the
        queues were empty.
    """
    rows = breakdown.waits[breakdown.waits["index"] >= breakdown.loop.ramp]
    waits = (rows["wait_ns"] / MS_NS).groupby(rows["worker"])
    columns = {"n": waits.count(), "mean_ms": waits.mean(), "p95_ms": waits.quantile(0.95), "total": waits.sum()}
    sums = pd.DataFrame(columns).reset_index()
    sums["ratio"] = sums["total"] / max(sums.pop("total").sum(), 1e-9)
    return sums.astype({"worker": int})


def lanes(breakdown: WaitBreakdown, rounds: int = ROUNDS) -> Lanes | None:
    """Return the rounds with the longest waiting after the start of an epoch; None if there are none."""
    loop, waits = breakdown.loop, breakdown.waits
    width = rounds * max(loop.num_workers, 1)
    steady = (waits["index"] >= loop.ramp) & (waits["epoch"] == waits["epoch"].shift(width - 1))
    sums = waits["wait_ns"].where(waits["index"] >= loop.ramp, 0.0).rolling(width).sum()
    sums = sums.where(steady)
    if not sums.notna().any():
        return None
    last = int(sums.to_numpy(na_value=-1.0).argmax())
    rows = waits.iloc[last - width + 1 : last + 1]
    begin, end = float(rows["asked_ns"].iloc[0]), float(rows["yield_ns"].iloc[-1])
    of_batch = np.nan, rows["index"], rows["worker"]
    parts = [
        _bars("wait", *of_batch, rows["asked_ns"], rows["yield_ns"]),
        _bars("work", *of_batch, rows["yield_ns"], rows["asked_ns"].shift(-1)),
        *_worker_bars(breakdown, begin, end),
    ]
    bars = pd.concat(parts, ignore_index=True).dropna(subset=["begin_ns", "end_ns"])
    bars["begin_ns"], bars["end_ns"] = bars["begin_ns"].clip(begin, end), bars["end_ns"].clip(begin, end)
    bars = bars[bars["end_ns"] > bars["begin_ns"]]
    bars["begin_ms"] = (bars["begin_ns"] - begin) / MS_NS
    bars["duration_ms"] = (bars["end_ns"] - bars["begin_ns"]) / MS_NS
    return Lanes(begin_ns=begin, end_ns=end, bars=bars.drop(columns=["begin_ns", "end_ns"]))


def _worker_bars(breakdown: WaitBreakdown, begin: float, end: float) -> list[pd.DataFrame]:
    yields = breakdown.waits[["epoch", "index", "yield_ns"]].drop_duplicates(["epoch", "index"])
    rows = breakdown.fetches.merge(yields, how="left", on=["epoch", "index"])
    rows = rows[(rows["idle_from_ns"] < end) & (rows["yield_ns"].fillna(np.inf) > begin)]
    worker, index = rows["worker"], rows["index"]
    return [
        _bars("idle", worker, index, worker, rows["idle_from_ns"], rows["begun_ns"]),
        _bars("getitem", worker, index, worker, rows["begun_ns"], rows["collating_ns"]),
        _bars("collate", worker, index, worker, rows["collating_ns"], rows["made_ns"]),
        _bars("parked", worker, index, worker, rows["made_ns"], rows["yield_ns"].fillna(end)),
    ]


def _bars(
    kind: str, worker: object, index: pd.Series, by: pd.Series, begin: pd.Series, end: pd.Series
) -> pd.DataFrame:
    columns = {"kind": kind, "worker": worker, "index": index, "by": by, "begin_ns": begin, "end_ns": end}
    return pd.DataFrame(columns, index=index.index)
