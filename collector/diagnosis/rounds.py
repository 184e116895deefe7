"""The boundary between the workers and the loop: who is waited for in a round, and what everybody does meanwhile.

In a round each worker makes one batch, so what recurs with `num_workers` batches is a worker's doing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.exposed import Exposed

MS_NS = 1e6
ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A few rounds of a loop.

    Attributes:
        begin_ns, end_ns: of the window.
        bars: worker (NaN: the training loop), kind (`idle`, `getitem`, `collate`, `parked`; of the loop: `wait`,
            `work`), index of the batch, and by (the worker that is waited for, or made it); begin_ms and
            duration_ms from the window's begin on. `parked` lasts from a batch's making until it is yielded.

    """

    begin_ns: float
    end_ns: float
    bars: pd.DataFrame


def fold(seen: Exposed) -> pd.DataFrame:
    """The waits by position in the round and by the worker that DataLoader recorded.

    Returns:
        position (index modulo num_workers), worker, n, mean_ms, p95_ms, and ratio of all waiting; without the first
        batches of each epoch, for which the queues were empty.

    """
    rows = seen.waits[seen.waits["index"] >= seen.loop.ramp]
    position = rows["index"] % max(seen.loop.num_workers, 1)
    waits = (rows["wait_ns"] / MS_NS).groupby([position.rename("position"), rows["worker"]])
    columns = {"n": waits.count(), "mean_ms": waits.mean(), "p95_ms": waits.quantile(0.95), "total": waits.sum()}
    found = pd.DataFrame(columns).reset_index()
    found["ratio"] = found["total"] / max(found.pop("total").sum(), 1e-9)
    return found.astype({"position": int, "worker": int})


def lanes(seen: Exposed, rounds: int = ROUNDS) -> Lanes | None:
    """The rounds with the longest waiting beyond the start of an epoch; None if there is no such stretch."""
    waits, width = seen.waits, rounds * max(seen.loop.num_workers, 1)
    steady = (waits["index"] >= seen.loop.ramp) & (waits["epoch"] == waits["epoch"].shift(width - 1))
    sums = waits["wait_ns"].where(waits["index"] >= seen.loop.ramp, 0.0).rolling(width).sum()
    sums = sums.where(steady)
    if not sums.notna().any():
        return None
    last = int(sums.to_numpy(na_value=-1.0).argmax())
    rows = waits.iloc[last - width + 1 : last + 1]
    begin, end = float(rows["asked_ns"].iloc[0]), float(rows["yield_ns"].iloc[-1])
    parts = [*_loop_bars(rows), *_worker_bars(seen, begin, end)]
    bars = pd.concat(parts, ignore_index=True).dropna(subset=["begin_ns", "end_ns"])
    bars["begin_ns"], bars["end_ns"] = bars["begin_ns"].clip(begin, end), bars["end_ns"].clip(begin, end)
    bars = bars[bars["end_ns"] > bars["begin_ns"]]
    bars["begin_ms"], bars["duration_ms"] = (
        (bars["begin_ns"] - begin) / MS_NS,
        (bars["end_ns"] - bars["begin_ns"]) / MS_NS,
    )
    return Lanes(begin_ns=begin, end_ns=end, bars=bars.drop(columns=["begin_ns", "end_ns"]))


def _loop_bars(rows: pd.DataFrame) -> list[pd.DataFrame]:
    by = rows["worker"]
    work = _bars("work", np.nan, rows["index"], by, rows["yield_ns"], rows["asked_ns"].shift(-1))
    return [_bars("wait", np.nan, rows["index"], by, rows["asked_ns"], rows["yield_ns"]), work]


def _worker_bars(seen: Exposed, begin: float, end: float) -> list[pd.DataFrame]:
    yields = seen.waits[["epoch", "index", "yield_ns"]].drop_duplicates(["epoch", "index"])
    made = seen.fetches[seen.fetches["idle_from_ns"] < end].merge(yields, how="left", on=["epoch", "index"])
    made = made[made["yield_ns"].fillna(np.inf) > begin]
    who, index = made["worker"], made["index"]
    return [
        _bars("idle", who, index, who, made["idle_from_ns"], made["begun_ns"]),
        _bars("getitem", who, index, who, made["begun_ns"], made["collating_ns"]),
        _bars("collate", who, index, who, made["collating_ns"], made["made_ns"]),
        _bars("parked", who, index, who, made["made_ns"], made["yield_ns"].fillna(end)),
    ]


def _bars(
    kind: str, worker: object, index: pd.Series, by: pd.Series, begin: pd.Series, end: pd.Series
) -> pd.DataFrame:
    columns = {"kind": kind, "worker": worker, "index": index, "by": by, "begin_ns": begin, "end_ns": end}
    return pd.DataFrame(columns, index=index.index)
