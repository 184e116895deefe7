"""Allocator snapshots that a run holds: which memory segments there were, and which lines held them.

They are JSON in gzip, which can hold nothing but plain values. Torch's pickles beside them are never opened.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from collector.errors import TidegaugeError
from collector.store.runs import Run
from training_harness.layout import SNAPSHOTS

#: A snapshot of 200,000 blocks takes some 40 MB.
_LIMIT_BYTES = 2**28
#: Frames of a stack that tell where in the user's code it was; those of torch say nothing.
_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSnapshot:
    """What one process's CUDA allocator held.

    Attributes:
        name: of the file.
        rank: of the process, None outside a distributed job.
        pid: of the process.
        segments: device, address, total_bytes, allocated_bytes, blocks (a list of (offset, bytes, in use)).
        sites: site (file:line function, of the user's code where it shows), blocks_count, allocated_bytes; the
            largest first. Empty if the allocation history was not recorded.

    """

    name: str
    rank: int | None
    pid: int
    segments: pd.DataFrame
    sites: pd.DataFrame


def newest_allocator_snapshot(run: Run) -> AllocatorSnapshot | None:
    """The newest allocator snapshot of a run, None if there is none.

    Raises:
        TidegaugeError: it is damaged.

    """
    found = sorted((run.path / SNAPSHOTS).glob("*.allocator.json.gz"), key=_taken_ns)
    if not found:
        return None
    try:
        return _parsed(found[-1].name, _plain(found[-1]))
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TidegaugeError(f"{found[-1]} is damaged ({error}): take another with `tidegauge snapshot`") from None


def _taken_ns(path: Path) -> int:
    """From the name: host.pid.time_ns.allocator.json.gz; a host may have dots too."""
    number = path.name.split(".")[-4]
    return int(number) if number.isdecimal() else 0


def _plain(path: Path) -> dict[str, Any]:
    if path.is_symlink():
        raise ValueError("it is a link")
    with gzip.open(path) as stream:
        text = stream.read(_LIMIT_BYTES + 1)
    if len(text) > _LIMIT_BYTES:
        raise ValueError(f"it is larger than {_LIMIT_BYTES:,} bytes")
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("it is no snapshot")
    return document


def _parsed(name: str, document: dict[str, Any]) -> AllocatorSnapshot:
    rows, held = [], dict[int, list[int]]()
    for segment in document["segments"]:
        blocks, offset = [], 0
        for block in segment["blocks"]:
            size, used = int(block["size"]), block["state"] == "active_allocated"
            blocks.append((offset, size, used))
            offset += size
            if used and "stack" in block:
                count_and_bytes = held.setdefault(int(block["stack"]), [0, 0])
                count_and_bytes[0] += 1
                count_and_bytes[1] += size
        rows.append(
            {
                "device": int(segment["device"]),
                "address": int(segment["address"]),
                "total_bytes": int(segment["total_size"]),
                "allocated_bytes": int(segment["allocated_size"]),
                "blocks": blocks,
            }
        )
    columns = ["device", "address", "total_bytes", "allocated_bytes", "blocks"]
    segments = pd.DataFrame(rows, columns=columns).sort_values("total_bytes", ascending=False, ignore_index=True)
    sites = [(_site(document, stack), count, size) for stack, (count, size) in held.items()]
    table = pd.DataFrame(sites, columns=["site", "blocks_count", "allocated_bytes"]).groupby("site", as_index=False)
    return AllocatorSnapshot(
        name=name,
        rank=document.get("rank"),
        pid=int(document["pid"]),
        segments=segments,
        sites=table.sum().sort_values("allocated_bytes", ascending=False, ignore_index=True),
    )


def _site(document: dict[str, Any], stack: int) -> str:
    frames = [document["frames"][number] for number in document["stacks"][stack]]
    own = [frame for frame in frames if not any(part in str(frame[0]) for part in _LIBRARIES)]
    file, line, function = (own or frames or [("unknown", 0, "")])[0]
    return f"{file}:{line} {function}".rstrip()
