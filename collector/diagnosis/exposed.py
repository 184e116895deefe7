"""Exposed stall: what the worker that a training waits for is doing meanwhile.

A stage costs the training only what the loop waits for it. So each wait is laid over the timeline of the process
that made the batch: not started yet, without an index, in the dataset (by the stages of the batch that it was
making), collating. What is left once the batch was made is its way to the loop. The parts of a wait add up to it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.diagnosis.frames import SECOND_NS, floats
from collector.diagnosis.loops import Loop, loops
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trends import Floats

#: Parts of a wait beside the stages: the worker had not looked for work yet; it had no index; the rest of
#: `__getitem__`; `collate_fn`; the made batch was on its way (pickled, queued, pinned, unpickled); the training
#: process itself chose samples and sent off indices; nobody recorded the fetch.
START, IDLE, OTHER, COLLATE = "worker start", "idle", "other", "collate"
TRANSFER, DISPATCH, UNKNOWN = "transfer", "dispatch", "not recorded"
PARTS = (START, IDLE, OTHER, COLLATE, TRANSFER, DISPATCH, UNKNOWN)
#: What a loop waits for now says more than what it waited for, and costs the same however long the run is.
RECENT_BATCHES = 20_000
#: What is shorter no clock can tell.
RESOLUTION_NS = 1e3
_PROCESS = ["host", "pid", "start_ticks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What one loop waited for, over the batches whose records are there.

    Attributes:
        waits: a row per batch: epoch, index, worker, asked_ns, yield_ns, made_ns, wait_ns, and `head_of_line_ns`:
            of the wait, while a later batch was made already and had to wait for its turn.
        parts: by the same rows, what was waited for, ns, a column each.
        fetches: a row per fetch of the loop: epoch, index, worker, and when it had no index (`idle_from_ns`), began
            (`begun_ns`), began to collate (`collating_ns`) and ended (`made_ns`).
        stages: by the same rows, what it spent in which stage, ns, a column each.

    """

    loop: Loop
    waits: pd.DataFrame
    parts: pd.DataFrame
    fetches: pd.DataFrame
    stages: pd.DataFrame

    @property
    def wait_seconds(self) -> float:
        """All that the loop waited."""
        return float(self.waits["wait_ns"].sum()) / SECOND_NS

    @property
    def wait_ratio(self) -> float:
        """Of the loop's time, from asking for the first batch of each epoch to its last."""
        epochs = self.waits.groupby("epoch")
        spent = float((epochs["yield_ns"].max() - epochs["asked_ns"].min()).sum()) / SECOND_NS
        return self.wait_seconds / max(spent, self.wait_seconds, 1e-9)

    @property
    def head_of_line_seconds(self) -> float:
        """Of the wait, while a later batch was there already."""
        return float(self.waits["head_of_line_ns"].sum()) / SECOND_NS

    @property
    def by_part(self) -> dict[str, float]:
        """What was waited for, seconds, the most first; without what is less than a clock can tell."""
        total_ns = self.parts.sum().sort_values(ascending=False)
        return {str(name): ns / SECOND_NS for name, ns in total_ns.items() if ns >= RESOLUTION_NS}


def exposed_stall(tables: RunTables) -> list[Exposed]:
    """The exposed stall of each loop, over the last batches whose fetches and stages are all there."""
    return [expose(loop, tables.stream("stage")) for loop in recent_loops(tables)]


def recent_loops(tables: RunTables) -> list[Loop]:
    """Each loop over its last batches whose fetches and stages are all there."""
    cut = [
        float(rows["time_ns"].iloc[0])
        for name in ("batch", "fetch", "stage")
        if len(rows := tables.stream(name)) < tables.rows_count(name)
    ]
    found = []
    for loop in loops(tables):
        batches = loop.batches[floats(loop.batches, "time_ns") >= max(cut, default=-np.inf)].iloc[-RECENT_BATCHES:]
        fetches = loop.fetches.iloc[-RECENT_BATCHES - 2 * loop.ramp :]  # some are for batches not yielded yet
        if len(batches):
            found.append(dataclasses.replace(loop, batches=batches, fetches=fetches))
    return found


def expose(loop: Loop, stages: pd.DataFrame) -> Exposed:
    """What this loop waited for.

    Args:
        loop: its batches and fetches.
        stages: the `stage` stream.

    """
    fetches, in_stages = _timeline(loop, stages)
    waits = _waits(loop, fetches)
    asked, wait, made = (waits[name].to_numpy() for name in ("asked_ns", "wait_ns", "made_ns"))
    made_seen = np.clip(made, asked, asked + wait)
    starved = np.where(np.isfinite(made), made_seen - asked, 0.0)
    parts = _while_making(waits, fetches, in_stages, starved)
    handed = np.where(np.isfinite(made), wait - starved, 0.0)
    # Once the queue gave the batch, the loop sends off the next index, and only then has it.
    blocked = np.fmax(np.fmin(waits["blocked_ns"].to_numpy(), wait), starved)
    taking = handed if not loop.num_workers else np.nan_to_num(wait - blocked) * (handed > 0)
    parts[DISPATCH] = taking
    if not loop.num_workers:
        parts[DISPATCH] += parts.pop(IDLE) + parts.pop(START)
    parts[TRANSFER] = handed - taking
    parts[UNKNOWN] = np.where(np.isfinite(made), 0.0, wait)
    waits = waits.drop(columns=["row", "blocked_ns"])
    return Exposed(loop=loop, waits=waits, parts=parts, fetches=fetches, stages=in_stages)


def _timeline(loop: Loop, stages: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The fetches of a loop by process and time, and what each spent in which stage, ns.

    A fetch begins at `begun_ns`, collates from `collating_ns` on and ends at `made_ns`; before it, its process had
    no index, from `idle_from_ns` on.
    """
    made = loop.fetches.assign(made_ns=floats(loop.fetches, "time_ns"))
    made = made[np.isfinite(made["made_ns"])]
    process = made.groupby(_PROCESS).ngroup().to_numpy()
    order = np.lexsort((made["made_ns"], process))
    made = made.iloc[order].reset_index(drop=True)
    rows = pd.DataFrame({"process": process[order], "made_ns": made["made_ns"]})
    for name in ("epoch", "index", "worker"):
        rows[name] = floats(made, name)
    before = rows.groupby("process")["made_ns"].shift().fillna(-np.inf)
    collate, getitem, idle = (
        np.fmax(np.nan_to_num(floats(made, name)), 0.0) for name in ("collate_ns", "getitem_ns", "idle_ns")
    )
    rows["collating_ns"] = np.maximum(rows["made_ns"] - collate, before)
    rows["begun_ns"] = np.maximum(rows["collating_ns"] - getitem, before)
    rows["idle_from_ns"] = np.maximum(rows["begun_ns"] - idle, before)
    in_dataset = (rows["collating_ns"] - rows["begun_ns"]).to_numpy()
    found = _stage_times(made, stages)
    # A stage that was called while collating counts as if it were of the dataset, up to what the dataset took.
    found = found.mul(in_dataset / np.fmax(found.sum(axis=1), np.fmax(in_dataset, 1.0)), axis=0)
    found[OTHER] = in_dataset - found.sum(axis=1)
    found[COLLATE] = rows["made_ns"] - rows["collating_ns"]
    return rows, found


def _stage_times(made: pd.DataFrame, stages: pd.DataFrame) -> pd.DataFrame:
    """What each fetch spent in which stage, ns. Both were recorded by one process at one moment."""
    keys = [*_PROCESS, "time_ns"]
    called = stages[stages["worker"].notna() & stages["duration_ns"].notna() & ~stages["stage"].isin(PARTS)]
    if called.empty:
        return pd.DataFrame(index=made.index)
    called = called[[*keys, "stage", "duration_ns"]].astype({"duration_ns": float, "pid": float, "time_ns": float})
    wide = called.pivot_table(index=keys, columns="stage", values="duration_ns", aggfunc="sum")
    place = pd.MultiIndex.from_frame(made[keys].astype({"pid": float, "time_ns": float}))
    found: pd.DataFrame = wide.reindex(place).fillna(0.0).reset_index(drop=True).rename_axis(columns=None)
    return found


def _waits(loop: Loop, fetches: pd.DataFrame) -> pd.DataFrame:
    """Each batch with the moment in which it was made, and the row of its fetch."""
    rows: pd.DataFrame = pd.DataFrame(
        {name: floats(loop.batches, name) for name in ("epoch", "index", "worker", "blocked_ns")}
    )
    rows["yield_ns"], rows["wait_ns"] = floats(loop.batches, "time_ns"), floats(loop.batches, "wait_ns")
    rows = rows[np.isfinite(rows["yield_ns"]) & (rows["wait_ns"] >= 0)]
    rows["asked_ns"] = rows["yield_ns"] - rows["wait_ns"]
    made = fetches[["epoch", "index", "made_ns"]].rename_axis("row").reset_index()
    made = made.drop_duplicates(["epoch", "index"], keep="last").sort_values(["epoch", "index"])
    from_behind = made.iloc[::-1].groupby("epoch")["made_ns"]
    made["later_ns"] = from_behind.cummin().groupby(made["epoch"]).shift()
    rows = rows.merge(made, how="left", on=["epoch", "index"]).sort_values("asked_ns", ignore_index=True)
    until = np.minimum(rows["made_ns"], rows["yield_ns"])
    ahead = np.maximum(until - np.maximum(rows["asked_ns"], rows.pop("later_ns")), 0.0)
    rows["head_of_line_ns"] = np.nan_to_num(ahead) if loop.in_order else 0.0
    return rows


def _while_making(
    waits: pd.DataFrame, fetches: pd.DataFrame, in_stages: pd.DataFrame, starved: Floats
) -> pd.DataFrame:
    """What the process that made each batch did, from asking for it until it was made; ns by part."""
    found = pd.DataFrame(0.0, index=waits.index, columns=[START, IDLE, *in_stages])
    at = waits.loc[starved > 0, ["asked_ns", "row"]].astype({"row": int})
    if at.empty:
        return found
    own = fetches.loc[at["row"]].reset_index(drop=True)
    asked, until = at["asked_ns"].to_numpy(), at["asked_ns"].to_numpy() + starved[starved > 0]
    first = pd.merge_asof(  # what the process was at when the loop began to wait
        pd.DataFrame({"asked_ns": asked, "process": own["process"]}),
        fetches.rename_axis("row").reset_index()[["row", "process", "made_ns"]].sort_values("made_ns"),
        left_on="asked_ns",
        right_on="made_ns",
        by="process",
        direction="forward",
    )["row"]
    spent = _spent(fetches, in_stages, at["row"].to_numpy(), until)
    spent -= _spent(fetches, in_stages, first.to_numpy(dtype=int), asked)
    spent = np.maximum(spent, 0.0)
    awake = fetches.groupby("process")["idle_from_ns"].first()[own["process"]].to_numpy()
    starting = np.clip(awake - asked, 0.0, until - asked)
    idle = np.maximum(until - asked - starting - spent.sum(axis=1), 0.0)
    found.loc[at.index] = np.column_stack([starting, idle, spent])
    return found


def _spent(fetches: pd.DataFrame, in_stages: pd.DataFrame, row: np.ndarray, until: Floats) -> Floats:
    """What a process had spent in each stage up to a moment within the fetch `row`, or before it; ns.

    The samples of a batch go through the stages one after the other: while it was in the dataset, each stage had
    its share of every moment.
    """
    whole = in_stages.to_numpy()
    earlier = (whole.cumsum(axis=0) - whole)[row]
    begun, collating, made = (fetches[name].to_numpy()[row] for name in ("begun_ns", "collating_ns", "made_ns"))
    dataset = np.clip(until - begun, 0.0, collating - begun) / np.maximum(collating - begun, 1.0)
    collate = np.clip(until - collating, 0.0, made - collating) / np.maximum(made - collating, 1.0)
    part = np.where(in_stages.columns == COLLATE, collate[:, np.newaxis], dataset[:, np.newaxis])
    spent: Floats = earlier + whole[row] * part
    return spent
