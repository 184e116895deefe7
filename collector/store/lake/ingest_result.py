"""The result of one step of the ingest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestResult:
    """The result of one step.

    Attributes:
        records_count: number of records that the step added to the lake.
        lag_ns: age of the oldest record that this step found outside the lake; None if it found none.
        lost_count: number of records that writers could not write, over the whole run.
        is_whole: True if everything that the step found is in the lake.
        problems: one line for each thing that could not be read or committed.
    """

    records_count: int
    lag_ns: int | None
    lost_count: int
    is_whole: bool
    problems: tuple[str, ...]
