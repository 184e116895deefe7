"""OOM risk: each limit of the run, how near it is, and when it will be met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from app.blocks import Block, Findings, Note, Table, answer
from app.figures import memory
from app.figures.devices import AT_ONCE, drawn, named, own_peaks
from app.moment import Moment, Panel, View
from app.panel import show
from collector.diagnosis.findings import KINDS, Finding
from collector.quantities import MISSING, known, number, percent, size
from collector.store import device_queries, memory_queries
from collector.wording import eta

#: limit of `memory_queries.HOST_LIMITS` -> kind of finding that forecasts it
FORECASTS = {"cgroup": "host-oom-risk", "host": "host-oom-risk", "shm": "shm-exhaustion-risk"}
#: As many processes are drawn with their open files.
MAX_PROCESSES = 4
NOTHING = "No limit is forecast to be met."
OF_GPU = (
    "That of a GPU is the largest sample of the driver or, if it is more, what PyTorch reserved at its own peak, "
    "which it knows between samples too: what lay outside PyTorch then leaves still less headroom."
)
#: Findings beside the forecasts whose evidence is here.
SEEN_HERE = ("cuda-oom", "host-oom-kill", "worker-killed", "shm-bus-error", "fd-leak", "shm-leak")


def findings(moment: Moment) -> Iterator[Block]:
    """Forecasts, and deaths by lack of memory."""
    if moment.verdict is not None:
        yield Findings(findings=_chosen(moment))


def limits(moment: Moment) -> Iterator[Block]:
    """One row per limit."""
    rows = [*_device_rows(moment), *_host_rows(moment), *_file_rows(moment)]
    if not rows:
        yield Note(text="No host or device sample yet: only the collector takes them.")
        return
    caption = (
        "Peak is over the whole run. The usage of a cgroup counts page cache, most of which the kernel can "
        "drop; its anonymous part can't be dropped."
    )
    yield Table(
        frame=pd.DataFrame(rows),
        caption=caption if device_queries.devices(moment.snapshot).empty else f"{caption} {OF_GPU}",
        download=f"{moment.run_id}-limits",
    )


def devices(moment: Moment) -> Iterator[Block]:
    """One chart per GPU of each host; one note where there is none."""
    table = device_queries.devices(moment.snapshot)
    if table.empty:
        yield Note(text="CPU-only run: no CUDA device was used or seen, so the GPU figures are left out.")
        return
    places, told = drawn(table, moment.span.rank)
    if told:
        yield Note(text=told)
    yield from _device_charts(moment, table, places[:AT_ONCE])


def further_devices(moment: Moment) -> Iterator[Block]:
    """The same of the other GPUs that are drawn."""
    table = device_queries.devices(moment.snapshot)
    if not table.empty:
        yield from _device_charts(moment, table, drawn(table, moment.span.rank)[0][AT_ONCE:])


def _device_charts(moment: Moment, table: pd.DataFrame, places: list[int]) -> Iterator[Block]:
    names = {"allocated": "allocated", "reserved": "reserved", "used": "used, all processes"}
    gpus = list(zip(named(table), table.to_dict("records"), strict=True))
    for name, row in (gpus[place] for place in places):
        lines = device_queries.device_lines(moment.snapshot, moment.span, row["gpu"])
        chart = memory.against_limit(
            {names[key]: value for key, value in lines.items()},
            moment.theme,
            name=name,
            capacity_bytes=row["total_bytes"],
            revision=moment.run_id,
        )
        yield replace(chart, caption=chart.caption + own_peaks(row))


def cgroup_and_host(moment: Moment) -> Iterator[Block]:
    """The cgroup that binds, else the host's memory."""
    table = memory_queries.host_limits(moment.snapshot)
    bound = table[table["limit"] == "cgroup"]
    yield from _host_charts(moment, bound if not bound.empty else table[table["limit"] == "host"])


def shared_memory(moment: Moment) -> Iterator[Block]:
    """/dev/shm, where batches of workers travel."""
    table = memory_queries.host_limits(moment.snapshot)
    yield from _host_charts(moment, table[table["limit"] == "shm"])


def open_files(moment: Moment) -> Iterator[Block]:
    """Open files of the processes that are nearest to their limit."""
    every = memory_queries.open_files(moment.snapshot)
    places = every.head(MAX_PROCESSES)
    if places.empty:
        return
    lines = memory_queries.process_lines(moment.snapshot, moment.span, "fd_count", places["series"].tolist())
    if not lines.points.empty:
        chart = memory.open_files(
            lines, moment.theme, limit_count=float(places["limit_count"].min()), revision=moment.run_id
        )
        left = f" The {len(places)} of {len(every)} processes that come nearest to theirs are drawn."
        yield replace(chart, caption=chart.caption + (left if len(places) < len(every) else ""))


def _chosen(moment: Moment) -> list[Finding]:
    found = moment.verdict.findings if moment.verdict else ()
    return [f for f in found if KINDS[f.kind] == "memory forecast" or f.kind in SEEN_HERE]


def _host_charts(moment: Moment, table: pd.DataFrame) -> Iterator[Block]:
    for _, row in table.iterrows():
        name = _limit_name(row, table)
        yield memory.against_limit(
            memory_queries.host_lines(moment.snapshot, moment.span, row["limit"], row["host"]),
            moment.theme,
            name=name,
            capacity_bytes=row["capacity_bytes"],
            revision=moment.run_id,
        )


def _limit_name(row: pd.Series, table: pd.DataFrame) -> str:
    name = memory.LIMIT_WORDS[row["limit"]]
    return f"{name} of {row['host']}" if table["host"].nunique() > 1 else name


def _device_rows(moment: Moment) -> Iterator[dict[str, str]]:
    table = device_queries.devices(moment.snapshot)
    for gpu, row in zip(named(table), table.to_dict("records"), strict=True):
        by_driver = known(row["used_bytes"])
        name, now = (gpu, "used_bytes") if by_driver else (f"{gpu} (reserved by PyTorch)", "reserved_bytes")
        # The driver is asked twice a second, and misses what PyTorch held in between.
        peak = float(np.fmax(row["used_peak_bytes"], row["reserved_peak_bytes"]))
        place = row["host"], int(row["device"])
        finding = _fatal(moment, *place) or _forecast(moment, "gpu-oom-risk", *place)
        yield _row(name, row[now], peak, row["total_bytes"], finding, moment)


def _host_rows(moment: Moment) -> Iterator[dict[str, str]]:
    table = memory_queries.host_limits(moment.snapshot)
    for _, row in table.iterrows():
        name = _limit_name(row, table)
        finding = _forecast(moment, FORECASTS[row["limit"]], row["host"])
        yield _row(name, row["now_bytes"], row["peak_bytes"], row["capacity_bytes"], finding, moment)


def _file_rows(moment: Moment) -> Iterator[dict[str, str]]:
    for row in memory_queries.open_files(moment.snapshot).head(1).to_dict("records"):
        finding = _forecast(moment, "fd-exhaustion-risk")
        yield {
            "Limit": f"open files, {row['series']}",
            "Capacity": number(row["limit_count"]),
            "Last": number(row["now_count"]),
            "Peak": number(row["peak_count"]),
            "Peak of capacity": percent(row["peak_count"] / row["limit_count"]),
            "Headroom at peak": number(row["limit_count"] - row["peak_count"]),
            "Limit met": _when(finding, moment, row["limit_count"]),
        }


def _forecast(moment: Moment, kind: str, host: str | None = None, device: int | None = None) -> Finding | None:
    for finding in moment.verdict.findings if moment.verdict else ():
        here = ((host, finding.locus.host), (device, finding.locus.device))
        if finding.kind == kind and all(None in pair or pair[0] == pair[1] for pair in here):
            return finding
    return None


def _row(
    name: str, now: float, peak: float, capacity: float, finding: Finding | None, moment: Moment
) -> dict[str, str]:
    headroom = capacity - peak
    return {
        "Limit": name,
        "Capacity": size(capacity),
        "Last": size(now),
        "Peak": size(peak),
        "Peak of capacity": percent(peak / capacity),
        "Headroom at peak": size(headroom),
        "Limit met": _when(finding, moment, capacity),
    }


def _fatal(moment: Moment, host: str, device: int) -> Finding | None:
    """Return the error that ended the training when this GPU's memory ran out."""
    found = _forecast(moment, "cuda-oom", host, device)
    return found if found and found.severity == "critical" else None


def _when(finding: Finding | None, moment: Moment, capacity: float) -> str:
    if finding and finding.kind == "cuda-oom":  # its limit may be a share of the device
        return f"met: {size(finding.limit.value)}" if finding.limit else "met: the training ended"
    if finding and finding.eta:
        return eta(finding.eta).partition(" (")[0]  # the finding has the rest
    return "no risk found" if moment.verdict and not finding and known(capacity) else MISSING


VIEW = View(
    name="oom-risk",
    question="How near is each limit, and when will it be met?",
    answer=lambda moment: answer(_chosen(moment), NOTHING),
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Limits", build=limits),),
        (Panel(name="GPU memory", build=devices),),
        (Panel(name="Memory of further GPUs", build=further_devices, turn=1),),
        (
            Panel(name="Host memory", build=cgroup_and_host),
            Panel(name="Shared memory", build=shared_memory),
        ),
        (Panel(name="Open files", build=open_files, turn=1),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
