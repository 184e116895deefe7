"""Read allocator snapshots of a run: memory segments, the lines that allocated them, and lines whose memory grew.

They are JSON in gzip, which holds nothing but plain values. Torch's pickles in the same folder are never opened.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from collector.errors import TidegaugeError
from collector.store.runs.run import Run
from training_harness.layout import SNAPSHOTS

#: Bound on an uncompressed snapshot; one of 200,000 blocks takes some 40 MB.
_LIMIT_BYTES = 2**28
#: Path parts of frames that are not the user's code.
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
    """The memory of one process's CUDA allocator.

    Attributes:
        segments: device, address, total_bytes, allocated_bytes, blocks (a list of (offset, bytes, in use)).
        sites: site (file:line function, in the user's code where possible), blocks_count, allocated_bytes; the
            largest first. Empty if the allocation history was not recorded.
    """

    name: str
    pid: int
    segments: pd.DataFrame
    sites: pd.DataFrame


def newest_allocator_snapshot(run: Run) -> AllocatorSnapshot | None:
    """Return the newest allocator snapshot of a run, None if there is none.

    Raises:
        TidegaugeError: it is damaged.
    """
    paths = sorted((run.path / SNAPSHOTS).glob("*.allocator.json.gz"), key=_time_ns)
    if not paths:
        return None
    try:
        return _parse(paths[-1].name, _load(paths[-1]))
    except _DAMAGED as error:
        raise TidegaugeError(f"{paths[-1]} is damaged ({error}): take another with `tidegauge snapshot`") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteGrowth:
    """An allocation site with more live memory later than before.

    Attributes:
        site: file:line and function, in the user's code where possible; empty if unknown.
        callers: sites in the user's code that called it, the nearest first.
        device: device of its tensors, "" for Python's own memory.
        made_by: operation that made a tensor that holds its graph, "" for others.
        in_traceback: True for variables of a frame that ended with an exception, which is kept.
        grown_count: growth of the number of live tensors or blocks.
        grown_bytes: growth of their memory.
        grown_nodes_count: growth of the number of graph nodes that its tensors hold.
    """

    site: str
    callers: tuple[str, ...]
    device: str
    made_by: str
    grown_count: int
    grown_bytes: int
    grown_nodes_count: int = 0
    in_traceback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGrowth:
    """The growth of one process's memory from one moment to a later one, by allocation site.

    Attributes:
        event: event of the snapshot; it names the process.
        window: the two moments, in words.
        held_bytes: device -> growth of the memory that the process held there; "cpu" is its resident memory.
        lines: the allocation sites, in no order.
    """

    event: Mapping[str, Any]
    window: str
    held_bytes: Mapping[str, int]
    lines: tuple[SiteGrowth, ...]


def read_growths(run: Run, events: Sequence[Mapping[str, Any]]) -> tuple[list[ProcessGrowth], list[str]]:
    """Return the memory growth of the run's processes, and one line for each damaged file.

    Args:
        run: the run.
        events: its events. For each process, the newest `growth` snapshot counts, and the first and last allocator
            snapshot with stacks. A file that is on another node is skipped.
    """
    growths, problems = [], []
    growth_events, allocator_events = dict[Any, Mapping[str, Any]](), dict[Any, list[Mapping[str, Any]]]()
    for event in events:
        process = (event["host"], event["pid"], event["start_ticks"])
        if event["kind"] == "snapshot" and event.get("path") and event["what"] == "growth":
            growth_events[process] = event
        elif event["kind"] == "snapshot" and event.get("pickle"):
            allocator_events.setdefault(process, []).append(event)
    pairs = [(events[0], events[-1]) for events in allocator_events.values() if len(events) > 1]
    readings = [(read_growth, (event,)) for event in growth_events.values()] + [
        (_difference, pair) for pair in pairs
    ]
    for read, read_events in readings:
        try:
            growths.append(read(run, *read_events))
        except FileNotFoundError:
            continue
        except _DAMAGED as error:
            path = read_events[-1]["path"]
            problems.append(f"{path} is damaged ({error}): take another with `tidegauge snapshot`")
    return growths, problems


def read_growth(run: Run, event: Mapping[str, Any]) -> ProcessGrowth:
    """Return the growth in the file of a `snapshot` event of the kind `growth`.

    Raises:
        OSError: the file cannot be read. A damaged file raises other errors (`_DAMAGED`).
    """
    document = _load(run.path / event["path"])
    steps, unit = int(document["steps_count"]), document["unit"]
    sites = [_user_lines(document, row["stack"], run) if "stack" in row else [""] for row in document["rows"]]
    lines = [
        SiteGrowth(
            site=site,
            callers=tuple(callers[:_CALLERS]),
            device=str(row["device"]),
            made_by=str(row["made_by"]),
            grown_count=int(row["grown_count"]),
            grown_bytes=int(row["grown_bytes"]),
            grown_nodes_count=int(row["grown_nodes_count"]),
            in_traceback=bool(row.get("in_traceback")),  # absent in an older file
        )
        for row, (site, *callers) in zip(document["rows"], sites, strict=True)
    ]
    last = int(event["step"])
    window = f"{unit} {last - steps:,}-{last:,}" if unit == "steps" else f"{steps:,} {unit}"
    return ProcessGrowth(event=event, window=window, held_bytes=document["held_grown_bytes"], lines=tuple(lines))


def _difference(run: Run, first: Mapping[str, Any], last: Mapping[str, Any]) -> ProcessGrowth:
    """Return the growth between two allocator snapshots; the blocks cover all memory, so `held_bytes` is empty."""
    before, after = (
        {(device, site): (count, size) for device, site, count, size in _sites(_load(run.path / event["path"]))}
        for event in (first, last)
    )
    lines = [
        SiteGrowth(
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
    window = f"steps {first['step']:,}-{last['step']:,}"
    return ProcessGrowth(event=last, window=window, held_bytes={}, lines=grown)


def _time_ns(path: Path) -> int:
    # The name is host.pid.time_ns.allocator.json.gz; the host may have dots too.
    number = path.name.split(".")[-4]
    return int(number) if number.isdecimal() else 0


def _load(path: Path) -> dict[str, Any]:
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


def _parse(name: str, document: dict[str, Any]) -> AllocatorSnapshot:
    rows = []
    for segment in document["segments"]:
        sizes = [int(block["size"]) for block in segment["blocks"]]
        offsets = itertools.accumulate(sizes[:-1], initial=0)
        blocks = [*zip(offsets, sizes, map(_in_use, segment["blocks"]), strict=False)]
        rows.append(
            [*(int(segment[name]) for name in ("device", "address", "total_size", "allocated_size")), blocks]
        )
    columns = ["device", "address", "total_bytes", "allocated_bytes", "blocks"]
    segments = pd.DataFrame(rows, columns=columns).sort_values(
        "total_bytes", ascending=False, kind="stable", ignore_index=True
    )
    sites = pd.DataFrame(_sites(document), columns=["device", "site", "blocks_count", "allocated_bytes"])
    table = sites.drop(columns="device").groupby("site", as_index=False)
    return AllocatorSnapshot(
        name=name,
        pid=int(document["pid"]),
        segments=segments,
        sites=table.sum().sort_values("allocated_bytes", ascending=False, kind="stable", ignore_index=True),
    )


def _sites(document: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """Return (device, site, blocks in use, bytes) of all sites."""
    totals = dict[tuple[int, str], list[int]]()
    names = dict[int, str]()
    for segment in document["segments"]:
        for block in segment["blocks"]:
            if _in_use(block) and "stack" in block:
                stack = int(block["stack"])
                site = names[stack] if stack in names else names.setdefault(stack, _user_lines(document, stack)[0])
                count_and_bytes = totals.setdefault((int(segment["device"]), site), [0, 0])
                count_and_bytes[0] += 1
                count_and_bytes[1] += int(block["size"])
    return [(device, site, count, size) for (device, site), (count, size) in totals.items()]


def _in_use(block: dict[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")


def _user_lines(document: dict[str, Any], stack: int, run: Run | None = None) -> list[str]:
    """Return the user's lines in a stack, the innermost first; paths in the run's directory are relative.

    A stack without user code gives its innermost line.
    """
    base = f"{run.manifest['cwd']}/" if run is not None and run.manifest.get("cwd") else ""
    frames = [document["frames"][number] for number in document["stacks"][stack]]
    user_frames = [frame for frame in frames if not any(part in str(frame[0]) for part in _LIBRARIES)]
    lines = user_frames or frames[:1] or [("unknown", 0, "")]
    return [f"{str(file).removeprefix(base)}:{line} {function}".rstrip() for file, line, function in lines]
