"""OOM risk: each limit of the run, how near it is, and when it will be met."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Findings, Note, Table, answer
from app.figures import memory
from app.panel import Moment, Panel, View, show
from collector.diagnosis.findings import KINDS, Finding
from collector.store import memory_queries
from collector.wording import MISSING, eta, known, percent, size

#: limit of `memory_queries.HOST_LIMITS` -> kind of finding that forecasts it
FORECASTS = {"cgroup": "host-oom-risk", "host": "host-oom-risk", "shm": "shm-exhaustion-risk"}
NOTHING = "No limit is forecast to be met."
DEATHS = ("cuda-oom", "host-oom-kill", "worker-killed", "shm-bus-error")


def findings(moment: Moment) -> Iterator[Block]:
    """Forecasts, and deaths by lack of memory."""
    if moment.verdict is not None:
        yield Findings(findings=_chosen(moment))


def limits(moment: Moment) -> Iterator[Block]:
    """One row per limit."""
    rows = [*_device_rows(moment), *_host_rows(moment)]
    if not rows:
        yield Note(text="No host or device sample yet: only the collector takes them.")
        return
    yield Table(
        frame=pd.DataFrame(rows),
        caption="Peak is over the whole run. The usage of a cgroup counts page cache, most of which the kernel can "
        "drop; its anonymous part can't be dropped.",
    )


def devices(moment: Moment) -> Iterator[Block]:
    """One chart per GPU; one note where there is none."""
    table = memory_queries.devices(moment.snapshot)
    if table.empty:
        yield Note(text="CPU-only run: no CUDA device was used or seen, so the GPU figures are left out.")
    for _, row in table.iterrows():
        device = int(row["device"])
        lines = memory_queries.device_lines(moment.snapshot, moment.span, device)
        names = {"allocated": "allocated", "reserved": "reserved", "used": "used, all processes"}
        yield memory.against_limit(
            {names[key]: value for key, value in lines.items()},
            moment.theme,
            name=f"GPU {device}",
            capacity_bytes=row["total_bytes"],
            revision=moment.run_id,
        )


def cgroup_and_host(moment: Moment) -> Iterator[Block]:
    """The cgroup that binds, else the host's memory."""
    table = memory_queries.host_limits(moment.snapshot)
    bound = table[table["limit"] == "cgroup"]
    yield from _host_charts(moment, bound if not bound.empty else table[table["limit"] == "host"])


def shared_memory(moment: Moment) -> Iterator[Block]:
    """/dev/shm, where batches of workers travel."""
    table = memory_queries.host_limits(moment.snapshot)
    yield from _host_charts(moment, table[table["limit"] == "shm"])


def _chosen(moment: Moment) -> list[Finding]:
    found = moment.verdict.findings if moment.verdict else ()
    return [f for f in found if KINDS[f.kind] == "memory forecast" or f.kind in DEATHS]


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
    for _, row in memory_queries.devices(moment.snapshot).iterrows():
        device = int(row["device"])
        by_driver = known(row["used_bytes"])
        now, peak = ("used_bytes", "used_peak_bytes") if by_driver else ("reserved_bytes", "reserved_peak_bytes")
        finding = _forecast(moment, "gpu-oom-risk", device)
        name = f"GPU {device}" if by_driver else f"GPU {device} (reserved by PyTorch)"
        yield _row(name, row[now], row[peak], row["total_bytes"], finding, moment)


def _host_rows(moment: Moment) -> Iterator[dict[str, str]]:
    table = memory_queries.host_limits(moment.snapshot)
    for _, row in table.iterrows():
        name = _limit_name(row, table)
        finding = _forecast(moment, FORECASTS[row["limit"]], None)
        yield _row(name, row["now_bytes"], row["peak_bytes"], row["capacity_bytes"], finding, moment)


def _forecast(moment: Moment, kind: str, device: int | None) -> Finding | None:
    found = moment.verdict.findings if moment.verdict else ()
    return next((f for f in found if f.kind == kind and (device is None or f.locus.device in (None, device))), None)


def _row(
    name: str, now: float, peak: float, capacity: float, finding: Finding | None, moment: Moment
) -> dict[str, str]:
    headroom = capacity - peak
    forecast = "no risk found" if moment.verdict and not finding else MISSING
    if finding and finding.eta:
        forecast = eta(finding.eta)
    return {
        "Limit": name,
        "Capacity": size(capacity),
        "Last": size(now),
        "Peak": size(peak),
        "Peak of capacity": percent(peak / capacity),
        "Headroom at peak": size(headroom),
        "Limit met": forecast,
    }


VIEW = View(
    name="oom-risk",
    question="How near is each limit, and when will it be met?",
    answer=lambda moment: answer(_chosen(moment), NOTHING),
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Limits", build=limits),),
        (Panel(name="GPU memory", build=devices),),
        (Panel(name="Host memory", build=cgroup_and_host), Panel(name="Shared memory", build=shared_memory)),
    ),
)

if __name__ == "__main__":
    show(VIEW)
