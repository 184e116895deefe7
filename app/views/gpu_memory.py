"""GPU memory: live tensors, cache, fragmentation, or something outside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from app.blocks import Block, Note, answer
from app.figures import devices
from app.runtime.moment import FINDINGS, Moment, Panel, View, once
from app.runtime.refresh import show
from app.shared_panels import Gpu, first_gpus, further_gpus, gpus
from collector.diagnosis import accounts, command_words
from collector.store import newest_allocator_snapshot, queries
from collector.units import MISSING, duration, is_known, number, percent, size

MAX_SITES = 20
NO_GPU = Note(
    "CPU-only run: it used no CUDA device. If it should have, this command finds the reason:",
    command="tidegauge doctor",
)


def _account(moment: Moment, gpu: Gpu) -> Iterator[Block]:
    parts = _parts(moment)[gpu.name]
    if parts.empty:
        yield Note(f"{gpu.name} has no record in this window. Choose a longer window.")
        return
    flushes = gpu.of(queries.cache_flushes(moment.snapshot, moment.span))
    words = {"name": gpu.name, "capacity_bytes": gpu.row["total_bytes"]}
    chart = devices.account(parts, flushes, gpu.errors, moment.theme, **words)
    yield replace(chart, caption=chart.caption + devices.own_peaks(gpu.row))


def _table(moment: Moment) -> Iterator[Block]:
    rows = [row for gpu, parts in _used(moment) for row in _in_numbers(gpu, parts)]
    if rows:
        caption = (
            "Last: while processes of the run used the GPU. A total with an unknown part (—) is a lower bound."
        )
        yield moment.table("gpus", caption, pd.DataFrame(rows).fillna(MISSING))


def _snapshot(moment: Moment) -> Iterator[Block]:
    """Draw the segments of the newest allocator snapshot, and list the lines that hold most."""
    if not gpus(moment):
        return
    taken = newest_allocator_snapshot(moment.run)
    if taken is None:
        yield Note(
            "No snapshot of the allocator. An out-of-memory error takes one, and so does this command:",
            command=f"tidegauge snapshot {moment.run_id}",
        )
        return
    yield devices.segments(taken.segments, moment.theme)
    if taken.sites.empty:
        yield Note(
            "The snapshot has no stacks, so the lines that hold the memory are unknown. This records stacks:",
            command=f"tidegauge run --memory-history 100000 -- {command_words(moment.manifest)}",
        )
        return
    top = taken.sites.head(MAX_SITES)
    yield moment.table(
        "sites",
        f"Top {len(top)} of {len(taken.sites):,} lines by memory in use, from snapshots/{taken.name} "
        f"(pid {taken.pid}).",
        {
            "Allocated at": top["site"],
            "In use": [size(value) for value in top["allocated_bytes"]],
            "Blocks": [number(count) for count in top["blocks_count"]],
        },
    )


@once
def _parts(moment: Moment) -> dict[str, pd.DataFrame]:
    """Return the known parts of each GPU's used memory over time (`diagnosis.accounts`), by the GPU's name."""
    parts = accounts(*queries.device_grid(moment.snapshot, moment.span))
    return {gpu.name: gpu.of(parts).drop(columns="gpu").dropna(axis=1, how="all") for gpu in gpus(moment)}


def _used(moment: Moment) -> list[tuple[Gpu, pd.DataFrame]]:
    """Return the GPUs with a record in the window, and the parts of their memory."""
    both = [(gpu, _parts(moment)[gpu.name]) for gpu in gpus(moment)]
    return [(gpu, parts) for gpu, parts in both if not parts.empty]


def _in_numbers(gpu: Gpu, parts: pd.DataFrame) -> Iterator[dict[str, str]]:
    seconds, parts = parts["elapsed_seconds"], parts.drop(columns="elapsed_seconds")
    totals, capacity = parts.sum(axis=1), gpu.row["total_bytes"]
    for place, words in ((int(totals.to_numpy().argmax()), "at the peak"), (-1, "last")):
        total = float(totals.iloc[place])
        yield {
            "GPU": gpu.name,
            "When": f"{words}, {duration(seconds.iloc[place])}",
            **{name[:1].upper() + name[1:]: size(parts[name].iloc[place]) for name in map(str, parts)},
            "Total": size(total),
            "Share of capacity": percent(total / capacity) if is_known(capacity) else MISSING,
        }


def _answer(moment: Moment) -> str:
    """Return the gravest finding, or the largest part of the fullest GPU."""
    if not gpus(moment):
        return "This run uses no GPU."
    fullest, most = "There is no record of a GPU in this window.", -1.0
    for gpu, parts in _used(moment):
        totals, capacity = parts.drop(columns="elapsed_seconds").sum(axis=1), gpu.row["total_bytes"]
        ratio = totals.max() / (capacity if is_known(capacity) else 1)
        if ratio > most:
            place, most = int(totals.to_numpy().argmax()), ratio
            at_peak = parts.drop(columns="elapsed_seconds").iloc[place].astype(float)
            largest = f"{size(at_peak.max())} of the {size(totals.iloc[place])} in use on {gpu.name}"
            fullest = f"At the peak, {largest} {devices.PART_WORDS[str(at_peak.idxmax())]}."
    return answer(moment.findings, f"No problem found. {fullest}{moment.unjudged('GPU memory')}")


VIEW = View(
    name="gpu-memory",
    question="Is GPU memory taken by live tensors, by the cache, or outside PyTorch?",
    answer=_answer,
    rows=(
        (Panel("Findings", lambda moment: FINDINGS.build(moment) if gpus(moment) else iter(())),),
        (Panel("Account", lambda moment: first_gpus(moment, _account, NO_GPU)),),
        (Panel("Account of further GPUs", lambda moment: further_gpus(moment, _account), turn=1),),
        (Panel("In numbers", _table, turn=1),),
        (Panel("Snapshot", _snapshot),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
