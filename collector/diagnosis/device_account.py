"""Where the memory of a device is: used = allocated + cached + fragmentation + non-PyTorch + others + residual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collector.quantities import known

#: In the order in which they are shown; each is taken out of what the driver says is used.
PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes")
#: What the driver names no process for: its own tables, graphics, memory that is being given back.
UNATTRIBUTED = "unattributed"
#: What they are made of: of the records of the allocators, and of the driver's sample.
_HELD = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
_TOLD = ("process_used_bytes", "other_used_bytes")


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
    held = (_sum(ranks, name) for name in _HELD)
    told = (_number(device.get(name)) for name in _TOLD)
    parts = {name: float(value) for name, value in _split(*held, *told).items() if known(value)}
    return DeviceAccount(
        parts=parts,
        residual_bytes=used - sum(parts.values()),
        residual_holds=(*(name for name in PARTS if name not in parts), UNATTRIBUTED),
    )


def accounts(driver: pd.DataFrame, allocators: pd.DataFrame) -> pd.DataFrame:
    """The account of each device over time, from `device_queries.device_grid`. Pure.

    Where the driver was not asked, the account is of what the allocators hold.

    Returns:
        gpu, elapsed_seconds, and bytes for each of `PARTS` and `UNATTRIBUTED`; a value that is not known is NaN.

    """
    keys = ["gpu", "bucket", "elapsed_seconds"]
    held, told = allocators.groupby(keys)[list(_HELD)].sum(skipna=False), driver.set_index(keys)
    moments = held.index.union(told.index)
    held, told = held.reindex(moments), told.reindex(moments)
    parts = pd.DataFrame(_split(*(held[name] for name in _HELD), *(told[name] for name in _TOLD)))
    parts[UNATTRIBUTED] = told["used_bytes"].fillna(held["reserved_bytes"]) - parts.sum(axis=1)
    # The driver and the allocator are read some ms apart: what is negative by that is nothing.
    return parts.clip(lower=0).dropna(subset=UNATTRIBUTED).reset_index().drop(columns="bucket")


def _split(allocated: Any, reserved: Any, holes: Any, own: Any, other: Any) -> dict[str, Any]:
    """Of each of `PARTS` the bytes, of numbers or of columns of them; NaN where it is not known."""
    values = allocated, reserved - allocated - np.nan_to_num(holes), holes, own - reserved, other
    return dict(zip(PARTS, values, strict=True))


def _sum(rows: list[Mapping[str, float | None]], name: str) -> float:
    """NaN if a row lacks it, or there is none: a part of a sum is no sum."""
    return sum(_number(row.get(name)) for row in rows) if rows else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value
