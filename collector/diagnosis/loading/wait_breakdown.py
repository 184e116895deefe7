"""The exposed stall: what the awaited worker does while the training waits, and what each stage takes per batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.loading.core_waits import core_waits
from collector.diagnosis.loading.loaders import Loop, all_loops, replaced_loaders
from collector.diagnosis.run.columns import GIB, SECOND_NS, WRITER, floats, mean, of_process
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats

#: Parts of a wait besides the stages. START: the worker had not started yet. IDLE: it had no index. OTHER: the rest
#: of `__getitem__`. COLLATE: `collate_fn`. TRANSFER: the batch was made, and pickled, queued, pinned or unpickled.
#: DISPATCH: the training process ran the sampler and sent indices. CORE: an estimate of the part of these two in
#: which a thread was ready to run but had no core. UNKNOWN: no process recorded the fetch.
START, IDLE, OTHER, COLLATE = "worker start", "idle", "other", "collate"
TRANSFER, DISPATCH, CORE, UNKNOWN = "transfer", "dispatch", "no core", "not recorded"
WAIT_PARTS = (START, IDLE, OTHER, COLLATE, TRANSFER, DISPATCH, CORE, UNKNOWN)
#: Rate of a batch of tensors through a queue, bytes/s: 0.6 to 1 GiB/s were measured (12 and 32 MB, 2 cores).
TRANSFER_RATE = GIB
#: Newest batches of a loop that are broken down, so that the cost does not grow with the run.
RECENT_BATCHES = 20_000
#: Shortest time that a clock measures.
RESOLUTION_NS = 1e3
_OF_BATCH = ("epoch", "index")
_OF_FETCH = ("pid", "start_ticks", "time_ns")
_OF_STAGE = ["stage", "in_fetch"]
_COLUMNS = [*_OF_STAGE, "calls", "calls_per_batch", "total_seconds", "batch_ms", "cpu_ratio", "fetch_ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitBreakdown:
    """The waits of one loop by part, over the batches whose records are there.

    Attributes:
        waits: a row per batch: epoch, index, worker, asked_ns, yield_ns, made_ns, wait_ns, and `head_of_line_ns`:
            the part of the wait in which a later batch was made already and had to wait for its turn.
        parts: ns of each wait by part, a column per part; the rows of `waits`.
        fetches: a row per fetch of the loop: epoch, index, worker, and when it had no index (`idle_from_ns`), began
            (`begun_ns`), began to collate (`collating_ns`) and ended (`made_ns`).
        stages: ns of each fetch by stage, a column per stage; the rows of `fetches`.
    """

    loop: Loop
    waits: pd.DataFrame
    parts: pd.DataFrame
    fetches: pd.DataFrame
    stages: pd.DataFrame

    @property
    def wait_seconds(self) -> float:
        """Seconds that the loop waited in all."""
        return float(self.waits["wait_ns"].sum()) / SECOND_NS

    @property
    def wait_ratio(self) -> float:
        """Share of the loop's time that it waited, from asking for the first batch of each epoch to its last."""
        epochs = self.waits.groupby("epoch")
        spent = float((epochs["yield_ns"].max() - epochs["asked_ns"].min()).sum()) / SECOND_NS
        return self.wait_seconds / max(spent, self.wait_seconds, 1e-9)

    @property
    def head_of_line_seconds(self) -> float:
        """Seconds of the wait in which a later batch was made already."""
        return float(self.waits["head_of_line_ns"].sum()) / SECOND_NS

    @property
    def by_part(self) -> dict[str, float]:
        """Seconds waited by part, the longest first, without those below `RESOLUTION_NS`."""
        total_ns = self.parts.sum().sort_values(ascending=False, kind="stable")
        return {str(name): ns / SECOND_NS for name, ns in total_ns.items() if ns >= RESOLUTION_NS}


def wait_breakdowns(tables: RunTables) -> list[WaitBreakdown]:
    """Break down the waits of each loop with its last setting, over the last batches that are wholly recorded."""
    replaced = replaced_loaders(tables)
    recent = (loop for loop in recent_loops(tables) if (loop.main, loop.loader) not in replaced)
    return [break_down_waits(loop) for loop in recent]


def recent_loops(tables: RunTables) -> list[Loop]:
    """Return each loop, with each of its settings, over its last batches whose fetches and stages are all there."""
    first_ns = [
        float(rows["time_ns"].iloc[0])
        for name in ("batch", "fetch", "stage")
        if len(rows := tables.stream(name)) < tables.rows_count(name)
    ]
    since_ns = max(first_ns, default=-np.inf)
    recent = []
    for loop in all_loops(tables):
        batches = loop.batches[floats(loop.batches, "time_ns") >= since_ns].iloc[-RECENT_BATCHES:]
        fetches = loop.fetches.iloc[-RECENT_BATCHES - 2 * loop.ramp :]  # some are for batches not yielded yet
        if len(batches):
            recent.append(dataclasses.replace(loop, batches=batches, fetches=fetches))
    return recent


def break_down_waits(loop: Loop) -> WaitBreakdown:
    """Split each wait of a loop by what the process that made the batch did meanwhile."""
    fetches, in_stages = _timeline(loop, loop.tables.stream("stage"))
    waits = _waits(loop, fetches)
    asked, wait, made = (waits[name].to_numpy() for name in ("asked_ns", "wait_ns", "made_ns"))
    starved = np.where(np.isfinite(made), np.clip(made, asked, asked + wait) - asked, 0.0)
    parts = _making_parts(waits, fetches, in_stages, starved)
    after_made = np.where(np.isfinite(made), wait - starved, 0.0)
    # Once the batch has left the queue, the loop sends the next index, and only then yields the batch.
    blocked = np.fmax(np.fmin(waits["blocked_ns"].to_numpy(), wait), starved)
    dispatch = after_made if not loop.num_workers else np.nan_to_num(wait - blocked) * (after_made > 0)
    transfer, cores = after_made - dispatch, core_waits(loop)
    if not loop.num_workers:
        dispatch = dispatch + (parts.pop(IDLE) + parts.pop(START)).to_numpy()
    # The bytes of a batch need their time on a core.
    copying = np.nan_to_num(mean(floats(loop.batches, "payload_bytes"))) / TRANSFER_RATE * SECOND_NS
    parts[DISPATCH] = dispatch * (1 - cores.in_loop)
    parts[TRANSFER] = np.maximum(transfer * (1 - cores.in_workers), np.minimum(transfer, copying))
    parts[CORE] = dispatch + transfer - parts[DISPATCH] - parts[TRANSFER]
    parts[UNKNOWN] = np.where(np.isfinite(made), 0.0, wait)
    waits = waits.drop(columns=["row", "blocked_ns"])
    return WaitBreakdown(loop=loop, waits=waits, parts=parts, fetches=fetches, stages=in_stages)


def _timeline(loop: Loop, stages: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the fetches of a loop by process and time, and the ns of each fetch by stage.

    A process idles from `idle_from_ns`, fetches from `begun_ns`, collates from `collating_ns` and is done at
    `made_ns`.
    """
    made = loop.fetches.assign(made_ns=floats(loop.fetches, "time_ns"))
    made = made[np.isfinite(made["made_ns"])]
    process = made.groupby(WRITER).ngroup().to_numpy()
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
    in_stages = _stage_times(made, stages)
    # A stage that was called while collating counts as if the dataset had called it, up to the dataset's time.
    in_stages = in_stages.mul(in_dataset / np.fmax(in_stages.sum(axis=1), np.fmax(in_dataset, 1.0)), axis=0)
    in_stages[OTHER] = in_dataset - in_stages.sum(axis=1)
    in_stages[COLLATE] = rows["made_ns"] - rows["collating_ns"]
    return rows, in_stages


def _stage_times(made: pd.DataFrame, stages: pd.DataFrame) -> pd.DataFrame:
    """Return the ns of each fetch by stage. One process records a fetch and its stages at one moment."""
    keys = [*WRITER, "time_ns"]
    called = stages[stages["worker"].notna() & stages["duration_ns"].notna() & ~stages["stage"].isin(WAIT_PARTS)]
    if called.empty:
        return pd.DataFrame(index=made.index)
    called = called[[*keys, "stage", "duration_ns"]].astype({"duration_ns": float, "pid": float, "time_ns": float})
    wide = called.pivot_table(index=keys, columns="stage", values="duration_ns", aggfunc="sum")
    place = pd.MultiIndex.from_frame(made[keys].astype({"pid": float, "time_ns": float}))
    times: pd.DataFrame = wide.reindex(place).fillna(0.0).reset_index(drop=True).rename_axis(columns=None)
    return times


def _waits(loop: Loop, fetches: pd.DataFrame) -> pd.DataFrame:
    """Return each batch with the time when it was made, and the row of its fetch."""
    rows: pd.DataFrame = pd.DataFrame(
        {name: floats(loop.batches, name) for name in ("epoch", "index", "worker", "blocked_ns")}
    )
    rows["yield_ns"], rows["wait_ns"] = floats(loop.batches, "time_ns"), floats(loop.batches, "wait_ns")
    rows = rows[np.isfinite(rows["yield_ns"]) & (rows["wait_ns"] >= 0)]
    rows["asked_ns"] = rows["yield_ns"] - rows["wait_ns"]
    made = fetches[["epoch", "index", "made_ns"]].rename_axis("row").reset_index()
    made = made.drop_duplicates(["epoch", "index"], keep="last").sort_values(["epoch", "index"])
    last_first = made.iloc[::-1].groupby("epoch")["made_ns"]
    made["later_ns"] = last_first.cummin().groupby(made["epoch"]).shift()
    rows = rows.merge(made, how="left", on=["epoch", "index"]).sort_values("asked_ns", ignore_index=True)
    until = np.minimum(rows["made_ns"], rows["yield_ns"])
    ahead = np.maximum(until - np.maximum(rows["asked_ns"], rows.pop("later_ns")), 0.0)
    rows["head_of_line_ns"] = np.nan_to_num(ahead) if loop.in_order else 0.0
    return rows


def _making_parts(
    waits: pd.DataFrame, fetches: pd.DataFrame, in_stages: pd.DataFrame, starved: Floats
) -> pd.DataFrame:
    """Return the ns by part of the process that made each batch, from asking for the batch until it was made."""
    parts = pd.DataFrame(0.0, index=waits.index, columns=[START, IDLE, *in_stages])
    at = waits.loc[starved > 0, ["asked_ns", "row"]].astype({"row": int})
    if at.empty:
        return parts
    process = fetches.loc[at["row"], "process"].reset_index(drop=True)
    asked, until = at["asked_ns"].to_numpy(), at["asked_ns"].to_numpy() + starved[starved > 0]
    first = pd.merge_asof(  # the fetch that the process was at when the loop began to wait
        pd.DataFrame({"asked_ns": asked, "process": process}),
        fetches.rename_axis("row").reset_index()[["row", "process", "made_ns"]].sort_values("made_ns"),
        left_on="asked_ns",
        right_on="made_ns",
        by="process",
        direction="forward",
    )["row"]
    spent = _spent(fetches, in_stages, at["row"].to_numpy(), until)
    spent -= _spent(fetches, in_stages, first.to_numpy(dtype=int), asked)
    spent = np.maximum(spent, 0.0)
    awake = fetches.groupby("process")["idle_from_ns"].first()[process].to_numpy()
    starting = np.clip(awake - asked, 0.0, until - asked)
    idle = np.maximum(until - asked - starting - spent.sum(axis=1), 0.0)
    parts.loc[at.index] = np.column_stack([starting, idle, spent])
    return parts


def _spent(fetches: pd.DataFrame, in_stages: pd.DataFrame, row: np.ndarray, until: Floats) -> Floats:
    """Return the ns that a process had spent in each stage up to a time within the fetch `row`, or before it.

    The samples of a batch go through the stages one after the other, so each stage gets its share of all the time
    that the batch was in the dataset.
    """
    whole = in_stages.to_numpy()
    earlier = (whole.cumsum(axis=0) - whole)[row]
    begun, collating, made = (fetches[name].to_numpy()[row] for name in ("begun_ns", "collating_ns", "made_ns"))
    dataset = np.clip(until - begun, 0.0, collating - begun) / np.maximum(collating - begun, 1.0)
    collate = np.clip(until - collating, 0.0, made - collating) / np.maximum(made - collating, 1.0)
    part = np.where(in_stages.columns == COLLATE, collate[:, np.newaxis], dataset[:, np.newaxis])
    spent: Floats = earlier + whole[row] * part
    return spent


def cost_per_stage(loop: Loop) -> pd.DataFrame:
    """Return the time of each stage of a loop's batches, longest first; empty if no fetch was recorded.

    Collating and the rest of the fetch have rows of their own, so that the stages of a fetch add up to it; a stage
    that was called while collating is counted in both. Stages that the training loop calls for no loader's batch
    are left out, and so are fetches of other batches.

    Returns:
        stage, in_fetch (false: called by the training loop), calls (NaN: not counted), calls_per_batch,
        total_seconds, batch_ms (per batch made, or used by the loop), cpu_ratio (share of the stage's time, where
        it was measured), fetch_ratio (share of all fetch time; NaN outside a fetch).
    """
    fetch = loop.fetches[_among(loop.fetches, loop.batches, _OF_BATCH)]
    getitem_ns, collate_ns = (float(np.nansum(floats(fetch, name))) for name in ("getitem_ns", "collate_ns"))
    costs = _stage_sums(_stages(loop, fetch))
    left_ns = getitem_ns - costs.loc[costs["in_fetch"], "wall_ns"].sum()
    if left_ns < RESOLUTION_NS * len(fetch):
        left_ns = 0.0
    rest = ((COLLATE, True, len(fetch), collate_ns, np.nan), (OTHER, True, np.nan, left_ns, np.nan))
    costs = pd.concat([costs, pd.DataFrame(rest, columns=list(costs))], ignore_index=True)
    costs = costs[costs["wall_ns"] > 0]
    batches_count = np.where(costs["in_fetch"], len(fetch), len(loop.batches))
    costs["calls_per_batch"] = costs["calls"] / batches_count
    costs["total_seconds"] = costs["wall_ns"] / SECOND_NS
    costs["batch_ms"] = costs["wall_ns"] / batches_count / 1e6
    fetch_ratio = costs["wall_ns"] / max(getitem_ns + collate_ns, 1.0)
    costs["fetch_ratio"] = np.where(costs["in_fetch"], fetch_ratio, np.nan)
    return costs.sort_values(["in_fetch", "total_seconds"], ascending=False, ignore_index=True)[_COLUMNS]


def _stages(loop: Loop, fetch: pd.DataFrame) -> pd.DataFrame:
    """Return the stages of these fetches, and those that the loop called for its batches."""
    stage = loop.tables.stream("stage")
    in_fetch = stage["worker"].notna().to_numpy()
    recorded = loop.tables.stream("batch").loc[
        loop.batches.index
    ]  # re-created loaders have their own numbers there
    called = of_process(stage[~in_fetch], loop.main)
    called = called[_among(called, recorded, ("loader", *_OF_BATCH))]
    return pd.concat([stage[in_fetch & _among(stage, fetch, _OF_FETCH)], called])


def _among(rows: pd.DataFrame, others: pd.DataFrame, columns: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Return which rows have the same values in these columns as one of the others."""
    keys, other_keys = (
        pd.MultiIndex.from_arrays([floats(table, name) for name in columns]) for table in (rows, others)
    )
    is_among: npt.NDArray[np.bool_] = keys.isin(other_keys)
    return is_among


def _stage_sums(stage: pd.DataFrame) -> pd.DataFrame:
    """Return stage, in_fetch, calls, wall_ns and cpu_ratio, a row per stage."""
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
