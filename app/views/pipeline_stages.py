"""Pipeline stages: what each stage costs, and what of it the training waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from app.blocks import Block, Note, Table
from app.figures import stages
from app.loading import recent
from app.moment import Moment, Panel, View
from app.panel import show
from collector import wording
from collector.diagnosis.exposed import PARTS
from collector.diagnosis.speed_ups import KEPT_BUSY
from collector.quantities import MISSING, duration, number, percent, quantity

NO_FETCH = Note(text="No batch was made in this window by a DataLoader that reports.")
_WAITED = ("seconds", "enough_seconds", "free_wait_ratio")
UNNAMED = (
    'No stage was recognised in this pipeline: `with training_harness.stage("decode"):` around a part of it names '
    "one, see docs/stages.md."
)


def answer(moment: Moment) -> str:
    """What is waited for, and what would be enough."""
    stall = _stall(moment)
    if stall is None:
        return ""
    if stall["wait_ratio"] < KEPT_BUSY:
        return (
            f"None: the training waits {percent(stall['wait_ratio'])} of its time for its data, so a faster stage "
            "would not make it faster."
        )
    return f"The training waits {percent(stall['wait_ratio'])} of its time: {wording.stall(stall)}."


def costs(moment: Moment) -> Iterator[Block]:
    """What each stage takes per batch."""
    found = recent(moment)
    if found is None or found.stages.empty:
        yield NO_FETCH
        return
    batches_count = found.stall["batches"]
    yield stages.costs(found.stages, moment.theme, batches_count=batches_count, revision=moment.run_id)
    if set(found.stages["stage"]) <= set(PARTS):
        yield Note(text=UNNAMED)


def exposed(moment: Moment) -> Iterator[Block]:
    """What the training waited for."""
    stall = _stall(moment)
    if stall is not None and stall["stages"]:
        yield stages.exposed(stall, moment.theme, revision=moment.run_id)


def table(moment: Moment) -> Iterator[Block]:
    """Every stage in numbers."""
    found = recent(moment)
    if found is None:
        return
    stall = found.stall
    waited = pd.DataFrame(stall["stages"], columns=["stage", *_WAITED])
    waited.insert(1, "in_fetch", True)
    rows = found.stages.merge(waited, how="outer", on=["stage", "in_fetch"], sort=False)
    if rows.empty:
        return
    rows = rows.sort_values(["in_fetch", "total_seconds"], ascending=False, na_position="last")
    total = stall["wait_seconds"]
    yield Table(
        frame=pd.DataFrame(
            {
                "Stage": [wording.part(name) for name in rows["stage"]],
                "Where": [_where(row) for row in rows.itertuples()],
                "Per batch": [quantity(value, "ms") for value in rows["batch_ms"]],
                "In total": [duration(value) for value in rows["total_seconds"]],
                "Calls per batch": [number(value) for value in rows["calls_per_batch"]],
                "Calls": [number(value) for value in rows["calls"]],
                "CPU": [percent(value) for value in rows["cpu_ratio"]],
                "Of the fetch": [percent(value) for value in rows["fetch_ratio"]],
                "Waited for": [duration(value) for value in rows["seconds"]],
                "Of the waiting": [percent(value / total) if total else MISSING for value in rows["seconds"]],
                "Enough": [duration(value) for value in rows["enough_seconds"]],
                "Waiting without it": [percent(value) for value in rows["free_wait_ratio"]],
            }
        ),
        caption=f"{_over(stall)} Waited for: what the awaited worker was doing. Enough: per batch, so that the "
        "training hardly waits; —: shortening this stage alone is not enough, or cannot be told.",
        download=f"{moment.run_id}-stages",
    )


def _over(stall: dict[str, Any]) -> str:
    rank = "" if stall["rank"] is None else f" of rank {stall['rank']}, which waited longest of those chosen"
    return f"Over the last {number(stall['batches'])} batches of the window{rank}."


def _where(row: Any) -> str:
    if row.stage in PARTS and pd.isna(row.batch_ms):
        return "around it"
    return "fetch" if row.in_fetch else "training loop"


def _stall(moment: Moment) -> dict[str, Any] | None:
    found = recent(moment)
    return None if found is None else found.stall


VIEW = View(
    name="pipeline-stages",
    question="Which stage must get faster, and by how much?",
    answer=answer,
    by_loader=True,
    rows=(
        (Panel(name="Waited for", build=exposed), Panel(name="Cost per batch", build=costs)),
        (Panel(name="Stages", build=table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
