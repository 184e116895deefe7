"""OOM risk: each limit of the run, how near it is, and when it will be met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.blocks import Block, Note, answer, needs_attention
from app.figures.devices import LINE_WORDS
from app.runtime.moment import FINDINGS, Moment, Panel, View, once
from app.runtime.refresh import show
from app.shared_panels import (
    Gpu,
    drawn_gpus,
    finding_on,
    first_gpus,
    further_gpus,
    gpu_usage,
    gpus,
    host_charts,
    limit_name,
    open_files,
    share_bytes_of,
    shared_memory,
)
from collector import report
from collector.findings import Finding
from collector.store import queries
from collector.units import MISSING, is_known, number, percent, size

#: limit of `queries.HOST_LIMITS` -> kind of finding that forecasts it
FORECASTS = {"cgroup": "host-oom-risk", "host": "host-oom-risk", "shm": "shm-exhaustion-risk"}
#: limit of `queries.HOST_LIMITS` -> kind of finding that a process died of it
_DEATHS = {"cgroup": "host-oom-kill", "host": "host-oom-kill", "shm": "shm-bus-error"}
_OF_FILES = ("fd-leak", "fd-exhaustion-risk")
ABOUT_CGROUPS = "Peak: over the whole run. A cgroup counts page cache too, most of which the kernel can drop."
ABOUT_GPUS = (
    "GPU peak: the largest of the driver's samples, the use at an out-of-memory error, and the peak of reserved "
    "that PyTorch counts. Last: while processes of the run used the GPU."
)
NO_FORECAST = "No limit is forecast to be met."
NO_GPU = Note("CPU-only run: it used no CUDA device, so there are no GPU figures.")


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


def _limit_table(moment: Moment) -> Iterator[Block]:
    rows = [_row(limit) for limit in _limits(moment)]
    if not rows:
        yield Note("No sample of host or device yet. The collector takes them.")
        return
    without_gpus = queries.devices(moment.snapshot).empty
    yield moment.table("limits", ABOUT_CGROUPS if without_gpus else f"{ABOUT_CGROUPS} {ABOUT_GPUS}", rows)


def _gpus_in_numbers(moment: Moment) -> Iterator[Block]:
    rows = [row for gpu in drawn_gpus(moment)[0] for row in _lines_in_numbers(moment, gpu)]
    if rows:
        caption = "PyTorch's own peak: over the whole run, in one process, between samples too."
        yield moment.table("gpu-lines", caption, rows)


def _lines_in_numbers(moment: Moment, gpu: Gpu) -> Iterator[dict[str, str]]:
    for key, lines in queries.device_lines(moment.snapshot, moment.span, gpu.row["gpu"]).items():
        for rank, points in lines.points.groupby("series"):
            yield {
                "GPU": gpu.name,
                "Memory": f"{LINE_WORDS[key]}, {rank!s}" if rank else LINE_WORDS[key],
                "Last": size(points["value"].iloc[-1]),
                "Peak of samples": size(points["value"].max()),
                "PyTorch's own peak": size(gpu.row.get(f"{key}_peak_bytes")) if key != "used" else MISSING,
            }


def _files_first(moment: Moment) -> Iterator[Block]:
    """Draw the open files above all other charts, where the gravest finding is about them."""
    return open_files(moment) if _is_about_files(moment) else iter(())


def _files_last(moment: Moment) -> Iterator[Block]:
    return iter(()) if _is_about_files(moment) else open_files(moment)


def _is_about_files(moment: Moment) -> bool:
    return any(finding.kind in _OF_FILES for finding in needs_attention(moment.findings)[:1])


def _cgroup_and_host(moment: Moment) -> Iterator[Block]:
    """Draw the cgroup that binds, else the host's memory."""
    table = queries.host_limits(moment.snapshot)
    bound = table[table["limit"] == "cgroup"]
    yield from host_charts(moment, bound if not bound.empty else table[table["limit"] == "host"])


@once
def _limits(moment: Moment) -> list[_Limit]:
    return [*_device_limits(moment), *_host_limits(moment), *_file_limits(moment)]


def _device_limits(moment: Moment) -> Iterator[_Limit]:
    for gpu in gpus(moment):
        row, place = gpu.row, (gpu.row["host"], int(gpu.row["device"]))
        by_driver = is_known(row["used_bytes"])
        error, risk = finding_on(moment, "cuda-oom", *place), finding_on(moment, "gpu-oom-risk", *place)
        has_ended = error is not None and error.severity == "critical"
        met = _when(error if has_ended else risk or error, moment, row["total_bytes"])
        if share_bytes := share_bytes_of(moment, gpu):  # it is met before the device is full
            yield _Limit(
                name=f"{gpu.name}, share of the process",
                capacity=share_bytes,
                last=row["reserved_bytes"],
                peak=row["reserved_peak_bytes"],
                met=met,
            )
            met = _when(None, moment, row["total_bytes"])
        yield _Limit(
            name=gpu.name if by_driver else f"{gpu.name} (reserved by PyTorch)",
            capacity=row["total_bytes"],
            last=row["used_bytes" if by_driver else "reserved_bytes"],
            peak=float(np.fmax(row["used_peak_bytes"], row["reserved_peak_bytes"])),
            met=met,
        )


def _host_limits(moment: Moment) -> Iterator[_Limit]:
    table = queries.host_limits(moment.snapshot)
    for _, row in table.iterrows():
        kinds = (_DEATHS[row["limit"]], FORECASTS[row["limit"]])
        findings = filter(None, (finding_on(moment, kind, row["host"]) for kind in kinds))
        # A finding on the host's memory is about the one of its limits that binds.
        is_cgroup = row["limit"] == "cgroup"
        about = (each for each in findings if not each.limit or (each.limit.name == "cgroup") == is_cgroup)
        finding = next(about, None)
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
            met=_when(finding_on(moment, "fd-exhaustion-risk"), moment, row["limit_count"]),
            is_count=True,
        )


def _row(limit: _Limit) -> dict[str, str]:
    words = number if limit.is_count else size
    return {
        "Limit": limit.name,
        "Share at peak": percent(limit.peak_ratio),
        "Limit met": limit.met,
        "Capacity": words(limit.capacity),
        "Peak": words(limit.peak),
        "Headroom at peak": words(limit.capacity - limit.peak),
        "Last": words(limit.last),
    }


def _answer(moment: Moment) -> str:
    """Return the gravest finding, or the limit that came nearest."""
    ratios = [(limit.peak_ratio, limit) for limit in _limits(moment) if is_known(limit.peak_ratio)]
    grows = any(finding.eta for finding in moment.findings)
    nothing = "No warning: the growth so far is small against the room left." if grows else NO_FORECAST
    if ratios:
        ratio, nearest = max(ratios, key=lambda pair: pair[0])
        capacity = f"{number(nearest.capacity)} files" if nearest.is_count else size(nearest.capacity)
        nothing += f" Nearest: {nearest.name}, {percent(ratio)} of {capacity} at the peak."
    return answer(moment.findings, nothing + moment.unjudged("host memory", "/dev/shm", "open files", "GPU memory"))


def _when(finding: Finding | None, moment: Moment, capacity: float) -> str:
    if finding and finding.kind == "cuda-oom":  # its limit may be a share of the device
        how = "training ended" if finding.severity == "critical" else "error caught"
        return f"met: {size(finding.limit.value)}, {how}" if finding.limit else f"met: {how}"
    if finding and finding.kind in _DEATHS.values():
        return "met: a process was killed"
    if finding and finding.eta:
        time_left = report.eta(finding.eta).partition(" (")[0]  # the finding has the rest
        return f"in {time_left}" if moment.is_running else f"not met: {time_left} were left"
    return "not forecast" if moment.verdict and not finding and is_known(capacity) else MISSING


VIEW = View(
    name="oom-risk",
    question="How near is each limit, and when will it be met?",
    answer=_answer,
    rows=(
        (FINDINGS,),
        (Panel("Limits", _limit_table),),
        (Panel("Open files", _files_first),),
        (Panel("GPU memory", lambda moment: first_gpus(moment, gpu_usage, NO_GPU)),),
        (Panel("Memory of further GPUs", lambda moment: further_gpus(moment, gpu_usage), turn=1),),
        (Panel("GPU memory in numbers", _gpus_in_numbers, turn=1),),
        (Panel("Host memory", _cgroup_and_host), Panel("Shared memory", shared_memory)),
        (Panel("Open files", _files_last, turn=1),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
