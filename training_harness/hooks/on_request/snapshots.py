"""Files under the run's `snapshots/`: written whole or not at all, as JSON in gzip that any tool can read.

An allocator snapshot holds each stack once: `stack` of a block or a trace entry is a position in `stacks`, whose
numbers are positions in `frames`. Where the allocation history is recorded, torch's own pickle is saved next to the
snapshot, for torch's viewer (torch/cuda/_memory_viz.py).
"""

from __future__ import annotations

import gzip
import inspect
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from training_harness.layout import SNAPSHOTS
from training_harness.session import Session

SNAPSHOT_SCHEMA = 1
#: Number of blocks that a snapshot lists one by one, those in the largest segments first.
MAX_BLOCKS = 200_000
_COMPRESS_LEVEL = 3
_NESTED = ("frames", "blocks", "history")


class RefusedError(RuntimeError):
    """A request that the training's state does not allow: the message tells the user why."""


def save(current: Session, what: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write a document; return its `path`, relative to the run directory, and its size (`bytes`)."""
    identity = current.identity
    head = {"schema": SNAPSHOT_SCHEMA, "what": what, "host": identity.host, "pid": identity.pid}
    text = json.dumps({**head, "rank": identity.rank, **document}, default=repr).encode()
    return write(current, f"{what}.json.gz", lambda path: path.write_bytes(gzip.compress(text, _COMPRESS_LEVEL)))


def write(current: Session, suffix: str, fill: Callable[[Path], object]) -> dict[str, Any]:
    """Let `fill` write a file of this process that ends in `suffix`; return its `path` and size (`bytes`)."""
    name = f"{current.identity.host}.{current.identity.pid}.{time.monotonic_ns()}.{suffix}"
    scratch = current.run_dir / SNAPSHOTS / f".{name}"
    try:
        scratch.touch(mode=0o600)
        fill(scratch)
        size_bytes = scratch.stat().st_size
        os.replace(scratch, scratch.with_name(name))
    finally:
        scratch.unlink(missing_ok=True)
    return {"path": f"{SNAPSHOTS}/{name}", "bytes": size_bytes}


def save_allocator(current: Session, torch: Any, *, with_history: bool) -> dict[str, Any]:
    """Save the state of the CUDA allocator, with its history if that is recorded; return paths and size.

    Raises:
        RefusedError: CUDA is not in use.
        RuntimeError: this allocator has no snapshots (cudaMallocAsync).
        OSError: it cannot be written.
    """
    cuda = torch.cuda
    if not cuda.is_initialized():
        raise RefusedError("this process does not use CUDA: there is no CUDA allocator to look at")
    if with_history:
        snapshot = cuda.memory._snapshot()
        file = write(current, "allocator.pickle", lambda path: path.write_bytes(pickle.dumps(snapshot)))
        return {**save(current, "allocator", compact(snapshot)), "pickle": file["path"]}
    fast = "include_traces" in inspect.signature(cuda.memory_snapshot).parameters
    segments = cuda.memory_snapshot(include_traces=False) if fast else cuda.memory_snapshot()
    return save(current, "allocator", compact({"segments": segments}))


def compact(snapshot: Mapping[str, Any], max_blocks: int = MAX_BLOCKS) -> dict[str, Any]:
    """Convert a snapshot in torch's layout to one without repetition: segments, device traces, stacks, frames."""
    stacks = _Stacks()
    segments, blocks_count, left_out_count = [], 0, 0
    for segment in sorted(snapshot["segments"], key=lambda segment: -segment["total_size"]):
        blocks = segment["blocks"][: max_blocks - blocks_count]
        blocks_count += len(blocks)
        left_out_count += len(segment["blocks"]) - len(blocks)
        segments.append({**stacks.encode(segment), "blocks": [stacks.encode(block) for block in blocks]})
    return {
        "segments": segments,
        "blocks_left_out_count": left_out_count,
        "device_traces": [[stacks.encode(entry) for entry in trace] for trace in snapshot.get("device_traces", ())],
        "stacks": list(stacks.numbers),
        "frames": list(stacks.frames),
    }


def with_shared_stacks(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert rows with `frames` to `rows`, `stacks` and `frames`, which hold each stack and each frame once."""
    stacks = _Stacks()
    encoded = [stacks.encode(row) for row in rows]
    return {"rows": encoded, "stacks": list(stacks.numbers), "frames": list(stacks.frames)}


class _Stacks:
    """Numbers of a snapshot's stacks and of their frames, in the order of their first use."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, int, str], int] = {}
        self.numbers: dict[tuple[int, ...], int] = {}

    def encode(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry's plain values, and the number of its stack if it has one."""
        values = {name: value for name, value in entry.items() if name not in _NESTED}
        if entry.get("frames"):
            values["stack"] = self._number(entry["frames"])
        return values

    def _number(self, frames: Iterable[Mapping[str, Any]]) -> int:
        numbers = self.frames
        keys = ((frame["filename"], frame["line"], frame["name"]) for frame in frames)
        stack = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        return self.numbers.setdefault(stack, len(self.numbers))
