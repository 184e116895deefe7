"""Account of a device's memory: used = allocated + cached + fragmentation + non-PyTorch + others + residual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collector.units import is_known

#: Parts of the used memory that the driver reports, in the order in which they are shown.
DEVICE_PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes")
#: Used memory for which the driver names no process: its own tables, graphics, memory that is being given back.
UNATTRIBUTED = "unattributed"
#: Columns from which the parts are computed: those of the allocators' records, and those of the driver's sample.
_ALLOCATOR_COLUMNS = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
_DRIVER_COLUMNS = ("process_used_bytes", "other_used_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    """The parts of a device's used memory, in bytes, and the residual.

    Attributes:
        parts: name of `DEVICE_PARTS` -> bytes; unknown parts are absent.
        residual_bytes: used, less all parts. Negative if the samples were taken while memory was given back.
        residual_holds: the contents of the residual: the unknown parts, and `UNATTRIBUTED`.

    """

    parts: Mapping[str, float]
    residual_bytes: float
    residual_holds: tuple[str, ...]


def account(
    device: Mapping[str, float | None], allocators: Iterable[Mapping[str, float | None]]
) -> DeviceAccount | None:
    """Return the account of one device at one moment. Pure.

    Holes count as fragmentation where the allocator counts them. With expandable segments it does not, and they are
    part of `cached` (c10/cuda/CUDACachingAllocator.cpp). So is memory that waits for another stream.

    Args:
        device: a record of the `device` stream.
        allocators: the newest record of the `device_memory` stream of each rank on that device.

    Returns:
        None if the driver does not report the used memory.

    """
    used = device.get("used_bytes")
    if used is None:
        return None
    ranks = list(allocators)
    allocator_values = (_sum(ranks, name) for name in _ALLOCATOR_COLUMNS)
    driver_values = (_number(device.get(name)) for name in _DRIVER_COLUMNS)
    parts = {
        name: float(value) for name, value in _split(*allocator_values, *driver_values).items() if is_known(value)
    }
    return DeviceAccount(
        parts=parts,
        residual_bytes=used - sum(parts.values()),
        residual_holds=(*(name for name in DEVICE_PARTS if name not in parts), UNATTRIBUTED),
    )


def accounts(driver: pd.DataFrame, allocators: pd.DataFrame) -> pd.DataFrame:
    """Return the account of each device over time, from `device_queries.device_grid`. Pure.

    Where the driver was not asked, the account covers only the memory that the allocators reserved.

    Returns:
        gpu, elapsed_seconds, and bytes for each of `DEVICE_PARTS` and `UNATTRIBUTED`, NaN where not known.

    """
    keys = ["gpu", "bucket", "elapsed_seconds"]
    ranks, device = allocators.groupby(keys)[list(_ALLOCATOR_COLUMNS)].sum(skipna=False), driver.set_index(keys)
    moments = ranks.index.union(device.index)
    ranks, device = ranks.reindex(moments), device.reindex(moments)
    allocator_values, driver_values = (
        (ranks[name] for name in _ALLOCATOR_COLUMNS),
        (device[name] for name in _DRIVER_COLUMNS),
    )
    parts = pd.DataFrame(_split(*allocator_values, *driver_values))
    parts[UNATTRIBUTED] = device["used_bytes"].fillna(ranks["reserved_bytes"]) - parts.sum(axis=1)
    # The driver and the allocator are read some ms apart, which can make a part slightly negative.
    return parts.clip(lower=0).dropna(subset=UNATTRIBUTED).reset_index().drop(columns="bucket")


def _split(allocated: Any, reserved: Any, holes: Any, process_used: Any, other_used: Any) -> dict[str, Any]:
    """Return name of `DEVICE_PARTS` -> bytes, for numbers or for columns; NaN where not known."""
    values = allocated, reserved - allocated - np.nan_to_num(holes), holes, process_used - reserved, other_used
    return dict(zip(DEVICE_PARTS, values, strict=True))


def _sum(rows: list[Mapping[str, float | None]], name: str) -> float:
    """Return the sum of a column; NaN if a row lacks it or there are no rows."""
    return sum(_number(row.get(name)) for row in rows) if rows else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value
