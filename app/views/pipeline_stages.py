"""Pipeline stages: the cost of each stage, and how long the training waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from app.blocks import Block, Note
from app.figures import workers
from app.runtime.loading import recent
from app.runtime.moment import Moment, Panel, View
from app.runtime.refresh import show
from app.shared_panels import NO_FETCH
from collector import report
from collector.diagnosis.loading import WAIT_PARTS
from collector.diagnosis.tuning import HEALTHY_WAIT_RATIO, WaitSummary
from collector.units import MISSING, duration, number, percent, quantity

#: Columns of an entry of `exposed_stall`.
_WAIT_COLUMNS = ("seconds", "enough_seconds", "free_wait_ratio")
UNNAMED = (
    'No stage was recognised. Name one: put `with training_harness.stage("decode"):` around a part of the pipeline '
    "(docs/stages.md)."
)


def _answer(moment: Moment) -> str:
    stall = _stall(moment)
    if stall is None:
        return ""
    if stall["wait_ratio"] < HEALTHY_WAIT_RATIO:
        return (
            f"None: training waits only {percent(stall['wait_ratio'])} of its time for data. A faster stage would "
            "not make it faster."
        )
    return f"Training waits {percent(stall['wait_ratio'])} of its time: {report.stall(stall)}."


def _costs(moment: Moment) -> Iterator[Block]:
    found = recent(moment)
    if found is None or found.stages.empty:
        yield NO_FETCH
        return
    batches_count = found.stall["batches"]
    yield workers.costs(found.stages, moment.theme, batches_count=batches_count)
    if set(found.stages["stage"]) <= set(WAIT_PARTS):
        yield Note(UNNAMED)


def _awaited_stages(moment: Moment) -> Iterator[Block]:
    stall = _stall(moment)
    if stall is not None and stall["stages"]:
        yield workers.awaited_stages(stall, moment.theme)


def _table(moment: Moment) -> Iterator[Block]:
    found = recent(moment)
    if found is None:
        return
    stall = found.stall
    waits = pd.DataFrame(stall["stages"], columns=["stage", *_WAIT_COLUMNS])
    waits.insert(1, "in_fetch", True)
    rows = found.stages.merge(waits, how="outer", on=["stage", "in_fetch"], sort=False)
    if rows.empty:
        return
    rows = rows.sort_values(["in_fetch", "total_seconds"], ascending=False, na_position="last")
    total_seconds = stall["wait_seconds"]
    rank = "" if stall["rank"] is None else f" of rank {stall['rank']}, which waited longest of those chosen"
    target = " Target per batch: the time at which training hardly waits; — if this stage alone is not enough."
    yield moment.table(
        "stages",
        f"Over the last {number(stall['batches'])} batches of the window{rank}. Wait: time that training waited "
        "while the awaited worker did this."
        f"{target if rows['enough_seconds'].notna().any() else ''}",
        {
            "Stage": [report.part(name) for name in rows["stage"]],
            "Where": [_where(row) for row in rows.itertuples()],
            "Per batch": [quantity(value, "ms") for value in rows["batch_ms"]],
            "In total": [duration(value) for value in rows["total_seconds"]],
            "Calls per batch": [number(value) for value in rows["calls_per_batch"]],
            "Calls": [number(value) for value in rows["calls"]],
            "CPU": [percent(value) for value in rows["cpu_ratio"]],
            "Share of fetch": [percent(value) for value in rows["fetch_ratio"]],
            "Wait": [duration(value) for value in rows["seconds"]],
            "Share of wait": [
                percent(value / total_seconds) if total_seconds else MISSING for value in rows["seconds"]
            ],
            "Target per batch": [duration(value) for value in rows["enough_seconds"]],
            "Wait if removed": [percent(value) for value in rows["free_wait_ratio"]],
        },
    )


def _where(row: Any) -> str:
    if row.stage in WAIT_PARTS and pd.isna(row.batch_ms):
        return "outside"
    return "fetch" if row.in_fetch else "training loop"


def _stall(moment: Moment) -> WaitSummary | None:
    found = recent(moment)
    return None if found is None else found.stall


VIEW = View(
    name="pipeline-stages",
    question="Which stage must get faster, and by how much?",
    answer=_answer,
    by_loader=True,
    rows=((Panel("Waited for", _awaited_stages), Panel("Cost per batch", _costs)), (Panel("Stages", _table),)),
)

if __name__ == "__main__":
    show(VIEW)
