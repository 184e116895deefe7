"""Snapshots that a run holds: which memory segments there were, which lines held them, and which held ever more.

They are JSON in gzip, which can hold nothing but plain values. Torch's pickles beside them are never opened.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
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
_LIBRARIES = (
    "/torch/",
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/training_harness/hooks/",
    "<frozen",
)
_CALLERS = 2
_DAMAGED = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
    except _DAMAGED as error:
        raise TidegaugeError(f"{found[-1]} is damaged ({error}): take another with `tidegauge snapshot`") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownLine:
    """A line of which more was alive later than before.

    Attributes:
        site: file:line and function, of the user's code where it shows; empty if it is not known.
        callers: the same of what called it in the user's code, the nearest first.
        device: of its tensors, "" for Python's own memory.
        made_by: what made a tensor that keeps its graph, "" for others.
        grown_nodes_count: of the graphs that its tensors keep.

    """

    site: str
    callers: tuple[str, ...]
    device: str
    made_by: str
    grown_count: int
    grown_bytes: int
    grown_nodes_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What one process kept from one moment to a later one.

    Attributes:
        event: the process, and what it is.
        window: these moments, in words.
        held_bytes: device -> how much more the process held there; "cpu" is its resident memory.
        lines: in no order.

    """

    event: Mapping[str, Any]
    window: str
    held_bytes: Mapping[str, int]
    lines: tuple[GrownLine, ...]


def grown_lines(run: Run, events: Sequence[Mapping[str, Any]]) -> tuple[list[Grown], list[str]]:
    """What processes said that they keep, and one line for each file that is damaged.

    Args:
        run: the run.
        events: its events; of each process the newest `growth` counts, and the first and last allocator snapshot
            with stacks. A file that is not here, but on another node, tells nothing.

    """
    found, problems = [], []
    growths, allocators = dict[Any, Mapping[str, Any]](), dict[Any, list[Mapping[str, Any]]]()
    for event in events:
        who = (event["host"], event["pid"], event["start_ticks"])
        if event["kind"] == "snapshot" and event.get("path") and event["what"] == "growth":
            growths[who] = event
        elif event["kind"] == "snapshot" and event.get("pickle"):
            allocators.setdefault(who, []).append(event)
    pairs = [(events[0], events[-1]) for events in allocators.values() if len(events) > 1]
    for read, told in [(growth, (event,)) for event in growths.values()] + [(_between, pair) for pair in pairs]:
        try:
            found.append(read(run, *told))
        except FileNotFoundError:
            continue
        except _DAMAGED as error:
            problems.append(f"{told[-1]['path']} is damaged ({error}): take another with `tidegauge snapshot`")
    return found, problems


def growth(run: Run, event: Mapping[str, Any]) -> Grown:
    """What a `snapshot` event of the kind `growth` tells.

    Raises:
        OSError: its file cannot be read; others as for any damaged file.
    """
    document = _plain(run.path / event["path"])
    steps, unit = int(document["steps_count"]), document["unit"]
    where = [_chain(document, row["stack"], run) if "stack" in row else [""] for row in document["rows"]]
    lines = [
        GrownLine(
            site=site,
            callers=tuple(callers[:_CALLERS]),
            device=str(row["device"]),
            made_by=str(row["made_by"]),
            grown_count=int(row["grown_count"]),
            grown_bytes=int(row["grown_bytes"]),
            grown_nodes_count=int(row["grown_nodes_count"]),
        )
        for row, (site, *callers) in zip(document["rows"], where, strict=True)
    ]
    last = int(event["step"])
    window = f"{unit} {last - steps:,}-{last:,}" if unit == "steps" else f"{steps:,} {unit}"
    return Grown(event=event, window=window, held_bytes=document["held_grown_bytes"], lines=tuple(lines))


def _between(run: Run, first: Mapping[str, Any], last: Mapping[str, Any]) -> Grown:
    """What the allocator's blocks tell by their stacks: all of it is known, so nothing is held besides."""
    before, after = (
        {(device, site): (count, size) for device, site, count, size in _sites(_plain(run.path / event["path"]))}
        for event in (first, last)
    )
    lines = [
        GrownLine(
            site=site,
            callers=(),
            device=f"cuda:{device}",
            made_by="",
            grown_count=count - before.get((device, site), (0, 0))[0],
            grown_bytes=size - before.get((device, site), (0, 0))[1],
        )
        for (device, site), (count, size) in after.items()
    ]
    grown = tuple(line for line in lines if line.grown_bytes > 0)
    return Grown(event=last, window=f"steps {first['step']:,}-{last['step']:,}", held_bytes={}, lines=grown)


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
    rows = []
    for segment in document["segments"]:
        blocks, offset = [], 0
        for block in segment["blocks"]:
            size = int(block["size"])
            blocks.append((offset, size, _in_use(block)))
            offset += size
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
    sites = pd.DataFrame(_sites(document), columns=["device", "site", "blocks_count", "allocated_bytes"])
    table = sites.drop(columns="device").groupby("site", as_index=False)
    return AllocatorSnapshot(
        name=name,
        rank=document.get("rank"),
        pid=int(document["pid"]),
        segments=segments,
        sites=table.sum().sort_values("allocated_bytes", ascending=False, ignore_index=True),
    )


def _sites(document: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """Device, site, blocks in use and their bytes."""
    held = dict[tuple[int, str], list[int]]()
    names = dict[int, str]()
    for segment in document["segments"]:
        for block in segment["blocks"]:
            if _in_use(block) and "stack" in block:
                stack = int(block["stack"])
                site = names[stack] if stack in names else names.setdefault(stack, _site(document, stack))
                count_and_bytes = held.setdefault((int(segment["device"]), site), [0, 0])
                count_and_bytes[0] += 1
                count_and_bytes[1] += int(block["size"])
    return [(device, site, count, size) for (device, site), (count, size) in held.items()]


def _in_use(block: dict[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")


def _site(document: dict[str, Any], stack: int) -> str:
    return _chain(document, stack)[0]


def _chain(document: dict[str, Any], stack: int, run: Run | None = None) -> list[str]:
    """The lines of the user's code in a stack, the innermost first; below the run's directory without it."""
    base = f"{run.manifest['cwd']}/" if run is not None and run.manifest.get("cwd") else ""
    frames = [document["frames"][number] for number in document["stacks"][stack]]
    own = [frame for frame in frames if not any(part in str(frame[0]) for part in _LIBRARIES)]
    lines = own or frames[:1] or [("unknown", 0, "")]
    return [f"{str(file).removeprefix(base)}:{line} {function}".rstrip() for file, line, function in lines]
