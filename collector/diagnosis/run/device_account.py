"""Account of a device's memory: used = allocated + cached + fragmentation + non-PyTorch + others + residual."""

from __future__ import annotations

import pandas as pd

#: Parts of the used memory that the driver reports, in the order in which they are shown.
DEVICE_PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes")
#: Used memory for which the driver names no process: its own tables, graphics, memory that is being given back.
UNATTRIBUTED = "unattributed"
_ALLOCATOR_COLUMNS = ["allocated_bytes", "reserved_bytes", "inactive_split_bytes"]


def accounts(driver: pd.DataFrame, allocators: pd.DataFrame) -> pd.DataFrame:
    """Return the account of each device over time, from `device_queries.device_grid`. Pure.

    Where the driver was not asked, the account covers only the memory that the allocators reserved. Holes count as
    fragmentation where the allocator counts them. With expandable segments it does not, and they are part of
    `cached` (c10/cuda/CUDACachingAllocator.cpp). So is memory that waits for another stream.

    Returns:
        gpu, elapsed_seconds, and bytes for each of `DEVICE_PARTS` and `UNATTRIBUTED`, NaN where not known.
    """
    keys = ["gpu", "bucket", "elapsed_seconds"]
    ranks, device = allocators.groupby(keys)[_ALLOCATOR_COLUMNS].sum(skipna=False), driver.set_index(keys)
    moments = ranks.index.union(device.index)
    ranks, device = ranks.reindex(moments), device.reindex(moments)
    allocated, reserved, holes = (ranks[name] for name in _ALLOCATOR_COLUMNS)
    parts = pd.DataFrame(
        {
            "allocated": allocated,
            "cached": reserved - allocated - holes.fillna(0),
            "fragmentation": holes,
            "non-PyTorch": device["process_used_bytes"] - reserved,
            "other processes": device["other_used_bytes"],
        },
    )
    parts[UNATTRIBUTED] = device["used_bytes"].fillna(reserved) - parts.sum(axis=1)
    # The driver and the allocator are read some ms apart, which can make a part slightly negative.
    return parts.clip(lower=0).dropna(subset=UNATTRIBUTED).reset_index().drop(columns="bucket")
