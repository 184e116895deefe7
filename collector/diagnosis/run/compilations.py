"""Functions that `torch.compile` compiled again, from the `compilation` events of a process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from collector.diagnosis.run.columns import SECOND_NS
from collector.diagnosis.run.tables import RunTables
from collector.store import ProcessKey


@dataclass(frozen=True, slots=True)
class Recompilations:
    """The compilations of functions that had been compiled before.

    Attributes:
        count: their number.
        seconds: their time, with that of their backward passes.
        first_ns, last_ns: ends of the first and of the last.
        function: the function that was compiled again most often, as `file:line, in function`.
        function_count: how often that was.
        condition: torch's reason for the last time.
        gave_up: torch's limit of recompilations was met by then, and calls that no version of a function fits run
            uncompiled.
    """

    count: int
    seconds: float
    first_ns: int
    last_ns: int
    function: str
    function_count: int
    condition: str
    gave_up: bool


def recompilations_of(tables: RunTables, key: ProcessKey, begin_ns: float, end_ns: float) -> Recompilations | None:
    """Return the recompilations of a process between two times, None if there are none."""
    compiled = [event for event in tables.events_of("compilation", by=key) if event["time_ns"] <= end_ns]
    within = [event for event in compiled if event["time_ns"] > begin_ns]
    again = [event for event in within if event["reason"] is not None and not event["gave_up"]]
    if not again:
        return None
    before = compiled[: -len(within)]
    [(function, function_count)] = Counter(event["function"] for event in again).most_common(1)
    totals = within[-1]
    return Recompilations(
        count=totals["again_count"] - (before[-1]["again_count"] if before else 0),
        seconds=(totals["again_ns"] - (before[-1]["again_ns"] if before else 0)) / SECOND_NS,
        first_ns=again[0]["time_ns"],
        last_ns=again[-1]["time_ns"],
        function=function,
        function_count=function_count,
        condition=[event["reason"] for event in again if event["function"] == function][-1],
        gave_up=any(event["gave_up"] for event in compiled),
    )
