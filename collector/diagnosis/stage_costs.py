"""What each stage of a pipeline takes per batch."""

from __future__ import annotations

import numpy as np
import pandas as pd

from collector.diagnosis.exposed import COLLATE, OTHER
from collector.diagnosis.frames import SECOND_NS, floats
from collector.diagnosis.tables import RunTables

_OF_STAGE = ["stage", "in_fetch"]
_COLUMNS = [*_OF_STAGE, "calls", "calls_per_batch", "total_seconds", "batch_ms", "cpu_ratio", "fetch_ratio"]


def stage_costs(tables: RunTables, *, loader: int | None, since_ns: float) -> pd.DataFrame:
    """The stages of a loader's pipeline since a time, longest first; empty if nothing was fetched.

    What collating and the rest of the fetch took are rows of their own, so that the stages of a fetch add up to it;
    a stage that was called while collating is counted in both. Stages that the training loop calls for no loader's
    batch are left out.

    Args:
        tables: with `batch`, `fetch` and `stage`.
        loader: its number.
        since_ns: CLOCK_MONOTONIC.

    Returns:
        stage, in_fetch (false: called by the training loop), calls (NaN: not counted), calls_per_batch,
        total_seconds, batch_ms (per batch made, or used by the loop), cpu_ratio (of the stage's time, where it was
        measured), fetch_ratio (of all time spent fetching; NaN outside of it).

    """
    batch, fetch, stage = (_since(tables.stream(name), loader, since_ns) for name in ("batch", "fetch", "stage"))
    fetch_ns, collate_ns = (float(np.nansum(floats(fetch, name))) for name in ("getitem_ns", "collate_ns"))
    fetch_ns += collate_ns
    found = _called(stage[stage["index"].notna()])
    left_ns = fetch_ns - collate_ns - found.loc[found["in_fetch"], "wall_ns"].sum()
    rest = ((COLLATE, True, len(fetch), collate_ns, np.nan), (OTHER, True, np.nan, left_ns, np.nan))
    found = pd.concat([found, pd.DataFrame(rest, columns=list(found))], ignore_index=True)
    found = found[found["wall_ns"] > 0]
    batches_count = np.where(found["in_fetch"], len(fetch), len(batch))
    found["calls_per_batch"] = found["calls"] / batches_count
    found["total_seconds"] = found["wall_ns"] / SECOND_NS
    found["batch_ms"] = found["wall_ns"] / batches_count / 1e6
    found["fetch_ratio"] = np.where(found["in_fetch"], found["wall_ns"] / max(fetch_ns, 1.0), np.nan)
    return found.sort_values(["in_fetch", "total_seconds"], ascending=False, ignore_index=True)[_COLUMNS]


def _since(table: pd.DataFrame, loader: int | None, since_ns: float) -> pd.DataFrame:
    return table[(floats(table, "time_ns") >= since_ns) & (table["loader"] == loader).to_numpy()]


def _called(stage: pd.DataFrame) -> pd.DataFrame:
    """Of each stage: stage, in_fetch, calls, wall_ns, cpu_ratio."""
    wall_ns, cpu_ns = floats(stage, "duration_ns"), floats(stage, "cpu_ns")
    rows = pd.DataFrame(
        {
            "stage": stage["stage"].to_numpy(),
            "in_fetch": stage["worker"].notna().to_numpy(),
            "calls": floats(stage, "calls_count"),
            "wall_ns": wall_ns,
            "cpu_ns": cpu_ns,
            "timed_ns": np.where(np.isfinite(cpu_ns), wall_ns, np.nan),
        }
    )
    sums = rows.groupby(_OF_STAGE, sort=False).sum(min_count=1).reset_index()
    sums["cpu_ratio"] = sums["cpu_ns"] / sums["timed_ns"]
    return sums.drop(columns=["cpu_ns", "timed_ns"])
