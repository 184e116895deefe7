"""Where the memory of a device is: used = allocated + cached + fragmentation + non-PyTorch + others + residual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

#: In the order in which they are shown; each is taken out of what the driver says is used.
PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes")
#: What the driver names no process for: its own tables, graphics, memory that is being given back.
UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    """The parts of a device's used memory, in bytes, and what they leave.

    Attributes:
        parts: name of `PARTS` -> bytes; what is not known is not there.
        residual_bytes: used, less all parts. Negative if the samples were taken while memory was given back.
        residual_holds: what is in it: the parts that are not known, and `UNATTRIBUTED`.

    """

    parts: Mapping[str, float]
    residual_bytes: float
    residual_holds: tuple[str, ...]


def account(
    device: Mapping[str, float | None], allocators: Iterable[Mapping[str, float | None]]
) -> DeviceAccount | None:
    """The account of one device at one moment. Pure.

    Holes count as fragmentation where the allocator counts them: with expandable segments it does not, and they are
    in `cached` (c10/cuda/CUDACachingAllocator.cpp). What waits for another stream is in `cached` too.

    Args:
        device: a record of the `device` stream.
        allocators: of each rank on that device, its newest record of the `device_memory` stream.

    Returns:
        None if the driver does not say what is used.

    """
    used = device.get("used_bytes")
    if used is None:
        return None
    ranks = list(allocators)
    allocated, reserved = _sum(ranks, "allocated_bytes"), _sum(ranks, "reserved_bytes")
    holes, own = _sum(ranks, "inactive_split_bytes"), device.get("process_used_bytes")
    cached = None if allocated is None or reserved is None else reserved - allocated - (holes or 0)
    outside = None if own is None or reserved is None else own - reserved
    values = (allocated, cached, holes, outside, device.get("other_used_bytes"))
    parts = {name: value for name, value in zip(PARTS, values, strict=True) if value is not None}
    return DeviceAccount(
        parts=parts,
        residual_bytes=used - sum(parts.values()),
        residual_holds=(*(name for name in PARTS if name not in parts), UNATTRIBUTED),
    )


def accounts(driver: pd.DataFrame, allocators: pd.DataFrame) -> pd.DataFrame:
    """The account of one device over time, from `device_queries.device_grid`. Pure.

    Where the driver was not asked, the account is of what the allocators hold.

    Returns:
        elapsed_seconds, a column of bytes for each of `PARTS` that is known anywhere, and `UNATTRIBUTED`; a value
        that is not known is NaN. Of each process the newest record stands until the next.

    """
    rows: list[dict[str, Any]] = []
    held: dict[int, Mapping[str, float | None]] = {}
    told: Mapping[Any, Any] = {}
    of_driver = {row["bucket"]: row for row in driver.to_dict("records")}
    of_ranks: dict[Any, Any] = {bucket: table.to_dict("records") for bucket, table in allocators.groupby("bucket")}
    for bucket in sorted({*of_driver, *of_ranks}):
        told = of_driver.get(bucket, told)
        held |= {record["pid"]: _known(record) for record in of_ranks.get(bucket, ())}
        ranks = list(held.values())
        found = account(_known(told) if told else {"used_bytes": _sum(ranks, "reserved_bytes")}, ranks)
        now = of_ranks[bucket][0] if bucket in of_ranks else told
        if found is not None:
            parts = {**found.parts, UNATTRIBUTED: found.residual_bytes}
            # The driver and the allocator are read some ms apart: what is negative by that is nothing.
            rows.append({"elapsed_seconds": now["elapsed_seconds"], **{k: max(0.0, v) for k, v in parts.items()}})
    return pd.DataFrame(rows, columns=["elapsed_seconds", *PARTS, UNATTRIBUTED]).dropna(axis=1, how="all")


def _known(record: Mapping[Any, Any]) -> dict[str, float | None]:
    return {name: None if pd.isna(value) else value for name, value in record.items()}


def _sum(rows: list[Mapping[str, float | None]], name: str) -> float | None:
    """None if a row lacks it, or there is none: a part of a sum is no sum."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return sum(values) if values and len(values) == len(rows) else None
