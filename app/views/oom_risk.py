"""OOM risk: each limit of the run, how near it is, and when it will be met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from app.blocks import Block, Findings, Note, Table, answer
from app.figures.devices import AT_ONCE, LINE_WORDS, device_names, select_devices, usage
from app.runtime.moment import Moment, Panel, View
from app.runtime.refresh import show
from app.shared_panels import host_charts, limit_name, open_files, shared_memory
from collector import report
from collector.findings import KINDS, Finding
from collector.store import queries
from collector.units import MISSING, is_known, number, percent, size

#: limit of `queries.HOST_LIMITS` -> kind of finding that forecasts it
FORECASTS = {"cgroup": "host-oom-risk", "host": "host-oom-risk", "shm": "shm-exhaustion-risk"}
ABOUT_CGROUPS = "Peak: over the whole run. A cgroup counts page cache too, most of which the kernel can drop."
ABOUT_GPUS = (
    "GPU peak: the largest of the driver's samples, the use at an out-of-memory error, and the peak of reserved "
    "that PyTorch counts. Last: while processes of the run used the GPU."
)
#: Kinds of findings, other than forecasts, whose evidence is on this page.
_OTHER_KINDS = ("cuda-oom", "host-oom-kill", "worker-killed", "shm-bus-error", "fd-leak", "shm-leak")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A row of the table of limits; bytes, or a count of files."""

    name: str
    capacity: float
    last: float
    peak: float
    met: str
    is_count: bool = False

    @property
    def peak_ratio(self) -> float:
        """Peak, as a share of the capacity."""
        return self.peak / self.capacity


def findings(moment: Moment) -> Iterator[Block]:
    """Show forecasts, and deaths by lack of memory."""
    if moment.verdict is not None:
        yield Findings(findings=_chosen(moment))


def limits(moment: Moment) -> Iterator[Block]:
    """List the limits."""
    found = _limits(moment)
    if not found:
        yield Note(text="No sample of host or device yet. The collector takes them.")
        return
    without_gpus = queries.devices(moment.snapshot).empty
    yield Table(
        frame=pd.DataFrame([_row(limit) for limit in found]),
        caption=ABOUT_CGROUPS if without_gpus else f"{ABOUT_CGROUPS} {ABOUT_GPUS}",
        download=f"{moment.run_id}-limits",
    )


def devices(moment: Moment) -> Iterator[Block]:
    """Draw the GPUs of each host, or say that there is none."""
    table = queries.devices(moment.snapshot)
    if table.empty:
        yield Note(text="CPU-only run: it used no CUDA device, so there are no GPU figures.")
        return
    places, words = select_devices(table, moment.span.rank)
    if words:
        yield Note(text=words)
    yield from _device_charts(moment, table, places[:AT_ONCE])


def further_devices(moment: Moment) -> Iterator[Block]:
    """Draw the other GPUs."""
    table = queries.devices(moment.snapshot)
    if not table.empty:
        yield from _device_charts(moment, table, select_devices(table, moment.span.rank)[0][AT_ONCE:])


def _device_charts(moment: Moment, table: pd.DataFrame, places: list[int]) -> Iterator[Block]:
    errors = queries.cuda_errors(moment.snapshot, moment.span)
    gpus = list(zip(device_names(table), table.to_dict("records"), strict=True))
    for name, row in (gpus[place] for place in places):
        yield usage(
            queries.device_lines(moment.snapshot, moment.span, row["gpu"]),
            errors[errors["gpu"] == row["gpu"]],
            moment.theme,
            name=name,
            capacity_bytes=row["total_bytes"],
            share_bytes=share_bytes(moment, row),
        )


def devices_in_numbers(moment: Moment) -> Iterator[Block]:
    """List the last and the highest values of the lines of each GPU that is drawn."""
    table = queries.devices(moment.snapshot)
    if table.empty:
        return
    names, rows = device_names(table), table.to_dict("records")
    values = [
        line
        for place in select_devices(table, moment.span.rank)[0]
        for line in _values(moment, names[place], rows[place])
    ]
    if values:
        yield Table(
            frame=pd.DataFrame(values),
            caption="PyTorch's own peak: over the whole run, in one process, between samples too.",
            download=f"{moment.run_id}-gpu-lines",
        )


def _values(moment: Moment, name: str, row: dict[Any, Any]) -> Iterator[dict[str, str]]:
    for key, lines in queries.device_lines(moment.snapshot, moment.span, row["gpu"]).items():
        for rank, points in lines.points.groupby("series"):
            yield {
                "GPU": name,
                "Memory": f"{LINE_WORDS[key]}, {rank!s}" if rank else LINE_WORDS[key],
                "Last": size(points["value"].iloc[-1]),
                "Peak of samples": size(points["value"].max()),
                "PyTorch's own peak": size(row.get(f"{key}_peak_bytes")) if key != "used" else MISSING,
            }


def share_bytes(moment: Moment, gpu: dict[Any, Any]) -> float | None:
    """Return the share of a GPU that a process may use, if it was met or is forecast to be met."""
    errors = queries.cuda_errors(moment.snapshot, moment.whole)
    met = errors.loc[(errors["gpu"] == gpu["gpu"]) & errors["is_of_share"].astype(bool), "limit_bytes"]
    if len(met):
        return float(met.iloc[-1])
    risk = _forecast(moment, "gpu-oom-risk", gpu["host"], int(gpu["device"]))
    is_share = risk is not None and risk.limit is not None and "share" in risk.limit.name
    return float(risk.limit.value) if is_share and risk and risk.limit else None


def cgroup_and_host(moment: Moment) -> Iterator[Block]:
    """Draw the cgroup that binds, else the host's memory."""
    table = queries.host_limits(moment.snapshot)
    bound = table[table["limit"] == "cgroup"]
    yield from host_charts(moment, bound if not bound.empty else table[table["limit"] == "host"])


def _chosen(moment: Moment) -> list[Finding]:
    found = moment.verdict.findings if moment.verdict else ()
    return [f for f in found if KINDS[f.kind] == "memory forecast" or f.kind in _OTHER_KINDS]


def _limits(moment: Moment) -> list[_Limit]:
    return moment.once("limits", lambda: [*_device_limits(moment), *_host_limits(moment), *_file_limits(moment)])


def _device_limits(moment: Moment) -> Iterator[_Limit]:
    table = queries.devices(moment.snapshot)
    for gpu, row in zip(device_names(table), table.to_dict("records"), strict=True):
        by_driver = is_known(row["used_bytes"])
        place = row["host"], int(row["device"])
        forecast = _forecast(moment, "gpu-oom-risk", *place)
        finding = _fatal(moment, *place) or forecast or _forecast(moment, "cuda-oom", *place)
        yield _Limit(
            name=gpu if by_driver else f"{gpu} (reserved by PyTorch)",
            capacity=row["total_bytes"],
            last=row["used_bytes" if by_driver else "reserved_bytes"],
            peak=float(np.fmax(row["used_peak_bytes"], row["reserved_peak_bytes"])),
            met=_when(finding, moment, row["total_bytes"]),
        )


def _host_limits(moment: Moment) -> Iterator[_Limit]:
    table = queries.host_limits(moment.snapshot)
    for _, row in table.iterrows():
        finding = _forecast(moment, FORECASTS[row["limit"]], row["host"])
        yield _Limit(
            name=limit_name(row, table),
            capacity=row["capacity_bytes"],
            last=row["now_bytes"],
            peak=row["peak_bytes"],
            met=_when(finding, moment, row["capacity_bytes"]),
        )


def _file_limits(moment: Moment) -> Iterator[_Limit]:
    for row in queries.open_files(moment.snapshot).head(1).to_dict("records"):
        yield _Limit(
            name=f"open files, {row['series']}",
            capacity=row["limit_count"],
            last=row["now_count"],
            peak=row["peak_count"],
            met=_when(_forecast(moment, "fd-exhaustion-risk"), moment, row["limit_count"]),
            is_count=True,
        )


def _forecast(moment: Moment, kind: str, host: str | None = None, device: int | None = None) -> Finding | None:
    for finding in moment.verdict.findings if moment.verdict else ():
        here = ((host, finding.locus.host), (device, finding.locus.device))
        if finding.kind == kind and all(None in pair or pair[0] == pair[1] for pair in here):
            return finding
    return None


def _row(limit: _Limit) -> dict[str, str]:
    words = number if limit.is_count else size
    return {
        "Limit": limit.name,
        "Capacity": words(limit.capacity),
        "Last": words(limit.last),
        "Peak": words(limit.peak),
        "Peak of capacity": percent(limit.peak_ratio),
        "Headroom at peak": words(limit.capacity - limit.peak),
        "Limit met": limit.met,
    }


def _answer(moment: Moment) -> str:
    """Return the gravest finding, or the limit that came nearest."""
    ratios = [(limit.peak_ratio, limit) for limit in _limits(moment) if is_known(limit.peak_ratio)]
    nothing = "No limit is forecast to be met."
    if ratios:
        ratio, nearest = max(ratios, key=lambda pair: pair[0])
        capacity = f"{number(nearest.capacity)} files" if nearest.is_count else size(nearest.capacity)
        nothing += f" Nearest: {nearest.name}, {percent(ratio)} of {capacity} at the peak."
    return answer(_chosen(moment), nothing)


def _fatal(moment: Moment, host: str, device: int) -> Finding | None:
    """Return the error that ended the training when this GPU's memory ran out."""
    found = _forecast(moment, "cuda-oom", host, device)
    return found if found and found.severity == "critical" else None


def _when(finding: Finding | None, moment: Moment, capacity: float) -> str:
    if finding and finding.kind == "cuda-oom":  # its limit may be a share of the device
        how = "training ended" if finding.severity == "critical" else "error caught"
        return f"met: {size(finding.limit.value)}, {how}" if finding.limit else f"met: {how}"
    if finding and finding.eta:
        return report.eta(finding.eta).partition(" (")[0]  # the finding has the rest
    return "not forecast" if moment.verdict and not finding and is_known(capacity) else MISSING


VIEW = View(
    name="oom-risk",
    question="How near is each limit, and when will it be met?",
    answer=_answer,
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Limits", build=limits),),
        (Panel(name="GPU memory", build=devices),),
        (Panel(name="Memory of further GPUs", build=further_devices, turn=1),),
        (Panel(name="GPU memory in numbers", build=devices_in_numbers, turn=1),),
        (
            Panel(name="Host memory", build=cgroup_and_host),
            Panel(name="Shared memory", build=shared_memory),
        ),
        (Panel(name="Open files", build=open_files, turn=1),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
