"""Parts of several views: the GPUs of a run, open files, and the memory of hosts against its limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from app.blocks import Block, Note
from app.figures import devices, memory
from app.figures.devices import device_names, select_devices
from app.runtime.moment import Moment, once
from collector.findings import Finding
from collector.store import queries

#: Number of processes whose open files are drawn, and of GPUs that one refresh draws.
MAX_PROCESSES, GPUS_AT_ONCE = 4, 2
NO_FETCH = Note("No batch in this window. Batches of a DataLoader, of torch or torchdata, fill this page.")
NO_PROCESS = Note("No process samples in this window. The collector takes them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of the run: its row of `queries.devices`, and its out-of-memory errors in the window."""

    name: str
    row: dict[Any, Any]
    errors: pd.DataFrame

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that are about this GPU."""
        rows: pd.DataFrame = table[table["gpu"] == self.row["gpu"]]
        return rows


#: Draws one GPU.
DrawGpu = Callable[[Moment, Gpu], Iterator[Block]]


@once
def gpus(moment: Moment) -> list[Gpu]:
    """Return all GPUs of the run."""
    table = queries.devices(moment.snapshot)
    errors = queries.cuda_errors(moment.snapshot, moment.span)
    return [
        Gpu(name=name, row=row, errors=errors[errors["gpu"] == row["gpu"]])
        for name, row in zip(device_names(table), table.to_dict("records"), strict=True)
    ]


@once
def drawn_gpus(moment: Moment) -> tuple[list[Gpu], str]:
    """Return the GPUs that are drawn, and a sentence that says so if these are not all."""
    all_gpus = gpus(moment)
    if not all_gpus:
        return [], ""
    places, words = select_devices(queries.devices(moment.snapshot), moment.span.rank)
    return [all_gpus[place] for place in places], words


def first_gpus(moment: Moment, draw: DrawGpu, no_gpu: Note) -> Iterator[Block]:
    """Draw the first GPUs, or show the note of a run without one."""
    chosen, words = drawn_gpus(moment)
    if not chosen:
        yield no_gpu
    if words:
        yield Note(words)
    for gpu in chosen[:GPUS_AT_ONCE]:
        yield from draw(moment, gpu)


def further_gpus(moment: Moment, draw: DrawGpu) -> Iterator[Block]:
    """Draw the other GPUs, in another turn."""
    for gpu in drawn_gpus(moment)[0][GPUS_AT_ONCE:]:
        yield from draw(moment, gpu)


def gpu_usage(moment: Moment, gpu: Gpu) -> Iterator[Block]:
    """Draw the memory of a GPU against its capacity, and the share of it that the process may use."""
    yield devices.usage(
        queries.device_lines(moment.snapshot, moment.span, gpu.row["gpu"]),
        gpu.errors,
        moment.theme,
        name=gpu.name,
        capacity_bytes=gpu.row["total_bytes"],
        share_bytes=share_bytes_of(moment, gpu),
    )


def share_bytes_of(moment: Moment, gpu: Gpu) -> float | None:
    """Return the share of a GPU that a process may use, if it was met or is forecast to be met."""
    errors = gpu.of(queries.cuda_errors(moment.snapshot, moment.whole))
    met = errors.loc[errors["is_of_share"].astype(bool), "limit_bytes"]
    if len(met):
        return float(met.iloc[-1])
    risk = finding_on(moment, "gpu-oom-risk", gpu.row["host"], int(gpu.row["device"]))
    return float(risk.limit.value) if risk and risk.limit and "share" in risk.limit.name else None


def finding_on(moment: Moment, kind: str, host: str | None = None, device: int | None = None) -> Finding | None:
    """Return the gravest finding of a kind, on a host and a device if these are given."""
    for finding in moment.all_findings:
        here = ((host, finding.locus.host), (device, finding.locus.device))
        if finding.kind == kind and all(None in pair or pair[0] == pair[1] for pair in here):
            return finding
    return None


def shared_memory(moment: Moment) -> Iterator[Block]:
    """Draw /dev/shm, which carries the batches of workers."""
    table = queries.host_limits(moment.snapshot)
    yield from host_charts(moment, table[table["limit"] == "shm"])


def open_files(moment: Moment) -> Iterator[Block]:
    """Draw the open files of the processes that are nearest to their limit."""
    all_places = queries.open_files(moment.snapshot)
    places = all_places.head(MAX_PROCESSES)
    if places.empty:
        return
    lines = queries.process_lines(moment.snapshot, moment.span, "fd_count", places["series"].tolist())
    if not lines.points.empty:
        chart = memory.open_files(lines, moment.theme, limit_count=float(places["limit_count"].min()))
        selection = f" Drawn: the {len(places)} of {len(all_places)} processes nearest to their limit."
        yield replace(chart, caption=chart.caption + (selection if len(places) < len(all_places) else ""))


def host_charts(moment: Moment, table: pd.DataFrame) -> Iterator[Block]:
    """Draw one chart per row of `queries.host_limits`: use against the limit."""
    for _, row in table.iterrows():
        lines = queries.host_lines(moment.snapshot, moment.span, row["limit"], row["host"])
        words = {"name": limit_name(row, table), "capacity_bytes": row["capacity_bytes"]}
        yield memory.against_limit(lines, moment.theme, **words)


def limit_name(row: pd.Series, table: pd.DataFrame) -> str:
    """Return a limit's name, with its host where there are several."""
    name = memory.LIMIT_WORDS[row["limit"]]
    return f"{name} of {row['host']}" if table["host"].nunique() > 1 else name
