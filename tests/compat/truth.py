"""Read what `counter.py` wrote: the steps, batches, workers and processes of a training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    """One line of the counter."""

    kind: str
    time_ns: int
    thing: int
    world_size: int
    workers: int


@dataclass(frozen=True)
class Truth:
    """The figures of one run of a program."""

    steps: int
    ended_by: str  # the kind of event that a step is: step, batch or forward
    batches: int
    workers: int
    processes: int


def read(directory: Path) -> Truth:
    """Return the figures of the run whose processes wrote here."""
    processes = []
    for path in sorted(directory.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        processes.append([Event(*json.loads(line)) for line in lines if line.endswith("]")])
    counts = {kind: steps(processes, kind) for kind in ("step", "batch", "forward")}
    ended_by = next((kind for kind, count in counts.items() if count), "forward")
    return Truth(
        steps=counts[ended_by],
        ended_by=ended_by,
        batches=sum(event.kind == "batch" for process in processes for event in process),
        workers=sum(newest_workers(process) for process in processes),
        processes=len(processes),
    )


def steps(processes: list[list[Event]], kind: str) -> int:
    """Return how often it happened: the most of any rank, and the sum over processes without ranks."""
    ranks, alone = 0, 0
    for process in processes:
        events = [event for event in process if event.kind == kind]
        if any(event.world_size > 1 for event in events):
            ranks = max(ranks, turns(events))
        else:
            alone += len(events) if kind == "batch" else turns(events)
    return ranks + alone


def turns(events: list[Event]) -> int:
    """Count things that take turns (two optimizers of a GAN) once, and those that follow each other together.

    Things whose times overlap take turns; the one that happened most often counts.
    """
    spans: dict[int, list[int]] = {}
    for position, event in enumerate(events):
        spans.setdefault(event.thing, [position, position])[1] = position
    counts = Counter(event.thing for event in events)
    total, most, end = 0, 0, -1
    for thing, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first > end:
            total, most = total + most, 0
        most, end = max(most, counts[thing]), max(end, last)
    return total + most


def newest_workers(process: list[Event]) -> int:
    """Return the number of workers of the newest epoch of every dataset, added up."""
    newest = {event.thing: event.workers for event in process if event.kind == "batch"}
    return sum(newest.values())
