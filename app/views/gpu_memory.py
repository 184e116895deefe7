"""GPU memory: live tensors, cache, fragmentation, or something outside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from app.blocks import Block, Findings, Note, Table, answer
from app.figures import devices
from app.runtime.moment import Moment, Panel, View
from app.runtime.refresh import show
from collector.diagnosis import accounts
from collector.findings import Finding
from collector.store import newest_allocator_snapshot, queries
from collector.units import MISSING, duration, is_known, number, percent, size

KINDS = ("gpu-", "cuda-oom", "pinned-cache-growth")
MAX_SITES = 20
NO_GPU = Note(
    text="CPU-only run: it used no CUDA device. If it should have, this command finds the reason:",
    command="tidegauge doctor",
)


def findings(moment: Moment) -> Iterator[Block]:
    """Show the findings about GPUs."""
    if moment.verdict is not None and not queries.devices(moment.snapshot).empty:
        yield Findings(findings=_chosen(moment))


def account(moment: Moment) -> Iterator[Block]:
    """Draw the parts of the memory of each device."""
    if not _gpus(moment):
        yield NO_GPU
        return
    places, words = _drawn(moment)
    if words:
        yield Note(text=words)
    yield from _charts(moment, places[: devices.AT_ONCE])


def further_account(moment: Moment) -> Iterator[Block]:
    """Draw the other devices."""
    if _gpus(moment):
        yield from _charts(moment, _drawn(moment)[0][devices.AT_ONCE :])


def _drawn(moment: Moment) -> tuple[list[int], str]:
    return devices.select_devices(queries.devices(moment.snapshot), moment.span.rank)


def _charts(moment: Moment, places: list[int]) -> Iterator[Block]:
    for gpu in (_gpus(moment)[place] for place in places):
        if gpu.parts.empty:
            yield Note(text=f"{gpu.name} has no record in this window. Choose a longer window.")
            continue
        chart = devices.account(
            gpu.parts,
            gpu.flushes,
            gpu.errors,
            moment.theme,
            name=gpu.name,
            capacity_bytes=gpu.capacity_bytes,
        )
        yield replace(chart, caption=chart.caption + gpu.own_peaks)


def table(moment: Moment) -> Iterator[Block]:
    """List the parts of each device's memory at its peak and at the end of the window."""
    rows = [row for gpu in _gpus(moment) if not gpu.parts.empty for row in _in_numbers(gpu)]
    if rows:
        yield Table(
            frame=pd.DataFrame(rows).fillna(MISSING),
            caption="Last: while processes of the run used the GPU. A total with an unknown part (—) is a lower "
            "bound.",
            download=f"{moment.run_id}-gpus",
        )


def snapshot(moment: Moment) -> Iterator[Block]:
    """Draw the segments of the newest allocator snapshot, and list the lines that hold most."""
    if queries.devices(moment.snapshot).empty:
        return
    taken = newest_allocator_snapshot(moment.run)
    if taken is None:
        yield Note(
            text="No snapshot of the allocator. An out-of-memory error takes one, and so does this command:",
            command=f"tidegauge snapshot {moment.run_id}",
        )
        return
    yield devices.segments(taken.segments, moment.theme)
    if taken.sites.empty:
        yield Note(
            text="The snapshot has no stacks, so the lines that hold the memory are unknown. This records stacks:",
            command="tidegauge run --memory-history 100000 -- python train.py",
        )
        return
    top = taken.sites.head(MAX_SITES)
    yield Table(
        frame=pd.DataFrame(
            {
                "Allocated at": top["site"],
                "In use": [size(value) for value in top["allocated_bytes"]],
                "Blocks": [number(count) for count in top["blocks_count"]],
            }
        ),
        caption=f"Top {len(top)} of {len(taken.sites):,} lines by memory in use, from snapshots/{taken.name} "
        f"(pid {taken.pid}).",
        download=f"{moment.run_id}-sites",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """A device of the run: the parts of its used memory (`device_account.accounts`), cache flushes and errors."""

    name: str
    capacity_bytes: float
    own_peaks: str
    parts: pd.DataFrame
    flushes: pd.DataFrame
    errors: pd.DataFrame

    @property
    def totals(self) -> pd.Series:
        """Used bytes over time."""
        totals: pd.Series = self.parts.drop(columns="elapsed_seconds").sum(axis=1)
        return totals


def _gpus(moment: Moment) -> list[_Gpu]:
    return moment.once("gpus", lambda: list(_read_gpus(moment)))


def _read_gpus(moment: Moment) -> Iterator[_Gpu]:
    found = queries.devices(moment.snapshot)
    parts = accounts(*queries.device_grid(moment.snapshot, moment.span))
    flushes = queries.cache_flushes(moment.snapshot, moment.span)
    errors = queries.cuda_errors(moment.snapshot, moment.span)
    for name, row in zip(devices.device_names(found), found.to_dict("records"), strict=True):
        yield _Gpu(
            name=name,
            capacity_bytes=row["total_bytes"],
            own_peaks=devices.own_peaks(row),
            parts=parts[parts["gpu"] == row["gpu"]].drop(columns="gpu").dropna(axis=1, how="all"),
            flushes=flushes[flushes["gpu"] == row["gpu"]],
            errors=errors[errors["gpu"] == row["gpu"]],
        )


def _in_numbers(gpu: _Gpu) -> Iterator[dict[str, str]]:
    parts, totals = gpu.parts.drop(columns="elapsed_seconds"), gpu.totals
    for place, words in ((int(totals.to_numpy().argmax()), "at the peak"), (-1, "last")):
        total = float(totals.iloc[place])
        yield {
            "GPU": gpu.name,
            "When": f"{words}, {duration(gpu.parts['elapsed_seconds'].iloc[place])}",
            **{name[:1].upper() + name[1:]: size(parts[name].iloc[place]) for name in map(str, parts)},
            "Total": size(total),
            "Of capacity": percent(total / gpu.capacity_bytes) if is_known(gpu.capacity_bytes) else MISSING,
        }


def _chosen(moment: Moment) -> list[Finding]:
    found = moment.verdict.findings if moment.verdict else ()
    return [finding for finding in found if finding.kind.startswith(KINDS)]


def _answer(moment: Moment) -> str:
    if queries.devices(moment.snapshot).empty:
        return "This run uses no GPU."
    return answer(_chosen(moment), _healthy(moment))


def _healthy(moment: Moment) -> str:
    """Return the largest part of the fullest GPU, for a run without findings about GPUs."""
    used = [gpu for gpu in _gpus(moment) if not gpu.parts.empty]
    if not used:
        return "No problem found. There is no record of a GPU in this window."
    fullest = max(
        used, key=lambda gpu: gpu.totals.max() / (gpu.capacity_bytes if is_known(gpu.capacity_bytes) else 1)
    )
    place = int(fullest.totals.to_numpy().argmax())
    at_peak = fullest.parts.drop(columns="elapsed_seconds").iloc[place].astype(float)
    return (
        f"No problem found. At the peak, {size(at_peak.max())} of the {size(fullest.totals.iloc[place])} in use on "
        f"{fullest.name} {devices.PART_WORDS[str(at_peak.idxmax())]}."
    )


VIEW = View(
    name="gpu-memory",
    question="Is GPU memory taken by live tensors, by the cache, or outside PyTorch?",
    answer=_answer,
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Account", build=account),),
        (Panel(name="Account of further GPUs", build=further_account, turn=1),),
        (Panel(name="In numbers", build=table, turn=1),),
        (Panel(name="Snapshot", build=snapshot),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
