"""Files under the run's `snapshots/`: written whole or not at all, as JSON in gzip that anybody may open.

An allocator snapshot keeps each stack once: `stack` of a block or a trace entry is a position in `stacks`, whose
numbers are positions in `frames`. Where the allocation history is recorded, torch's own pickle is saved beside it,
for its viewer (torch/cuda/_memory_viz.py).
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
#: A snapshot tells of so many blocks one by one, those in the largest segments first.
MAX_BLOCKS = 200_000
_COMPRESS_LEVEL = 3
_NESTED = ("frames", "blocks", "history")


def save(current: Session, what: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write a document; returns its `path`, relative to the run directory, and its size (`bytes`).

    Raises:
        OSError: it cannot be written.
    """
    identity = current.identity
    head = {"schema": SNAPSHOT_SCHEMA, "what": what, "host": identity.host, "pid": identity.pid}
    text = json.dumps({**head, "rank": identity.rank, **document}, default=repr).encode()
    return write(current, f"{what}.json.gz", lambda path: path.write_bytes(gzip.compress(text, _COMPRESS_LEVEL)))


def write(current: Session, suffix: str, fill: Callable[[Path], object]) -> dict[str, Any]:
    """Let `fill` write a file of this process that ends in `suffix`; returns its `path` and size (`bytes`).

    Raises:
        OSError: it cannot be written.
    """
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
    """Save the state of the CUDA allocator, with its history if that is recorded; returns where it is.

    Raises:
        RuntimeError: CUDA is not in use, or this allocator takes no snapshots (cudaMallocAsync).
        OSError: it cannot be written.
    """
    cuda = torch.cuda
    if not cuda.is_initialized():
        raise RuntimeError("this process does not use CUDA: there is no CUDA allocator to look at")
    if with_history:
        whole = cuda.memory._snapshot()
        kept = write(current, "allocator.pickle", lambda path: path.write_bytes(pickle.dumps(whole)))
        return {**save(current, "allocator", compact(whole)), "pickle": kept["path"]}
    fast = "include_traces" in inspect.signature(cuda.memory_snapshot).parameters
    segments = cuda.memory_snapshot(include_traces=False) if fast else cuda.memory_snapshot()
    return save(current, "allocator", compact({"segments": segments}))


def compact(snapshot: Mapping[str, Any], max_blocks: int = MAX_BLOCKS) -> dict[str, Any]:
    """A snapshot in torch's layout without its repetitions: `segments`, `device_traces`, `stacks`, `frames`."""
    stacks = _Stacks()
    segments, blocks_count, left_out_count = [], 0, 0
    for segment in sorted(snapshot["segments"], key=lambda segment: -segment["total_size"]):
        blocks = segment["blocks"][: max_blocks - blocks_count]
        blocks_count += len(blocks)
        left_out_count += len(segment["blocks"]) - len(blocks)
        segments.append({**stacks.flat(segment), "blocks": [stacks.flat(block) for block in blocks]})
    return {
        "segments": segments,
        "blocks_left_out_count": left_out_count,
        "device_traces": [[stacks.flat(entry) for entry in trace] for trace in snapshot.get("device_traces", ())],
        "stacks": list(stacks.numbers),
        "frames": list(stacks.frames),
    }


def stacked(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows with `frames`, as `rows`, `stacks` and `frames`: each stack and each frame is there once."""
    stacks = _Stacks()
    flat = [stacks.flat(row) for row in rows]
    return {"rows": flat, "stacks": list(stacks.numbers), "frames": list(stacks.frames)}


class _Stacks:
    """Numbers the stacks of a snapshot, and their frames, in the order of their first use."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, int, str], int] = {}
        self.numbers: dict[tuple[int, ...], int] = {}

    def flat(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry's own values, and the number of its stack if it has one."""
        own = {name: value for name, value in entry.items() if name not in _NESTED}
        if entry.get("frames"):
            own["stack"] = self._number(entry["frames"])
        return own

    def _number(self, frames: Iterable[Mapping[str, Any]]) -> int:
        known = self.frames
        keys = ((frame["filename"], frame["line"], frame["name"]) for frame in frames)
        stack = tuple(known.setdefault(key, len(known)) for key in keys)
        return self.numbers.setdefault(stack, len(self.numbers))
