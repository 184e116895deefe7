"""What each stage of a pipeline takes per batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.exposed import COLLATE, OTHER, RESOLUTION_NS
from collector.diagnosis.frames import SECOND_NS, floats, of_process
from collector.diagnosis.loops import Loop
from collector.diagnosis.tables import RunTables

_OF_BATCH = ("epoch", "index")
_OF_FETCH = ("pid", "start_ticks", "time_ns")
_OF_STAGE = ["stage", "in_fetch"]
_COLUMNS = [*_OF_STAGE, "calls", "calls_per_batch", "total_seconds", "batch_ms", "cpu_ratio", "fetch_ratio"]


def stage_costs(tables: RunTables, loop: Loop) -> pd.DataFrame:
    """What a loop's batches took, stage by stage, longest first; empty if nobody recorded how they were made.

    What collating and the rest of the fetch took are rows of their own, so that the stages of a fetch add up to it;
    a stage that was called while collating is counted in both. Stages that the training loop calls for no loader's
    batch are left out.

    Args:
        tables: of the run.
        loop: its batches, and their fetches among others.

    Returns:
        stage, in_fetch (false: called by the training loop), calls (NaN: not counted), calls_per_batch,
        total_seconds, batch_ms (per batch made, or used by the loop), cpu_ratio (of the stage's time, where it was
        measured), fetch_ratio (of all time spent fetching; NaN outside of it).

    """
    fetch = loop.fetches[_among(loop.fetches, loop.batches, _OF_BATCH)]
    getitem_ns, collate_ns = (float(np.nansum(floats(fetch, name))) for name in ("getitem_ns", "collate_ns"))
    found = _called(_stages(tables, loop, fetch))
    left_ns = getitem_ns - found.loc[found["in_fetch"], "wall_ns"].sum()
    if left_ns < RESOLUTION_NS * len(fetch):
        left_ns = 0.0
    rest = ((COLLATE, True, len(fetch), collate_ns, np.nan), (OTHER, True, np.nan, left_ns, np.nan))
    found = pd.concat([found, pd.DataFrame(rest, columns=list(found))], ignore_index=True)
    found = found[found["wall_ns"] > 0]
    batches_count = np.where(found["in_fetch"], len(fetch), len(loop.batches))
    found["calls_per_batch"] = found["calls"] / batches_count
    found["total_seconds"] = found["wall_ns"] / SECOND_NS
    found["batch_ms"] = found["wall_ns"] / batches_count / 1e6
    of_fetch = found["wall_ns"] / max(getitem_ns + collate_ns, 1.0)
    found["fetch_ratio"] = np.where(found["in_fetch"], of_fetch, np.nan)
    return found.sort_values(["in_fetch", "total_seconds"], ascending=False, ignore_index=True)[_COLUMNS]


def _stages(tables: RunTables, loop: Loop, fetch: pd.DataFrame) -> pd.DataFrame:
    """The stages of these fetches, and those that the loop called for its batches."""
    stage = tables.stream("stage")
    in_fetch = stage["worker"].notna().to_numpy()
    recorded = tables.stream("batch").loc[loop.batches.index]  # loaders of one loop have other numbers there
    called = of_process(stage[~in_fetch], loop.main)
    called = called[_among(called, recorded, ("loader", *_OF_BATCH))]
    return pd.concat([stage[in_fetch & _among(stage, fetch, _OF_FETCH)], called])


def _among(rows: pd.DataFrame, others: pd.DataFrame, columns: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which rows have the same in these columns as one of the others."""
    mine, theirs = (pd.MultiIndex.from_arrays([floats(each, name) for name in columns]) for each in (rows, others))
    found: npt.NDArray[np.bool_] = mine.isin(theirs)
    return found


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
